"""The directory of named values. Part of the state machine: no threads, no transport.

An entry stays as long as its publisher renews it, or until it is withdrawn. The version of a name grows with
each publish, over withdrawals too.
"""

import difflib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from onesided.errors import DeadlineExceeded, HandleError, RemoteAccessError

from .limits import MAX_PAGE_BYTES
from .timing import Lease, Remembered, Ticket, Timers

Kind = Literal["published", "withdrawn", "expired"]


@dataclass(frozen=True)
class Entry:
    """What is published under a name.

    `version` counts the publishes of the name; `owner` names the client that published it, as
    host:pid:number.
    """

    name: str
    value: bytes
    version: int
    owner: str


@dataclass(frozen=True)
class Event:
    """What happened to an entry: it was published (for the first time or anew), withdrawn, or its lease
    ended."""

    kind: Kind
    entry: Entry


class Watcher:
    """The events of one watch that were not read yet. Whoever made it takes them out of `events`.

    At most `LIMIT` wait for a slow reader. Beyond that it is `overrun`: it gets no more, and must begin anew.
    """

    LIMIT = 10_000

    def __init__(self, prefix: str, on_event: Callable[[], None]) -> None:
        self.prefix = prefix
        self.events: deque[Event] = deque()
        self.overrun = False
        self._on_event = on_event

    def see(self, event: Event) -> None:
        """Takes `event` if it is about one of its names."""
        if event.entry.name.startswith(self.prefix) and not self.overrun:
            self.events.append(event)
            self.overrun = len(self.events) > self.LIMIT
            self._on_event()


class Catalog:
    """All entries of a server."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._entries: dict[str, tuple[Entry, Lease]] = {}
        self._owned: dict[str, set[str]] = {}  # by client: its names
        self._versions = Remembered()  # of names that are gone
        self._waiting: dict[str, list[Ticket[Entry]]] = {}  # by name: lookups
        self._watchers: set[Watcher] = set()

    def publish(
        self, owner: str, name: str, value: bytes, lease_s: float, replace: bool = False, version: int = 0
    ) -> Entry:
        """Puts `value` under `name`. With a version it restores an entry that was lost, and never overwrites
        one that is there."""
        if name in self._entries:
            held, lease = self._entries[name]
            if held.owner == owner and version:
                lease.renew()
                return held
            if held.owner != owner and (version or not replace):
                raise RemoteAccessError(
                    f"{name!r} is published by {held.owner}, {lease.said()}; replace=True takes the name over"
                )
            self._drop(name)
            version = held.version + 1
        elif not version:
            version = self._versions.last(name) + 1
        entry = Entry(name, value, version, owner)
        self._entries[name] = (entry, Lease(self._timers, lease_s, lambda: self._remove(name, "expired")))
        self._owned.setdefault(owner, set()).add(name)
        self._tell(Event("published", entry))
        for ticket in self._waiting.pop(name, []):
            ticket.resolve(entry)
        return entry

    def renew(self, owner: str, count: int) -> bool:
        """Renews what `owner` published; False if that is not `count` entries."""
        names = self._owned.get(owner, set())
        for name in names:
            self._entries[name][1].renew()
        return len(names) == count

    def withdraw(self, owner: str, name: str) -> None:
        """Removes an entry of `owner`; one that is not there is as good as withdrawn."""
        held = self._entries.get(name)
        if held is not None:
            if held[0].owner != owner:
                raise RemoteAccessError(f"{name!r} is published by {held[0].owner}; only that client can withdraw it")
            self._remove(name, "withdrawn")

    def withdraw_all(self, owner: str) -> None:
        """Removes all entries of `owner`, which is leaving."""
        for name in sorted(self._owned.get(owner, ())):
            self._remove(name, "withdrawn")

    def lookup(self, name: str, wait: bool) -> Ticket[Entry]:
        """Finds an entry; where there is none it waits for one, or fails at once."""
        ticket: Ticket[Entry] = Ticket()
        if name in self._entries:
            ticket.resolve(self._entries[name][0])
        elif wait:
            self._waiting.setdefault(name, []).append(ticket)
        else:
            ticket.fail(HandleError(f"nothing is published as {name!r}{self._near(name)}"))
        return ticket

    def end_lookup(self, name: str, ticket: Ticket[Entry], waited_s: float) -> None:
        """The lookup's time is over, or its caller is gone."""
        tickets = self._waiting.get(name, [])
        if ticket in tickets:
            tickets.remove(ticket)
            if not tickets:
                del self._waiting[name]
            ticket.fail(
                DeadlineExceeded(f"nothing was published as {name!r} within {waited_s:.3g} s{self._near(name)}")
            )

    def page(self, prefix: str, after: str, limit_bytes: int = MAX_PAGE_BYTES) -> tuple[list[Entry], bool]:
        """Entries whose names begin with `prefix` and are greater than `after`, by name, until their values
        reach `limit_bytes`; and whether there are more."""
        found: list[Entry] = []
        nbytes = 0
        for name in sorted(name for name in self._entries if name > after and name.startswith(prefix)):
            if nbytes >= limit_bytes:
                return found, True
            found.append(self._entries[name][0])
            nbytes += len(found[-1].value) + 4 * len(name) + 64
        return found, False

    def watch(self, prefix: str, on_event: Callable[[], None]) -> tuple[list[Entry], Watcher]:
        """Returns what is there, and what will tell of every change to it. `on_event` runs at each event."""
        watcher = Watcher(prefix, on_event)
        self._watchers.add(watcher)
        return [self._entries[name][0] for name in sorted(self._entries) if name.startswith(prefix)], watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Ends a watch."""
        self._watchers.discard(watcher)

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, name: str) -> Entry:
        entry, lease = self._entries.pop(name)
        lease.cancel()
        names = self._owned[entry.owner]
        names.discard(name)
        if not names:
            del self._owned[entry.owner]
        return entry

    def _remove(self, name: str, kind: Kind) -> None:
        entry = self._drop(name)
        self._versions.keep(name, entry.version)
        self._tell(Event(kind, entry))

    def _tell(self, event: Event) -> None:
        for watcher in self._watchers:
            watcher.see(event)

    def _near(self, name: str) -> str:
        # Comparing costs time that all clients of the server share: likely names first, and not many.
        names = [other for other in self._entries if other[:4] == name[:4]] or list(self._entries)
        near = difflib.get_close_matches(name, names[:200], n=3, cutoff=0.5)
        if near:
            return "; near it: " + ", ".join(map(repr, near))
        if not self._entries:
            return "; the directory is empty"
        return f"; there {'is 1 other name' if len(self._entries) == 1 else f'are {len(self._entries)} other names'}"
