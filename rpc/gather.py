"""The collectives of one group, matched by number. Part of the state machine: no threads, no transport.

Every member counts its collectives from 1, failed ones too: call number k of each member belongs with call
number k of every other. A collective ends in one of three ways, the same for all of its members:

- complete: every member gave its payload; all get all payloads, by rank;
- given up: the deadline of one member passed, or it went on to a later number; all get that error, also those
  that arrive later, so that one who waited too long and one who came too late agree that it failed, and the
  next one starts clean;
- broken: a member was lost or left; all get ConnectionLost, as they do from every later one.

An answer may be lost on its way, so an outcome is kept until every member has come with a later number.
"""

from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded, OnesidedError, StaleHandle

from .limits import MAX_GATHER_BYTES, ranks_text
from .timing import Ticket

Payloads = tuple[bytes, ...]


class _Gather:
    """One collective: what was given so far, who waits, and how it ended."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.payloads: dict[int, bytes] = {}
        self.nbytes = 0
        self.tickets: list[Ticket[Payloads]] = []
        self.outcome: Payloads | Exception | None = None

    def end(self, outcome: Payloads | Exception) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.payloads.clear()
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            self.tell(ticket)

    def tell(self, ticket: Ticket[Payloads]) -> None:
        if self.outcome is None:
            self.tickets.append(ticket)
        elif isinstance(self.outcome, Exception):
            ticket.fail(self.outcome)
        else:
            ticket.resolve(self.outcome)


class Gathers:
    """All collectives of a group of `size` members in one epoch."""

    def __init__(self, group: str, size: int) -> None:
        self._group = group
        self._size = size
        self._posted = [0] * size  # by rank: the highest number it came with
        self._gathers: dict[int, _Gather] = {}
        self._broken: ConnectionLost | None = None
        self._gone: dict[int, str] = {}  # by rank, in order of time: how it went

    def post(self, rank: int, sequence: int, operation: str, payload: bytes) -> Ticket[Payloads]:
        """Gives `payload` for `rank` to number `sequence`. The same number again is the same call, sent
        again."""
        ticket: Ticket[Payloads] = Ticket()
        if sequence < self._posted[rank]:
            at = self._posted[rank]
            ticket.fail(
                StaleHandle(f"{operation} number {sequence} of group {self._group!r} is over: rank {rank} is at {at}")
            )
            return ticket
        gather = self._at(sequence, operation)
        self._advance(rank, sequence)
        self._give(gather, sequence, rank, operation, payload)
        gather.tell(ticket)
        return ticket

    def resume(self, rank: int, sequence: int, operation: str, payload: bytes | None) -> None:
        """Takes over from an earlier server where `rank` was: number `sequence` is over for it. It gave
        `payload`, which others may still wait for, or it gave up (None)."""
        if sequence <= self._posted[rank]:
            return
        gather = self._at(sequence, operation)
        self._advance(rank, sequence)
        if payload is not None:
            self._give(gather, sequence, rank, operation, payload)
        else:
            self._passed_over(gather, sequence, [rank])

    def give_up(self, rank: int, sequence: int, waited_s: float) -> None:
        """The deadline of `rank` passed: the collective fails for all."""
        gather = self._gathers.get(sequence)
        if gather is not None and gather.outcome is None:
            missing = set(range(self._size)) - gather.payloads.keys()
            gather.end(
                DeadlineExceeded(
                    f"{gather.operation} number {sequence} of group {self._group!r}: {ranks_text(missing)} "
                    f"(of {self._size}) did not arrive; rank {rank} gave up after {waited_s:.3g} s"
                )
            )

    def lose(self, rank: int, how: str) -> None:
        """`rank` is gone: what is pending and what comes fails. `how` continues "rank 3 ..."."""
        self._gone[rank] = how
        how_each = "; ".join(f"rank {gone} {how}" for gone, how in [*self._gone.items()][:3])
        self._broken = ConnectionLost(
            f"group {self._group!r}: {ranks_text(self._gone)} of {self._size} gone: {how_each}"
        )
        for gather in self._gathers.values():
            gather.end(self._broken)

    def _at(self, sequence: int, operation: str) -> _Gather:
        if sequence not in self._gathers:
            self._prune()
            gather = self._gathers[sequence] = _Gather(operation)
            if self._broken is not None:
                gather.end(self._broken)
            # Outcomes are kept until all have passed them, so whoever is further and gave nothing here never
            # will.
            self._passed_over(gather, sequence, [r for r, at in enumerate(self._posted) if at >= sequence])
        return self._gathers[sequence]

    def _passed_over(self, gather: _Gather, sequence: int, ranks: list[int]) -> None:
        ranks = [rank for rank in ranks if rank not in gather.payloads]
        if ranks:
            gather.end(
                DeadlineExceeded(
                    f"{gather.operation} number {sequence} of group {self._group!r}: {ranks_text(ranks)} gave up on it"
                )
            )

    def _advance(self, rank: int, sequence: int) -> None:
        before, self._posted[rank] = self._posted[rank], sequence
        for number in [n for n in self._gathers if before <= n < sequence]:
            if self._gathers[number].outcome is None:
                self._passed_over(self._gathers[number], number, [rank])

    def _give(self, gather: _Gather, sequence: int, rank: int, operation: str, payload: bytes) -> None:
        if gather.outcome is not None:
            return
        if operation != gather.operation:
            gather.end(
                OnesidedError(
                    f"collective number {sequence} of group {self._group!r}: rank {rank} called {operation} "
                    f"where {ranks_text(gather.payloads)} called {gather.operation}"
                )
            )
            return
        gather.nbytes += len(payload) - len(gather.payloads.get(rank, b""))
        gather.payloads[rank] = payload
        if gather.nbytes > MAX_GATHER_BYTES:
            gather.end(
                BoundsError(
                    f"{operation} number {sequence} of group {self._group!r}: the payloads have more than "
                    f"{MAX_GATHER_BYTES} bytes together"
                )
            )
        elif len(gather.payloads) == self._size:
            gather.end(tuple(gather.payloads[r] for r in range(self._size)))

    def _prune(self) -> None:
        staying = [at for rank, at in enumerate(self._posted) if rank not in self._gone]
        oldest = min(staying, default=max(self._posted) + 1)
        for number in [n for n in self._gathers if n < oldest]:
            del self._gathers[number]
