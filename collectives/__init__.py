"""Collectives: what ranks do together, as plain algorithms on windows, one a file."""

from .communicator import Communicator
from .data import ReduceOp
from .hooks import Hook, Operation
from .messages import Batch, MessageWork
from .registry import Explanation, algorithms, explain, register_algorithm
from .team import Move, Team, parts
from .work import Work

__all__ = [
    "Batch",
    "Communicator",
    "Explanation",
    "Hook",
    "MessageWork",
    "Move",
    "Operation",
    "ReduceOp",
    "Team",
    "Work",
    "algorithms",
    "explain",
    "parts",
    "register_algorithm",
]
