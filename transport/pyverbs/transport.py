"""The transport: memory that peers reach, conversations with peers, and how each operation becomes work requests."""

import contextlib
import hmac
import itertools
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onesided.transport.opened import close_at_exit

from onesided import errors

from . import wire
from .verbs import LOCAL_WRITE, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, QueuePair, Rail
from .wire import READ, WRITE

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# What a handle says, and what devices are told.
ACCESS = {
    "r": (READ, REMOTE_READ),
    "w": (WRITE, REMOTE_WRITE | LOCAL_WRITE),
    "rw": (READ | WRITE, REMOTE_READ | REMOTE_WRITE | REMOTE_ATOMIC | LOCAL_WRITE),
}
# Messages leave at once, and a peer whose host has vanished is noticed within about ten seconds.
TCP_OPTIONS = {"NODELAY": 1, "KEEPIDLE": 4, "KEEPINTVL": 2, "KEEPCNT": 3, "USER_TIMEOUT": 10_000}


def as_bytes(buffer: Any, written: bool = False) -> Bytes:
    """The bytes of a tensor, array or buffer; never a copy."""
    array: Any = np.asarray(buffer) if hasattr(buffer, "__array__") else buffer
    view = memoryview(array)
    if not view.c_contiguous or (written and view.readonly):
        raise errors.LayoutError("this memory is strided, or read-only where it is to be written")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def left_s(until_s: float) -> float:
    """Until a deadline; 0 when it has passed."""
    return max(0.0, until_s - time.monotonic())


