"""The active side: a connection to a peer, and how each operation becomes work requests."""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onesided.errors import (
    BoundsError,
    ConnectionLost,
    DeadlineExceeded,
    HandleError,
    OnesidedError,
    RemoteAccessError,
    StaleHandle,
)

from . import wire
from .rail import QueuePair, told_as
from .target import LOCAL_WRITE, Bytes, as_bytes
from .wire import READ, WRITE

if TYPE_CHECKING:
    from .transport import PyverbsTransport

DEPTH = 16  # work requests under way


def left_s(until_s: float) -> float:
    """Until a deadline; 0 when it has passed."""
    return max(0.0, until_s - time.monotonic())


class Use(NamedTuple):
    """One operation on one memory of the peer."""

    what: str
    memory_id: int
    reach: Any  # Attached
    at: int  # where in the memory
    until_s: float


class Connection:
    """The way to one peer: one lane, from the first rail here to the first there; one operation at a time."""

    def __init__(self, transport: "PyverbsTransport", endpoint: wire.Endpoint, name: str, until_s: float) -> None:
        if endpoint.kind != wire.RDMA:
            raise HandleError(f"connect: this endpoint is of kind {endpoint.kind}, not {wire.RDMA} (rdma)")
        self.transport, self.rail, self.verbs = transport, transport.rails[0], transport.rails[0].verbs
        self.peer, self.token = name or f"process {endpoint.pid}", endpoint.transport
        self.operating = threading.Lock()
        self.lost: OnesidedError | None = None
        self.questions, self.answers = itertools.count(1), dict[int, Any]()
        self.generation = 0
        self.pair: QueuePair | None = None
        self.reaches: dict[tuple[int, bytes], Any] = {}  # what is attached
        self.taken_away = False  # the peer has said that it has no queue pairs for this connection any more
        self.revoked: set[int] = set()
        self.using: int | None = None  # the memory of the operation under way
        self.word = np.zeros(1, np.uint64)  # where results of atomics and flushes land
        host, _, port = endpoint.address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), max(left_s(until_s), 1e-3))
        except TimeoutError as error:
            raise DeadlineExceeded(f"connect: {self.peer} does not answer at {endpoint.address}") from error
        except OSError as error:
            raise ConnectionLost(f"connect: {self.peer} does not listen at {endpoint.address}: {error}") from error
        except (ValueError, OverflowError) as error:
            raise HandleError(f"an endpoint's address {endpoint.address!r} is not one of ours") from error
        self.framed = wire.Framed(sock)
        self.word_region = self.rail.register(self.word, LOCAL_WRITE)
        transport.watch(self)
        try:
            welcome = self.ask(wire.Hello(endpoint.number, endpoint.secret, os.getpid()), wire.Welcome, until_s)
            self.peer_rails = len(welcome.rails)
            self.open_generation(until_s)
        except BaseException:
            self.close()
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends it, after the operation under way; at the deadline, with it."""
        closed = StaleHandle("this connection is closed")
        if not self.operating.acquire(timeout=timeout_s):
            self.lost = self.lost or closed  # the operation looks at it
            self.operating.acquire()
        self.lost = self.lost or closed
        self.end_generation()
        self.operating.release()
        self.transport.unwatch(self)
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

    def ask(self, question: Any, expected: Any, until_s: float) -> Any:
        """Sends a question, and waits for the answer that carries its number."""
        number = next(self.questions)
        with self.transport.changed:
            self.check_connected()
            self.answers[number] = None
            try:
                self.transport.tell(self, question, number)
                self.transport.changed.wait_for(lambda: self.answers[number] or self.lost, left_s(until_s))
            finally:
                answer = self.answers.pop(number)
            if answer is None:
                self.check_connected()
                raise DeadlineExceeded(f"{self.peer} does not answer (its process may be stopped)")
        if isinstance(answer, wire.Failed):
            kind = wire.ERRORS[answer.error] if answer.error < len(wire.ERRORS) else OnesidedError
            raise kind(f"{self.peer}: {answer.text}")
        if not isinstance(answer, expected):
            raise ConnectionLost(f"{self.peer} does not speak this protocol")
        return answer

    def hear(self) -> None:
        """Takes answers and revocations; a revocation is confirmed when no operation uses the memory."""
        for message, number in self.framed.receive():
            if isinstance(message, wire.Revoke):
                self.revoked.add(message.memory_id)
                if self.using != message.memory_id:
                    self.framed.send(wire.Revoked(message.memory_id))
            elif isinstance(message, wire.Ended):
                self.taken_away = True
            elif number in self.answers:
                self.answers[number] = message

    def end(self) -> None:
        """The peer is gone."""
        self.lost = self.lost or ConnectionLost(f"{self.peer} closed its transport or has ended")

    def attach(self, there: wire.RemoteMemory, until_s: float) -> Any:
        """Where a memory is; asked once."""
        reach = self.reaches.get((there.memory_id, there.key))
        if reach is None:
            reach = self.ask(wire.Attach(there.memory_id, there.key), wire.Attached, until_s)
            pieces = -(-reach.nbytes // reach.piece_nbytes)
            if (len(reach.keys), len(reach.words_keys)) != (pieces * self.peer_rails, self.peer_rails):
                raise ConnectionLost(f"attach: {self.peer} described its memory wrongly")
            self.reaches[there.memory_id, there.key] = reach
        return reach

    # ---- Generations -------------------------------------------------------------------------------------------------

    def open_generation(self, until_s: float) -> None:
        """Agrees on new queue pairs. The peer takes the old ones away before it answers: nothing old lands any more."""
        self.generation += 1
        self.taken_away = False
        pair = QueuePair(self.rail, DEPTH)
        try:
            opened = self.ask(wire.Open(self.generation, [pair.address(0, 0)]), wire.Opened, until_s)
            if len(opened.pairs) != 1:
                raise ConnectionLost(f"connect: {self.peer} answered with {len(opened.pairs)} queue pairs for 1")
            pair.connect(opened.pairs[0])
        except BaseException:
            pair.close()
            raise
        self.pair = pair

    def end_generation(self) -> None:
        """No source is read, and no destination written, any more when this returns."""
        if self.pair is not None:
            self.pair.close()
        self.pair = None

    # ---- Work requests -----------------------------------------------------------------------------------------------

    def run(self, use: Use, requests: Iterable[Any]) -> None:
        """Posts work requests, and returns when all are complete at the peer. Any failure ends the generation."""
        pair, left, under_way, turns = self.pair, iter(requests), 0, itertools.count()
        assert pair is not None
        try:
            with told_as(ConnectionLost, f"{use.what} to {self.peer}"):
                while True:
                    for request in itertools.islice(left, DEPTH - under_way):
                        pair.pair.post_send(request)
                        under_way += 1
                    if under_way == 0:
                        return
                    count, completions = pair.queue.poll(DEPTH)
                    for completion in completions:
                        self.check_complete(use, completion.status)
                    under_way -= count
                    if count == 0:
                        self.check_connected()
                        if left_s(use.until_s) == 0:
                            raise DeadlineExceeded(f"{use.what} to {self.peer}: its source is not read again")
                        time.sleep(0 if next(turns) < 100 else 0.0002)
        except BaseException:
            self.end_generation()
            raise

    def check_complete(self, use: Use, status: int) -> None:
        """Raises what a completion with an error means."""
        enums = self.verbs.enums
        if status == enums.IBV_WC_SUCCESS:
            return
        cause = f"{use.what} to {self.peer}: {self.verbs.cq.cqe_status_to_str(status)}"
        if status not in (enums.IBV_WC_REM_ACCESS_ERR, enums.IBV_WC_REM_INV_REQ_ERR, enums.IBV_WC_REM_OP_ERR):
            raise ConnectionLost(cause)
        raise StaleHandle(f"{cause}: it was closed") if use.memory_id in self.revoked else RemoteAccessError(cause)

    def request(self, opcode: str, local: int, nbytes: int, lkey: int, address: int, rkey: int, *operands: int) -> Any:
        """A work request; with operands, an atomic one."""
        wr, code = self.verbs.wr, getattr(self.verbs.enums, f"IBV_WR_{opcode}")
        request = wr.SendWR(opcode=code, num_sge=1, sg=[wr.SGE(local, nbytes, lkey)])
        (request.set_wr_atomic if operands else request.set_wr_rdma)(rkey, address, *operands)
        return request

    def word_request(self, opcode: str, address: int, rkey: int, *operands: int) -> Any:
        """A request whose result is one word and lands in `word`."""
        return self.request(opcode, self.word.ctypes.data, 8, self.word_region.lkey, address, rkey, *operands)

    def signal_request(self, use: Use, index: int, add: int) -> Any:
        """An atomic add to a word, behind all writes before it on the queue pair: that makes the signal strong."""
        if not 0 <= index < use.reach.signals:
            raise BoundsError(f"{use.what}: signal {index} is not one of the {use.reach.signals} of {self.peer}")
        address = use.reach.words_address + 8 * (1 + index)
        return self.word_request("ATOMIC_FETCH_AND_ADD", address, use.reach.words_keys[0], add % 2**64, 0)

    def transfer(self, use: Use, opcode: str, data: Bytes, access: int, then: Sequence[Any] = ()) -> None:
        """A WRITE or READ in parts, of which none is longer than a message may be or crosses the end of a region."""
        region: Any = self.rail.register(data, access) if data.size else None

        def parts() -> Iterator[Any]:
            done = 0
            while done < data.size:
                at = use.at + done
                piece, within = divmod(at, use.reach.piece_nbytes)
                nbytes = min(data.size - done, use.reach.piece_nbytes - within, self.rail.longest_message)
                local, there, rkey = data.ctypes.data + done, use.reach.address + at, use.reach.keys[piece]
                yield self.request(opcode, local, nbytes, region.lkey, there, rkey)
                done += nbytes

        try:
            self.run(use, itertools.chain(parts(), then))
        finally:  # either all is complete or the queue pair is gone
            if region is not None:
                region.close()

    # ---- Operations --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self, what: str, remote: Any, offset: int, nbytes: int, access: int, timeout_s: float) -> Iterator[Use]:
        """Checks, opens what is not open yet, and has a revocation wait until the operation is over."""
        until_s = time.monotonic() + timeout_s
        there = wire.RemoteMemory.from_bytes(remote.to_bytes())
        if there.kind != wire.RDMA or there.transport != self.token:
            raise HandleError(f"{what}: this handle is not of a memory of {self.peer}")
        if offset < 0 or offset + nbytes > there.nbytes:
            raise BoundsError(f"{what}: {nbytes} bytes at {offset} are not within the {there.nbytes} of {self.peer}")
        if not self.operating.acquire(timeout=timeout_s):
            raise DeadlineExceeded(f"{what} to {self.peer}: another operation was under way until the deadline")
        try:
            self.check_connected()
            reach = self.attach(there, until_s)
            if there.offset_bytes + there.nbytes > reach.nbytes:
                raise HandleError(f"{what}: this handle describes more than the {reach.nbytes} bytes of the memory")
            if access & ~(there.access & reach.access):
                raise RemoteAccessError(f"{what}: the memory of {self.peer} does not permit it")
            if self.taken_away:
                self.end_generation()
            if self.pair is None:
                self.open_generation(until_s)
            with self.transport.changed:
                if there.memory_id in self.revoked:
                    raise StaleHandle(f"{what}: the memory of {self.peer} was closed")
                self.using = there.memory_id
            try:
                yield Use(what, there.memory_id, reach, there.offset_bytes + offset, until_s)
            finally:
                with self.transport.changed:
                    self.using = None
                    if there.memory_id in self.revoked and self.connected:
                        self.transport.tell(self, wire.Revoked(there.memory_id))
        finally:
            self.operating.release()

    def write(
        self, source: Any, remote: Any, offset_bytes: int = 0, *, signal: int | None = None, add: int = 1,
        timeout_s: float = 30.0,
    ) -> None:  # fmt: skip
        """Writes all of `source`, then adds `add` to a signal if one is given; complete at the peer on return."""
        data = as_bytes(source)
        with self.use("write", remote, offset_bytes, data.size, WRITE, timeout_s) as use:
            then = [] if signal is None else [self.signal_request(use, signal, add)]
            self.transfer(use, "RDMA_WRITE", data, 0, then)

    def read(self, destination: Any, remote: Any, offset_bytes: int = 0, *, timeout_s: float = 30.0) -> None:
        """Fills `destination`."""
        data = as_bytes(destination, written=True)
        with self.use("read", remote, offset_bytes, data.size, READ, timeout_s) as use:
            self.transfer(use, "RDMA_READ", data, LOCAL_WRITE)

    def signal(self, remote: Any, index: int, add: int = 1, *, timeout_s: float = 30.0) -> None:
        """Adds to a signal when all earlier writes are visible there."""
        with self.use("signal", remote, 0, 0, 0, timeout_s) as use:
            self.run(use, [self.signal_request(use, index, add)])

    def fetch_add(self, remote: Any, offset_bytes: int, add: int, *, timeout_s: float = 30.0) -> int:
        """Adds to an aligned 8-byte word; returns what it held."""
        return self.atomic("ATOMIC_FETCH_AND_ADD", remote, offset_bytes, timeout_s, add % 2**64, 0)

    def compare_swap(
        self, remote: Any, offset_bytes: int, expected: int, desired: int, *, timeout_s: float = 30.0
    ) -> int:
        """Sets an aligned 8-byte word to `desired` if it holds `expected`; returns what it held."""
        return self.atomic("ATOMIC_CMP_AND_SWP", remote, offset_bytes, timeout_s, expected % 2**64, desired % 2**64)

    def atomic(self, opcode: str, remote: Any, offset_bytes: int, timeout_s: float, *operands: int) -> int:
        """Either of the two."""
        with self.use(opcode, remote, offset_bytes, 8, READ | WRITE, timeout_s) as use:
            address, rkey = use.reach.address + use.at, use.reach.keys[use.at // use.reach.piece_nbytes]
            if address % 8:
                raise BoundsError(f"{opcode}: offset {offset_bytes} is not aligned to 8 bytes")
            self.run(use, [self.word_request(opcode, address, rkey, *operands)])
            return int(self.word[0])

    def flush(self, remote: Any, timeout_s: float = 30.0) -> None:
        """Returns when all earlier operations are visible to everybody: a read behind them pushes them to memory."""
        with self.use("flush", remote, 0, 0, 0, timeout_s) as use:
            self.run(use, [self.word_request("RDMA_READ", use.reach.words_address, use.reach.words_keys[0])])
