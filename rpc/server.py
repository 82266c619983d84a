"""The control plane's server: the state machine behind gRPC.

One event loop on one thread of its own serves all servers of the process, so that a waiting call costs no
thread and ten thousand of them wait as well as one. The state machine is called from that thread only.
"""

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from queue import Empty
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from onesided.errors import OnesidedError, StaleHandle

from . import address as addresses
from . import limits
from .catalog import Entry
from .process import ForkGuard, Outcome, claim_grpc, close_at_exit, forget, undisturbed
from .state import ControlState
from .status import MARK, to_status
from .timing import Ticket
from .v1 import control_pb2 as pb
from .v1 import control_pb2_grpc as pb_grpc

T = TypeVar("T")
log = logging.getLogger("onesided.rpc")

SERVICES = ("onesided.v1.Control", "onesided.v1.Directory")
START_S = 30.0  # for a server to listen or to close; far more than a loaded machine takes
GRACE_S = 1.0  # for answers under way when a server closes

OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on one port is a mistake, not a load balancer
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients ping every 10 s, see client.py
    ("grpc.keepalive_permit_without_calls", 1),
)


class Server:
    """Serves groups and a directory to every process that can connect. It holds soft state only: one that is
    started anew at the same address gets it all back from the members.

    Any process can hold one; `onesided serve` runs one alone. Thread-safe. It is closed when the interpreter
    ends.

    Args:
        bind: "host:port", where to listen: on this one address and no other. Port 0 takes a free one. A host
            name means its first IPv4 address, or its first one. Beware that gRPC takes 0.0.0.0 for all
            interfaces of IPv6 too.
        credentials: of gRPC, for TLS (`grpc.ssl_server_credentials`); None: clear text.

    Raises:
        BoundsError: `bind` is no address.
        OnesidedError: nothing can listen there; the message names the address and the system's reason.
    """

    def __init__(self, bind: str = "127.0.0.1:0", *, credentials: grpc.ServerCredentials | None = None) -> None:
        host, port = addresses.parse(bind, port_zero=True)
        claim_grpc()
        self._guard = ForkGuard("a Server")
        self._lock = threading.Lock()
        self._closed = False
        self._host = _Host()
        host = addresses.resolve(host)
        port = _loop().run(self._host.start(host, port, credentials), START_S)
        self._address = addresses.join(host, port)
        close_at_exit(self, self.close)
        log.info("control plane serves at %s", self._address)

    @property
    def address(self) -> str:
        """Where it listens, with the actual port: "127.0.0.1:29500" or "[::1]:29500"."""
        return self._address

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    @property
    def members(self) -> int:
        """How many members its groups have, those apart that are lost or left."""
        self._guard.check()
        if self._closed:
            raise StaleHandle(f"the server at {self._address} is closed")
        return _loop().run(self._host.count_members(), START_S)

    def close(self) -> None:
        """Stops listening, lets answers under way out, and breaks what still waits. Idempotent. Clients take
        it for an outage, and go on with the next server at this address."""
        self._guard.check()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        forget(self)
        _loop().run(self._host.stop(), START_S)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server {self._address}{' closed' if self._closed else ''}>"


class _LoopThread:
    """The event loop of this process's servers, on a thread that ends with the interpreter."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_on_loop_error)
        self._thread = threading.Thread(target=self._loop.run_forever, name="onesided-rpc", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        undisturbed(self._thread.start)
        close_at_exit(self, self._stop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs `work` on the loop and waits for it. Raises what it raises, or TimeoutError."""
        outcome: Outcome[T] = Outcome()

        async def run() -> None:
            try:
                outcome.returned(await work)
            except BaseException as error:  # noqa: BLE001  # raised below
                outcome.raised(error)

        self._loop.call_soon_threadsafe(self._begin, run())
        try:
            return outcome.get(timeout_s)
        except Empty:
            raise TimeoutError(f"the control plane of this process is stuck for {timeout_s:g} s") from None

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself keeps no hold of it
        task.add_done_callback(self._tasks.discard)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio wakes all loops of a process through one socket; those that find it read already say so,
    # harmlessly.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


