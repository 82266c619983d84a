"""torch.distributed's operations, beside gloo's in the same processes."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import Processes, parent, raises
from world import world

from onesided import Group
from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded, LayoutError, Unsupported
from onesided.process_group import OnesidedProcessGroup

SIZE = 3
TYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]
# Older torch has the other names, and newer one warns of them.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]


def tensor(rank: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, (count,), generator=generator).to(dtype)


def operations(rank: int, count: int, dtype: torch.dtype, pg: Any, async_op: bool) -> list[torch.Tensor]:
    """What each operation has written on this rank."""
    results: list[torch.Tensor] = []

    def done(work: Any, *written: torch.Tensor) -> None:
        if async_op:
            work.wait()
            assert work.is_completed()
            assert work.is_success()
        results.extend(written)

    def many(numbers: list[int]) -> list[torch.Tensor]:
        return [torch.zeros(number, dtype=dtype) for number in numbers]

    options: dict[str, Any] = {"group": pg, "async_op": async_op}
    for root in range(SIZE):
        one = tensor(rank, count, dtype)
        done(dist.broadcast(one, root, **options), one)
    for op in OPS:
        one = tensor(rank, count, dtype)
        done(dist.all_reduce(one, op, **options), one)
        one = tensor(rank, count, dtype)
        done(dist.reduce(one, 1, op, **options), *[one] if rank == 1 else [])
    outputs = many([count] * SIZE)
    done(dist.all_gather(outputs, tensor(rank, count, dtype), **options), *outputs)
    outputs = many([count] * SIZE) if rank == 2 else []
    done(dist.gather(tensor(rank, count, dtype), outputs or None, 2, **options), *outputs)
    given = [tensor(each, count, dtype, 1) for each in range(SIZE)] if rank == 1 else None
    (one,) = many([count])
    done(dist.scatter(one, given, 1, **options), one)
    (output,) = many([count])
    given = [tensor(rank, count, dtype, each) for each in range(SIZE)]
    done(dist.reduce_scatter(output, given, **options), output)
    (output,) = many([count * SIZE])
    done(all_gather_single(output, tensor(rank, count, dtype), **options), output)
    (output,) = many([count])
    done(reduce_scatter_single(output, tensor(rank, count * SIZE, dtype), **options), output)
    (output,) = many([count * SIZE])
    done(dist.all_to_all_single(output, tensor(rank, count * SIZE, dtype), **options), output)
    # Rank a gives rank b (a + b) % 3 times so many.
    rows = [(rank + each) % 3 * count for each in range(SIZE)]
    (output,) = many([sum(rows)])
    done(dist.all_to_all_single(output, tensor(rank, sum(rows), dtype), rows, rows, **options), output)
    dist.barrier(group=pg)
    return results


def beside_gloo(group: Group) -> None:
    with world(group):
        gloo = dist.new_group(backend="gloo")
        for count, dtype, async_op in itertools.product([0, 1, 1001], TYPES, [False, True]):
            ours = operations(group.rank, count, dtype, None, async_op)
            theirs = operations(group.rank, count, dtype, gloo, False)
            for number, (one, expected) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(one, expected), f"result {number} of {count} {dtype}: {one} is not {expected}"


def test_operations_equal_those_of_gloo(processes: Processes) -> None:
    processes.run(beside_gloo, SIZE)


def beyond_gloo(group: Group) -> None:
    rank, size = group.rank, group.size
    with world(group):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            one = tensor(rank, 100, dtype)
            dist.all_reduce(one, dist.ReduceOp.AVG)
            total = sum(tensor(each, 100).double() for each in range(size))
            assert torch.equal(one, (total / size).to(dtype)), dtype
        one = tensor(rank, 100)
        dist.all_reduce(one, dist._make_nccl_premul_sum(0.5))
        assert torch.equal(one, sum(0.5 * tensor(each, 100) for each in range(size)))
        given, output = tensor(rank, 100 * size), torch.zeros(100)
        reduce_scatter_single(output, given, dist._make_nccl_premul_sum(0.5))
        expected = sum(0.5 * tensor(each, 100 * size) for each in range(size))
        assert torch.equal(output, expected[100 * rank : 100 * (rank + 1)])
        assert torch.equal(given, tensor(rank, 100 * size)), "the input is not to be changed"
        # Sizes that differ.
        outputs = [torch.zeros(each) for each in range(size)]
        dist.all_gather(outputs, tensor(rank, rank))
        assert all(torch.equal(output, tensor(each, each)) for each, output in enumerate(outputs))
        outputs = [torch.zeros(each + rank) for each in range(size)]
        dist.all_to_all(outputs, [tensor(rank, each + rank, seed=each) for each in range(size)])
        assert all(torch.equal(out, tensor(each, each + rank, seed=rank)) for each, out in enumerate(outputs))
        # Several at once.
        ones = [tensor(rank, 10, seed=turn) for turn in range(4)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for one in ones:
                dist.all_reduce(one)
        manager.wait()
        for turn, one in enumerate(ones):
            assert torch.equal(one, sum(tensor(each, 10, seed=turn) for each in range(size)))
        # A parameter, which autograd would not let be written to.
        parameter = torch.nn.Parameter(tensor(rank, 5))
        dist.broadcast(parameter, 0)
        assert torch.equal(parameter.detach(), tensor(0, 5))
        work = dist.all_reduce(one, async_op=True)
        assert torch.equal(work.get_future().wait()[0], one)
        assert work.result()[0] is one


def test_what_gloo_has_not(processes: Processes) -> None:
    processes.run(beyond_gloo, SIZE)


def objects(group: Group) -> None:
    rank, size = group.rank, group.size
    with world(group):
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
        assert gathered == [{"rank": each, "text": "x" * each} for each in range(size)]
        shared = [{"from": 1}, "two"] if rank == 1 else [None, None]
        dist.broadcast_object_list(shared, 1)
        assert shared == [{"from": 1}, "two"]
        at_root: list[Any] | None = [None] * size if rank == 2 else None
        dist.gather_object(rank * 2, at_root, 2)
        assert at_root == ([0, 2, 4] if rank == 2 else None)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, ["a", "b", "c"] if rank == 0 else None, 0)
        assert mine == ["abc"[rank]]
        # Subgroups, some of which this rank is not in.
        for members in ([0, 1], [1, 2], [2], [2, 0]):
            pg = dist.new_group(members)
            if rank in members:
                one = torch.tensor([rank])
                dist.all_reduce(one, group=pg)
                assert one.item() == sum(members)
                assert isinstance(pg, OnesidedProcessGroup)
                assert pg.communicator.size == len(members)
                dist.destroy_process_group(pg)


def test_objects_and_subgroups(processes: Processes) -> None:
    processes.run(objects, SIZE)


def default_group() -> OnesidedProcessGroup:
    pg = dist.group.WORLD
    assert isinstance(pg, OnesidedProcessGroup)
    return pg


def cause(call: Callable[[], object], says: str) -> BaseException | None:
    """What is behind the DistBackendError that `call` raises."""
    try:
        call()
    except dist.DistBackendError as error:
        assert says in str(error), error  # noqa: PT017 - the ranks do not import pytest
        return error.__cause__
    raise AssertionError("nothing was raised")


def mistakes(group: Group) -> None:
    """They are told at once, in the caller's terms, and cost nothing."""
    with world(group):
        with raises(LayoutError):
            dist.all_reduce(torch.zeros(4, 4)[:, 1])
        with raises(Unsupported, "bit operations"):
            dist.all_reduce(torch.zeros(4), dist.ReduceOp.BAND)
        with raises(BoundsError, "dst must be another one"):
            dist.distributed_c10d._get_default_group().send([torch.zeros(4)], group.rank, 0).wait()
        one = torch.ones(4)
        dist.all_reduce(one)
        assert (one == group.size).all()


