"""Collectives, on the bare state machine; random runs against a model."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onesided.rpc.gather import Gathers

from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded, OnesidedError, StaleHandle


def outcome(ticket) -> object:
    """What a ticket was decided for: a tuple, an error class, or None while it is open."""
    if not ticket.done:
        return None
    try:
        return ticket.result()
    except OnesidedError as error:
        return type(error)


def post(gathers: Gathers, rank: int, sequence: int, payload: bytes = b"") -> object:
    return gathers.post(rank, sequence, "all_gather", payload)


def test_completes_with_the_last_one_and_orders_by_rank() -> None:
    gathers = Gathers("g", 3)
    tickets = [post(gathers, rank, 1, bytes([rank])) for rank in (2, 0)]
    assert [outcome(ticket) for ticket in tickets] == [None, None]
    assert outcome(post(gathers, 1, 1, b"")) == (b"\0", b"", b"\2")
    assert {outcome(ticket) for ticket in tickets} == {(b"\0", b"", b"\2")}


def test_an_answer_that_was_lost_is_had_again() -> None:
    gathers = Gathers("g", 2)
    first = post(gathers, 0, 1, b"a")
    again = post(gathers, 0, 1, b"a")
    post(gathers, 1, 1, b"b")
    assert outcome(first) == outcome(again) == outcome(post(gathers, 0, 1, b"a")) == (b"a", b"b")
    post(gathers, 1, 2)
    assert outcome(post(gathers, 0, 1, b"a")) == (b"a", b"b"), "also when another went on"
    post(gathers, 0, 2)
    assert outcome(post(gathers, 0, 1, b"a")) is StaleHandle


def test_giving_up_fails_all_the_same_way_and_the_next_is_clean() -> None:
    gathers = Gathers("g", 3)
    early = post(gathers, 0, 1)
    other = post(gathers, 2, 1)
    gathers.give_up(0, 1, 2.0)
    with pytest.raises(DeadlineExceeded, match=r"rank 1 \(of 3\) did not arrive; rank 0 gave up after 2 s"):
        early.result()
    assert outcome(other) is DeadlineExceeded
    assert outcome(post(gathers, 1, 1)) is DeadlineExceeded, "the late one learns it too"
    tickets = [post(gathers, rank, 2, b"%d" % rank) for rank in range(3)]
    assert {outcome(ticket) for ticket in tickets} == {(b"0", b"1", b"2")}


def test_going_on_is_giving_up() -> None:
    gathers = Gathers("g", 2)
    waiting = post(gathers, 0, 1)
    post(gathers, 1, 2)
    with pytest.raises(DeadlineExceeded, match="rank 1 gave up on it"):
        waiting.result()
    assert outcome(post(gathers, 0, 2)) == (b"", b"")
    post(gathers, 1, 9)
    assert outcome(post(gathers, 0, 3)) is DeadlineExceeded
    assert outcome(post(gathers, 0, 9)) == (b"", b"")


def test_an_interrupted_member_has_taken_part() -> None:
    gathers = Gathers("g", 2)
    post(gathers, 0, 1, b"mine")  # and its caller pressed Ctrl-C
    pending = post(gathers, 0, 2, b"next")
    assert outcome(post(gathers, 1, 1, b"yours")) == (b"mine", b"yours")
    post(gathers, 1, 2, b"x")
    assert outcome(pending) == (b"next", b"x")


def test_loss_fails_what_is_open_and_keeps_what_was_complete() -> None:
    gathers = Gathers("g", 3)
    for rank in range(3):
        post(gathers, rank, 1, b"%d" % rank)
    pending = post(gathers, 0, 2)
    gathers.lose(1, "left")
    with pytest.raises(ConnectionLost, match="group 'g': rank 1 of 3 gone: rank 1 left"):
        pending.result()
    assert outcome(post(gathers, 2, 1)) == (b"0", b"1", b"2")
    assert outcome(post(gathers, 2, 2)) is ConnectionLost
    assert outcome(post(gathers, 0, 3)) is ConnectionLost


def test_different_collectives_under_one_number() -> None:
    gathers = Gathers("g", 2)
    waiting = gathers.post(0, 1, "barrier", b"")
    wrong = gathers.post(1, 1, "all_gather", b"x")
    for ticket in (waiting, wrong):
        with pytest.raises(OnesidedError, match="rank 1 called all_gather where rank 0 called barrier"):
            ticket.result()


def test_payloads_too_large_together() -> None:
    gathers = Gathers("g", 2)
    ticket = post(gathers, 0, 1, bytes(8 << 20))
    assert outcome(post(gathers, 0, 1, bytes(8 << 20))) is None, "sent again is counted once"
    assert outcome(post(gathers, 1, 1, bytes(8 << 20))) is BoundsError
    assert outcome(ticket) is BoundsError
    post(gathers, 0, 2, bytes(7 << 20))
    assert len(outcome(post(gathers, 1, 2, bytes(8 << 20)))) == 2


def test_memory_stays_bounded() -> None:
    gathers = Gathers("g", 4)
    for sequence in range(1, 1000):
        for rank in range(4):
            post(gathers, rank, sequence, bytes(100))
        assert len(gathers._gathers) <= 2


def test_after_a_restart_those_behind_get_what_those_ahead_gave() -> None:
    # Rank 0 has the outcome of number 7 and waits in number 8; the others' answers of number 7 were lost.
    gathers = Gathers("g", 3)
    gathers.resume(0, 7, "all_gather", b"0")
    gathers.resume(0, 8, "all_gather", b"zero")
    ahead = post(gathers, 0, 8, b"zero")
    behind = []
    for rank in (1, 2):
        gathers.resume(rank, 6, "all_gather", b"old")
        behind.append(post(gathers, rank, 7, b"%d" % rank))
    assert {outcome(ticket) for ticket in behind} == {(b"0", b"1", b"2")}
    for rank in (1, 2):
        post(gathers, rank, 8)
    assert outcome(ahead) == (b"zero", b"", b"")


def test_after_a_restart_a_failure_is_a_failure_for_all() -> None:
    gathers = Gathers("g", 2)
    gathers.resume(0, 3, "all_gather", None)
    assert outcome(post(gathers, 1, 3)) is DeadlineExceeded
    assert outcome(post(gathers, 1, 4, b"b")) is None
    assert outcome(post(gathers, 0, 4, b"a")) == (b"a", b"b")


@settings(max_examples=300)
@given(st.integers(1, 4), st.data())
def test_random_runs_agree_with_the_model(size: int, data: st.DataObject) -> None:
    """Members go through numbers 1, 2, ... and at each of them post, or post and give up, in any interleaving.
    The model decides from the order of events alone what each number ends with."""
    gathers = Gathers("g", size)
    at = [0] * size  # how far each member is
    model: dict[int, object] = {}  # number -> DeadlineExceeded or the payloads
    given_: dict[int, dict[int, bytes]] = {}
    tickets: list[tuple[int, object]] = []
    for step in range(data.draw(st.integers(0, 40))):
        rank = data.draw(st.sampled_from(range(size)))
        ready = at[rank] == 0 or at[rank] in model  # a member waits for its last one ...
        action = data.draw(st.sampled_from(["post", "give up", "again"]))
        if action == "post" and ready:
            at[rank] += 1
            number, payload = at[rank], b"%d.%d" % (rank, step)
            tickets.append((number, post(gathers, rank, number, payload)))
            if number not in model:
                given_.setdefault(number, {})[rank] = payload
                if len(given_[number]) == size:
                    model[number] = tuple(given_[number][r] for r in range(size))
        elif action == "give up" and not ready:  # ... unless its deadline passes
            gathers.give_up(rank, at[rank], 1.0)
            model[at[rank]] = DeadlineExceeded
        elif action == "again" and at[rank]:
            tickets.append((at[rank], post(gathers, rank, at[rank], given_.get(at[rank], {}).get(rank, b""))))
        for number, ticket in tickets:
            assert outcome(ticket) == model.get(number), (number, at)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_any_order_of_arrival(order: tuple[int, ...]) -> None:
    gathers = Gathers("g", 3)
    tickets = {rank: post(gathers, rank, 1, bytes([rank])) for rank in order}
    assert {outcome(ticket) for ticket in tickets.values()} == {(b"\0", b"\1", b"\2")}
