"""One client of a control server: its connection, its heartbeat, and what is put back when the server has
restarted.

A group or a directory owns one client. Requests may be sent twice, so a broken connection is no error: they
are sent again until their time is over. When the server answers that it does not know this client, it has
restarted: the client puts back its membership with the last collectives, and its entries, and the request is
sent again.
"""

import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from onesided.errors import ConnectionLost, DeadlineExceeded, OnesidedError, StaleHandle

from . import address as addresses
from . import limits
from .catalog import Entry, Event
from .directory import Mailbox
from .membership import Forgotten
from .process import Flag, ForkGuard, claim_grpc, close_at_exit, forget, soon, undisturbed
from .status import RETRY, from_status, is_ours
from .v1 import control_pb2 as pb
from .v1 import control_pb2_grpc as pb_grpc

log = logging.getLogger("onesided.rpc")

REPLY_S = 10.0  # for a request that does not wait, across a restart of the server
LATE_S = 0.5  # what a connected server may take beyond the deadline that it keeps: its answer names who is missing
AT_ONCE_S = 0.1  # for an answer of a server that answered just now
LEAVE_S = 2.0  # a goodbye that nobody takes ends here; the lease does the rest
BEATS_PER_LEASE = 3
RETRY_FIRST_S, RETRY_MOST_S = 0.02, 0.5
RESTORED_AT_ONCE = 32  # entries that are on their way together after a restart of the server
MAILBOX = 1024  # events of a watch read ahead
BACK_S = 15.0  # after a restart of the server, entries that are back within this were never gone

OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # the control plane is a neighbour; proxies of the environment are for the web
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),  # finds a host that vanished without a word
    ("grpc.keepalive_timeout_ms", 5_000),
)

_numbers = itertools.count(1)


@dataclass
class _Given:
    """One collective that this member took part in. `payload` is None if it failed here."""

    sequence: int
    operation: str
    payload: bytes | None


@dataclass
class _Published:
    value: bytes
    version: int
    lease_s: float


