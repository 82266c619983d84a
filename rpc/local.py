"""Groups within one process: the same state machine behind a lock, for one thread a member."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from onesided.errors import ConnectionLost, DeadlineExceeded, StaleHandle

from . import limits
from .catalog import Entry
from .directory import Directory, Mailbox
from .gather import Payloads
from .group import Group
from .state import ControlState
from .timing import Ticket

T = TypeVar("T")

NEVER_S = float("inf")  # a thread does not vanish: leases last for ever
AFTER_FAILURE_S = 5.0  # for the other threads of run_local to end, once one has failed

_numbers = itertools.count(1)


class _Hub:
    """The state that the members of one group share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state = ControlState()

    def wait(self, ticket: Ticket[T], timeout_s: float) -> T:
        """Waits for a ticket of `state`, whose deadline is in `timeout_s`; a signal can interrupt it."""
        decided = threading.Event()
        with self.lock:
            ticket.when_done(decided.set)
        deadline_s = time.monotonic() + timeout_s
        while not decided.wait(min(max(deadline_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            with self.lock:
                self.state.run_due()
        return ticket.result()


class _LocalSeat:
    """One member: the seat of its group and the link of its directory."""

    lease_s = NEVER_S

    def __init__(self, hub: _Hub, name: str, size: int, rank: int) -> None:
        self.name, self.size, self.rank, self.epoch = name, size, rank, 1
        self.client_id = f"{name[:200]}/{rank}:{os.getpid()}:{next(_numbers)}"
        self._hub = hub
        self._left = False

    def join(self) -> None:
        """Takes the place; the last member to do so forms the group."""
        self._hub.state.members.join(self.client_id, self.name, self.size, self.rank, NEVER_S)

    def gather(self, sequence: int, operation: str, payload: bytes, timeout_s: float) -> list[bytes]:
        with self._hub.lock:
            if self._left:
                raise ConnectionLost(f"rank {self.rank} of group {self.name!r} has left")
            ticket: Ticket[Payloads] = self._hub.state.gather(self.client_id, sequence, operation, payload, timeout_s)
        payloads = self._hub.wait(ticket, timeout_s)
        return list(payloads)

    def gone(self) -> frozenset[int]:
        with self._hub.lock:
            return frozenset(range(self.size)) if self._left else self._hub.state.members.gone(self.client_id)

    def leave(self, how: str = "left") -> None:
        """Leaves, `how` telling the others how."""
        with self._hub.lock:
            self._left = True
            self._hub.state.leave(self.client_id, how)

    def publish(self, name: str, value: bytes, lease_s: float, replace: bool) -> Entry:  # noqa: ARG002
        with self._hub.lock:
            if self._left:
                raise StaleHandle(f"rank {self.rank} of group {self.name!r} has left")
            return self._hub.state.catalog.publish(self.client_id, name, value, NEVER_S, replace)

    def lookup(self, name: str, timeout_s: float) -> Entry:
        with self._hub.lock:
            ticket = self._hub.state.lookup(name, timeout_s)
        return self._hub.wait(ticket, timeout_s)

    def withdraw(self, name: str) -> None:
        with self._hub.lock:
            self._hub.state.catalog.withdraw(self.client_id, name)

    def list(self, prefix: str) -> list[Entry]:
        with self._hub.lock:
            return self._hub.state.catalog.page(prefix, "", limit_bytes=1 << 62)[0]

    def watch(self, prefix: str, mailbox: Mailbox) -> Callable[[], None]:
        from .catalog import Event

        def on_event() -> None:
            mailbox.put(watcher.events.popleft())

        with self._hub.lock:
            entries, watcher = self._hub.state.catalog.watch(prefix, on_event)
            for entry in entries:
                mailbox.put(Event("published", entry))

        def stop() -> None:
            with self._hub.lock:
                self._hub.state.catalog.unwatch(watcher)

        return stop


def local_group(size: int, name: str) -> list[Group]:
    """All members of a new group, by rank; see `Group.local`."""
    return [Group(seat, Directory._over(seat)) for seat in _seats(size, name)]


def _seats(size: int, name: str) -> list[_LocalSeat]:
    hub = _Hub()
    seats = [_LocalSeat(hub, name, size, rank) for rank in range(size)]
    for seat in seats:
        seat.join()
    return seats


def run_local(size: int, fn: Callable[[Group], T], *, timeout_s: float = 60.0, name: str = "local") -> Sequence[T]:
    """Runs `fn(group)` in `size` threads, one for each member of a new group; returns what they return, by
    rank.

    A thread leaves the group when its `fn` returns. When one raises, the others' collectives, pending and
    later, raise ConnectionLost naming it, and once they have ended (or 5 s later) the first failure is raised
    here.

    Raises:
        DeadlineExceeded: not all have ended in `timeout_s` seconds; the message names the ranks that still
            run. Their threads are left behind, with failing collectives.
        Whatever `fn` raised first.
    """
    deadline_s = time.monotonic() + limits.check_timeout(timeout_s)
    seats = _seats(limits.check_size(size), limits.check_name(name, "group name"))
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []  # in order of time

    def member(seat: _LocalSeat, group: Group) -> None:
        try:
            results[seat.rank] = fn(group)
            group.leave()
        except BaseException as error:  # noqa: BLE001  # pytest's outcomes are no Exceptions; raised in the caller
            failures.append((seat.rank, error))
            seat.leave(f"raised {type(error).__name__}: {error}"[:300])
            with contextlib.suppress(Exception):  # of the close callbacks: the first failure is told already
                group.leave()

    threads = [
        threading.Thread(
            target=member, args=(seat, Group(seat, Directory._over(seat))), name=f"{name}-{seat.rank}", daemon=True
        )
        for seat in seats
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            _join(thread, deadline_s, failures)
    finally:
        running = [seat for seat, thread in zip(seats, threads, strict=True) if thread.is_alive()]
        for seat in running:
            seat.leave("was left behind by run_local")
    if failures:
        rank, error = failures[0]
        if hasattr(error, "add_note"):
            error.add_note(f"raised by rank {rank} of {size} in run_local")
        raise error
    if running:
        ranks = limits.ranks_text(seat.rank for seat in running)
        raise DeadlineExceeded(f"run_local: {ranks} of {size} still running after {timeout_s:g} s")
    return [results[rank] for rank in range(size)]


def _join(thread: threading.Thread, deadline_s: float, failures: list[tuple[int, BaseException]]) -> None:
    """Joins a thread until the deadline, or AFTER_FAILURE_S after the first failure was seen."""
    failed = False
    while thread.is_alive() and time.monotonic() < deadline_s:
        if failures and not failed:
            failed = True
            deadline_s = min(deadline_s, time.monotonic() + AFTER_FAILURE_S)
        thread.join(max(0.0, min(deadline_s - time.monotonic(), 0.1)))
