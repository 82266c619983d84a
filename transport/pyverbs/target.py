"""The passive side: memory that peers reach, and what they are answered. Their operations run no code here."""

import hmac
import secrets
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from onesided.errors import (
    BoundsError,
    DeadlineExceeded,
    HandleError,
    LayoutError,
    OnesidedError,
    RemoteAccessError,
    StaleHandle,
    Unsupported,
)

from . import wire
from .rail import QueuePair

if TYPE_CHECKING:
    from .transport import PyverbsTransport

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC = 1, 2, 4, 8  # ibv_access_flags
ACCESS = {"r": wire.READ, "w": wire.WRITE, "rw": wire.READ | wire.WRITE}
FLAGS = {
    "r": REMOTE_READ,
    "w": REMOTE_WRITE | LOCAL_WRITE,
    "rw": REMOTE_READ | REMOTE_WRITE | REMOTE_ATOMIC | LOCAL_WRITE,
}


def as_bytes(buffer: Any, written: bool = False) -> Bytes:
    """The bytes of a tensor, array or buffer; never a copy."""
    array: Any = np.asarray(buffer) if hasattr(buffer, "__array__") else buffer
    view = memoryview(array)
    if not view.c_contiguous or (written and view.readonly):
        raise LayoutError("this memory is strided, or read-only where it is to be written")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def check_open(it: Any) -> None:
    """StaleHandle if a memory or transport is closed."""
    if it.closed:
        raise StaleHandle(f"this {type(it).__name__} is closed")


class Memory:
    """Memory of this process that peers reach through their devices: `data`, and its signals beside it."""

    def __init__(self, transport: "PyverbsTransport", data: Bytes, access: str, signals: int) -> None:
        if access not in FLAGS:
            raise LayoutError(f"access must be 'r', 'w' or 'rw', not {access!r}")
        if not 0 <= signals <= 1 << 20:
            raise BoundsError(f"a memory has 0 to {1 << 20} signals, not {signals}")
        self.transport, self.data, self.nbytes, self.access, self.signals = transport, data, data.size, access, signals
        self.closed, self.key, self.id = False, secrets.token_bytes(16), next(transport.numbers)
        # One word to read for a flush, then the signals: registered apart from the data, and in strict order.
        self.words = np.zeros(1 + signals, np.uint64)
        self.regions, self.words_regions = [], []
        for rail in transport.rails:
            if self.nbytes:
                self.regions.append(rail.register(data, FLAGS[access]))
            self.words_regions.append(rail.register(self.words, FLAGS["rw"]))

    def handle(self) -> bytes:
        """The bytes to give to peers."""
        check_open(self)
        transport, access = self.transport.token, ACCESS[self.access]
        it = wire.RemoteMemory(wire.RDMA, access, transport, self.id, 0, self.nbytes, self.signals, self.key)
        return it.to_bytes()

    def reach(self) -> Any:
        """What the device of a peer must know. The memory is one piece: it is one region on each rail."""
        keys, words_keys = [mr.rkey for mr in self.regions], [mr.rkey for mr in self.words_regions]
        data, words = self.data.ctypes.data, self.words.ctypes.data
        size, access = self.nbytes, ACCESS[self.access]
        return wire.Attached(size, access, self.signals, data, max(size, 1), words, keys, words_keys)

    def signal_value(self, index: int) -> int:
        """The count of a signal now."""
        check_open(self)
        if not 0 <= index < self.signals:
            raise BoundsError(f"signal {index} is not one of {self.signals}")
        return int(self.words[1 + index])

    def wait_signal(self, index: int, at_least: int, timeout_s: float = 30.0) -> int:
        """Waits until a signal has reached `at_least`; counters may wrap. Returns its count."""
        until_s = time.monotonic() + timeout_s
        while ((value := self.signal_value(index)) - at_least) & (1 << 63):
            if time.monotonic() > until_s:
                raise DeadlineExceeded(f"signal {index} has not reached {at_least} in {timeout_s:g} s: it is {value}")
            time.sleep(0.0005)
        return value

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all access. Peers say when nothing of theirs is under way, or lose their queue pairs at the deadline."""
        if not self.closed:
            self.closed = True
            self.transport.revoke(self.id, timeout_s)
            for region in [*self.regions, *self.words_regions]:
                region.close()


class Incoming:
    """A peer that connected to this transport. Used with the transport's lock held."""

    def __init__(self, transport: "PyverbsTransport", sock: socket.socket) -> None:
        self.transport, self.framed, self.greeted = transport, wire.Framed(sock), False
        self.responders: list[QueuePair] = []
        self.attached: Counter[int] = Counter()  # how often it has opened each memory

    def hear(self) -> None:
        """Answers what has come."""
        for message, request_id in self.framed.receive():
            try:
                reply = self.answer(message)
            except OnesidedError as error:
                reply = wire.Failed(wire.ERRORS.index(type(error)), str(error))
            if reply is not None:
                self.framed.send(reply, request_id)

    def answer(self, message: Any) -> Any:
        """The reply, if the message has one."""
        transport = self.transport
        if not self.greeted and not isinstance(message, wire.Hello):
            raise RemoteAccessError("not connected")
        if isinstance(message, wire.Hello):
            bound = transport.bound.get(message.endpoint)
            if bound is None:
                raise StaleHandle("connect: this endpoint was used already, or its transport was made anew")
            if not hmac.compare_digest(bound.secret, message.secret):
                raise HandleError("connect: this endpoint's secret is wrong")
            if not bound.shared:
                del transport.bound[message.endpoint]
            self.greeted = True
            return wire.Welcome([rail.address for rail in transport.rails])
        if isinstance(message, wire.Open):
            return wire.Opened(message.generation, self.open_pairs(message.pairs))
        if isinstance(message, wire.Attach):
            memory = transport.memories.get(message.memory_id)
            if memory is None or memory.closed:
                raise StaleHandle("attach: this memory was closed")
            if not hmac.compare_digest(memory.key, message.key):
                raise HandleError("attach: this handle's key does not fit the memory")
            self.attached[message.memory_id] += 1
            return memory.reach()
        if isinstance(message, wire.Detach | wire.Revoked):
            if isinstance(message, wire.Revoked) or self.attached[message.memory_id] <= 1:
                del self.attached[message.memory_id]
            else:
                self.attached[message.memory_id] -= 1
            return None
        raise Unsupported(f"unexpected message {type(message).__name__}")

    def open_pairs(self, pairs: list[Any]) -> list[Any]:
        """The queue pairs of a new generation, which answer those of the peer."""
        self.close_responders()  # first: whatever of the old generation is still on its way finds nobody
        answers = []
        for pair in pairs:
            if pair.remote_rail >= len(self.transport.rails):
                raise HandleError(f"connect: there is no rail {pair.remote_rail} here")
            self.responders.append(QueuePair(self.transport.rails[pair.remote_rail]))
            self.responders[-1].accept(pair)
            answers.append(self.responders[-1].address(pair.local_rail, pair.remote_rail))
        return answers

    def close_responders(self) -> None:
        """From here on the peer's device reaches nothing."""
        while self.responders:
            self.responders.pop().close()

    def end(self) -> None:
        """The peer is gone."""
        self.close_responders()
        self.attached.clear()
