"""Barrier by dissemination (Hensgen, Finkel and Manber, 1988).

Steps: ceil(log2 n). Messages sent by each rank: one a step, of no bytes. After step k each rank has heard, directly or
through others, of the 2**(k+1) ranks before it.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span

NOTHING = Span(b"")
NOTHING_HERE = Span(bytearray(), writable=True)


@register_algorithm("barrier", "dissemination")
def barrier(team: Team) -> None:
    """Returns when every rank has called it."""
    distance = 1
    while distance < team.size:
        team.step(
            team.send((team.rank + distance) % team.size, NOTHING),
            team.receive((team.rank - distance) % team.size, NOTHING_HERE),
        )
        distance *= 2
