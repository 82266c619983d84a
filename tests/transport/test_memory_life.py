"""The bytes of a Memory live as long as anybody can see them, and are only written where they may be."""

import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest
from harness import Kind

from onesided import LayoutError, RemoteMemory, StaleHandle

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
