"""Sends and receives: by rank and tag, from anybody, many at once, and what fails."""

import itertools
import time

import numpy as np
import pytest
from harness import Kind, Processes, parent, pattern, raises, same
from onesided.collectives import Communicator

from onesided import BoundsError, ConnectionLost, DeadlineExceeded, Group, LayoutError, OnesidedError, StaleHandle
from onesided._core import Span

# Around the size of a slot, and many slots.
SIZES = [0, 1, 47, 48, 49, 1000, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 5_000_001]


def ring(group: Group, kind: Kind) -> None:
    """Everybody to the next one: each way to issue them."""
    with Communicator(group, transport=kind.name) as comm:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for turn, nbytes in enumerate(SIZES):
            sent, expected = pattern(nbytes, 100 * turn + comm.rank), pattern(nbytes, 100 * turn + before)
            into = np.zeros(nbytes, np.uint8)
            work = comm.recv(into, before, async_op=True)
            comm.send(sent, after)
            work.wait()
            assert work.is_completed()
            assert work.exception() is None
            assert work.source_rank == before
            same(into, expected)
            into[:] = 0
            work = comm.send(sent, after, async_op=True)
            comm.recv(into, before)
            same(into, expected)
            work.wait()
            into[:] = 0
            batch = comm.batch_op_create()
            batch.send(sent, after)
            batch.recv(into, before)
            batch.issue()
            same(into, expected)
            work = batch.issue(async_op=True)  # it is empty now
            work.wait()
            assert work.is_completed()
            comm.barrier(async_op=True).wait()  # collective operations go on beside them


@pytest.mark.parametrize("size", [2, 3])
def test_everybody_to_the_next(processes: Processes, kind: Kind, size: int) -> None:
    processes.run(ring, size, kind)


def tags(group: Group, kind: Kind) -> None:
    """Received in another order than sent: what is in the way is set aside, small or large, whole or half."""
    counts = [3, 2_000_000, 5, 400_000, 7]
    with Communicator(group, transport=kind.name) as comm:
        for order in itertools.islice(itertools.permutations(range(len(counts))), 0, 120, 7):
            if comm.rank == 0:
                works = [comm.send(pattern(n, tag), 1, True, tag=tag) for tag, n in enumerate(counts)]
                for work in works:
                    work.wait()
            else:
                for tag in order:
                    into = np.zeros(counts[tag], np.uint8)
                    comm.recv(into, 0, tag=tag)
                    same(into, pattern(counts[tag], tag))


def test_tags(processes: Processes, kind: Kind) -> None:
    processes.run(tags, 2, kind)


def anybody(group: Group, kind: Kind) -> None:
    """One receives what all others send, in whatever order it comes; each sender's own order is kept."""
    each = 50
    with Communicator(group, transport=kind.name) as comm:
        if comm.rank == 0:
            seen: dict[int, list[int]] = {rank: [] for rank in range(1, comm.size)}
            works, goals = [], []
            for turn in range(each * (comm.size - 1)):
                goal = np.zeros(2, np.int64)
                if turn % 2:
                    works.append(comm.recv(goal, async_op=True))
                    goals.append(goal)
                else:
                    work = comm.recv(goal)
                    assert work.source_rank == goal[0]
                    seen[goal[0]].append(goal[1])
            for work, goal in zip(works, goals, strict=True):
                work.wait()
                assert work.source_rank == goal[0]
                seen[goal[0]].append(goal[1])
            assert {rank: sorted(numbers) for rank, numbers in seen.items()} == {
                rank: list(range(each)) for rank in seen
            }
        else:
            for number in range(each):
                comm.send(np.array([comm.rank, number]), 0)


def test_from_anybody(processes: Processes, kind: Kind) -> None:
    processes.run(anybody, 4, kind)


def order(group: Group, kind: Kind) -> None:
    """Receives of one rank and tag, posted before and after, get what was sent in its order."""
    count = 200
    with Communicator(group, transport=kind.name) as comm:
        if comm.rank == 0:
            works = [comm.send(np.array([number]), 1, True, tag=9) for number in range(count)]
        else:
            goals = [np.zeros(1, np.int64) for _ in range(count)]
            works = [comm.recv(goal, 0 if number % 3 else None, True, tag=9) for number, goal in enumerate(goals)]
        for work in reversed(works):
            work.wait()
        if comm.rank == 1:
            assert [int(goal[0]) for goal in goals] == list(range(count))


def test_order(processes: Processes, kind: Kind) -> None:
    processes.run(order, 2, kind)