_shared: list[_LoopThread] = []
_shared_lock = threading.Lock()


def _loop() -> _LoopThread:
    with _shared_lock:
        if not _shared:
            _shared.append(_LoopThread())
        return _shared[0]


class _Closing(Exception):
    """The server is closing, and this call would wait longer than it lives."""


class _Host:
    """One server on the loop: its state, its timer, and the calls that wait. Everything here runs on the
    loop."""

    def __init__(self) -> None:
        self.state = ControlState()
        self._waits: set[asyncio.Future[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._server: grpc.aio.Server | None = None
        self._health: Any = None

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        """Listens; returns the port."""
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        server = grpc.aio.server(options=OPTIONS)
        pb_grpc.add_ControlServicer_to_server(_Control(self), server)
        pb_grpc.add_DirectoryServicer_to_server(_Directory(self), server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined,unused-ignore]  # not in the stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        where = addresses.join(host, port)
        # gRPC would log the reason and say only that it failed.
        why = addresses.why_not_bound(host, port) if port else ""
        try:
            bound = (
                0
                if why
                else (
                    server.add_secure_port(where, credentials)
                    if credentials is not None
                    else server.add_insecure_port(where)
                )
            )
        except RuntimeError as error:
            why, bound = addresses.why_not_bound(host, port) or str(error), 0
        if not bound:
            await server.stop(None)
            raise OnesidedError(f"the control plane cannot listen at {where}: {why or 'gRPC gives no reason'}")
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        """Ends every wait, then the server."""
        assert self._server is not None
        if self._wake is not None:
            self._wake.cancel()
        await self._health.enter_graceful_shutdown()
        for wait in list(self._waits):
            if not wait.done():
                wait.set_exception(_Closing())
        await self._server.stop(GRACE_S)

    async def count_members(self) -> int:
        """How many members stay."""
        return self.state.members.staying

    async def wait(self, ticket: Ticket[T]) -> T:
        """Waits until `ticket` is decided; returns or raises what it was decided for."""
        self.arm()
        if not ticket.done:
            future = self.expect()
            ticket.when_done(lambda: self.finish(future))
            await future
        return ticket.result()

    def expect(self) -> "asyncio.Future[None]":
        """A future that also ends when the server closes."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.add(future)
        future.add_done_callback(self._waits.discard)
        return future

    def finish(self, future: "asyncio.Future[None]") -> None:
        """Ends a future of `expect`, unless something did."""
        if not future.done():
            future.set_result(None)

    def arm(self) -> None:
        """Sets the one timer to the earliest thing to do. Called after whatever changes the state."""
        when_s = self.state.next_s()
        if self._wake is not None:
            if when_s is not None and self._wake.when() <= when_s:
                return
            self._wake.cancel()
            self._wake = None
        if when_s is not None:  # both clocks are time.monotonic
            self._wake = asyncio.get_running_loop().call_at(when_s, self._on_time)

    def _on_time(self) -> None:
        self._wake = None
        self.state.run_due()
        self.arm()


Handler = Callable[[Any, Any, Any], Awaitable[Any]]


def _answers(handler: Handler) -> Handler:
    """Makes a handler send its errors as status codes."""

    @functools.wraps(handler)
    async def call(self: "_Service", request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except _Closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is closing")
        except (OnesidedError, TypeError) as error:
            code, details = to_status(error)
            await context.abort(code, details, ((MARK, type(error).__name__),))
        finally:
            self._host.arm()

    return call


class _Service:
    def __init__(self, host: _Host) -> None:
        self._host = host

    @property
    def _state(self) -> ControlState:
        return self._host.state


class _Control(_Service, pb_grpc.ControlServicer):
    @_answers
    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        rank = request.rank if request.HasField("rank") else None
        ticket = self._state.join(
            request.client_id, request.group, request.size, rank, request.lease_s, request.timeout_s
        )
        try:
            place = await self._host.wait(ticket)
        except asyncio.CancelledError:
            self._state.members.withdraw_join(request.client_id, request.group, ticket)
            raise
        return pb.JoinReply(rank=place.rank, epoch=place.epoch)

    @_answers
    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeReply:
        payload = request.payload if request.HasField("payload") else None
        self._state.resume(
            request.client_id,
            request.group,
            request.size,
            request.rank,
            request.epoch,
            request.lease_s,
            request.sequence,
            request.operation,
            payload,
        )
        return pb.ResumeReply()

    @_answers
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        gone, republish = self._state.heartbeat(request.client_id, request.member, request.entries)
        return pb.HeartbeatReply(gone_ranks=sorted(gone), republish=republish)

    @_answers
    async def AllGather(self, request: pb.AllGatherRequest, context: Any) -> pb.AllGatherReply:
        ticket = self._state.gather(
            request.client_id, request.sequence, request.operation, request.payload, request.timeout_s
        )
        payloads = await self._host.wait(ticket)
        return pb.AllGatherReply(payloads=payloads)

    @_answers
    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        self._state.leave(request.client_id)
        return pb.LeaveReply()


class _Directory(_Service, pb_grpc.DirectoryServicer):
    @_answers
    async def Publish(self, request: pb.PublishRequest, context: Any) -> pb.PublishReply:
        entry = self._state.publish(
            request.client_id, request.name, request.value, request.lease_s, request.replace, request.version
        )
        return pb.PublishReply(entry=_entry(entry))

    @_answers
    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupReply:
        ticket = self._state.lookup(request.name, request.timeout_s)
        try:
            return pb.LookupReply(entry=_entry(await self._host.wait(ticket)))
        except asyncio.CancelledError:
            self._state.catalog.end_lookup(request.name, ticket, 0.0)
            raise

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchReply]:
        try:
            prefix = limits.check_prefix(request.prefix)
        except OnesidedError as error:
            code, details = to_status(error)
            await context.abort(code, details, ((MARK, type(error).__name__),))
        changes: list[asyncio.Future[None]] = [self._host.expect()]

        entries, watcher = self._state.catalog.watch(prefix, lambda: self._host.finish(changes[0]))
        try:
            for entry in entries:
                yield pb.WatchReply(kind=pb.WatchReply.PUBLISHED, entry=_entry(entry))
            yield pb.WatchReply(kind=pb.WatchReply.SYNCED, server_id=self._state.server_id)
            while not watcher.overrun:
                await changes[0]
                changes[0] = self._host.expect()
                while watcher.events and not watcher.overrun:
                    event = watcher.events.popleft()
                    yield pb.WatchReply(kind=_KINDS[event.kind], entry=_entry(event.entry))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the reader of this watch fell behind")
        except _Closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is closing")
        finally:
            self._state.catalog.unwatch(watcher)
            changes[0].cancel()

    @_answers
    async def Withdraw(self, request: pb.WithdrawRequest, context: Any) -> pb.WithdrawReply:
        limits.check_name(request.name, "entry name")
        self._state.catalog.withdraw(request.client_id, request.name)
        return pb.WithdrawReply()

    @_answers
    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListReply:
        entries, more = self._state.catalog.page(limits.check_prefix(request.prefix), request.after)
        return pb.ListReply(entries=map(_entry, entries), more=more)


_KINDS = {
    "published": pb.WatchReply.PUBLISHED,
    "withdrawn": pb.WatchReply.WITHDRAWN,
    "expired": pb.WatchReply.EXPIRED,
}


def _entry(entry: Entry) -> pb.Entry:
    return pb.Entry(name=entry.name, value=entry.value, version=entry.version, owner=entry.owner)
