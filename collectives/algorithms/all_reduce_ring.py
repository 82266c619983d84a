"""All-reduce round a ring (Patarasuk and Yuan, 2009): a reduce-scatter and an all-gather, in which only neighbours
speak.

Steps: 2 (n-1). Bytes sent by each rank: 2 (n-1)/n of the whole, the least there can be.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team, parts

from onesided._core import Span

from .all_gather_ring import all_gather
from .reduce_scatter_ring import reduce_scatter


@register_algorithm("all_reduce", "ring")
def all_reduce(team: Team, output: Span, data: Span) -> None:
    """`output` becomes the reduction of everybody's `data`; they may be the same."""
    results = parts(output, team.size)
    reduce_scatter(team, results[team.rank], parts(data, team.size))
    all_gather(team, results, results[team.rank])
