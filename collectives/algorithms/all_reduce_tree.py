"""All-reduce along a binomial tree: a reduce to rank 0 and a broadcast from it.

Steps: 2 ceil(log2 n). Bytes sent: the whole, once up and, by each rank, once for each child down.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span

from .broadcast_binomial import broadcast
from .reduce_binomial import reduce


@register_algorithm("all_reduce", "tree")
def all_reduce(team: Team, output: Span, data: Span) -> None:
    """`output` becomes the reduction of everybody's `data`; they may be the same."""
    reduce(team, output, data, 0)
    broadcast(team, output, 0)