class _Answer:
    """The answer to a request, which is sent when this is made. For one thread."""

    def __init__(self, method: Any, request: Any, timeout_s: float) -> None:
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._future: Any = None
        self._ended = False

        def send() -> None:
            self._future = method.future(request, timeout=timeout_s, wait_for_ready=True)
            self._future.add_done_callback(self._done.put)

        try:
            undisturbed(send)
        except BaseException:
            self.cancel()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Whether it comes within `timeout_s`."""
        with contextlib.suppress(queue.Empty):
            self._done.get(timeout=min(timeout_s, threading.TIMEOUT_MAX))
            self._ended = True
        return self._ended

    def get(self) -> Any:
        """Waits for it, and returns it or raises grpc.RpcError."""
        if not self._ended:
            self._done.get()
            self._ended = True
        return undisturbed(self._future.result)

    def cancel(self) -> None:
        """Nobody waits for it any longer."""
        soon(lambda: self._future is None or self._future.cancel())


class _Unanswered(Exception):
    """The deadline has passed, and no server is there that could still answer."""


class Client:
    """See the module. Implements the group's seat and the directory's link. Thread-safe; a caller that waits
    can be interrupted by a signal at any time, which cancels its request."""

    def __init__(self, address: str, lease_s: float, credentials: grpc.ChannelCredentials | None = None) -> None:
        host, port = addresses.parse(address)
        claim_grpc()
        self.address = addresses.join(host, port)
        self.lease_s = lease_s
        self.client_id = f"{socket.gethostname()[:64]}:{os.getpid()}:{next(_numbers)}-{os.urandom(4).hex()}"
        self.name, self.size, self.rank, self.epoch = "", 0, 0, 0  # of the group, once joined
        self._guard = ForkGuard("this connection to the control plane")
        self._channel = (
            grpc.insecure_channel(self.address, OPTIONS)
            if credentials is None
            else grpc.secure_channel(self.address, credentials, OPTIONS)
        )
        stubs = pb_grpc.ControlStub(self._channel), pb_grpc.DirectoryStub(self._channel)
        self._methods: dict[str, Any] = {name: method for stub in stubs for name, method in vars(stub).items()}
        self._member = False
        self._gone: frozenset[int] = frozenset()
        self._given: list[_Given] = []  # the last two: others may be one collective behind
        self._published: dict[str, _Published] = {}
        self._doubtful: set[str] = set()  # published, perhaps: no answer came
        self._entries_lock = threading.RLock()  # one change of this client's entries at a time
        self._restore_lock = threading.Lock()
        self._closed = Flag()
        self._beats: queue.SimpleQueue[None] = queue.SimpleQueue()  # let the next heartbeat come at once
        self._keeper: threading.Thread | None = None
        self._keeper_lock = threading.Lock()
        close_at_exit(self, self.close)

    # The seat of a group

    def join(self, name: str, size: int, rank: int | None, timeout_s: float) -> None:
        """Takes a place in a group; returns when all members are there."""
        self.name, self.size = name, size
        request = pb.JoinRequest(client_id=self.client_id, group=name, size=size, rank=rank, lease_s=self.lease_s)
        reply = self._call("Join", request, timeout_s, f"joining group {name!r}")
        self.rank, self.epoch = reply.rank, reply.epoch
        self._member = True
        self._keep()

    def gather(self, sequence: int, operation: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Takes part in a collective; see gather.py for what it promises."""
        given = _Given(sequence, operation, payload)
        self._given = [*self._given[-1:], given]
        deadline_s = time.monotonic() + timeout_s
        request = pb.AllGatherRequest(client_id=self.client_id, sequence=sequence, operation=operation, payload=payload)
        try:
            reply = self._call(
                "AllGather",
                request,
                timeout_s,
                f"{operation} number {sequence} of group {self.name!r} at rank {self.rank}",
            )
        except OnesidedError as error:
            given.payload = None
            if isinstance(error, ConnectionLost):
                # So that `gone` knows what the error says. The server has just answered.
                self._renew(min(max(deadline_s - time.monotonic(), AT_ONCE_S), LATE_S))
            raise
        return list(reply.payloads)

    def gone(self) -> frozenset[int]:
        """The ranks that are lost or left, as the last heartbeat told."""
        return self._gone

    def leave(self) -> None:
        """Says goodbye and closes the connection. Never raises for a server that is gone."""
        self.close()

    def _lose(self, ranks: Iterable[int]) -> None:
        with self._keeper_lock:  # the heartbeat and a collective may both have news
            self._gone |= frozenset(ranks)

    # The link of a directory

    def publish(self, name: str, value: bytes, lease_s: float, replace: bool) -> Entry:
        """Publishes, and keeps it published."""
        request = pb.PublishRequest(client_id=self.client_id, name=name, value=value, lease_s=lease_s, replace=replace)
        with self._entries_lock:
            try:
                entry = _entry(self._request("Publish", request, f"publishing {name!r}").entry)
            except (ConnectionLost, KeyboardInterrupt):
                if name not in self._published:
                    self._doubtful.add(name)
                raise
            self._doubtful.discard(name)
            before_s = self._interval_s()
            self._published[name] = _Published(value, entry.version, lease_s)
            self._keep(sooner=self._interval_s() < before_s)
        return entry

    def lookup(self, name: str, timeout_s: float) -> Entry:
        """Finds an entry."""
        what = f"looking up {name!r}"
        request = pb.LookupRequest(name=name)
        if timeout_s > 0:
            return _entry(self._call("Lookup", request, timeout_s, what).entry)
        return _entry(self._request("Lookup", request, what).entry)

    def withdraw(self, name: str) -> None:
        """Removes an entry."""
        with self._entries_lock:
            self._published.pop(name, None)
            self._doubtful.discard(name)
            self._request("Withdraw", pb.WithdrawRequest(client_id=self.client_id, name=name), f"withdrawing {name!r}")

    def list(self, prefix: str) -> list[Entry]:
        """All entries, page by page."""
        found: list[Entry] = []
        more = True
        while more:
            request = pb.ListRequest(prefix=prefix, after=found[-1].name if found else "")
            reply = self._request("List", request, f"listing {prefix!r}")
            found += map(_entry, reply.entries)
            more = reply.more
        return found

    def watch(self, prefix: str, mailbox: Mailbox) -> Callable[[], None]:
        """Lets the events of a prefix into `mailbox`; returns what ends that."""
        self._check()
        reader = _WatchReader(self, prefix, mailbox)
        threading.Thread(target=reader.run, name="onesided-watch", daemon=True).start()
        return reader.stop

    def close(self, patience_s: float = LEAVE_S) -> None:
        """Says goodbye, withdrawing all, and closes the connection. Idempotent; never raises for a server
        that is gone, nor waits for it longer than `patience_s`."""
        with self._keeper_lock:
            if self._closed.is_set():
                return
            self._closed.set()
            keeper = self._keeper
        forget(self)
        self._beats.put(None)
        deadline_s = time.monotonic() + patience_s
        if self._entries_lock.acquire(timeout=patience_s):  # what is being put back comes before the goodbye
            self._entries_lock.release()
        left_s = max(deadline_s - time.monotonic(), 0.0)
        try:
            if self.name or keeper is not None or self._doubtful:  # nothing was registered otherwise
                leave, request = self._methods["Leave"], pb.LeaveRequest(client_id=self.client_id)
                # Not a future: that may need a new thread, and there are none while the interpreter ends.
                undisturbed(lambda: leave(request, timeout=left_s))
        except grpc.RpcError as error:
            log.debug("goodbye to %s not taken: %s", self.address, error.details())
        finally:
            undisturbed(self._channel.close)
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(max(deadline_s - time.monotonic(), 0.0))

    # Requests

    def _request(self, method: str, request: Any, what: str) -> Any:
        """Sends a request that does not wait for others. Raises ConnectionLost if no answer comes."""
        try:
            return self._call(method, request, REPLY_S, what, waits=False)
        except DeadlineExceeded as error:
            raise ConnectionLost(str(error)) from error

    def _call(self, method: str, request: Any, timeout_s: float, what: str, waits: bool = True) -> Any:
        """Sends `request` until it is answered, over restarts of the server; raises what the server answers,
        or DeadlineExceeded: at the deadline if no server is connected then, else up to LATE_S after it."""
        self._check()
        deadline_s = time.monotonic() + timeout_s
        pause_s = RETRY_FIRST_S
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if waits:
                request.timeout_s = left_s
            try:
                return self._once(method, request, left_s, LATE_S if waits else 0.0)
            except _Unanswered:
                self._check()
                raise self._silent(what, timeout_s, "no server is connected") from None
            except grpc.RpcError as error:
                self._check()
                answer = from_status(error)
                if isinstance(answer, Forgotten):
                    answer = self._restored(deadline_s) or answer
                    if not isinstance(answer, Forgotten | DeadlineExceeded):
                        raise answer from None
                elif is_ours(error):
                    raise answer from None
                elif error.code() not in RETRY:
                    raise type(answer)(f"{what}: the control plane at {self.address}: {answer}") from None
                if time.monotonic() >= deadline_s:
                    raise self._silent(what, timeout_s, error.details()) from None
            if not isinstance(answer, Forgotten):
                self._closed.wait(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))
                pause_s = min(2 * pause_s, RETRY_MOST_S)

    def _silent(self, what: str, timeout_s: float, why: str | None) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{what}: no answer from the control plane at {self.address} within {timeout_s:.3g} s ({why})"
        )

    def _once(self, method: str, request: Any, timeout_s: float, late_s: float = 0.0) -> Any:
        """Sends `request` once. A server that is connected when `timeout_s` have passed gets `late_s` more. Waits
        without holding off signals: whatever interrupts it cancels the request."""
        answer = self._start(method, request, timeout_s + late_s)
        try:
            if late_s and not answer.wait(timeout_s) and not self._connected():
                raise _Unanswered
            return answer.get()
        except BaseException:
            answer.cancel()
            raise

    def _connected(self) -> bool:
        """Whether a server is at the other end now. What gRPC has for it in public costs a thread that polls."""
        ask = getattr(getattr(self._channel, "_channel", None), "check_connectivity_state", None)
        try:
            return ask is None or undisturbed(lambda: ask(False)) == grpc.ChannelConnectivity.READY.value[0]
        except ValueError:  # the channel was closed
            return False

    def _start(self, method: str, request: Any, timeout_s: float) -> "_Answer":
        """Sends `request`."""
        try:
            return _Answer(self._methods[method], request, timeout_s)
        except (ValueError, RuntimeError) as error:  # another thread closed the channel; the interpreter ends
            raise StaleHandle(f"the connection to {self.address} was closed: {error}") from None

    def open_stream(self, method: str, request: Any) -> Any:
        """Opens a stream of answers; waits for the server to be there when it is read."""
        self._check()
        try:
            return self._methods[method](request, wait_for_ready=True)
        except ValueError:
            raise StaleHandle(f"the connection to {self.address} was closed") from None

    def _check(self) -> None:
        self._guard.check()
        if self._closed.is_set():
            raise StaleHandle(f"the connection to {self.address} was closed")

    # What is kept alive, and put back

    def _keep(self, sooner: bool = False) -> None:
        """Starts the heartbeat, or lets it know that it must come sooner than it had planned."""
        with self._keeper_lock:
            if self._closed.is_set():
                return
            if self._keeper is None:
                undisturbed(self._start_keeper)
            elif sooner:
                self._beats.put(None)

    def _start_keeper(self) -> None:
        if self._keeper is None:  # Ctrl-C may have ended the wait for an earlier start
            keeper = threading.Thread(target=self._beat, name="onesided-heartbeat", daemon=True)
            keeper.start()
            self._keeper = keeper

    def _interval_s(self) -> float:
        leases = [published.lease_s for published in list(self._published.values())]
        return min([*leases, self.lease_s]) / BEATS_PER_LEASE

    def _beat(self) -> None:
        """The heartbeat thread: renews all leases until the client is closed."""
        while not self._closed.is_set():
            self._renew(max(self._interval_s(), LATE_S))
            with contextlib.suppress(queue.Empty):
                self._beats.get(timeout=self._interval_s())

    def _renew(self, timeout_s: float) -> None:
        """One heartbeat. Failing is no loss by itself."""
        deadline_s = time.monotonic() + timeout_s
        try:
            request = pb.HeartbeatRequest(client_id=self.client_id, member=self._member, entries=len(self._published))
            reply = self._once("Heartbeat", request, timeout_s)
            self._lose(reply.gone_ranks)
            if reply.republish:
                self._restore_entries(deadline_s + REPLY_S)
        except grpc.RpcError as error:
            if isinstance(from_status(error), Forgotten):
                self._restored(deadline_s + REPLY_S)
            else:
                log.debug("heartbeat to %s failed: %s", self.address, error.details())
        except OnesidedError as error:
            log.debug("heartbeat to %s failed: %s", self.address, error)

    def _restored(self, deadline_s: float) -> Exception | None:
        """Puts back what the server has forgotten. Returns None, or why it cannot be."""
        out: Exception | None = None
        if not self._restore_lock.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
            return DeadlineExceeded(f"the control plane at {self.address} restarted, and is still being told of all")
        try:
            if self._member:
                out = self._resume(deadline_s)
            self._restore_entries(deadline_s)
        except grpc.RpcError as error:
            log.debug("%s could not be put back: %s", self.client_id, error.details())
            return out or DeadlineExceeded(f"the control plane at {self.address} went away: {error.details()}")
        except OnesidedError as error:
            return error
        finally:
            self._restore_lock.release()
        log.info("the control plane at %s restarted; %s is registered again", self.address, self.client_id)
        return out

    def _resume(self, deadline_s: float) -> Exception | None:
        """Puts back the membership, and what this member gave to the last two collectives, in order. Returns
        None, or that this member is out of its group."""
        for given in self._given or [_Given(0, "", None)]:
            request = pb.ResumeRequest(
                client_id=self.client_id,
                group=self.name,
                size=self.size,
                rank=self.rank,
                epoch=self.epoch,
                lease_s=self.lease_s,
                sequence=given.sequence,
                operation=given.operation,
                payload=given.payload,
            )
            try:
                self._once("Resume", request, max(deadline_s - time.monotonic(), 0.0))
            except grpc.RpcError as error:
                if not is_ours(error):
                    raise
                self._lose([self.rank])
                return from_status(error)
        return None

    def _restore_entries(self, deadline_s: float) -> None:
        """Publishes again what the server lost; entries that were taken over meanwhile are let go."""
        if not self._entries_lock.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
            raise DeadlineExceeded(f"the control plane at {self.address} was too slow to take what was published")
        try:
            for name in sorted(self._doubtful):
                request = pb.WithdrawRequest(client_id=self.client_id, name=name)
                try:
                    self._once("Withdraw", request, max(deadline_s - time.monotonic(), 0.0))
                except grpc.RpcError as error:
                    if not is_ours(error):
                        raise
                self._doubtful.discard(name)  # gone, or another's
            names = list(self._published)
            for start in range(0, len(names), RESTORED_AT_ONCE):
                self._check()  # nothing is put back after the goodbye
                sent = [
                    (name, self._restore_entry(name, deadline_s)) for name in names[start : start + RESTORED_AT_ONCE]
                ]
                for name, answer in sent:
                    try:
                        answer.get()
                    except grpc.RpcError as error:
                        if not is_ours(error):
                            raise
                        log.warning("%r is no longer published by this process: %s", name, error.details())
                        del self._published[name]
        finally:
            self._entries_lock.release()

    def _restore_entry(self, name: str, deadline_s: float) -> "_Answer":
        published = self._published[name]
        request = pb.PublishRequest(
            client_id=self.client_id,
            name=name,
            value=published.value,
            lease_s=published.lease_s,
            version=published.version,
        )
        return self._start("Publish", request, max(deadline_s - time.monotonic(), 0.0))