def test_mistakes(processes: Processes) -> None:
    processes.run(mistakes, 2)


def one_is_absent(group: Group) -> None:
    with world(group):
        dist.barrier()
        if group.rank == 1:
            parent.hear()  # the others have ended
        else:
            late = cause(lambda: default_group().monitored_barrier(timedelta(seconds=0.5)), "rank 1")
            assert isinstance(late, DeadlineExceeded)
        with raises(RuntimeError, "ended"):
            dist.all_reduce(torch.zeros(1))
        work = None
        with raises(RuntimeError, "ended"):
            work = dist.all_reduce(torch.zeros(1), async_op=True)
            work.wait()
        assert work is not None
        assert isinstance(work.exception(), dist.DistBackendError)
        with raises(RuntimeError, "ended"):
            work.get_future().wait()
        parent.say()


def test_a_rank_that_never_arrives_is_named(processes: Processes) -> None:
    team = processes.start(one_is_absent, SIZE)
    for rank in (0, 2):
        team[rank].said()
    team[1].tell()
    team[1].said()
    for process in team:
        process.result()


def one_is_killed(group: Group) -> None:
    with world(group):
        dist.barrier()
        parent.say()
        if group.rank == 1:
            parent.hear()  # it is killed meanwhile
        assert isinstance(cause(lambda: dist.all_reduce(torch.ones(1_000_000)), "rank 1"), ConnectionLost)


def test_a_rank_that_dies_is_named(processes: Processes) -> None:
    team = processes.start(one_is_killed, SIZE)
    for process in team:
        process.said()
    team[1].kill()
    for rank in (0, 2):
        team[rank].result()


def aborted(group: Group) -> None:
    with world(group):
        if group.rank == 0:
            default_group().abort()
        with raises(RuntimeError, "aborted"):
            dist.barrier()
        with raises(RuntimeError, "aborted"):
            dist.barrier()


def test_an_abort_ends_it_everywhere(processes: Processes) -> None:
    processes.run(aborted, SIZE)