def both_at_once(group: Group, kind: Kind) -> None:
    """Everybody sends large ones to everybody before it receives: nothing is in the way of anything."""
    with Communicator(group, transport=kind.name) as comm:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        for turn in range(3):
            nbytes = 3_000_000
            sends = [comm.send(pattern(nbytes, 10 * comm.rank + rank + turn), rank, True) for rank in others]
            goals = [np.zeros(nbytes, np.uint8) for _ in others]
            for rank, goal in zip(reversed(others), goals, strict=True):
                comm.recv(goal, rank)
                same(goal, pattern(nbytes, 10 * rank + comm.rank + turn))
            for work in sends:
                work.wait()


def test_all_send_before_they_receive(processes: Processes, kind: Kind) -> None:
    processes.run(both_at_once, 3, kind)


def late(group: Group, kind: Kind) -> None:
    """Deadlines: a message of which nothing has moved is taken back; a wait that ends leaves it."""
    with Communicator(group, transport=kind.name) as comm:
        goal = np.zeros(4, np.int64)
        if comm.rank == 0:
            with raises(DeadlineExceeded, "recv from rank 1 (tag 3): 0 of 32 bytes"):
                comm.recv(goal, 1, tag=3, timeout=0.05)
            with raises(DeadlineExceeded, "recv from any rank (tag 3)"):
                comm.recv(goal, tag=3, timeout=0.05)
            work = comm.recv(goal, 1, async_op=True, timeout=0.05)
            with raises(DeadlineExceeded, "recv from rank 1 (tag 0)"):
                work.wait()
            assert isinstance(work.exception(), DeadlineExceeded)
            work = comm.recv(goal, 1, async_op=True)
            with raises(DeadlineExceeded, "it goes on"):
                work.wait(0.05)
            assert not work.is_completed()
            parent.say()
            work.wait()
            assert (goal == 5).all()
            # More than the slots hold.
            with raises(DeadlineExceeded, "send to rank 1 (tag 2): 0 of 10 bytes"):
                for _ in range(100):
                    comm.send(np.zeros(10, np.uint8), 1, tag=2, timeout=0.05)
            comm.barrier()
            comm.send(np.full(4, 6), 1, tag=7)
        else:
            parent.hear()
            comm.send(np.full(4, 5), 0)
            comm.barrier()
            comm.recv(goal, 0, tag=7)
            assert (goal == 6).all()


def test_deadlines(processes: Processes, kind: Kind) -> None:
    team = processes.start(late, 2, kind)
    team[0].said()
    team[1].tell()
    for process in team:
        process.result()


def half_received(group: Group, kind: Kind) -> None:
    """A receive whose message is under way fails alone at its deadline; nothing is written any more."""
    nbytes = 8_000_000
    with Communicator(group, transport=kind.name) as comm:
        if comm.rank == 0:
            goal = np.zeros(nbytes, np.uint8)
            comm.send(np.zeros(1), 1, tag=9)
            group.all_gather(b"")
            work = comm.recv(goal, 1, async_op=True, timeout=0.2)
            with raises(DeadlineExceeded, f"of {nbytes} bytes"):
                work.wait()
            assert " 0 of" not in str(work.exception())
            goal[:] = 0
            group.all_gather(b"")
            comm.recv(np.zeros(1), 1, tag=2)  # behind the rest of it
            assert not goal.any()
        else:
            # Nobody serves, so it moves only while this rank waits for another one.
            source = Span(pattern(nbytes, 1))
            sending = comm._messages.send(0, 0, source, None, True)
            comm.recv(np.zeros(1), 0, tag=9)
            group.all_gather(b"")
            group.all_gather(b"")
            assert sending.wait()
            comm.send(np.zeros(1), 0, tag=2)


def test_a_receive_half_way_at_its_deadline(processes: Processes, kind: Kind) -> None:
    processes.run(half_received, 2, kind)


def test_a_send_half_way_at_its_deadline(processes: Processes, kind: Kind) -> None:
    processes.run(half_sent, 2, kind)


def half_sent(group: Group, kind: Kind) -> None:
    with Communicator(group, transport=kind.name) as comm:
        big = np.zeros(8_000_000, np.uint8)
        if comm.rank == 0:
            with raises(DeadlineExceeded, "send to rank 1 (tag 0)"):
                comm.send(big, 1, timeout=0.1)
            with raises(OnesidedError, "has ended"):
                comm.send(big, 1)
        else:
            group.all_gather(b"")  # it has failed there
            with raises(OnesidedError, "rank 0 has ended the communicator"):
                comm.recv(big, 0)
            return
        group.all_gather(b"")