class _WatchReader:
    """Reads one watch on a thread of its own, over broken connections and restarts of the server.

    After each of them the server begins anew with all that is there. What was told already is not told again.
    What is missing is told as withdrawn; by a server that restarted, as expired, once its publisher had
    `BACK_S` to put it back.
    """

    def __init__(self, client: Client, prefix: str, mailbox: Mailbox) -> None:
        self._client = client
        self._prefix = prefix
        self._mailbox = mailbox
        self._stopped = Flag()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._server_id = ""
        self._known: dict[str, Entry] = {}  # as told
        self._missing: set[str] = set()  # of those: not seen since the stream began
        self._patience: threading.Timer | None = None

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        with self._lock:
            if self._stream is not None:
                soon(self._stream.cancel)
            self._forget_patience()

    def run(self) -> None:
        """The thread."""
        pause_s = RETRY_FIRST_S
        while not self._stopped.is_set():
            try:
                for reply in self._open():
                    pause_s = RETRY_FIRST_S
                    with self._lock:
                        self._take(reply)
            except grpc.RpcError as error:
                if is_ours(error) or error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    self._mailbox.fail(from_status(error))
                    return
                log.debug("watch of %r at %s broke: %s", self._prefix, self._client.address, error.details())
            except StaleHandle:
                return
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, RETRY_MOST_S)

    def _open(self) -> Any:
        with self._lock:
            self._forget_patience()
            self._missing = set(self._known)
            self._stream = self._client.open_stream("Watch", pb.WatchRequest(prefix=self._prefix))
            if self._stopped.is_set():
                self._stream.cancel()
            return self._stream

    def _take(self, reply: pb.WatchReply) -> None:
        kind, entry = reply.kind, _entry(reply.entry)
        if kind == pb.WatchReply.SYNCED:
            restarted = self._server_id not in ("", reply.server_id)
            self._server_id = reply.server_id
            if restarted and self._missing:
                self._patience = threading.Timer(BACK_S, self._lose_patience)
                self._patience.daemon = True
                self._patience.start()
            elif not restarted:
                self._tell_missing("withdrawn")
            return
        self._missing.discard(entry.name)
        if kind == pb.WatchReply.PUBLISHED:
            if self._known.get(entry.name) != entry:
                self._known[entry.name] = entry
                self._mailbox.put(Event("published", entry), MAILBOX)
        elif self._known.pop(entry.name, None) is not None:
            self._mailbox.put(Event("withdrawn" if kind == pb.WatchReply.WITHDRAWN else "expired", entry), MAILBOX)

    def _tell_missing(self, kind: Literal["withdrawn", "expired"]) -> None:
        for name in sorted(self._missing):
            self._mailbox.put(Event(kind, self._known.pop(name)), MAILBOX)
        self._missing.clear()

    def _lose_patience(self) -> None:
        with self._lock:
            if self._patience is threading.current_thread():
                self._tell_missing("expired")

    def _forget_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _entry(entry: pb.Entry) -> Entry:
    return Entry(entry.name, entry.value, entry.version, entry.owner)
