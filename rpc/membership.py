"""Who is in which group. Part of the state machine: no threads, no transport.

A group is formed when as many have joined as it has members; that formation is an epoch, numbered from 1 for
each name. Its members stay until they leave or their lease ends. Nobody joins a formed epoch: joiners wait
until the last of its members is gone, and then form the next one. So whoever restarts gets a higher epoch,
which is its incarnation.

A joiner whose place is held by a member that may be dead waits for proof. A heartbeat of the holder proves
that it lives, and the joiner is told so; the end of its lease, that it does not.
"""

from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded, OnesidedError

from .gather import Gathers, Payloads
from .limits import ranks_text
from .timing import Lease, Remembered, Ticket, Timers

AWAITED_LEASES = 2.0  # after a restart of the server, members have this many leases to come back ...
AWAITED_MIN_S = 5.0  # ... and no less than this


class Forgotten(OnesidedError):
    """The server does not know this client: it restarted. Only between client and server; callers never see
    it."""


class Membership:
    """What a joiner gets: its place in one epoch of a group."""

    __slots__ = ("epoch", "rank")

    def __init__(self, rank: int, epoch: int) -> None:
        self.rank = rank
        self.epoch = epoch


class _Joiner:
    def __init__(self, client_id: str, rank: int | None, lease_s: float) -> None:
        self.client_id = client_id
        self.rank = rank
        self.lease_s = lease_s
        self.ticket: Ticket[Membership] = Ticket()
        self.unproven: set[int] | None = None  # ranks that hold its place and may be dead; None: nobody holds it


class _Member:
    """One rank of an epoch. `client_id` is None while it is awaited after a restart of the server."""

    def __init__(self, rank: int, client_id: str | None, lease: Lease) -> None:
        self.rank = rank
        self.client_id = client_id
        self.lease = lease
        self.gone = ""  # how it went, or empty

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.client_id or 'not back since the server restarted'})"


class _Epoch:
    """One formation of a group."""

    def __init__(self, group: str, size: int, number: int) -> None:
        self.number = number
        self.size = size
        self.members: list[_Member] = []
        self.gathers = Gathers(group, size)

    def staying(self) -> list[_Member]:
        return [member for member in self.members if not member.gone]

    def gone(self) -> frozenset[int]:
        return frozenset(member.rank for member in self.members if member.gone)


