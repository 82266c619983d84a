"""Reduce-scatter round a ring: partial results travel, and each rank adds its part.

Steps: n - 1. Bytes sent by each rank: all parts but one. Only neighbours speak.
"""

from collections.abc import Sequence

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("reduce_scatter", "ring")
def reduce_scatter(team: Team, output: Span, inputs: Sequence[Span]) -> None:
    """`output` becomes the reduction of everybody's `inputs[rank]`. It may be that input, and no other."""
    if team.size == 1:
        output.copy_from(inputs[0])
        return
    before, behind = (team.rank - 1) % team.size, (team.rank + 1) % team.size
    most = max(inputs, key=len)
    # What comes in one step goes out in the next: two pieces of scratch memory in turn.
    room = team.scratch(most, 2)
    partial = inputs[before]
    for step in range(1, team.size):
        part = inputs[(team.rank - step - 1) % team.size]
        goal = output if step == team.size - 1 else room[step % 2].part(0, len(part))
        team.step(team.send(behind, partial), team.reduce(before, goal, part))
        partial = goal
