"""All-to-all: everybody sends to everybody.

Steps: 1. Bytes sent by each rank: all inputs but its own, once. Sizes may differ.
"""

from collections.abc import Sequence

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("all_to_all", "direct")
def all_to_all(team: Team, outputs: Sequence[Span], inputs: Sequence[Span]) -> None:
    """`outputs[r]` becomes the `inputs[rank]` of rank r."""
    outputs[team.rank].copy_from(inputs[team.rank])
    if team.size > 1:
        team.step(
            *(team.send(peer, inputs[peer]) for peer in team.others()),
            *(team.receive(peer, outputs[peer]) for peer in team.others()),
        )
