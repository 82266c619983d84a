"""stats(), describe() and logging: what there is to see, and that nothing is said unasked."""

import json
import logging
import os

import numpy as np
import pytest
from harness import Kind, Processes, raises

from onesided import BoundsError, Group, StaleHandle, Window, stats


def counts_of(kind: Kind, rank: int, group: Group) -> dict[str, int]:
    """The counters towards one rank; all zero before the first operation."""
    by_peer = stats().get(kind.name, {})
    return dict(by_peer.get(f"rank {rank} of group {group.name!r}", {}))


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


def exact_counts(group: Group, kind: Kind, async_op: bool, private: bool) -> None:
    if private:
        window = Window.create(group, np.zeros(4096, np.uint8), signals=2, transport=kind.name)
    else:
        window = Window.allocate(group, 4096, signals=2, transport=kind.name)
    peer = 1 - group.rank
    group.barrier()
    before = counts_of(kind, peer, group)
    for i in range(7):
        window.put(bytes(100 + i), peer, signal=0 if i < 3 else None, async_op=async_op).wait()
    for _ in range(5):
        window.get(bytearray(50), peer, async_op=async_op).wait()
    window.put(b"", peer)
    window.signal(peer, 1)
    window.signal(peer, 1, 10)
    atomics = not private or kind.private_atomics
    if atomics:
        for _ in range(4):
            window.fetch_add(peer, 0, 1)
        window.compare_swap(peer, 0, 0, 1)
    window.flush(peer)
    window.flush(peer)
    # Devices get copies of small puts, nothing of an empty one, and bring small gets into a buffer if somebody waits.
    copies = 13 if kind.name == "shm" else 7 if async_op else 12
    expected = {
        "puts": 8, "gets": 5, "signals": 5, "bytes_put": sum(range(100, 107)), "bytes_got": 250, "copies": copies,
        "flushes": 2, "atomics": 5 if atomics else 0,
    }  # fmt: skip
    assert difference(counts_of(kind, peer, group), before) == {name: n for name, n in expected.items() if n}
    window.wait_signal(0, 3)
    waits = stats()["window"][window.name]
    assert waits["waits"] == 1
    with raises(BoundsError):
        window.put(b"x", peer, 5000)
    assert difference(counts_of(kind, peer, group), before)["errors"] == 1
    group.barrier()
    window.close()
    assert counts_of(kind, peer, group)["puts"] >= 8  # stay after the end


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_counts_are_exact(processes: Processes, kind: Kind, async_op: bool, private: bool) -> None:
    processes.run(exact_counts, 2, kind, async_op, private)


def counts_of_threads(group: Group, kind: Kind) -> None:
    from harness import in_threads

    window = Window.allocate(group, 4096, signals=1, transport=kind.name)
    peer = 1 - group.rank
    before = counts_of(kind, peer, group)

    def put() -> None:
        for _ in range(500):
            window.put(b"12345678", peer, signal=0)

    in_threads([put] * 8)
    done = difference(counts_of(kind, peer, group), before)
    assert (done["puts"], done["bytes_put"], done["copies"], done["signals"]) == (4000, 32_000, 4000, 4000)
    group.barrier()
    window.close()


def test_counts_of_many_threads_are_exact(processes: Processes, kind: Kind) -> None:
    processes.run(counts_of_threads, 2, kind)


def no_registration_later(group: Group, kind: Kind) -> None:
    """A second put registers nothing, whatever its source: case 42's rule, in small."""
    window = Window.allocate(group, 1 << 22, transport=kind.name)
    peer = 1 - group.rank

    def registrations() -> int:
        return sum(counts["registrations"] for counts in stats()[kind.name].values())

    # What a device is to read must be registered, once for each array; on shm, never.
    source, other = np.zeros(1 << 22, np.uint8), np.zeros(1 << 20, np.uint8)
    if kind.name == "rdma":
        window.put(source, peer)
        window.put(other, peer)
    window.put(b"x", peer)
    before = registrations()
    for _ in range(20):
        window.put(source, peer)
        window.put(other[100:], peer, async_op=True).wait()
        window.get(source, peer)
        if kind.name == "shm":
            window.put(bytearray(1 << 20), peer)
    window.flush()
    assert registrations() == before
    group.barrier()
    window.close()
    Window.allocate(group, 8, transport=kind.name).close()
    assert registrations() > before
    group.barrier()


def test_a_second_put_registers_nothing(processes: Processes, kind: Kind) -> None:
    processes.run(no_registration_later, 2, kind)


def async_failures_count(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, signals=1, transport=kind.name)
    peer = 1 - group.rank
    group.barrier()
    if group.rank == 1:
        window.close()
        group.barrier()
        group.barrier()
        return
    group.barrier()
    before = counts_of(kind, peer, group)
    for _ in range(3):
        window.put(b"x", peer, async_op=True)
    with raises(StaleHandle):
        window.flush(peer)
    done = difference(counts_of(kind, peer, group), before)
    assert done["errors"] >= 3
    assert "puts" not in done
    group.barrier()
    window.close()


def test_failures_of_asynchronous_operations_count(processes: Processes, kind: Kind) -> None:
    processes.run(async_failures_count, 2, kind)


def shape_of_stats(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, signals=1, transport=kind.name)
    window.put(b"x", 0, signal=0)
    window.wait_signal(0, 1)
    found = stats()
    json.dumps(found)
    assert {kind.name, "window"} <= set(found)
    names = {
        "puts", "gets", "signals", "atomics", "flushes", "bytes_put", "bytes_got", "copies", "registrations",
        "cache_hits",
        "waits", "sleeps", "errors",
    }  # fmt: skip
    for peers in found.values():
        for counts in peers.values():
            assert set(counts) == names
            assert all(isinstance(count, int) and count >= 0 for count in counts.values())
    found.clear()  # a copy
    assert stats()
    window.close()


def test_shape_of_stats(processes: Processes, kind: Kind) -> None:
    processes.run(shape_of_stats, 1, kind)


def said_unasked(group: Group, kind: Kind) -> None:
    """Everything that could be logged, in a process that has not configured logging."""
    assert not logging.getLogger().handlers
    window = Window.allocate(group, 8, transport=kind.name)
    with raises(BoundsError):
        window.put(b"123456789", 0)
    window.close()
    with Window.expose(group.directory, f"silent {os.getpid()}", nbytes=8, transport=kind.name):
        Window.attach(group.directory, f"silent {os.getpid()}").close()
    group.directory.publish(f"left {os.getpid()}", b"x")


def test_logging_is_silent_by_default(processes: Processes, spawn, kind: Kind, capfd) -> None:
    processes.restart()
    processes.run(said_unasked, 2, kind)
    processes.restart()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_logging_says_what_was_chosen(kind: Kind, caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="onesided"):
        with Group.local(1, name="logged")[0] as group:
            Window.allocate(group, 8, transport="auto").close()
    assert any(record.name == "onesided.windows" and "logged/1" in record.getMessage() for record in caplog.records)
    assert any(record.name == "onesided.transport" and "auto" in record.getMessage() for record in caplog.records)
