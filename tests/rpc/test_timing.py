"""The clockwork of the state machine, on a clock that the test sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onesided.rpc.timing import Lease, Remembered, Ticket, Timers

from onesided.errors import DeadlineExceeded


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_timers_run_in_order_of_time_and_not_before() -> None:
    clock, ran = Clock(), []
    timers = Timers(clock)
    for delay_s in (3, 1, 2):
        timers.after(delay_s, lambda delay_s=delay_s: ran.append(delay_s))
    assert timers.next_s() == 101
    clock.now_s = 100.99
    timers.run_due()
    assert ran == []
    clock.now_s = 102
    timers.run_due()
    assert ran == [1, 2]
    assert timers.next_s() == 103


def test_cancelled_timers_do_not_run_and_do_not_pile_up() -> None:
    clock, ran = Clock(), []
    timers = Timers(clock)
    kept = timers.after(5, lambda: ran.append("kept"))
    for _ in range(10_000):
        timers.cancel(timers.after(60, lambda: ran.append("cancelled")))
    assert len(timers._heap) < 300
    timers.cancel(timers.after(1, lambda: None))
    assert timers.next_s() == 105
    clock.now_s = 200
    timers.run_due()
    assert ran == ["kept"]
    timers.cancel(kept)
    assert timers.next_s() is None


def test_a_timer_may_set_timers() -> None:
    clock, ran = Clock(), []
    timers = Timers(clock)
    timers.after(1, lambda: timers.after(0, lambda: ran.append(1)))
    clock.now_s += 1
    timers.run_due()
    assert ran == [1]


def advance(clock: Clock, timers: Timers, seconds: float, step_s: float = 0.1) -> None:
    """Lets time pass as a process sees it that is awake."""
    end_s = clock.now_s + seconds
    while clock.now_s < end_s:
        clock.now_s = min(clock.now_s + step_s, end_s)
        timers.run_due()


@given(st.lists(st.floats(0.1, 15), max_size=12))
def test_a_lease_ends_at_the_first_pause_longer_than_it(pauses: list[float]) -> None:
    clock, ended = Clock(), []
    timers = Timers(clock)
    lease = Lease(timers, 10.0, lambda: ended.append(clock.now_s))
    for pause_s in pauses:
        renewed_s = clock.now_s
        advance(clock, timers, pause_s)
        if pause_s > 10.1:
            assert ended[0] == pytest.approx(renewed_s + 10, abs=0.11)
            return
        if pause_s < 9.9:
            assert ended == []
        if ended:
            return
        lease.renew()


def test_a_lease_survives_that_its_keeper_stood_still() -> None:
    clock, ended = Clock(), []
    timers = Timers(clock)
    lease = Lease(timers, 10.0, lambda: ended.append(clock.now_s))
    clock.now_s += 25  # SIGSTOP, 15 s beyond the end of the lease
    timers.run_due()
    assert ended == []
    lease.renew()  # what lay in the socket
    advance(clock, timers, 9.9)
    assert ended == []
    clock.now_s += 100
    timers.run_due()
    assert ended == []
    advance(clock, timers, 9.8)
    assert ended == []
    advance(clock, timers, 0.3)
    assert len(ended) == 1


def test_a_cancelled_lease_never_ends() -> None:
    clock, ended = Clock(), []
    timers = Timers(clock)
    Lease(timers, 1.0, lambda: ended.append(1)).cancel()
    advance(clock, timers, 5)
    assert ended == []


def test_tickets_are_decided_once() -> None:
    ticket: Ticket[int] = Ticket()
    seen = []
    ticket.when_done(lambda: seen.append("before"))
    assert not ticket.done
    ticket.resolve(3)
    ticket.fail(ValueError())
    ticket.resolve(4)
    ticket.when_done(lambda: seen.append("after"))
    assert ticket.done
    assert ticket.result() == 3
    assert seen == ["before", "after"]


def test_errors_that_are_shared_are_raised_as_copies() -> None:
    error = DeadlineExceeded("late")
    tickets: list[Ticket[int]] = [Ticket(), Ticket()]
    raised = []
    for ticket in tickets:
        ticket.fail(error)
        with pytest.raises(DeadlineExceeded, match=r"^late$") as caught:
            ticket.result()
        raised.append(caught.value)
    assert raised[0] is not raised[1]


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 5)), max_size=60))
def test_remembered_numbers_never_go_back(steps: list[tuple[str, int]]) -> None:
    remembered, model = Remembered(limit=3), {}
    for name, step in steps:
        before = remembered.last(name)
        assert before >= model.get(name, 0)
        number = before + step
        remembered.keep(name, number)
        model[name] = number
        assert remembered.last(name) == number
        assert len(remembered._last) <= 3
