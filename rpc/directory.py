"""The directory of named values: what windows and versions are found by."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from onesided.errors import DeadlineExceeded, StaleHandle

from . import limits
from .catalog import Entry, Event
from .process import ForkGuard

if TYPE_CHECKING:
    import grpc

__all__ = ["Directory", "Entry", "Event", "Watch"]


class DirectoryLink(Protocol):
    """Where a directory's requests go: over gRPC (client.py), or within this process (local.py)."""

    lease_s: float

    def publish(self, name: str, value: bytes, lease_s: float, replace: bool) -> Entry: ...
    def lookup(self, name: str, timeout_s: float) -> Entry: ...
    def withdraw(self, name: str) -> None: ...
    def list(self, prefix: str) -> list[Entry]: ...
    def watch(self, prefix: str, mailbox: "Mailbox") -> Callable[[], None]: ...


class Directory:
    """Small values under names, for everybody who can reach the server; each stays as long as its publisher
    lives.

    Thread-safe. What this client published is renewed in the background until it is withdrawn or the
    directory is closed; when this process dies, it goes once its lease is over. After a restart of the server
    it is published again, under its old version, before anybody is told that it was gone.

    Args:
        address: of the server, as "host:port".
        lease_s: for how long an entry outlives its publisher, in seconds (0.1 to 86,400).
        credentials: of gRPC, for TLS (`grpc.ssl_channel_credentials`); None: clear text.

    Every method raises ConnectionLost if the server cannot be reached for ten seconds, StaleHandle once the
    directory is closed, OnesidedError in a forked child, BoundsError and TypeError for arguments that cannot
    be right. Nothing is sent before the constructor returns: a server that is not there yet is waited for by
    the first call.
    """

    def __init__(
        self,
        address: str,
        *,
        lease_s: float = limits.DEFAULT_LEASE_S,
        credentials: "grpc.ChannelCredentials | None" = None,
    ) -> None:
        from .client import Client

        link = Client(address, limits.check_lease(lease_s), credentials)
        self._init(link, link.close)

    @classmethod
    def _over(cls, link: DirectoryLink) -> "Directory":
        """A directory of a group, which ends its link itself when it is left."""
        directory = cls.__new__(cls)
        directory._init(link, lambda: None)
        return directory

    def _init(self, link: DirectoryLink, close_link: Callable[[], object]) -> None:
        self._link = link
        self._close_link = close_link
        self._guard = ForkGuard("a Directory")
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once `close` was called, or the group that it belongs to was left."""
        return self._closed

    def publish(self, name: str, value: bytes, *, lease_s: float | None = None, replace: bool = False) -> Entry:
        """Puts `value` (at most 1 MiB) under `name` (1 to 255 bytes), and keeps it there.

        Publishing again what this client published is always allowed, and makes a new version.

        Args:
            lease_s: as of the directory, for this entry alone.
            replace: also when another client published the name and its lease has not ended.

        Returns:
            The entry as the directory holds it, with its version.

        Raises:
            RemoteAccessError: another client published the name, and its lease has not ended; the message names
                it and says for how long that runs.
        """
        self._check()
        name = limits.check_name(name, "entry name")
        data = limits.check_bytes(value, f"value of {name!r}", limits.MAX_VALUE_BYTES)
        lease = self._link.lease_s if lease_s is None else limits.check_lease(lease_s)
        return self._link.publish(name, data, lease, bool(replace))

    def lookup(self, name: str, *, timeout_s: float = 0) -> Entry:
        """Returns the entry that is published under `name`, waiting for it if `timeout_s` is more than 0.

        Raises:
            HandleError: nothing is published under the name, and `timeout_s` is 0; near names are listed.
            DeadlineExceeded: nothing was, for `timeout_s` seconds.
        """
        self._check()
        return self._link.lookup(limits.check_name(name, "entry name"), limits.check_timeout(timeout_s))

    def withdraw(self, name: str) -> None:
        """Removes what this client published under `name`. No error if nothing is there.

        Raises:
            RemoteAccessError: another client published it; the message names it.
        """
        self._check()
        self._link.withdraw(limits.check_name(name, "entry name"))

    def list(self, prefix: str = "") -> "list[Entry]":
        """Returns all entries whose names begin with `prefix`, by name."""
        self._check()
        return self._link.list(limits.check_prefix(prefix))

    def watch(self, prefix: str = "") -> "Watch":
        """Follows what happens to the names that begin with `prefix`; see `Watch`."""
        self._check()
        watch = Watch(lambda mailbox: self._link.watch(limits.check_prefix(prefix), mailbox), self._watches.discard)
        with self._lock:
            self._watches.add(watch)
        return watch

    def close(self) -> None:
        """Withdraws what this client published and ends its watches. Idempotent. Leaving a group closes its
        directory; closed on its own, that withdraws nothing before the group is left."""
        if self._guard.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for watch in list(self._watches):
            watch.close()
        self._close_link()

    def __enter__(self) -> "Directory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        self._guard.check()
        if self._closed:
            raise StaleHandle("this directory is closed")


class Watch:
    """The events of a directory in order: first "published" for each entry that is there, by name, then every
    change.

    Iterating waits for the next event, and ends when the watch is closed, from another thread too. Nothing is
    repeated or made up when the connection breaks or the server restarts; several changes of one entry during
    an outage may come as one. An entry that is not back 15 s after a restart of the server is told as
    "expired".
    """

    def __init__(self, start: "Callable[[Mailbox], Callable[[], None]]", on_close: "Callable[[Watch], None]") -> None:
        self._guard = ForkGuard("a Watch")
        self._mailbox = Mailbox()
        self._on_close = on_close
        self._stop = start(self._mailbox)

    def next(self, *, timeout_s: float | None = None) -> Event:
        """Returns the next event. Raises DeadlineExceeded if none comes in `timeout_s` seconds (None: 60),
        StaleHandle once closed."""
        self._guard.check()
        waited_s = limits.check_timeout(timeout_s)
        event = self._mailbox.get(waited_s)
        if event is None:
            if self._mailbox.closed:
                raise StaleHandle("this watch is closed")
            raise DeadlineExceeded(f"no event of this watch within {waited_s:g} s")
        return event

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        self._guard.check()
        event = self._mailbox.get(None)
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Ends it. Idempotent."""
        if not self._guard.forked:
            self._mailbox.close()
            self._stop()
            self._on_close(self)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Mailbox:
    """Events between the thread that receives them and the one that reads them."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self.closed = False

    def put(self, event: Event, limit: int | None = None) -> None:
        """Adds an event; waits while `limit` lie there unread."""
        with self._changed:
            while limit is not None and len(self._events) >= limit and not self.closed:
                self._changed.wait()
            self._events.append(event)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Ends it with an error, which the reader gets after the last event."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def get(self, timeout_s: float | None) -> Event | None:
        """Takes the oldest event; None: it was closed, or `timeout_s` passed."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self.closed:
                    return None
                if self._events:
                    self._changed.notify_all()
                    return self._events.popleft()
                if self._error is not None:
                    raise self._error
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                self._changed.wait(left_s)

    def close(self) -> None:
        """Ends it; events that were not read are dropped."""
        with self._changed:
            self.closed = True
            self._events.clear()
            self._changed.notify_all()
