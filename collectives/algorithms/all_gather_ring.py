"""All-gather round a ring.

Steps: n - 1. Bytes sent by each rank: all inputs but that of the rank behind it. Only neighbours speak.
"""

from collections.abc import Sequence

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("all_gather", "ring")
def all_gather(team: Team, outputs: Sequence[Span], data: Span) -> None:
    """`outputs[r]` becomes the `data` of rank r."""
    outputs[team.rank].copy_from(data)
    before, behind = (team.rank - 1) % team.size, (team.rank + 1) % team.size
    for step in range(team.size - 1):
        team.step(
            team.send(behind, outputs[(team.rank - step) % team.size]),
            team.receive(before, outputs[(team.rank - step - 1) % team.size]),
        )