class _Group:
    """One name: at most one epoch, and those who wait for the next."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size  # of the next epoch
        self.epoch: _Epoch | None = None
        self.joiners: dict[str, _Joiner] = {}  # by client, in order of arrival


class Memberships:
    """All groups of a server."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._groups: dict[str, _Group] = {}
        self._places: dict[str, tuple[_Group, _Epoch, _Member]] = {}  # by client, gone members of a live epoch too
        self._epochs = Remembered()

    def join(self, client_id: str, name: str, size: int, rank: int | None, lease_s: float) -> Ticket[Membership]:
        """Asks for a place. The same client again is the same joiner, or gets the place that it has."""
        if client_id in self._places:
            _, epoch, member = self._places[client_id]
            ticket: Ticket[Membership] = Ticket()
            ticket.resolve(Membership(member.rank, epoch.number))
            return ticket
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name, size)
        joiner = _Joiner(client_id, rank, lease_s)
        error = self._refusal(group, size, joiner)
        if error is not None:
            joiner.ticket.fail(error)
        else:
            group.size = size
            group.joiners[client_id] = joiner
            self._form(group)
        return joiner.ticket

    def withdraw_join(self, client_id: str, name: str, ticket: Ticket[Membership]) -> None:
        """The joiner's call broke: forgets it, unless it has called again."""
        group = self._groups.get(name)
        joiner = group.joiners.get(client_id) if group else None
        if group is not None and joiner is not None and joiner.ticket is ticket:
            self._drop_joiner(group, joiner)

    def join_deadline(self, client_id: str, name: str, ticket: Ticket[Membership], waited_s: float) -> None:
        """The joiner's time is over: tells it who was missing."""
        group = self._groups.get(name)
        if group is not None and not ticket.done:
            ticket.fail(
                DeadlineExceeded(f"group {name!r} was not formed within {waited_s:.3g} s: {self._missing(group)}")
            )
            self.withdraw_join(client_id, name, ticket)

    def resume(self, client_id: str, name: str, size: int, rank: int, epoch_number: int, lease_s: float) -> Gathers:
        """Puts a member back after a restart of the server; those of its group that are not back yet are
        awaited."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name, size)
        epoch = group.epoch
        if epoch is None and epoch_number >= self._epochs.last(name):
            epoch = group.epoch = _Epoch(name, size, epoch_number)
            for other in range(size):
                self._seat(group, epoch, other, None, max(AWAITED_LEASES * lease_s, AWAITED_MIN_S))
        if epoch is None or epoch.number != epoch_number or epoch.size != size:
            current = self._epochs.last(name) if epoch is None else epoch.number
            self._tidy(group)
            raise ConnectionLost(
                f"group {name!r} is at epoch {current}; rank {rank} of epoch {epoch_number} is out of it"
            )
        member = epoch.members[rank]
        if member.gone or member.client_id not in (None, client_id):
            raise ConnectionLost(
                f"rank {rank} of group {name!r} is out of epoch {epoch_number}: it {member.gone or 'was taken over'}"
            )
        if member.client_id is None:
            member.lease.cancel()
            self._prove(group, self._seat(group, epoch, rank, client_id, lease_s))
        return epoch.gathers

    def heartbeat(self, client_id: str) -> frozenset[int]:
        """Renews a member's lease; returns the ranks of its group that are gone, which may be its own."""
        group, epoch, member = self._place(client_id)
        if not member.gone:
            member.lease.renew()
            self._prove(group, member)
        return epoch.gone()

    def post(self, client_id: str, sequence: int, operation: str, payload: bytes) -> Ticket[Payloads]:
        """Gives a payload to a collective of the client's group."""
        _, epoch, member = self._place(client_id)
        return epoch.gathers.post(member.rank, sequence, operation, payload)

    def give_up(self, client_id: str, sequence: int, waited_s: float) -> None:
        """The deadline of a collective passed for this client."""
        if client_id in self._places:
            _, epoch, member = self._places[client_id]
            epoch.gathers.give_up(member.rank, sequence, waited_s)

    def leave(self, client_id: str, how: str = "left") -> None:
        """Ends a membership; `how` says so to the others."""
        if client_id in self._places:
            self._go(*self._places[client_id], how)

    def gone(self, client_id: str) -> frozenset[int]:
        """The ranks of the client's group that are lost or left."""
        return self._place(client_id)[1].gone()

    @property
    def staying(self) -> int:
        """How many members all groups have together, those awaited apart."""
        return sum(not member.gone for _, _, member in self._places.values())

    def _place(self, client_id: str) -> tuple[_Group, _Epoch, _Member]:
        try:
            return self._places[client_id]
        except KeyError:
            raise Forgotten(f"this server does not know {client_id}") from None

    def _refusal(self, group: _Group, size: int, joiner: _Joiner) -> OnesidedError | None:
        """Why this one cannot join, or None; notes in the joiner who must prove that it lives."""
        others = [other for other in group.joiners.values() if other.client_id != joiner.client_id]
        staying = group.epoch.staying() if group.epoch else []
        known = group.size if others else group.epoch.size if group.epoch and staying else size
        if known != size:
            return BoundsError(
                f"group {group.name!r} has size {known}; {joiner.client_id} wants to join it with size {size}"
            )
        for other in others:
            if joiner.rank is not None and other.rank == joiner.rank:
                return BoundsError(
                    f"rank {joiner.rank} of group {group.name!r} is taken by {other.client_id}, which is joining too"
                )
        if len(others) >= size:
            return BoundsError(f"group {group.name!r} has {size} joiners already, and as many members")
        contested = [m for m in staying if joiner.rank is None or m.rank == joiner.rank]
        if staying and len(contested) == (size if joiner.rank is None else 1):
            joiner.unproven = {member.rank for member in contested}
        return None

    def _prove(self, group: _Group, member: _Member) -> None:
        for joiner in list(group.joiners.values()):
            if joiner.unproven is not None:
                joiner.unproven.discard(member.rank)
                if not joiner.unproven:
                    what = "all ranks" if joiner.rank is None else str(member)
                    joiner.ticket.fail(
                        BoundsError(
                            f"{joiner.client_id} cannot join group {group.name!r}: "
                            f"{what} of {group.size} taken by a live "
                            f"member"
                        )
                    )
                    self._drop_joiner(group, joiner)

    def _drop_joiner(self, group: _Group, joiner: _Joiner) -> None:
        group.joiners.pop(joiner.client_id, None)
        self._tidy(group)

    def _missing(self, group: _Group) -> str:
        staying = group.epoch.staying() if group.epoch else []
        if group.epoch and staying:
            return (
                f"{len(staying)} of its members from epoch {group.epoch.number} are still there: "
                f"{ranks_text(m.rank for m in staying)}"
            )
        here = [joiner.rank for joiner in group.joiners.values()]
        count = f"{group.size - len(here)} of {group.size} members missing"
        if None in here:
            return count
        return f"{count}: {ranks_text(set(range(group.size)) - set(here))}"

    def _form(self, group: _Group) -> None:
        """Forms the next epoch, if the last one is over and all are there."""
        if group.epoch is not None or len(group.joiners) < group.size:
            return
        epoch = group.epoch = _Epoch(group.name, group.size, self._epochs.last(group.name) + 1)
        joiners, group.joiners = group.joiners, {}
        chosen = {joiner.rank: joiner for joiner in joiners.values() if joiner.rank is not None}
        others = iter([joiner for joiner in joiners.values() if joiner.rank is None])
        seated = [chosen.get(rank) or next(others) for rank in range(group.size)]
        for rank, joiner in enumerate(seated):
            self._seat(group, epoch, rank, joiner.client_id, joiner.lease_s)
        for rank, joiner in enumerate(seated):
            joiner.ticket.resolve(Membership(rank, epoch.number))

    def _seat(self, group: _Group, epoch: _Epoch, rank: int, client_id: str | None, lease_s: float) -> _Member:
        def end() -> None:
            self._go(group, epoch, member, f"was lost: no sign of {client_id or 'it'} for {lease_s:g} s")

        member = _Member(rank, client_id, Lease(self._timers, lease_s, end))
        epoch.members[rank : rank + 1] = [member]
        if client_id is not None:
            self._places[client_id] = (group, epoch, member)
        return member

    def _go(self, group: _Group, epoch: _Epoch, member: _Member, how: str) -> None:
        if member.gone:
            return
        member.gone = how
        member.lease.cancel()
        epoch.gathers.lose(member.rank, how)
        for joiner in group.joiners.values():
            joiner.unproven = None if joiner.rank in (None, member.rank) else joiner.unproven
        if not epoch.staying():
            for other in epoch.members:
                self._places.pop(other.client_id or "", None)
            self._epochs.keep(group.name, epoch.number)
            group.epoch = None
            self._form(group)
            self._tidy(group)

    def _tidy(self, group: _Group) -> None:
        if group.epoch is None and not group.joiners:
            self._groups.pop(group.name, None)


__all__ = ["Forgotten", "Membership", "Memberships"]