class Memory:
    """Memory of this process that peers reach through their devices: `data`, and its signals beside it."""

    def __init__(self, transport: "PyverbsTransport", data: Bytes, access: str, signals: int) -> None:
        if access not in ACCESS:
            raise errors.LayoutError(f"access must be 'r', 'w' or 'rw', not {access!r}")
        (permitted, flags), memory_id, key = ACCESS[access], next(transport.numbers), secrets.token_bytes(16)
        self.transport, self.data, self.closed = transport, data, False
        self.remote = wire.RemoteMemory(wire.RDMA, permitted, transport.token, memory_id, 0, data.size, signals, key)
        # One word to read for a flush, then the signals: registered apart from the data, and in strict order.
        self.words = np.zeros(1 + signals, np.uint64)
        self.regions = [rail.register(data, flags) for rail in transport.rails if data.size]
        self.words_regions = [rail.register(self.words, ACCESS["rw"][1]) for rail in transport.rails]
        transport.memories[memory_id] = self

    def handle(self) -> bytes:
        """The bytes to give to peers."""
        if self.closed:
            raise errors.StaleHandle("this memory is closed")
        return self.remote.to_bytes()

    def reach(self) -> Any:
        """What the device of a peer must know. The memory is one piece: it is one region on each rail."""
        it, data, words = self.remote, self.data.ctypes.data, self.words.ctypes.data
        keys, words_keys = [mr.rkey for mr in self.regions], [mr.rkey for mr in self.words_regions]
        return wire.Attached(it.nbytes, it.access, it.signals, data, max(it.nbytes, 1), words, keys, words_keys)

    def signal_value(self, index: int) -> int:
        """The count of a signal now."""
        if self.closed or not 0 <= index < self.remote.signals:
            kind = errors.StaleHandle if self.closed else errors.BoundsError
            raise kind(f"signal {index} of {self.remote.signals}")
        return int(self.words[1 + index])

    def wait_signal(self, index: int, at_least: int, timeout_s: float = 30.0) -> int:
        """Waits until a signal has reached `at_least`; counters may wrap. Returns its count."""
        until_s = time.monotonic() + timeout_s
        while ((value := self.signal_value(index)) - at_least) & (1 << 63):
            if left_s(until_s) == 0:
                raise errors.DeadlineExceeded(f"signal {index} is {value} after {timeout_s:g} s, not yet {at_least}")
            time.sleep(0.0005)
        return value

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all access. Peers say when nothing of theirs is under way, or lose their queue pairs at the deadline."""
        if self.closed:
            return
        self.closed, transport, memory_id = True, self.transport, self.remote.memory_id
        with transport.changed:
            holders = [p for p in transport.talking if isinstance(p, Incoming) and memory_id in p.attached]
            for peer in holders:
                peer.send(wire.Revoke(memory_id))
            transport.changed.wait_for(lambda: not any(memory_id in p.attached for p in holders), timeout_s)
            for peer in holders:
                if peer.attached.pop(memory_id, 0):  # it has not answered: it was stopped
                    peer.close_responders()
                    peer.send(wire.Ended(memory_id))
            del transport.memories[memory_id]
        for region in [*self.regions, *self.words_regions]:
            region.close()


class Conversation:
    """Messages with one peer, whose end is the peer's. A thread hears them, with the transport's lock held."""

    def __init__(self, transport: "PyverbsTransport", sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in TCP_OPTIONS.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        self.transport, self.socket = transport, sock
        with transport.changed:
            threading.Thread(target=self.listen, name="onesided-pyverbs-peer", daemon=True).start()
            transport.talking.append(self)

    def listen(self) -> None:
        """Takes messages until the stream ends, or holds what is no message."""
        received, changed = bytearray(), self.transport.changed
        try:
            while data := self.socket.recv(65536):
                received += data
                for message, request_id in wire.take_frames(received):
                    with changed:
                        self.hear(message, request_id)
                        changed.notify_all()
        except (OSError, errors.HandleError):
            pass
        finally:
            self.socket.close()
            with changed:
                self.transport.talking.remove(self)
                changed.notify_all()
                self.end()

    def send(self, message: Any, request_id: int = 0) -> None:
        """Sends without waiting: a peer that leaves so much unread that no more fits is hung up on."""
        frame = wire.to_frame(message, request_id)
        with contextlib.suppress(OSError):
            if self.socket.send(frame, socket.MSG_DONTWAIT) == len(frame):
                return
        self.hang_up()

    def hang_up(self) -> None:
        """Has listen() end."""
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)

    def hear(self, message: Any, request_id: int) -> None:
        """What to do with a message."""

    def end(self) -> None:
        """What to do when the peer is gone."""


class Incoming(Conversation):
    """A peer that connected to this transport, and is answered. Its operations run no code here."""

    def __init__(self, transport: "PyverbsTransport", sock: socket.socket) -> None:
        self.greeted = False
        self.responders: list[QueuePair] = []
        self.attached: Counter[int] = Counter()  # how often it has opened each memory
        super().__init__(transport, sock)

    def hear(self, message: Any, request_id: int) -> None:
        """Answers, if the message has an answer."""
        try:
            reply = self.answer(message)
        except errors.OnesidedError as error:
            reply = wire.Failed(wire.ERRORS.index(type(error)), str(error))
        if reply is not None:
            self.send(reply, request_id)

    def answer(self, message: Any) -> Any:
        """The reply, if there is one."""
        transport = self.transport
        if isinstance(message, wire.Hello):
            bound = transport.bound.get(message.endpoint)
            if bound is None:
                raise errors.StaleHandle("connect: this endpoint was used already, or its transport was made anew")
            if not hmac.compare_digest(bound.secret, message.secret):
                raise errors.HandleError("connect: this endpoint's secret is wrong")
            if not bound.shared:
                del transport.bound[message.endpoint]
            self.greeted = True
            return wire.Welcome([rail.address for rail in transport.rails])
        if not self.greeted:
            raise errors.RemoteAccessError("not connected")
        if isinstance(message, wire.Open):
            return wire.Opened(message.generation, self.open_pairs(message.pairs))
        if isinstance(message, wire.Attach):
            memory = transport.memories.get(message.memory_id)
            if memory is None or memory.closed:
                raise errors.StaleHandle("attach: this memory was closed")
            if not hmac.compare_digest(memory.remote.key, message.key):
                raise errors.HandleError("attach: this handle's key does not fit the memory")
            self.attached[message.memory_id] += 1
            return memory.reach()
        if isinstance(message, wire.Detach):
            self.attached -= Counter([message.memory_id])  # keeps what is left above 0
        elif isinstance(message, wire.Revoked):
            self.attached.pop(message.memory_id, None)
        else:
            raise errors.Unsupported(f"unexpected message {type(message).__name__}")
        return None

    def open_pairs(self, pairs: list[Any]) -> list[Any]:
        """The queue pairs of a new generation, which answer those of the peer."""
        self.close_responders()  # first: whatever of the old generation is still on its way finds nobody
        for pair in pairs:
            if pair.remote_rail >= len(self.transport.rails):
                raise errors.HandleError(f"connect: there is no rail {pair.remote_rail} here")
            self.responders.append(QueuePair(self.transport.rails[pair.remote_rail], passive=True))
            self.responders[-1].connect(pair)
        return [own.address(it.local_rail, it.remote_rail) for own, it in zip(self.responders, pairs, strict=True)]

    def close_responders(self) -> None:
        """From here on the peer's device reaches nothing."""
        while self.responders:
            self.responders.pop().close()

    def end(self) -> None:
        """The peer is gone, and holds nothing any more."""
        self.close_responders()
        self.attached.clear()


