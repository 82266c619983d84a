"""The transport itself: its ports, its listener, and the thread that hears peers."""

import contextlib
import itertools
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from onesided.transport.opened import close_at_exit

from onesided.errors import OnesidedError, RegistrationError, Unsupported

from . import wire
from .origin import Connection, left_s
from .rail import Rail
from .target import Incoming, Memory, as_bytes, check_open


def own_address() -> str:
    """The source address of a route to the world. Connecting a datagram socket sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        return str(probe.getsockname()[0])
    return "127.0.0.1"


class PyverbsTransport:
    """The rdma transport as readable Python: the same protocol, so each can be the peer of the other.

    For reading, and for testing `rdma` against a second implementation; "auto" never chooses it. Operations are
    synchronous and use one queue pair. A thread answers peers over TCP.

    `nics` names ports ("rxe0", "rxe0:1", "rxe0:1/3" with the index of a GID); peers reach memory through all of them,
    operations from here use the first. None is the first active port with a RoCE v2 address, preferably an IPv4 one.
    Peers introduce themselves at `address`, by default that of the first port. Not to be used after a fork.
    """

    kind = "pyverbs"

    def __init__(self, nics: Sequence[str] | None = None, *, address: str = "", why: str = "asked for") -> None:
        self.rails, self.why, self.closed = [Rail(nic) for nic in nics or [""]], why, False
        self.token, self.numbers = secrets.token_bytes(16), itertools.count(1)
        # Guards everything below and the conversations; notified whenever something was heard.
        self.changed = threading.Condition(threading.RLock())
        self.bound: dict[int, wire.Endpoint] = {}
        self.memories: dict[int, Memory] = {}
        self.talking: dict[socket.socket, Incoming | Connection] = {}
        host = address or self.rails[0].host or own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family, backlog=128)
        self.listener.setblocking(False)
        self.wake, self.woken = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.woken, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self.serve, name="onesided-pyverbs", daemon=True)
        self.thread.start()
        close_at_exit(self)

    @staticmethod
    def unsupported_reason() -> str | None:
        """Why there can be none here; None if there can."""
        try:
            Rail().close()
        except Unsupported as error:
            return str(error)
        return None

    @classmethod
    def supported(cls) -> bool:
        """Whether pyverbs imports and finds a port. Opens devices, and changes nothing."""
        return cls.unsupported_reason() is None

    def allocate(self, nbytes: int, access: str = "rw", *, signals: int = 0, max_peers: int = 256) -> Memory:
        """New memory, zeroed. `max_peers` means nothing here."""
        try:
            data = np.zeros(nbytes, np.uint8)
        except (MemoryError, ValueError) as error:
            raise RegistrationError(f"there is no memory of {nbytes} bytes: {error}") from error
        return self.register_memory(data, access, signals=signals, max_peers=max_peers)

    def register_memory(self, buffer: Any, access: str = "rw", *, signals: int = 0, max_peers: int = 256) -> Memory:
        """Makes a tensor or buffer known to peers; never copies."""
        del max_peers
        check_open(self)
        memory = Memory(self, as_bytes(buffer, written="w" in access), access, signals)
        with self.changed:
            self.memories[memory.id] = memory
        return memory

    def bind(self, *, shared: bool = False) -> bytes:
        """An endpoint for one connection, or for any number if `shared`."""
        with self.changed:
            check_open(self)
            host, port = self.listener.getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            number, secret = next(self.numbers), secrets.token_bytes(16)
            endpoint = wire.Endpoint(
                wire.RDMA, int(shared), self.token, bytes(16), number, secret, os.getpid(), address
            )
            self.bound[number] = endpoint
        return endpoint.to_bytes()

    def connect(self, endpoint: bytes, *, name: str = "", timeout_s: float = 30.0) -> Connection:
        """Connects to the peer that bound `endpoint`, whichever implementation it is."""
        check_open(self)
        return Connection(self, wire.Endpoint.from_bytes(endpoint), name, time.monotonic() + timeout_s)

    def revoke(self, memory_id: int, timeout_s: float) -> None:
        """Peers end their operations on a memory. Of one that does not in time (it was stopped), the queue pairs go."""
        with self.changed:
            holders = [p for p in self.talking.values() if isinstance(p, Incoming) and memory_id in p.attached]
            for peer in holders:
                self.tell(peer, wire.Revoke(memory_id))
            if not self.changed.wait_for(lambda: not any(memory_id in p.attached for p in holders), timeout_s):
                for peer in holders:
                    if memory_id in peer.attached:
                        del peer.attached[memory_id]
                        peer.close_responders()
                        self.tell(peer, wire.Ended(memory_id))
            self.memories.pop(memory_id, None)

    # ---- The thread that hears peers ---------------------------------------------------------------------------------

    def watch(self, peer: Incoming | Connection) -> None:
        """Hears it from here on."""
        with self.changed:
            self.talking[peer.framed.socket] = peer
            self.selector.register(peer.framed.socket, selectors.EVENT_READ)

    def unwatch(self, peer: Incoming | Connection) -> None:
        """Ends the conversation, and what depends on it."""
        with self.changed:
            if self.talking.pop(peer.framed.socket, None) is not None:
                self.selector.unregister(peer.framed.socket)
                peer.framed.socket.close()
                peer.end()
                self.changed.notify_all()

    def tell(self, peer: Incoming | Connection, message: Any = None, request_id: int = 0) -> None:
        """Sends; a peer that is gone is noticed here, too."""
        try:
            peer.framed.send(message, request_id)
        except (OSError, OnesidedError):
            self.unwatch(peer)

    def serve(self) -> None:
        """Until close(): accepts, hears, and sends what did not fit a socket."""
        while not self.closed:
            unsent = any(peer.framed.unsent for peer in list(self.talking.values()))
            for key, _ in self.selector.select(0.01 if unsent else None):
                with self.changed:
                    if key.fileobj is self.listener:
                        with contextlib.suppress(OSError):  # it has gone again, or there are no descriptors left
                            self.watch(Incoming(self, self.listener.accept()[0]))
                    elif (peer := self.talking.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        try:
                            peer.hear()
                        except (OSError, OnesidedError):
                            self.unwatch(peer)
                        self.changed.notify_all()
            with self.changed:
                for peer in list(self.talking.values()):
                    self.tell(peer)

    def close(self, timeout_s: float = 5.0) -> None:
        """Closes connections, then memories, then itself. Closing twice is legal."""
        if self.closed:
            return
        until_s = time.monotonic() + timeout_s
        for peer in list(self.talking.values()):
            if isinstance(peer, Connection):
                peer.close(left_s(until_s))
        for memory in list(self.memories.values()):
            memory.close(left_s(until_s))
        self.closed = True
        self.wake.send(b"x")
        self.thread.join()
        for peer in list(self.talking.values()):
            self.unwatch(peer)
        everything: list[Any] = [self.selector, self.listener, self.wake, self.woken, *self.rails]
        for one in everything:
            one.close()

    def describe(self) -> dict[str, str]:
        """What it is and what it holds."""
        rails = {f"rail {n}": f"{rail.name}, GID {rail.gid_index}" for n, rail in enumerate(self.rails)}
        state = "closed" if self.closed else "open"
        return {"kind": self.kind, "state": state, "memories": str(len(self.memories)), **rails, "why": self.why}

    def __enter__(self) -> "PyverbsTransport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
