"""All-reduce by recursive doubling (Thakur, Rabenseifner and Gropp, 2005).

Steps: log2 n, and two more if n is no power of two: then the ranks beyond it hand their data to a partner first and
have the result from it at the end. Bytes sent by each rank: the whole in each step. For small data on many ranks. Both
of a pair compute the same, as reductions are commutative bit for bit.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span


@register_algorithm("all_reduce", "recursive_doubling")
def all_reduce(team: Team, output: Span, data: Span) -> None:
    """`output` becomes the reduction of everybody's `data`; they may be the same."""
    core = 1 << (team.size.bit_length() - 1)  # so many ranks take part in the doubling
    if team.rank >= core:
        team.step(team.send(team.rank - core, data))
        team.step(team.receive(team.rank - core, output))
        return
    partner = team.rank + core
    held, free = output, team.scratch(data)[0]
    if partner < team.size:
        team.step(team.reduce(partner, held, data))
    else:
        held.copy_from(data)
    distance = 1
    while distance < core:
        peer = team.rank ^ distance
        team.step(team.send(peer, held), team.reduce(peer, free, held))
        held, free = free, held
        distance *= 2
    output.copy_from(held)
    if partner < team.size:
        team.step(team.send(partner, output))
