"""Collectives: what ranks do together, as plain algorithms on windows, one a file."""

from .communicator import Communicator
from .data import ReduceOp
from .registry import Explanation, algorithms, explain, register_algorithm
from .team import Move, Team, parts
from .work import Work

__all__ = [
    "Communicator",
    "Explanation",
    "Move",
    "ReduceOp",
    "Team",
    "Work",
    "algorithms",
    "explain",
    "parts",
    "register_algorithm",
]