class Connection(Conversation):
    """The way to one peer: one lane, from the first rail here to the first there; one operation at a time."""

    def __init__(self, transport: "PyverbsTransport", endpoint: wire.Endpoint, name: str, timeout_s: float) -> None:
        if endpoint.kind != wire.RDMA:
            raise errors.HandleError(f"connect: this endpoint is of kind {endpoint.kind}, not {wire.RDMA} (rdma)")
        self.rail, self.peer, self.token = transport.rails[0], name or f"process {endpoint.pid}", endpoint.transport
        # The operation under way: its name, its deadline, and its memory. Connecting is one without memory.
        self.what, self.until_s = f"connecting to {self.peer}", time.monotonic() + timeout_s
        self.using: int | None = None
        self.question, self.reply = 0, None  # the number of the last question, and what came back
        self.lost: errors.OnesidedError | None = None
        self.reaches: dict[tuple[int, bytes], Any] = {}  # what is attached
        self.revoked: set[int] = set()
        self.unanswered = False  # a revocation of the memory in use, to be confirmed when the operation is over
        self.generation = 0
        self.pair: QueuePair | None = None
        self.taken_away = False  # the peer has said that it has no queue pairs for this connection any more
        self.word = np.zeros(1, np.uint64)  # where results of atomics and flushes land
        self.word_region = self.rail.register(self.word, LOCAL_WRITE)
        host, _, port = endpoint.address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), max(timeout_s, 1e-3))
        except TimeoutError as error:
            raise errors.DeadlineExceeded(f"{self.what}: no answer at {endpoint.address}") from error
        except OSError as error:
            raise errors.ConnectionLost(f"{self.what} at {endpoint.address}: {error}") from error
        except (ValueError, OverflowError) as error:
            raise errors.HandleError(f"an endpoint's address {endpoint.address!r} is not one of ours") from error
        super().__init__(transport, sock)
        try:
            welcome = self.ask(wire.Hello(endpoint.number, endpoint.secret, os.getpid()), wire.Welcome)
            self.peer_rails = len(welcome.rails)
            self.open_generation()
        except BaseException:
            self.close()
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends it, after the operation under way; at the deadline, with it."""
        changed = self.transport.changed
        with changed:
            changed.wait_for(lambda: self.using is None, timeout_s)
            self.lost = self.lost or errors.StaleHandle("this connection is closed")
            changed.notify_all()  # the operation looks at it
            changed.wait_for(lambda: self.using is None)
            self.end_generation()
        self.hang_up()
        self.word_region.close()

    @property
    def connected(self) -> bool:
        """False once it was closed or the peer is lost."""
        return self.lost is None

    def check_connected(self) -> None:
        """ConnectionLost if the peer is gone, StaleHandle if this was closed here."""
        if self.lost is not None:
            raise type(self.lost)(str(self.lost))

    # ---- The conversation --------------------------------------------------------------------------------------------

    def ask(self, question: Any, expected: Any) -> Any:
        """Sends a question, and waits for the answer that carries its number."""
        with self.transport.changed:
            self.check_connected()
            self.question, self.reply = self.question + 1, None
            self.send(question, self.question)
            self.transport.changed.wait_for(lambda: self.reply or self.lost, left_s(self.until_s))
            reply: Any = self.reply
        if reply is None:
            self.check_connected()
            raise errors.DeadlineExceeded(f"{self.what}: there is no answer (the process may be stopped)")
        if isinstance(reply, wire.Failed):
            kind = wire.ERRORS[reply.error] if reply.error < len(wire.ERRORS) else errors.OnesidedError
            raise kind(f"{self.what}: {reply.text}")
        if not isinstance(reply, expected):
            raise errors.ConnectionLost(f"{self.what}: the peer does not speak this protocol")
        return reply

    def hear(self, message: Any, request_id: int) -> None:
        """Takes answers and revocations, confirmed when no operation uses the memory. Renew: only its keys change."""
        if isinstance(message, wire.Revoke | wire.Renew):
            if isinstance(message, wire.Revoke):
                self.revoked.add(message.memory_id)
            for known in [known for known in self.reaches if known[0] == message.memory_id]:
                del self.reaches[known]
            if self.using == message.memory_id:
                self.unanswered = True
            else:
                self.send(wire.Revoked(message.memory_id))
        elif isinstance(message, wire.Ended):
            self.taken_away = True
        elif request_id == self.question:
            self.reply = message

    def end(self) -> None:
        """The peer is gone."""
        self.lost = self.lost or errors.ConnectionLost(f"{self.peer} closed its transport or has ended")

    def attach(self, there: wire.RemoteMemory) -> Any:
        """Where a memory is; asked once."""
        reach = self.reaches.get((there.memory_id, there.key))
        if reach is None:
            reach = self.ask(wire.Attach(there.memory_id, there.key), wire.Attached)
            pieces = -(-reach.nbytes // reach.piece_nbytes)
            if (len(reach.keys), len(reach.words_keys)) != (pieces * self.peer_rails, self.peer_rails):
                raise errors.ConnectionLost(f"{self.what}: the peer described its memory wrongly")
            self.reaches[there.memory_id, there.key] = reach
        return reach

    # ---- Generations -------------------------------------------------------------------------------------------------

    def open_generation(self) -> None:
        """Agrees on new queue pairs. The peer takes the old ones away before it answers: nothing old lands any more."""
        self.end_generation()
        self.generation, self.taken_away = self.generation + 1, False
        self.pair = QueuePair(self.rail, passive=False)
        opened = self.ask(wire.Open(self.generation, [self.pair.address(0, 0)]), wire.Opened)
        if len(opened.pairs) != 1:
            raise errors.ConnectionLost(f"{self.what}: there are {len(opened.pairs)} queue pairs for 1")
        self.pair.connect(opened.pairs[0])

    def end_generation(self) -> None:
        """No source is read, and no destination written, any more when this returns."""
        if self.pair is not None:
            self.pair.close()
        self.pair = None

    def run(self, requests: Sequence[Any]) -> None:
        """Returns when all are complete at the peer. Any failure ends the generation; the next run opens another."""
        try:
            if self.pair is None or self.taken_away:
                self.open_generation()
            assert self.pair is not None
            self.pair.run(self.what, requests, self.until_s, self.check_connected)
        except BaseException:
            self.end_generation()
            raise

    # ---- Operations --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def operation(
        self, what: str, remote: Any, offset: int, nbytes: int, access: int, timeout_s: float
    ) -> Iterator[tuple[Any, int]]:
        """When it is its turn: the memory as Attached, and where in it. A revocation waits until the end."""
        until_s, changed = time.monotonic() + timeout_s, self.transport.changed
        there = wire.RemoteMemory.from_bytes(remote.to_bytes())
        if there.kind != wire.RDMA or there.transport != self.token:
            raise errors.HandleError(f"{what}: this handle is not of a memory of {self.peer}")
        if offset < 0 or offset + nbytes > there.nbytes:
            raise errors.BoundsError(f"{what}: {nbytes} bytes at {offset} are not within the {there.nbytes} there")
        with changed:
            if not changed.wait_for(lambda: self.using is None, timeout_s):
                raise errors.DeadlineExceeded(f"{what} to {self.peer}: another operation is under way")
            if there.memory_id in self.revoked:
                raise errors.StaleHandle(f"{what} to {self.peer}: the memory was closed")
            self.what, self.until_s, self.using = f"{what} to {self.peer}", until_s, there.memory_id
        try:
            self.check_connected()
            reach = self.attach(there)
            if there.offset_bytes + there.nbytes > reach.nbytes:
                raise errors.HandleError(f"{self.what}: the memory has {reach.nbytes} bytes, this handle says more")
            if access & ~(there.access & reach.access):
                raise errors.RemoteAccessError(f"{self.what}: the memory does not permit it")
            yield reach, there.offset_bytes + offset
        finally:
            with changed:
                self.using = None
                if self.unanswered:
                    self.unanswered = False
                    self.send(wire.Revoked(there.memory_id))
                changed.notify_all()

    def word_request(self, opcode: str, address: int, rkey: int, *operands: int) -> Any:
        """A request whose result is one word and lands in `word`."""
        return self.rail.request(opcode, self.word.ctypes.data, 8, self.word_region.lkey, address, rkey, *operands)

    def signal_request(self, reach: Any, index: int, add: int) -> Any:
        """An atomic add to a word, behind all writes before it on the queue pair: that makes the signal strong."""
        if not 0 <= index < reach.signals:
            raise errors.BoundsError(f"{self.what}: signal {index} is not one of {reach.signals}")
        address = reach.words_address + 8 * (1 + index)
        return self.word_request("ATOMIC_FETCH_AND_ADD", address, reach.words_keys[0], add % 2**64, 0)

    def transfer(self, opcode: str, reach: Any, at: int, data: Bytes, access: int, then: Sequence[Any] = ()) -> None:
        """A WRITE or READ in parts, of which none is longer than a message may be or crosses the end of a region."""
        region: Any = self.rail.register(data, access) if data.size else contextlib.nullcontext()
        with region:
            requests, done = [], 0
            while done < data.size:
                piece, within = divmod(at + done, reach.piece_nbytes)
                nbytes = min(data.size - done, reach.piece_nbytes - within, self.rail.longest_message)
                local, address = data.ctypes.data + done, reach.address + at + done
                requests.append(self.rail.request(opcode, local, nbytes, region.lkey, address, reach.keys[piece]))
                done += nbytes
            self.run([*requests, *then])  # on return either all is complete or the queue pair is gone

    def write(
        self, source: Any, remote: Any, offset_bytes: int = 0, *, signal: int | None = None, add: int = 1,
        timeout_s: float = 30.0,
    ) -> None:  # fmt: skip
        """Writes all of `source`, then adds `add` to a signal if one is given; complete at the peer on return."""
        data = as_bytes(source)
        with self.operation("write", remote, offset_bytes, data.size, WRITE, timeout_s) as (reach, at):
            then = [] if signal is None else [self.signal_request(reach, signal, add)]
            self.transfer("RDMA_WRITE", reach, at, data, 0, then)

    def read(self, destination: Any, remote: Any, offset_bytes: int = 0, *, timeout_s: float = 30.0) -> None:
        """Fills `destination`."""
        data = as_bytes(destination, written=True)
        with self.operation("read", remote, offset_bytes, data.size, READ, timeout_s) as (reach, at):
            self.transfer("RDMA_READ", reach, at, data, LOCAL_WRITE)

    def signal(self, remote: Any, index: int, add: int = 1, *, timeout_s: float = 30.0) -> None:
        """Adds to a signal when all earlier writes are visible there."""
        with self.operation("signal", remote, 0, 0, 0, timeout_s) as (reach, _):
            self.run([self.signal_request(reach, index, add)])

    def fetch_add(self, remote: Any, offset_bytes: int, add: int, *, timeout_s: float = 30.0) -> int:
        """Adds to an aligned 8-byte word; returns what it held."""
        return self.atomic("ATOMIC_FETCH_AND_ADD", remote, offset_bytes, timeout_s, add, 0)

    def compare_swap(
        self, remote: Any, offset_bytes: int, expected: int, desired: int, *, timeout_s: float = 30.0
    ) -> int:
        """Sets an aligned 8-byte word to `desired` if it holds `expected`; returns what it held."""
        return self.atomic("ATOMIC_CMP_AND_SWP", remote, offset_bytes, timeout_s, expected, desired)

    def atomic(self, opcode: str, remote: Any, offset_bytes: int, timeout_s: float, *operands: int) -> int:
        """Either of the two."""
        with self.operation(opcode, remote, offset_bytes, 8, READ | WRITE, timeout_s) as (reach, at):
            if (reach.address + at) % 8:
                raise errors.BoundsError(f"{self.what}: offset {offset_bytes} is not aligned to 8 bytes")
            rkey = reach.keys[at // reach.piece_nbytes]
            self.run([self.word_request(opcode, reach.address + at, rkey, *(it % 2**64 for it in operands))])
            return int(self.word[0])

    def flush(self, remote: Any, timeout_s: float = 30.0) -> None:
        """Returns when all earlier operations are visible to everybody: a read behind them pushes them to memory."""
        with self.operation("flush", remote, 0, 0, 0, timeout_s) as (reach, _):
            self.run([self.word_request("RDMA_READ", reach.words_address, reach.words_keys[0])])


class PyverbsTransport:
    """The rdma transport as readable Python: the same protocol, so each can be the peer of the other.

    For reading, and for testing `rdma` against a second implementation; "auto" never chooses it. Operations are
    synchronous and use one queue pair. A thread accepts peers over TCP, and one hears each of them.

    `nics` names ports ("rxe0", "rxe0:1", "rxe0:1/3" with the index of a GID); peers reach memory through all of them,
    operations from here use the first. None is the active port with the best RoCE v2 address, preferably an IPv4 one.
    Peers introduce themselves at `address`, an IPv4 address of this host, by default that of the first port. Not to be
    used after a fork.
    """

    kind = "pyverbs"

    def __init__(self, nics: Sequence[str] | None = None, *, address: str = "", why: str = "asked for") -> None:
        self.rails, self.why, self.closed = [Rail(nic) for nic in nics or [""]], why, False
        self.token, self.numbers = secrets.token_bytes(16), itertools.count(1)
        # Guards everything below and the conversations; notified whenever something was heard.
        self.changed = threading.Condition(threading.RLock())
        self.bound: dict[int, wire.Endpoint] = {}
        self.memories: dict[int, Memory] = {}
        self.talking: list[Conversation] = []
        host = address or self.rails[0].ip or own_address()
        self.listener = socket.create_server((host, 0), backlog=128)
        self.thread = threading.Thread(target=self.serve, name="onesided-pyverbs", daemon=True)
        self.thread.start()
        close_at_exit(self)

    @staticmethod
    def unsupported_reason() -> str | None:
        """Why there can be none here; None if there can."""
        try:
            Rail().close()
        except errors.Unsupported as error:
            return str(error)
        return None

    @classmethod
    def supported(cls) -> bool:
        """Whether pyverbs imports and finds a port. Opens devices, and changes nothing."""
        return cls.unsupported_reason() is None

    def check_open(self) -> None:
        """StaleHandle if it is closed."""
        if self.closed:
            raise errors.StaleHandle("this transport is closed")

    def allocate(self, nbytes: int, access: str = "rw", *, signals: int = 0, max_peers: int = 256) -> Memory:
        """New memory, zeroed. `max_peers` means nothing here."""
        return self.register_memory(np.zeros(nbytes, np.uint8), access, signals=signals, max_peers=max_peers)

    def register_memory(self, buffer: Any, access: str = "rw", *, signals: int = 0, max_peers: int = 256) -> Memory:
        """Makes a tensor or buffer known to peers; never copies."""
        del max_peers
        self.check_open()
        return Memory(self, as_bytes(buffer, written="w" in access), access, signals)

    def bind(self, *, shared: bool = False) -> bytes:
        """An endpoint for one connection, or for any number if `shared`. It knows no permissions of single peers."""
        self.check_open()
        address = "{}:{}".format(*self.listener.getsockname())
        number, secret, pid = next(self.numbers), secrets.token_bytes(16), os.getpid()
        bound = wire.Endpoint(wire.RDMA, int(shared), self.token, bytes(16), number, secret, pid, address)
        self.bound[number] = bound
        return bound.to_bytes()

    def connect(self, endpoint: bytes, *, name: str = "", timeout_s: float = 30.0) -> Connection:
        """Connects to the peer that bound `endpoint`, whichever implementation it is."""
        self.check_open()
        return Connection(self, wire.Endpoint.from_bytes(endpoint), name, timeout_s)

    def serve(self) -> None:
        """Until close(): accepts peers."""
        while not self.closed:
            try:
                Incoming(self, self.listener.accept()[0])
            except (OSError, RuntimeError):  # it is gone again, or there are no descriptors or no threads left
                time.sleep(0.01)

    def close(self, timeout_s: float = 5.0) -> None:
        """Closes connections, then memories, then itself. Closing twice is legal."""
        if self.closed:
            return
        until_s = time.monotonic() + timeout_s
        for peer in list(self.talking):
            if isinstance(peer, Connection):
                peer.close(left_s(until_s))
        for memory in list(self.memories.values()):
            memory.close(left_s(until_s))
        self.closed = True
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.thread.join()
        self.listener.close()
        with self.changed:
            for peer in self.talking:
                peer.hang_up()
            self.changed.wait_for(lambda: not self.talking, timeout_s)
        for rail in self.rails:
            rail.close()

    def describe(self) -> dict[str, str]:
        """What it is and what it holds."""
        rails = {f"rail {n}": f"{rail.name}, GID {rail.gid_index}" for n, rail in enumerate(self.rails)}
        state = "closed" if self.closed else "open"
        return {"kind": self.kind, "state": state, "memories": str(len(self.memories)), **rails, "why": self.why}

    def __enter__(self) -> "PyverbsTransport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def own_address() -> str:
    """The source address of a route to the world. Connecting a datagram socket sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        return str(probe.getsockname()[0])
    return "127.0.0.1"