def wrong(group: Group, kind: Kind) -> None:
    """A size that does not fit is an error of the receive; the next message is received as ever."""
    with Communicator(group, transport=kind.name) as comm:
        good = np.ones(6, np.float32)
        other = 1 - comm.rank
        for error, says, use in (
            (TypeError, "must be a tensor or an array, not list", lambda: comm.send([1], other)),
            (BoundsError, "dst must be another one of the 2 ranks, not 2", lambda: comm.send(good, 2)),
            (BoundsError, "src must be another one", lambda: comm.recv(good, comm.rank)),
            (BoundsError, "dst must be another one", lambda: comm.send(good, True)),
            (BoundsError, "tag must be", lambda: comm.send(good, other, tag=-1)),
            (BoundsError, "tag must be", lambda: comm.recv(good, tag="a")),  # type: ignore[arg-type]
            (LayoutError, "", lambda: comm.send(np.ones((4, 4))[:, 1], other)),
            (LayoutError, "", lambda: comm.recv(np.frombuffer(b"12345678", np.int64))),
        ):
            with raises(error, says):
                use()
        for large in (10, 1_000_000):
            for tag in (0, 1):
                if comm.rank == 0:
                    comm.send(pattern(large, 3), 1)
                    comm.send(pattern(large, 4), 1, tag=1)
                else:
                    goal = np.zeros(large, np.uint8)
                    if tag == 1:  # so that the first is set aside
                        comm.recv(goal, 0, tag=1)
                    with raises(BoundsError, f"rank 0 sends {large} bytes (tag 0) where this rank receives 3"):
                        comm.recv(np.zeros(3, np.uint8), 0)
                    if tag == 0:
                        comm.recv(goal, 0, tag=1)
                    same(goal, pattern(large, 4))


def test_what_is_wrong(processes: Processes, kind: Kind) -> None:
    processes.run(wrong, 2, kind)


def one_dies(group: Group, kind: Kind) -> None:
    """Messages with the dead fail and name it; those of others go on."""
    comm = Communicator(group, transport=kind.name)
    comm.barrier()
    if comm.rank == 2:
        comm.send(np.zeros(1), 0, tag=5)
        parent.say()
        parent.hear()  # it is killed meanwhile
    goal = np.zeros(4_000_000, np.uint8)
    if comm.rank == 0:
        from_dead = comm.recv(goal, 2, async_op=True)
        to_dead = comm.send(goal, 2, async_op=True)
        parent.say()
        for work in (from_dead, to_dead):
            with raises(ConnectionLost, "rank 2"):
                work.wait()
        comm.recv(np.zeros(1), 2, tag=5)  # what was there before
        with raises(ConnectionLost, "rank 2"):
            comm.recv(goal, 2)
        comm.recv(goal)
        same(goal, pattern(len(goal), 1))
        comm.send(goal, 1)
        with raises(ConnectionLost, "rank 2"):
            comm.barrier()
    else:
        parent.say()
        comm.send(pattern(len(goal), 1), 0)
        comm.recv(goal, 0)
        same(goal, pattern(len(goal), 1))
        with raises(ConnectionLost, "rank 2"):
            comm.barrier()
    comm.finalize()


def test_a_rank_that_dies(processes: Processes, kind: Kind) -> None:
    team = processes.start(one_dies, 3, kind)
    for process in team:
        process.said()
    team[2].kill()
    for process in team[:2]:
        process.result()


def ended(group: Group, kind: Kind) -> None:
    """An abort and a finalize end what is under way."""
    comm = Communicator(group, transport=kind.name)
    goal = np.zeros(10)
    work = comm.recv(goal, async_op=True)
    called: list[BaseException | None] = []
    work.add_done_callback(lambda one: called.append(one.exception()))
    group.all_gather(b"")
    if comm.rank == 0:
        comm.abort("enough")
    with raises(ConnectionLost, "enough"):
        work.wait()
    until = time.monotonic() + 20
    while not called and time.monotonic() < until:
        time.sleep(0.001)
    assert isinstance(called[0], ConnectionLost)
    work.add_done_callback(lambda one: called.append(one.exception()))
    assert len(called) == 2
    with raises(ConnectionLost, "enough"):
        comm.send(goal, 1 - comm.rank)
    comm.finalize()
    with raises(StaleHandle, "finalized"):
        comm.send(goal, 1 - comm.rank)
    second = Communicator(group, transport=kind.name)
    work = second.recv(goal, async_op=True)
    other = second.recv(goal, 1 - comm.rank, async_op=True)
    group.all_gather(b"")
    second.finalize()
    for one in (work, other):
        with raises(StaleHandle, "finalized before"):
            one.wait()


def test_abort_and_finalize(processes: Processes, kind: Kind) -> None:
    processes.run(ended, 2, kind)
