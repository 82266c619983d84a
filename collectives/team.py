"""What an algorithm is written with: some ranks, and steps that move spans between them."""

from collections.abc import Callable, Sequence

from onesided.windows import Countdown

from onesided._core import Lanes, Span

__all__ = ["Move", "Team", "parts"]

Move = tuple[object, ...]  # as csrc/python/lanes.cpp reads it

SEND, RECEIVE, REDUCE, COMBINE = range(4)


class Team:
    """The ranks that run one operation, numbered from 0, and this rank among them.

    A step makes all of its moves at once, and returns when all are over: then what was received is there and what was
    sent may be changed. Every move needs its opposite, of the same size, in a step of that peer. Moves of one direction
    with one peer happen in the order given; so do moves next to each other with the same goal, chunk by chunk: that is
    how an order of reduction is fixed. A goal must not overlap what the same step sends.
    """

    def __init__(
        self,
        lanes: Lanes,
        members: Sequence[int],
        member: int,
        operation: str,
        label: int,
        element: str | None,
        reduction: str | None,
        countdown: Countdown,
        scratch: Callable[[Span, int], Span],
    ) -> None:
        self.rank = member
        self.size = len(members)
        self._lanes = lanes
        self._members = members
        self._operation = operation
        self._label = label
        self._element = element
        self._reduction = reduction
        self._countdown = countdown
        self._scratch = scratch

    def send(self, peer: int, data: Span) -> Move:
        """`data` goes to `peer`."""
        return SEND, self._members[peer], data

    def receive(self, peer: int, into: Span) -> Move:
        """`into` comes from `peer`."""
        return RECEIVE, self._members[peer], into

    def reduce(self, peer: int, into: Span, operand: Span) -> Move:
        """`into` becomes `operand`, reduced with what comes from `peer`. They may be the same."""
        return REDUCE, self._members[peer], into, operand

    def combine(self, into: Span, left: Span, right: Span) -> Move:
        """`into` becomes `left` reduced with `right`: no peer takes part, but it has its place in the order of
        moves."""
        return COMBINE, 0, into, left, right

    def step(self, *moves: Move) -> None:
        """Makes all moves. Raises what Lanes.step raises; then the operation has failed on all ranks."""
        self._lanes.step(self._operation, self._label, moves, self._element, self._reduction, self._countdown.left_s())

    def scratch(self, like: Span, count: int = 1) -> list[Span]:
        """`count` pieces of memory of this rank, each as large as `like`. One call an operation; contents undefined."""
        room = self._scratch(like, count)
        return [room.part(index * len(like), (index + 1) * len(like)) for index in range(count)]

    def others(self) -> list[int]:
        """All ranks but this one, each rank's list beginning with the next one: so not all send to the same at once."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]


def parts(span: Span, count: int) -> list[Span]:
    """`span` cut into `count` parts that differ by at most one element."""
    small, larger = divmod(len(span), count)
    begins = [index * small + min(index, larger) for index in range(count + 1)]
    return [span.part(begins[index], begins[index + 1]) for index in range(count)]
