"""Gather: everybody sends to the root.

Steps: 1. Bytes sent by each rank but the root: its input, once. Inputs may differ in size.
"""

from collections.abc import Sequence

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("gather", "direct")
def gather(team: Team, outputs: Sequence[Span], data: Span, root: int) -> None:
    """On `root`, `outputs[r]` becomes the `data` of rank r; elsewhere `outputs` is empty."""
    if team.rank != root:
        team.step(team.send(root, data))
        return
    outputs[root].copy_from(data)
    if team.size > 1:
        team.step(*(team.receive(peer, outputs[peer]) for peer in team.others()))
