"""Reduce-scatter in which every rank sends each part to the rank that reduces it.

Steps: 1. Bytes sent by each rank: all parts but its own, once. Each part is reduced by one rank, in the order of
distance from it: its own first, then those of the ranks behind it.
"""

from collections.abc import Sequence

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("reduce_scatter", "direct")
def reduce_scatter(team: Team, output: Span, inputs: Sequence[Span]) -> None:
    """`output` becomes the reduction of everybody's `inputs[rank]`. It may be that input, and no other."""
    if team.size == 1:
        output.copy_from(inputs[0])
        return
    own = inputs[team.rank]
    others = team.others()
    team.step(
        *(team.send(peer, inputs[peer]) for peer in others),
        *(team.reduce(peer, output, output if index else own) for index, peer in enumerate(others)),
    )
