"""One window whose ranks reach each other in different ways: shm within a host, rdma between hosts."""

import os

import numpy as np
import pytest
from harness import Kind, Processes, pattern, raises, same
from onesided.windows.fabric import Fabric

from onesided import BoundsError, Group, StaleHandle, Unsupported, Window


@pytest.fixture
def rdma(kind: Kind) -> Kind:
    if kind.name != "rdma":
        pytest.skip("only together with rdma are there two ways")
    return kind


def as_if_on(host: str) -> None:
    """From here on this process counts as one on that host."""
    os.environ["ONESIDED_HOST"] = host


def words(window: Window) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return window.array.view(np.uint64)


def case_17(group: Group, private: bool) -> None:
    """Ranks 0 and 1 share a host, rank 2 has its own; all of them use the words of all."""
    as_if_on("b" if group.rank == 2 else "a")
    try:
        window = (
            Window.create(group, np.zeros(1 << 20, np.uint8), signals=3)
            if private
            else Window.allocate(group, nbytes=1 << 20, signals=3)
        )
        described = window.describe()
        assert described["transport"] == "shm+rdma", described
        kinds = [peer["kind"] for peer in described["peers"]]
        near = {0, 1} if group.rank < 2 else {2}
        assert [("shm" in kind) for kind in kinds] == [rank in near for rank in range(3)], kinds

        # Adds to one word of each rank, from all of them: exact, and every value is seen once.
        seen = [[window.fetch_add(peer, 0, 1) for peer in range(3)] for _ in range(300)]
        told = group.all_gather(repr(seen).encode())
        for peer in range(3):
            values = [turn[peer] for said in told for turn in eval(said)]
            assert sorted(values) == list(range(900))
        assert words(window)[0] == 900

        # A lock on rank 0 that excludes, whichever way its holder comes.
        for _ in range(20):
            while window.compare_swap(0, 8, 0, group.rank + 1) != 0:
                pass
            held = np.zeros(1, np.uint64)
            window.get(held, 0, 16)
            window.put(held + 1, 0, 16)
            window.flush(0)
            assert window.compare_swap(0, 8, group.rank + 1, 0) == group.rank + 1
        group.barrier()
        if group.rank == 0:
            assert words(window)[2] == 60

        # Strong signals, of every size, synchronous and not; sent by both ways onto one counter.
        for turn, nbytes in enumerate([1, 300, 5000, 200_000]):
            for peer in range(3):
                source = pattern(nbytes, group.rank * 10 + turn)
                at = 4096 + 200_000 * group.rank
                window.put(source, peer, at, signal=1, async_op=turn % 2 == 1).wait(20)
            window.wait_signal(1, 3 * (turn + 1), timeout_s=20)
            for rank in range(3):
                begin = 4096 + 200_000 * rank
                same(window.array[begin : begin + nbytes], pattern(nbytes, rank * 10 + turn))
            group.barrier()
        for peer in range(3):
            with raises(BoundsError):
                window.put(b"x", peer, 1 << 20)
            with raises(BoundsError):
                window.put(b"x", peer, 0, signal=3)
        window.flush()
        group.barrier()
        if group.rank == 0:
            window.close()
        group.barrier()
        if group.rank != 0:
            with raises(StaleHandle):
                window.put(b"x", 0)
                window.flush(0)
            window.put(b"x", 3 - group.rank, 100, signal=2)
            window.wait_signal(2, 1, timeout_s=20)
        group.barrier()
        window.close()
    finally:
        del os.environ["ONESIDED_HOST"]


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_case_17_shm_and_rdma_peers_in_one_window(processes: Processes, rdma: Kind, private: bool) -> None:
    processes.run(case_17, 3, private)


def one_host_each(group: Group) -> None:
    as_if_on(str(group.rank))
    try:
        with Window.allocate(group, nbytes=64) as window:
            assert window.describe()["transport"] == "rdma"
            assert "2 hosts" in window.describe()["why"]
            window.put(b"hello", 1 - group.rank, signal=0)
            window.wait_signal(0, timeout_s=20)
            group.barrier()
    finally:
        del os.environ["ONESIDED_HOST"]


def test_auto_takes_rdma_between_hosts(processes: Processes, rdma: Kind) -> None:
    processes.run(one_host_each, 2)


def nothing_reaches(group: Group) -> None:
    as_if_on(str(group.rank))
    try:
        with raises(Unsupported, "2 hosts"):
            Window.allocate(group, nbytes=64)
    finally:
        del os.environ["ONESIDED_HOST"]
    with Window.allocate(group, nbytes=64) as window:
        assert window.describe()["transport"] == "shm"
        group.barrier()


def test_auto_says_why_nothing_reaches_all(processes: Processes, kind: Kind) -> None:
    from onesided import RdmaTransport

    if kind.name != "shm" or RdmaTransport.supported():
        pytest.skip("there is an RDMA device, so something does")
    processes.run(nothing_reaches, 2)


def different_wishes(group: Group) -> None:
    with raises(Exception, "different transports"):
        Window.allocate(group, nbytes=64, transport="shm" if group.rank == 0 else "rdma")


def test_ranks_that_ask_for_different_kinds(processes: Processes, rdma: Kind) -> None:
    processes.run(different_wishes, 2)


def test_the_memory_has_a_place_for_every_rank() -> None:
    """In each of its two registrations; the default of a transport is 256."""
    asked: list[int] = []

    class Recorder:
        def register_memory(self, memory: object, access: str, *, signals: int, max_peers: int = 256) -> object:
            asked.append(max_peers)
            return memory

    class Memory:
        access, signals = "rw", 1

    fabric = Fabric.__new__(Fabric)
    fabric.transport, fabric.far, fabric._most_peers = None, Recorder(), 1001  # type: ignore[assignment]
    fabric.register(lambda _: (None, Memory()))  # type: ignore[arg-type,return-value]
    assert asked == [1001]
