"""Ranks that die, stay away, or do something else (case 49): everybody is told who it was, nobody waits for ever."""

import time

import numpy as np
import pytest
from harness import Kind, Processes, parent, raises
from onesided.collectives import Communicator, ReduceOp, algorithms

from onesided import BoundsError, ConnectionLost, DeadlineExceeded, Group, LayoutError, OnesidedError, StaleHandle
from onesided.errors import Unsupported

SIZE = 4


def one_is_absent(group: Group, kind: Kind) -> None:
    comm = Communicator(group, transport=kind.name)
    comm.barrier()
    begun = time.monotonic()
    if group.rank == 2:
        parent.hear()  # the others have ended
        with raises(DeadlineExceeded, "has ended the communicator"):
            comm.barrier()
    else:
        tensor = np.ones(100_000, np.float32)
        with raises(DeadlineExceeded, "rank 2"):
            comm.all_reduce(tensor, timeout=0.5)
        assert time.monotonic() - begun < 20
        with raises(DeadlineExceeded):
            comm.barrier()
        assert comm.is_aborted()
    parent.say()
    comm.finalize()


def test_case_49_a_rank_that_never_arrives(processes: Processes, kind: Kind) -> None:
    team = processes.start(one_is_absent, SIZE, kind)
    for rank in (0, 1, 3):
        team[rank].said()
    team[2].tell()
    team[2].said()
    for process in team:
        process.result()


def one_is_killed(group: Group, kind: Kind, name: str) -> None:
    comm = Communicator(group, transport=kind.name)
    comm.barrier()
    parent.say()
    if group.rank == 1:
        parent.hear()  # it is killed meanwhile
    tensor = np.ones(1_000_000, np.float32)
    with raises(ConnectionLost, "rank 1"):
        comm.all_reduce(tensor, algorithm=name)
    with raises(ConnectionLost):
        comm.all_reduce(tensor, async_op=True).wait()
    comm.finalize()


@pytest.mark.parametrize("name", ["ring", "two_shot", "tree"])
def test_case_49_a_rank_that_dies(processes: Processes, kind: Kind, name: str) -> None:
    """Those that do not speak with it are told by those that do."""
    team = processes.start(one_is_killed, SIZE, kind, name)
    for process in team:
        process.said()
    team[1].kill()
    for rank in (0, 2, 3):
        team[rank].result()


def ended_by_one(group: Group, kind: Kind) -> None:
    comm = Communicator(group, transport=kind.name)
    if group.rank == 0:
        comm.abort("no more steps")
    with raises(ConnectionLost, "no more steps"):
        comm.barrier()
    comm.finalize()
    with raises(StaleHandle, "finalized"):
        comm.barrier()
    comm.finalize()


def test_an_abort_reaches_everybody(processes: Processes, kind: Kind) -> None:
    processes.run(ended_by_one, 3, kind)


def different(group: Group, kind: Kind, how: str) -> None:
    comm = Communicator(group, transport=kind.name)
    odd = group.rank == 1
    with raises(OnesidedError, "rank"):
        if how == "operation" and odd:
            comm.broadcast(np.zeros(10, np.int64), 0)
        elif how == "type":
            comm.all_reduce(np.zeros(10, np.int64 if odd else np.float64))
        else:
            comm.all_reduce(np.zeros(11 if odd and how == "size" else 10, np.int64))
        comm.barrier()
    comm.finalize()


@pytest.mark.parametrize("how", ["operation", "type", "size"])
def test_ranks_that_do_different_things_are_told(processes: Processes, kind: Kind, how: str) -> None:
    processes.run(different, 2, kind, how)


def wrong(group: Group, kind: Kind) -> None:
    """What is wrong is said before anything is sent, so the communicator goes on."""
    with Communicator(group, transport=kind.name) as comm:
        good = np.ones(6, np.float32)
        for error, says, use in (
            (TypeError, "must be a tensor or an array, not list", lambda: comm.all_reduce([1, 2])),
            (TypeError, "op must be a ReduceOp", lambda: comm.all_reduce(good, "sum")),
            (LayoutError, "", lambda: comm.all_reduce(np.ones((4, 4))[:, 1])),
            (LayoutError, "", lambda: comm.all_reduce(np.frombuffer(b"12345678", np.int64))),
            (Unsupported, "bit operations", lambda: comm.all_reduce(good, ReduceOp.BAND)),
            (Unsupported, "no algorithm 'fast' for all_reduce", lambda: comm.all_reduce(good, algorithm="fast")),
            (BoundsError, "root must be one of the 2 ranks, not 2", lambda: comm.broadcast(good, 2)),
            (BoundsError, "cannot share equally", lambda: comm.reduce_scatter_single(good, np.ones(7, np.float32))),
            (LayoutError, "own part", lambda: comm.all_gather_single(good, np.ones(2, np.float32))),
            (BoundsError, "a tensor for each of the 2 ranks", lambda: comm.all_gather([good], good)),
            (BoundsError, "add up", lambda: comm.all_to_all_v_single(good, good, [1, 1], [3, 3])),
        ):
            with raises(error, says):
                use()
        comm.all_reduce(good)
        assert (good == 2).all()


def test_what_is_wrong_is_said_at_once(processes: Processes, kind: Kind) -> None:
    processes.run(wrong, 2, kind)


def test_choices_are_explained(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = Group.local(1)
    with Communicator(group) as comm:
        assert comm.explain("all_reduce", 8).algorithm == "one_shot"
        assert comm.explain("all_reduce", 8, "ring")[2:4] == ("ring", "asked for by the call")
        monkeypatch.setenv("ONESIDED_ALL_REDUCE", "tree")
        explained = comm.explain("all_reduce", 8)
        assert explained[2:4] == ("tree", "asked for by ONESIDED_ALL_REDUCE")
        assert sorted([*explained.others, "tree"]) == algorithms("all_reduce")
    group.leave()
