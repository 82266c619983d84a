"""Every operation against NumPy (case 47): types, counts, numbers of ranks, algorithms, in place and unaligned."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Kind, Processes, same
from onesided.collectives import Communicator, ReduceOp, algorithms

from onesided import Group

COUNTS = [0, 1, 7, 1000, 70_001]
FLOATS = ["float32", "float64", "float16"]
INTEGERS = ["int8", "uint8", "int16", "int32", "int64"]
OPERATIONS: dict[ReduceOp, Callable[[Any], Any]] = {
    ReduceOp.SUM: lambda each: np.add.reduce(each, dtype=each.dtype),
    ReduceOp.PRODUCT: lambda each: np.multiply.reduce(each, dtype=each.dtype),
    ReduceOp.MIN: np.minimum.reduce,
    ReduceOp.MAX: np.maximum.reduce,
    ReduceOp.BAND: np.bitwise_and.reduce,
    ReduceOp.BOR: np.bitwise_or.reduce,
    ReduceOp.BXOR: np.bitwise_xor.reduce,
    ReduceOp.AVG: lambda each: average(each),
}


def average(values: Any) -> Any:
    total = np.add.reduce(values, dtype=values.dtype)
    if total.dtype.kind == "f":
        return (total.astype(np.float64) / len(values)).astype(values.dtype)
    return np.trunc(total / len(values)).astype(values.dtype)


def values(count: int, dtype: str, rank: int, seed: int = 0) -> Any:
    """Small whole numbers: sums and products of them are exact in every type and order. Each rank knows everybody's."""
    numbers = np.random.default_rng([seed, rank, count]).integers(1 if dtype[0] == "u" else -2, 3, count)
    return numbers.astype(dtype)


def unaligned(array: Any) -> Any:
    """The same values one byte beyond where they would be aligned."""
    room = bytearray(array.nbytes + 1)
    moved = np.frombuffer(room, np.uint8)[1:].view(array.dtype) if array.size else array.copy()
    moved[:] = array
    return moved


def operations_of(dtype: str) -> list[ReduceOp]:
    bits = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
    return [op for op in OPERATIONS if dtype in INTEGERS or op not in bits]


def reductions(group: Group, kind: Kind, dtypes: list[str], counts: list[int]) -> None:
    size, rank = group.size, group.rank
    with Communicator(group, transport=kind.name, slot_nbytes=4096) as comm:
        for dtype, count in itertools.product(dtypes, counts):
            everybody = np.stack([values(count, dtype, each) for each in range(size)])
            for op in operations_of(dtype):
                expected = OPERATIONS[op](everybody)
                for name in algorithms("all_reduce"):
                    tensor = unaligned(everybody[rank])
                    comm.all_reduce(tensor, op, algorithm=name)
                    same(tensor, expected, f"all_reduce {name} {op} {dtype} {count}")
                root = (count + 1) % size
                tensor = everybody[rank].copy()
                comm.reduce(tensor, root, op)
                same(tensor, expected if rank == root else everybody[rank], f"reduce {op} {dtype} {count}")
            wide = np.stack([values(count * size, dtype, each, 1) for each in range(size)])
            expected = np.add.reduce(wide, dtype=wide.dtype)[rank * count : (rank + 1) * count]
            for name in algorithms("reduce_scatter"):
                output = np.zeros(count, dtype)
                comm.reduce_scatter_single(output, wide[rank], algorithm=name)
                same(output, expected, f"reduce_scatter {name} {dtype} {count}")
                mine = wide[rank].copy()
                output = mine[rank * count : (rank + 1) * count]  # in place
                comm.reduce_scatter_single(output, mine, algorithm=name)
                same(output, expected, f"reduce_scatter in place {name} {dtype} {count}")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_case_47_reductions(processes: Processes, kind: Kind, size: int) -> None:
    dtypes = FLOATS + INTEGERS if size <= 3 else ["float32", "int64"]
    counts = COUNTS
    if kind.name == "rdma":  # what differs is how chunks move; on Soft-RoCE a step takes milliseconds
        dtypes, counts = (["float32"], [0, 1, 2000]) if size > 3 else (["float16", "int64"], [1, 7000])
    processes.run(reductions, size, kind, dtypes, counts, timeout_s=100)


