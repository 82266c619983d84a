"""The whole state of a control plane as one deterministic machine, without threads, sockets or sleep.

`ControlState` answers at once or with a `Ticket` that is decided later: by another request, or by `run_due`
when the time has come. It is not thread-safe: whoever drives it (the server's event loop, the lock in
`local.py`, a test) calls it from one place at a time. Its parts are in membership.py, gather.py and
catalog.py.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from . import limits
from .catalog import Catalog, Entry
from .gather import Payloads
from .membership import Membership, Memberships
from .timing import Ticket, Timers


class ControlState:
    """Groups and directory of one server. `clock` returns seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.server_id = os.urandom(8).hex()  # differs after a restart
        self.timers = Timers(clock)
        self.members = Memberships(self.timers)
        self.catalog = Catalog(self.timers)

    def join(
        self, client_id: str, group: str, size: int, rank: int | None, lease_s: float, timeout_s: float
    ) -> Ticket[Membership]:
        """Asks for a place in a group: decided when the group is formed, refused, or after `timeout_s`."""
        limits.check_name(client_id, "client id")
        limits.check_name(group, "group name")
        limits.check_size(size)
        if rank is not None:
            limits.check_rank(rank, size)
        limits.check_lease(lease_s)
        waited_s = limits.check_timeout(timeout_s)
        ticket = self.members.join(client_id, group, size, rank, lease_s)
        self._deadline(ticket, waited_s, lambda: self.members.join_deadline(client_id, group, ticket, waited_s))
        return ticket

    def resume(
        self,
        client_id: str,
        group: str,
        size: int,
        rank: int,
        epoch: int,
        lease_s: float,
        sequence: int,
        operation: str,
        payload: bytes | None,
    ) -> None:
        """Puts a member back that an earlier server knew, with its last collective."""
        limits.check_name(client_id, "client id")
        limits.check_name(group, "group name")
        limits.check_rank(rank, limits.check_size(size))
        limits.check_lease(lease_s)
        gathers = self.members.resume(client_id, group, size, rank, epoch, lease_s)
        gathers.resume(rank, sequence, operation, payload)

    def heartbeat(self, client_id: str, member: bool, entries: int) -> tuple[frozenset[int], bool]:
        """Renews all that the client holds; returns the gone ranks of its group, and whether entries must be
        published again."""
        complete = self.catalog.renew(client_id, entries)
        gone = self.members.heartbeat(client_id) if member else frozenset()
        return gone, not complete

    def gather(
        self, client_id: str, sequence: int, operation: str, payload: bytes, timeout_s: float
    ) -> Ticket[Payloads]:
        """Gives a payload to a collective: decided when it ends, see gather.py."""
        waited_s = limits.check_timeout(timeout_s)
        ticket = self.members.post(client_id, sequence, operation, payload)
        self._deadline(ticket, waited_s, lambda: self.members.give_up(client_id, sequence, waited_s))
        return ticket

    def leave(self, client_id: str, how: str = "left") -> None:
        """Ends the client's membership and withdraws its entries."""
        self.members.leave(client_id, how)
        self.catalog.withdraw_all(client_id)

    def publish(self, client_id: str, name: str, value: bytes, lease_s: float, replace: bool, version: int) -> Entry:
        """Puts a value into the directory."""
        limits.check_name(client_id, "client id")
        limits.check_name(name, "entry name")
        limits.check_bytes(value, f"value of {name!r}", limits.MAX_VALUE_BYTES)
        limits.check_lease(lease_s)
        return self.catalog.publish(client_id, name, value, lease_s, replace, version)

    def lookup(self, name: str, timeout_s: float) -> Ticket[Entry]:
        """Finds an entry, or waits for it for at most `timeout_s`."""
        limits.check_name(name, "entry name")
        waited_s = limits.check_timeout(timeout_s)
        ticket = self.catalog.lookup(name, wait=waited_s > 0)
        self._deadline(ticket, waited_s, lambda: self.catalog.end_lookup(name, ticket, waited_s))
        return ticket

    def run_due(self) -> None:
        """Does all whose time has come."""
        self.timers.run_due()

    def next_s(self) -> float | None:
        """When `run_due` has something to do next, on the clock; None: never, unless a request comes."""
        return self.timers.next_s()

    def _deadline(self, ticket: Ticket[Any], timeout_s: float, at_deadline: Callable[[], None]) -> None:
        if not ticket.done:
            timer = self.timers.after(timeout_s, at_deadline)
            ticket.when_done(lambda: self.timers.cancel(timer))
