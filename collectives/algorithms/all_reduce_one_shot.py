"""All-reduce in which everybody sends everything to everybody.

Steps: 1. Bytes sent by each rank: the whole, n - 1 times. For small data, where only the number of steps counts. All
ranks reduce in the order of ranks, so that all have the same bits.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Move, Team

from onesided._core import Span


@register_algorithm("all_reduce", "one_shot")
def all_reduce(team: Team, output: Span, data: Span) -> None:
    """`output` becomes the reduction of everybody's `data`; they may be the same."""
    if team.size == 1:
        output.copy_from(data)
        return
    own = team.scratch(data)[0]
    own.copy_from(data)
    moves: list[Move] = [team.send(peer, own) for peer in team.others()]
    for rank in range(team.size):
        if rank == team.rank:
            if rank:
                moves.append(team.combine(output, output, own))
        elif rank == 0:
            moves.append(team.receive(0, output))
        else:
            moves.append(team.reduce(rank, output, own if rank == 1 and team.rank == 0 else output))
    team.step(*moves)
