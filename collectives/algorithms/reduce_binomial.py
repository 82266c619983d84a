"""Reduce along a binomial tree.

Steps: ceil(log2 n). Bytes sent by each rank but the root: the whole, once.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("reduce", "binomial")
def reduce(team: Team, output: Span, data: Span, root: int) -> None:
    """`output` of `root` becomes the reduction of everybody's `data`; on others it is scratch memory. They may be the
    same."""
    place = (team.rank - root) % team.size
    held = data
    distance = 1
    while distance < team.size:
        if place & distance:
            team.step(team.send((place - distance + root) % team.size, held))
            return
        if place + distance < team.size:
            team.step(team.reduce((place + distance + root) % team.size, output, held))
            held = output
        distance *= 2
    output.copy_from(held)
