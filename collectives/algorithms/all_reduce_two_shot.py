"""All-reduce as a direct reduce-scatter and a direct all-gather.

Steps: 2. Bytes sent by each rank: 2 (n-1)/n of the whole, the least there can be. Each part is reduced by one rank, so
that all have the same bits.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team, parts

from onesided._core import Span

from .all_gather_direct import all_gather
from .reduce_scatter_direct import reduce_scatter


@register_algorithm("all_reduce", "two_shot")
def all_reduce(team: Team, output: Span, data: Span) -> None:
    """`output` becomes the reduction of everybody's `data`; they may be the same."""
    results = parts(output, team.size)
    reduce_scatter(team, results[team.rank], parts(data, team.size))
    all_gather(team, results, results[team.rank])