def movements(group: Group, kind: Kind, counts: list[int]) -> None:
    size, rank = group.size, group.rank
    with Communicator(group, transport=kind.name, slot_nbytes=4096) as comm:
        for count in counts:
            all_values = [values(count, "int32", each) for each in range(size)]
            for root, name in itertools.product(range(size), algorithms("broadcast")):
                tensor = all_values[rank].copy()
                comm.broadcast(tensor, root, algorithm=name)
                same(tensor, all_values[root], f"broadcast {name} {count} from {root}")
            for name in algorithms("all_gather"):
                output = np.zeros(count * size, np.int32)
                comm.all_gather_single(output, all_values[rank], algorithm=name)
                same(output, np.concatenate(all_values), f"all_gather {name} {count}")
                own = output[rank * count : (rank + 1) * count]
                output[: rank * count] = 0
                comm.all_gather_single(output, own, algorithm=name)  # in place
                same(output, np.concatenate(all_values), f"all_gather in place {name} {count}")
            # Sizes that differ, none among them.
            uneven = [values(count * (each % 3), "float64", each) for each in range(size)]
            for name in algorithms("all_gather"):
                outputs = [np.zeros_like(one) for one in uneven]
                comm.all_gather_v(outputs, uneven[rank], algorithm=name)
                for output, expected in zip(outputs, uneven, strict=True):
                    same(output, expected, f"all_gather_v {name} {count}")
            root = count % size
            outputs = [np.zeros_like(one) for one in uneven] if rank == root else None
            comm.gather(outputs, uneven[rank], root)
            for output, expected in zip(outputs or [], uneven, strict=True) if outputs else []:
                same(output, expected, f"gather {count}")
            output = np.zeros_like(uneven[rank])
            comm.scatter(output, uneven if rank == root else None, root)
            same(output, uneven[rank], f"scatter {count}")
            # What rank a gives to rank b: (a + 2 b) % 4 times so many rows.
            rows = [[(a + 2 * b) % 4 * count for b in range(size)] for a in range(size)]
            given = [values(sum(rows[a]), "int16", a, 2) for a in range(size)]
            pieces = [np.split(given[a], np.cumsum(rows[a])[:-1]) for a in range(size)]
            expected = np.concatenate([pieces[a][rank] for a in range(size)])
            output = np.zeros(len(expected), np.int16)
            comm.all_to_all_v_single(output, given[rank], [rows[a][rank] for a in range(size)], rows[rank])
            same(output, expected, f"all_to_all_v {count}")
            even = [values(count * size, "int8", a, 3) for a in range(size)]
            output = np.zeros(count * size, np.int8)
            comm.all_to_all_single(output, even[rank])
            same(output, np.concatenate([np.split(one, size)[rank] for one in even]), f"all_to_all {count}")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_case_47_movements(processes: Processes, kind: Kind, size: int) -> None:
    processes.run(movements, size, kind, COUNTS if kind.name == "shm" else [0, 1, 3000], timeout_s=100)


def agreement(group: Group, kind: Kind) -> list[bytes]:
    """Sums of numbers whose order matters."""
    results = []
    with Communicator(group, transport=kind.name) as comm:
        for count, name in itertools.product([3, 5000], algorithms("all_reduce")):
            tensor = np.random.default_rng(group.rank).standard_normal(count).astype(np.float32)
            comm.all_reduce(tensor, algorithm=name)
            results.append(tensor.tobytes())
    return results


def test_all_ranks_have_the_same_bits(processes: Processes, kind: Kind) -> None:
    first, *others = processes.run(agreement, 5, kind)
    assert all(other == first for other in others)


def in_order(group: Group, kind: Kind) -> None:
    """Asynchronous and synchronous operations, mixed, run in the order in which they are issued."""
    with Communicator(group, transport=kind.name) as comm:
        tensor = np.ones(1000, np.int64)
        works = [comm.all_reduce(tensor, async_op=True) for _ in range(5)]
        comm.all_reduce(tensor)
        assert all(work.is_completed() and work.exception() is None for work in works)
        assert (tensor == group.size**6).all()
        work = comm.barrier(async_op=True)
        told: list[object] = []
        work.wait()
        work.add_done_callback(told.append)
        assert told == [work]


def test_operations_run_in_order(processes: Processes, kind: Kind) -> None:
    processes.run(in_order, 3, kind)


def barriers(group: Group, kind: Kind, rounds: int) -> None:
    """Everybody puts its turn into a window that all see: who leaves a barrier finds all others there."""
    from onesided import Window

    window = Window.allocate(group, shape=group.size, dtype=np.int64, transport=kind.name)
    with Communicator(group, transport=kind.name) as comm:
        for turn in range(1, rounds + 1):
            for peer in range(group.size):
                window.put(np.array([turn]), peer, 8 * group.rank)
            window.flush()
            comm.barrier()
            assert (window.array >= turn).all(), f"turn {turn}: {window.array}"
    group.barrier()
    window.close()


def test_case_48_no_barrier_returns_early(processes: Processes, kind: Kind) -> None:
    processes.run(barriers, 3, kind, 500 if kind.name == "shm" else 100)


def flood(group: Group, kind: Kind, rounds: int) -> None:
    """Broadcasts without anything between them: nothing is overwritten that was not read."""
    with Communicator(group, transport=kind.name, slot_nbytes=1024) as comm:
        for turn in range(rounds):
            count = 1 + turn * 37 % 3000
            tensor = np.full(count, turn if group.rank == turn % group.size else -1, np.int32)
            comm.broadcast(tensor, turn % group.size)
            assert (tensor == turn).all(), f"turn {turn}"


def test_case_48_broadcast_floods(processes: Processes, kind: Kind) -> None:
    processes.run(flood, 4, kind, 500 if kind.name == "shm" else 100)
