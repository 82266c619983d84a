"""All-gather in which everybody sends to everybody.

Steps: 1. Bytes sent by each rank: its input, n - 1 times. Inputs may differ in size.
"""

from collections.abc import Sequence

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("all_gather", "direct")
def all_gather(team: Team, outputs: Sequence[Span], data: Span) -> None:
    """`outputs[r]` becomes the `data` of rank r."""
    outputs[team.rank].copy_from(data)
    if team.size > 1:
        team.step(
            *(team.send(peer, data) for peer in team.others()),
            *(team.receive(peer, outputs[peer]) for peer in team.others()),
        )
