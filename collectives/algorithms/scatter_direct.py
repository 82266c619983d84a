"""Scatter: the root sends to everybody.

Steps: 1. Bytes sent by the root: all inputs but its own. Inputs may differ in size.
"""

from collections.abc import Sequence

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("scatter", "direct")
def scatter(team: Team, output: Span, inputs: Sequence[Span], root: int) -> None:
    """`output` of rank r becomes `inputs[r]` of `root`; elsewhere `inputs` is empty."""
    if team.rank != root:
        team.step(team.receive(root, output))
        return
    output.copy_from(inputs[root])
    if team.size > 1:
        team.step(*(team.send(peer, inputs[peer]) for peer in team.others()))
