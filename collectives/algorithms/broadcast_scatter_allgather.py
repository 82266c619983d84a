"""Broadcast as a scatter and an all-gather (van de Geijn; Thakur, Rabenseifner and Gropp, 2005).

Steps: 2. Bytes sent: by the root (n-1)/n of the whole; then by each rank its part to all others.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team, parts

from onesided._core import Span


@register_algorithm("broadcast", "scatter_allgather")
def broadcast(team: Team, data: Span, root: int) -> None:
    """`data` of `root` goes into everybody's."""
    part = parts(data, team.size)
    if team.rank == root:
        # Its own part goes to all in the second step, as theirs do.
        team.step(*(team.send(peer, part[peer]) for peer in team.others()))
        team.step(*(team.send(peer, part[root]) for peer in team.others()))
        return
    team.step(team.receive(root, part[team.rank]))
    team.step(
        *(team.send(peer, part[team.rank]) for peer in team.others() if peer != root),
        *(team.receive(peer, part[peer]) for peer in team.others()),
    )
