"""Broadcast along a chain, in blocks: each rank passes a block on while it receives the next.

Steps: n - 2 + blocks. Bytes sent by each rank but the last: the whole, once. For large data on many ranks.
"""

from onesided.collectives.registry import register_algorithm
from onesided.collectives.team import Team

from onesided._core import Span

BLOCK_NBYTES = 512 << 10


@register_algorithm("broadcast", "chain")
def broadcast(team: Team, data: Span, root: int) -> None:
    """`data` of `root` goes into everybody's."""
    if team.size == 1:
        return
    place = (team.rank - root) % team.size
    before, behind = (team.rank - 1) % team.size, (team.rank + 1) % team.size
    step = max(1, BLOCK_NBYTES * len(data) // max(1, data.nbytes))
    blocks = [data.part(begin, min(begin + step, len(data))) for begin in range(0, max(1, len(data)), step)]
    for turn in range(len(blocks) + 1):
        moves = []
        if place > 0 and turn < len(blocks):
            moves.append(team.receive(before, blocks[turn]))
        if place < team.size - 1 and turn > 0:
            moves.append(team.send(behind, blocks[turn - 1]))
        if moves:
            team.step(*moves)
