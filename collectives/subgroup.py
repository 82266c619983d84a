"""Splitting a communicator: who is in which part, and how the members of a part tell each other bytes."""

from collections.abc import Callable, Sequence
from typing import Any

from onesided._core import Span
from onesided.errors import BoundsError, StaleHandle

from .algorithms.all_gather_direct import all_gather
from .team import Team

__all__ = ["Subgroup", "gather_bytes", "members_of"]

LENGTH_NBYTES = 8


def gather_bytes(team: Team, payload: bytes) -> list[bytes]:
    """Everybody's payloads, in the order of ranks. Two steps: their lengths, then they themselves."""
    lengths = bytearray(LENGTH_NBYTES * team.size)
    own = len(payload).to_bytes(LENGTH_NBYTES, "little")
    all_gather(team, _cut(lengths, [LENGTH_NBYTES] * team.size), Span(own))
    sizes = [
        int.from_bytes(lengths[rank * LENGTH_NBYTES : (rank + 1) * LENGTH_NBYTES], "little")
        for rank in range(team.size)
    ]
    gathered = bytearray(sum(sizes))
    all_gather(team, _cut(gathered, sizes), Span(payload))
    found, begin = [], 0
    for size in sizes:
        found.append(bytes(gathered[begin : begin + size]))
        begin += size
    return found


def _cut(memory: bytearray, sizes: Sequence[int]) -> list[Span]:
    whole, cuts, begin = Span(memory, 1, True), [], 0
    for size in sizes:
        cuts.append(whole.part(begin, begin + size))
        begin += size
    return cuts


class Subgroup:
    """The group (onesided.windows, Exchange) of a communicator that was split off: its bytes go over lanes.

    `gather` are those of the parent while the communicator is made, then its own.
    """

    def __init__(self, rank: int, size: int, name: str, gather: Callable[[bytes, float | None], list[bytes]]) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.gather = gather
        self._callbacks: list[Callable[[], object]] = []
        self._closed = False

    def all_gather(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Everybody's payloads, in rank order. Collective."""
        if self._closed:
            raise StaleHandle(f"group {self.name!r} was closed")
        return self.gather(payload, timeout_s)

    def add_close_callback(self, callback: Callable[[], object]) -> None:
        """Has `callback` called by `close`; the newest first."""
        if self._closed:
            raise StaleHandle(f"group {self.name!r} was closed")
        self._callbacks.append(callback)

    def close(self) -> None:
        """Runs the callbacks. Not collective; idempotent."""
        self._closed = True
        while self._callbacks:
            self._callbacks.pop()()


def members_of(ranks: Any, rank: int, size: int) -> list[int]:
    """The ranks of the part that `rank` is in, in their new order; none if it is in none.

    `ranks` are those of one part, or of all parts: a list of lists.
    """
    given = list(ranks)
    parts = [list(part) for part in given] if any(hasattr(one, "__iter__") for one in given) else [given]
    seen: set[int] = set()
    for part in parts:
        for one in part:
            if isinstance(one, bool) or not hasattr(one, "__index__"):
                raise TypeError(f"split: ranks must be integers, not {type(one).__name__}")
            if not 0 <= one < size:
                raise BoundsError(f"split: rank {one} is not one of the {size} of this communicator")
            if int(one) in seen:
                raise BoundsError(f"split: rank {one} is there twice")
            seen.add(int(one))
    mine = [[int(one) for one in part] for part in parts if rank in part]
    return mine[0] if mine else []
