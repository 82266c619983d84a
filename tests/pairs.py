"""Two transports that are connected both ways."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from harness import Kind
from onesided.transport import Connection, Memory, Transport

from onesided import RemoteMemory


class Pair:
    """Two transports of one process, `a` and `b`. `a` uses `to_b`, `b` uses `to_a`."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.a: Transport = kind.open()
        self.b: Transport = kind.open()
        for_a, for_b = self.a.bind(), self.b.bind()
        self.to_b: Connection = self.a.connect(for_b, name="b", timeout_s=20)
        self.to_a: Connection = self.b.connect(for_a, name="a", timeout_s=20)

    def close(self) -> None:
        for connection in (self.to_a, self.to_b):
            connection.close()
        for transport in (self.a, self.b):
            transport.close()


@contextmanager
def connected(kind: Kind) -> Iterator[Pair]:
    pair = Pair(kind)
    try:
        yield pair
    finally:
        pair.close()


def remote(memory: Memory) -> RemoteMemory:
    """What a peer gets: it has been bytes on the way."""
    return RemoteMemory.from_bytes(memory.handle())


def array(memory: Any) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.frombuffer(memory, np.uint8)


MEMORIES = ["allocated", "numpy", "bytearray", "allocated slice", "torch"]


def make_memory(transport: Transport, how: str, nbytes: int, **options: Any) -> Memory:
    """Memory of every origin, zeroed."""
    if how == "allocated":
        return transport.allocate(nbytes, **options)
    if how == "allocated slice":
        whole = transport.allocate(nbytes + 100)
        return transport.register_memory(memoryview(whole)[50 : 50 + nbytes], **options)
    if how == "torch":
        import torch

        return transport.register_memory(torch.zeros(nbytes, dtype=torch.uint8), **options)
    return transport.register_memory(np.zeros(nbytes, np.uint8) if how == "numpy" else bytearray(nbytes), **options)
