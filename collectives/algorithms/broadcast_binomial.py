"""Broadcast along a binomial tree.

Steps: ceil(log2 n). Bytes sent: the whole, once for each child; by the root ceil(log2 n) times.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("broadcast", "binomial")
def broadcast(team: Team, data: Span, root: int) -> None:
    """`data` of `root` goes into everybody's. Ranks are counted from the root; one with k trailing zeros has k
    children."""
    place = (team.rank - root) % team.size
    distance = 1
    while distance < team.size and not place & distance:
        distance *= 2
    if place:
        team.step(team.receive((place - distance + root) % team.size, data))
    children = []
    while distance > 1:
        distance //= 2
        if place + distance < team.size:
            children.append((place + distance + root) % team.size)
    if children:
        team.step(*(team.send(child, data) for child in children))
