"""The bytes of a Memory live as long as anybody can see them, and are only written where they may be."""

import ctypes
import gc
import mmap
import platform
import weakref
from pathlib import Path

import numpy as np
import pytest
from harness import Kind, pattern, same
from pairs import connected, remote

from onesided import LayoutError, RegistrationError, RemoteMemory, StaleHandle

N = 64 << 20  # large enough to be unmapped when it is freed


class Source:
    """Memory that tells when it is gone."""

    def __init__(self) -> None:
        self.array = np.ones(N, np.uint8)
        self.gone = weakref.ref(self.array)

    def drop(self) -> bool:
        del self.array
        gc.collect()
        return self.gone() is None


def test_an_array_over_closed_private_memory_stays_good(kind: Kind) -> None:
    source = Source()
    with kind.open() as transport:
        memory = transport.register_memory(source.array)
        view = np.frombuffer(memory, np.uint8)
        memory.close()
        assert not source.drop()
        assert view.sum() == N
        view[:] = 2
        del memory
        assert int(view.sum(dtype=np.int64)) == 2 * N
        del view
        gc.collect()
        assert source.gone() is None


def test_so_does_one_whose_transport_was_closed(kind: Kind) -> None:
    source = Source()
    transport = kind.open()
    memory = transport.register_memory(source.array)
    transport.close()
    assert not source.drop()
    assert np.frombuffer(memory, np.uint8).sum() == N


def test_close_lets_go_of_memory_that_nobody_looks_at(kind: Kind) -> None:
    source = Source()
    with kind.open() as transport:
        memory = transport.register_memory(source.array)
        part = memory.view(0, 8)
        memory.close()
        assert source.drop()
        for dead in (memory, part):
            with pytest.raises(BufferError, match="closed"):
                memoryview(dead)
        other = transport.allocate(8)
        connection = transport.connect(transport.bind())
        remote = RemoteMemory.from_bytes(other.handle())
        for dead in (memory, part):
            with pytest.raises(StaleHandle):
                connection.write(dead, remote)


def kernel_version() -> tuple[int, ...]:
    return tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


def test_a_mapped_file_is_a_source(kind: Kind, tmp_path: Path) -> None:
    """Weights lie in files; mapped read-only, they are put as they are."""
    file = tmp_path / "weights"
    file.write_bytes(pattern(100_000).tobytes())
    with file.open("rb") as opened, connected(kind) as pair:
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            mapped = mmap.mmap(opened.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
            memory = pair.b.allocate(100_000, signals=1)
            pair.to_b.write(mapped, remote(memory), signal=0)
            memory.wait_signal(0, 1, timeout_s=20)
            same(memory, pattern(100_000))


@pytest.mark.parametrize("what", ["bytes", "array", "mapping"])
def test_read_only_memory_stays_read_only(kind: Kind, what: str) -> None:
    source = {
        "bytes": bytes(4096),
        "array": np.zeros(4096, np.uint8),
        "mapping": mmap.mmap(-1, 4096, prot=mmap.PROT_READ),
    }[what]
    if isinstance(source, np.ndarray):
        source.flags.writeable = False
    with kind.open() as transport:
        with pytest.raises(LayoutError, match="read-only"):
            transport.register_memory(source, "rw")
        if kind.name == "rdma" and what == "mapping" and kernel_version() < (6, 2):
            # It is shared, too, and the kernel cannot pin that. A put copies it.
            with pytest.raises(RegistrationError, match=r"Linux before 6\.2"):
                transport.register_memory(source, "r")
            return
        memory = transport.register_memory(source, "r")
        assert memoryview(memory).readonly
        assert not np.frombuffer(memory, np.uint8).flags.writeable
        with pytest.raises(TypeError):
            memoryview(memory)[0] = 1
        other = transport.allocate(4096)
        ctypes.memset(other.address, 7, 4096)
        connection = transport.connect(transport.bind())
        for destination in (memory, memory.view(8, 8)):
            with pytest.raises(LayoutError, match="read-only"):
                connection.read(destination, RemoteMemory.from_bytes(other.handle()))
        into = bytearray(4096)
        connection.read(into, RemoteMemory.from_bytes(memory.handle()))
        assert into == bytes(4096)


def test_describe_says_why(kind: Kind) -> None:
    with kind.open() as transport:
        described = transport.describe()
        assert described["kind"] == kind.name
        assert described["why"] == f"asked for {kind.name!r}"
        with transport.connect(transport.bind()):
            assert transport.describe()["connections"] == "1"
