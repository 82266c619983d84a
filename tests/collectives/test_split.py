"""Communicators of some of the ranks, the windows and hooks of a communicator."""

import numpy as np
import pytest
from harness import Kind, Processes, raises
from onesided.collectives import Communicator, Operation, ReduceOp

from onesided import BoundsError, Group, OnesidedError, StaleHandle

SIZE = 5


def parts(group: Group, kind: Kind) -> None:
    """Parts as a list of all, as own lists, in another order, nested, and of one rank."""
    with Communicator(group, transport=kind.name, name="whole") as comm:
        rank = comm.rank
        pairs = comm.split([[0, 1], [2, 3]])
        if rank == 4:
            assert pairs is None
        else:
            assert pairs is not None
            assert (pairs.rank, pairs.size) == (rank % 2, 2)
            assert pairs.world_ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
            tensor = np.full(1000, rank, np.int64)
            pairs.all_reduce(tensor)
            assert (tensor == sum(pairs.world_ranks)).all()
        backwards = comm.split([4, 2, 0] if rank % 2 == 0 else [3, 1], name="backwards")
        assert backwards is not None
        assert backwards.name == "backwards"
        assert backwards.world_ranks == ([4, 2, 0] if rank % 2 == 0 else [3, 1])
        assert backwards.world_ranks[backwards.rank] == rank
        gathered = np.empty(backwards.size, np.int64)
        work = backwards.all_gather_single(gathered, np.array([rank]), async_op=True)
        tensor = np.full(7, rank, np.float32)
        comm.all_reduce(tensor, ReduceOp.MAX)  # the whole goes on beside its parts
        assert (tensor == 4).all()
        work.wait()
        assert gathered.tolist() == backwards.world_ranks
        within = backwards.split([1, 0] if rank in (2, 4) else [])
        if rank in (2, 4):
            assert within is not None
            assert within.world_ranks == [2, 4]
            within.broadcast(tensor, 0)
            within.finalize()
        else:
            assert within is None
        alone = comm.split([rank])
        assert alone is not None
        alone.barrier()
        for one in (alone, backwards, pairs):
            if one is not None:
                one.finalize()
                one.finalize()
                with raises(StaleHandle, "finalized"):
                    one.barrier()
        comm.barrier()


def test_parts(processes: Processes, kind: Kind) -> None:
    processes.run(parts, SIZE, kind)


def refused(group: Group, kind: Kind) -> None:
    """What is wrong on one rank is an error on all, and the communicator goes on."""
    with Communicator(group, transport=kind.name) as comm:
        rank = comm.rank
        with raises(BoundsError, "rank 0 is to be with ranks [0, 1]"):
            comm.split([0, 1] if rank == 0 else [1, 2] if rank else [])
        with raises(BoundsError, "rank 7 is not one of the 3" if rank == 1 else "split failed on rank 1"):
            comm.split([0, 7, 1] if rank == 1 else [0, 1])
        with raises(BoundsError, "twice" if rank == 1 else "split failed on rank 1"):
            comm.split([[0, 1], [1]] if rank == 1 else [[0, 1], [2]])
        with raises(TypeError if rank == 2 else BoundsError, "integers"):
            comm.split(["0"] if rank == 2 else [0, 1])
        with raises(BoundsError, "name 'a'"):
            comm.split([0, 1, 2], name="a" if rank == 0 else "b")
        tensor = np.ones(3)
        comm.all_reduce(tensor)
        assert (tensor == 3).all()


def test_what_is_wrong_on_one_rank_is_told_to_all(processes: Processes, kind: Kind) -> None:
    processes.run(refused, 3, kind)


def outlives(group: Group, kind: Kind) -> None:
    """A part is independent of what it was split from."""
    comm = Communicator(group, transport=kind.name)
    part = comm.split(list(range(comm.size)))
    assert part is not None
    group.all_gather(b"")  # all have it
    comm.abort("enough")
    with raises(OnesidedError, "enough"):
        comm.barrier()
    comm.finalize()
    tensor = np.full(100_000, 2.0)
    part.all_reduce(tensor)
    assert (tensor == 2 * part.size).all()
    window = part.new_window(nbytes=64, signals=1)
    window.put(np.full(8, part.rank, np.uint8), (part.rank + 1) % part.size, signal=0)
    window.wait_signal(0)
    assert (window.array[:8] == (part.rank - 1) % part.size).all()
    window.close()
    mine = np.zeros(16, np.int32)
    over = part.new_window(mine)
    over.put(np.arange(16, dtype=np.int32), (part.rank + 1) % part.size)
    part.barrier()
    assert (mine == np.arange(16)).all()
    over.close()
    part.finalize()


def test_a_part_outlives_the_whole(processes: Processes, kind: Kind) -> None:
    processes.run(outlives, 3, kind)


def hooked(group: Group, kind: Kind) -> None:
    with Communicator(group, transport=kind.name, name="hooked") as comm:
        begun: list[Operation] = []
        over: list[tuple[Operation, BaseException | None]] = []
        ended: list[str] = []
        hooks = [
            comm.register_pre_hook(begun.append),
            comm.register_post_hook(lambda operation, error: over.append((operation, error))),
            comm.register_abort_hook(ended.append),
        ]
        tensor = np.ones(3)
        comm.all_reduce(tensor)
        comm.barrier(async_op=True).wait()
        assert begun == [Operation("hooked", "all_reduce", False), Operation("hooked", "barrier", True)]
        assert over == [(one, None) for one in begun]

        def refuse(operation: Operation) -> None:
            raise RuntimeError(f"no {operation.name} today")

        refusal = comm.register_pre_hook(refuse)
        with raises(RuntimeError, "no all_reduce today"):
            comm.all_reduce(tensor)
        refusal.remove()
        refusal.remove()
        comm.all_reduce(tensor)
        assert (tensor == 4).all()
        hooks[0].remove()
        hooks[1].remove()
        comm.barrier()
        assert len(over) == 3
        assert ended == []
        last: list[BaseException | None] = []
        comm.register_post_hook(lambda _, error: last.append(error))
        group.all_gather(b"")  # all are through the barrier
        if comm.rank == 0:
            comm.abort("it is late")
        with raises(OnesidedError, "it is late"):
            comm.barrier()
        assert len(ended) == 1
        assert "it is late" in ended[0]
        assert isinstance(last[-1], OnesidedError)


def test_hooks(processes: Processes, kind: Kind) -> None:
    processes.run(hooked, 2, kind)


@pytest.mark.parametrize("size", [1, 3])
def test_one_rank_or_none(processes: Processes, kind: Kind, size: int) -> None:
    processes.run(nobody, size, kind)


def nobody(group: Group, kind: Kind) -> None:
    with Communicator(group, transport=kind.name) as comm:
        assert comm.split([]) is None
        assert (comm.get_rank(), comm.get_size(), comm.get_name()) == (group.rank, group.size, group.name)
