"""What a failure is told as, whom it touches, and what comes after it (case 35)."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from fake_verbs import FakeVerbs, Pair, Status, connected, windows
from harness import raises, wait_until

from onesided import ConnectionLost, OnesidedError, RdmaTransport, RegistrationError, RemoteAccessError

MIB = 1 << 20


def causes(fake: FakeVerbs) -> None:
    """One of five fails: those before it succeed, it has its own cause, those behind it say that they were flushed."""
    with windows(3, MIB) as (near, _, third):
        source = np.full(MIB, 7, np.uint8)
        fake.hold()
        works = [near.put(source, 1, async_op=True) for _ in range(5)]
        other = near.put(source, 2, async_op=True)
        fake.fail_completion(Status.RETRY_EXC_ERR, nth=3)
        fake.release_all()
        for work in works[:2]:
            work.wait(20)
        with raises(ConnectionLost, "no answer"):
            works[2].wait(20)
        for work in works[3:]:
            with raises(ConnectionLost, "flushed, because another operation"):
                work.wait(20)
            with raises(ConnectionLost, "no answer"):  # and the cause behind it
                work.wait(20)
        assert works[0].exception() is None
        assert "no answer" in str(works[2].exception())
        other.wait(20)
        assert (third.array == 7).all()
        near.flush()  # all of it was told
        near.put(source, 1, signal=0)
        near.put(source, 2, signal=0)


def test_case_35_each_has_its_own_cause(alone) -> None:
    alone(causes, devices=1)


KINDS: dict[Status, tuple[type[OnesidedError], str]] = {
    Status.REM_ACCESS_ERR: (RemoteAccessError, "the memory was closed there"),
    Status.REM_INV_REQ_ERR: (RemoteAccessError, "does not do this operation"),
    Status.REM_OP_ERR: (RemoteAccessError, "could not finish"),
    Status.LOC_PROT_ERR: (RegistrationError, "freed or changed"),
    Status.LOC_LEN_ERR: (RegistrationError, ""),
    Status.RETRY_EXC_ERR: (ConnectionLost, "no answer"),
    Status.RNR_RETRY_EXC_ERR: (ConnectionLost, ""),
    Status.FATAL_ERR: (ConnectionLost, ""),
    Status.GENERAL_ERR: (ConnectionLost, ""),
}


USES: dict[str, Callable[[Pair, "np.ndarray"], object]] = {
    "put": lambda pair, mine: pair.connection.write(mine, pair.remote),
    "asynchronous put": lambda pair, mine: pair.connection.write(mine, pair.remote, async_op=True).wait(20),
    "get": lambda pair, mine: pair.connection.read(mine, pair.remote),
    "small get": lambda pair, mine: pair.connection.read(mine[:8], pair.remote),
    "fetch_add": lambda pair, mine: pair.connection.fetch_add(pair.remote, 0, 0),
    "compare_swap": lambda pair, mine: pair.connection.compare_swap(pair.remote, 0, 0, 0),
    "flush": lambda pair, mine: (pair.connection.write(b"x", pair.remote), pair.connection.flush(pair.remote)),
    "signal": lambda pair, mine: (pair.connection.signal(pair.remote, 0, 0), pair.connection.flush(pair.remote)),
}


def every_status(fake: FakeVerbs) -> None:
    """Every operation, with every way in which a device says that it failed; the next one works."""
    a, b = RdmaTransport(), RdmaTransport()
    for status, (kind, says) in KINDS.items():
        for name, use in USES.items():
            with connected(MIB // 8, a=a, b=b) as pair:
                mine = np.full(MIB // 8, 7, np.uint8)
                fake.fail_completion(status)
                with raises((kind, ConnectionLost) if name in ("flush", "signal") else kind, says):
                    use(pair, mine)
                pair.connection.write(mine, pair.remote, signal=0, timeout_s=20)
                assert pair.memory.signal_value(0) == 1
                assert (pair.array == 7).all()
    a.close()
    b.close()


def test_every_status_is_told_in_our_words(alone) -> None:
    alone(every_status, devices=1, timeout_s=90)


def flush_tells(fake: FakeVerbs) -> None:
    with connected(4096) as pair:
        fake.fail_completion(Status.REM_ACCESS_ERR)
        pair.connection.write(b"x", pair.remote)
        with raises(RemoteAccessError, "the memory was closed there"):
            pair.connection.flush(pair.remote)


def test_a_flush_raises_what_a_small_put_has_met(alone) -> None:
    alone(flush_tells, devices=1)


def backs_off(fake: FakeVerbs) -> None:
    """A path that fails at once, again and again, is not tried again and again; one that works again is found."""
    with connected(4096) as pair:
        fake.port_down("fake0")
        wait_until(lambda: not fake.pending_at(), "all is over")
        fake.reset_counts()
        begun, tries = time.monotonic(), 0
        while time.monotonic() < begun + 1:
            tries += 1
            with raises(OnesidedError):
                pair.connection.write(b"x", pair.remote, timeout_s=0.5)
                pair.connection.flush(pair.remote, timeout_s=0.5)
        # Each try to reconnect posts at a new queue pair: a handful in a second, though asked for all the time.
        assert fake.count("post_sends") < 30, (fake.count("post_sends"), tries)
        fake.port_up("fake0")

        def works() -> bool:
            try:
                pair.connection.write(b"again", pair.remote, timeout_s=5)
                pair.connection.flush(pair.remote, timeout_s=5)
            except OnesidedError:
                return False
            return True

        wait_until(works, "the port that came back is used", 10)
        assert bytes(pair.array[:5]) == b"again"


def test_case_35_reconnecting_backs_off(alone) -> None:
    alone(backs_off, devices=1)


# ---- Asynchronous events ---------------------------------------------------------------------------------------------

EVENTS: dict[str, tuple[Callable[[FakeVerbs, int], None], str]] = {
    "port": (lambda fake, qp: fake.port_down("fake0"), "fake0:1: the port went down"),
    "queue pair": (lambda fake, qp: fake.qp_fatal(qp), "fake0"),
    "completion queue": (lambda fake, qp: fake.cq_error(qp), "fake0"),
    "device": (lambda fake, qp: fake.device_fatal("fake0"), "fake0: the device failed"),
}


def event(fake: FakeVerbs, what: str, how: str) -> None:
    """An event of the device ends what uses it, whoever waits is told the cause, and no one else is touched."""
    happens, says = EVENTS[what]
    with (
        connected(MIB, a={"nics": ["fake0"]}, b={"nics": ["fake0"]}) as pair,
        connected(MIB, a={"nics": ["fake1"]}, b={"nics": ["fake1"]}) as other,
    ):
        source = np.full(MIB, 7, np.uint8)
        fake.hold()
        work = pair.connection.write(source, pair.remote, async_op=True)
        elsewhere = other.connection.write(source, other.remote, async_op=True)
        pairs = [number for number in fake.qp_nums("fake0") if fake.pending(number)]
        assert len(pairs) == 1
        raised: list[BaseException] = []

        under_way = fake.pending()

        def wait() -> None:
            try:
                work.wait(20) if how == "wait" else pair.connection.flush(pair.remote, 20)
            except OnesidedError as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        if how == "flush":
            wait_until(lambda: fake.pending() > under_way, "the flush is under way, too")
        happens(fake, pairs[0])
        thread.join(20)
        assert raised, "nobody was told"
        assert isinstance(raised[0], ConnectionLost)
        assert says in str(raised[0]), raised[0]
        source[:] = 9
        fake.release_all()
        assert not (pair.array == 9).any()
        assert not elsewhere.done() or elsewhere.exception() is None
        elsewhere.wait(20)
        other.connection.write(source, other.remote, signal=0)
        if what == "port":
            fake.port_up("fake0")
        if what != "device":
            pair.connection.write(source, pair.remote, signal=0, timeout_s=20)
            assert (pair.array == 9).all()
        else:
            for _ in range(3):
                with raises(OnesidedError):
                    pair.connection.write(source, pair.remote, timeout_s=1)


@pytest.mark.parametrize("how", ["wait", "flush"])
@pytest.mark.parametrize("what", EVENTS)
def test_events_end_what_uses_the_device(alone, what: str, how: str) -> None:
    alone(event, what, how, devices=2)


def one_rail_of_two(fake: FakeVerbs) -> None:
    """A port of two goes down: what was under way fails and says why; with the other rail, it goes on."""
    with connected(MIB) as pair:
        source = np.full(MIB, 7, np.uint8)
        pair.connection.write(source, pair.remote)
        fake.port_down("fake1")
        said: list[str] = []

        def works() -> bool:
            try:
                pair.connection.write(source, pair.remote, signal=0, timeout_s=5)
            except OnesidedError as error:
                said.append(str(error))
                return False
            return True

        source[:] = 8
        wait_until(works, "the rail that is left is used", 10)
        assert all("fake1" in message for message in said), said
        assert (pair.array == 8).all()
        before = fake.traffic("fake1", "written")
        pair.connection.write(source, pair.remote)
        assert fake.traffic("fake1", "written") == before


def test_a_rail_that_goes_down_leaves_the_other(alone) -> None:
    alone(one_rail_of_two, devices=2)


def comes_back(fake: FakeVerbs) -> None:
    """When the port is up again, the next generation has both rails."""
    with connected(MIB) as pair:
        source = np.full(MIB, 7, np.uint8)
        fake.port_down("fake1")

        def works() -> bool:
            try:
                pair.connection.write(source, pair.remote, timeout_s=5)
            except OnesidedError:
                return False
            return True

        wait_until(works, "the rail that is left is used", 10)
        fake.port_up("fake1")
        fake.fail_completion(Status.RETRY_EXC_ERR)
        with raises(ConnectionLost):
            pair.connection.write(source, pair.remote, timeout_s=5)
        wait_until(works, "the next generation", 10)
        before = fake.traffic("fake1", "written")
        pair.connection.write(source, pair.remote)
        assert fake.traffic("fake1", "written") > before


def test_a_rail_that_came_back_is_used_again(alone) -> None:
    alone(comes_back, devices=2)


def untold(fake: FakeVerbs) -> None:
    """A small put that was lost without anybody being told: the next flush raises, or the next signal, once."""
    with windows(2, MIB) as (near, far):
        for tells in (lambda: near.flush(1, timeout_s=5), lambda: near.flush(timeout_s=5)):
            fake.fail_completion(Status.RETRY_EXC_ERR)
            near.put(b"lost", 1)
            with raises(ConnectionLost, "no answer"):
                tells()
            near.flush(1, timeout_s=5)
            near.put(b"well", 1, signal=0)
            near.flush(1, timeout_s=5)
        assert far.signal_value(0) == 2


def test_a_put_that_nobody_was_told_of_is_told_by_flush(alone) -> None:
    alone(untold, devices=1)


def acknowledgement_lost(fake: FakeVerbs) -> None:
    """It arrived, but the answer did not: the operation fails, and is not done twice by anybody."""
    with connected(4096) as pair:
        for turn in range(1, 4):
            pair.connection.write(b"", pair.remote, signal=0)  # over a new connection
            fake.fail_completion(Status.RETRY_EXC_ERR, executed=True)
            with raises(ConnectionLost):
                pair.connection.fetch_add(pair.remote, 0, 1)
            assert pair.array.view(np.uint64)[0] == turn


def test_an_atomic_whose_answer_is_lost_is_not_repeated(alone) -> None:
    alone(acknowledgement_lost, devices=1)


def refused(fake: FakeVerbs, nth: int) -> None:
    """ibv_post_send refuses a request, the second of two among them: an error, nothing half done, and usable again."""
    with connected(MIB) as pair:
        source = np.full(MIB, 7, np.uint8)
        fake.fail("post_send", 12, nth=nth)
        with raises(ConnectionLost, "refused a work request"):
            pair.connection.write(b"small", pair.remote, signal=0)
            pair.connection.write(source, pair.remote, signal=0)
        assert pair.memory.signal_value(0) == (nth - 1) // 2
        pair.connection.write(source, pair.remote, signal=1, timeout_s=20)
        assert (pair.array == 7).all()
        assert pair.memory.signal_value(1) == 1


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_request_that_is_refused(alone, nth: int) -> None:
    alone(refused, nth, devices=1)


def second_refused(fake: FakeVerbs) -> None:
    """A put is taken in and the signal behind it refused: the caller has its buffer back, which is not read again."""
    with connected(MIB) as pair:
        source = np.full(MIB, 7, np.uint8)
        fake.hold()
        fake.fail("post_send", 12, nth=2)
        with raises(ConnectionLost, "refused a work request"):
            pair.connection.write(source, pair.remote, signal=0)
        source[:] = 9
        fake.release_all()
        assert not (pair.array == 9).any()


def test_a_request_that_is_refused_behind_another(alone) -> None:
    alone(second_refused, devices=1)


def own_cause(fake: FakeVerbs, nbytes: int) -> None:
    """A put with a signal is two requests: whichever of them fails, it is this operation's failure."""
    with connected(MIB) as pair:
        source = np.full(nbytes, 7, np.uint8)
        for nth in (2, 1):
            fake.hold()
            work = pair.connection.write(source, pair.remote, signal=0, async_op=True)
            fake.fail_completion(Status.REM_ACCESS_ERR, nth=nth)
            fake.release_all()
            with raises(RemoteAccessError, "the memory was closed there"):
                work.wait(20)
            pair.connection.write(b"", pair.remote, signal=1, timeout_s=20)


@pytest.mark.parametrize("nbytes", [8, MIB])
def test_a_put_with_a_signal_has_its_own_cause(alone, nbytes: int) -> None:
    alone(own_cause, nbytes, devices=1)


def gone_at_once(fake: FakeVerbs) -> None:
    """The peer's queue pairs answer no more, and its process has not ended."""
    with connected(MIB) as pair:
        for number in fake.qp_nums():
            fake.peer_gone(number)
        with raises(ConnectionLost, "no answer"):
            pair.connection.write(np.zeros(MIB, np.uint8), pair.remote, timeout_s=20)
        pair.connection.write(b"again", pair.remote, signal=0, timeout_s=20)  # over new ones
        assert pair.memory.signal_value(0) == 1


def test_queue_pairs_that_do_not_answer(alone) -> None:
    alone(gone_at_once, devices=2)
