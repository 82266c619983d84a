"""Which algorithms there are, and which one runs."""

import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from onesided.errors import Unsupported

__all__ = ["Choice", "Explanation", "algorithms", "choose", "explain", "register_algorithm"]

OPERATIONS = (
    "barrier",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)

F = TypeVar("F", bound=Callable[..., None])
_algorithms: dict[str, dict[str, Callable[..., None]]] = {operation: {} for operation in OPERATIONS}


class Choice(NamedTuple):
    """An algorithm for one operation, and why it was taken."""

    name: str
    why: str
    run: Callable[..., None]


def register_algorithm(operation: str, name: str) -> Callable[[F], F]:
    """Makes a function known as algorithm `name` for `operation`: a decorator.

    It is called as `run(team, ...)` with what the built-in ones of that operation take, see collectives/algorithms. It
    is taken where it is asked for by name: `algorithm=` of a call, or the environment. All ranks must ask for the same.

    Raises Unsupported for an operation that there is not; a name that exists is replaced.
    """
    if operation not in _algorithms:
        raise Unsupported(f"there is no operation {operation!r}: {', '.join(OPERATIONS)}")

    def register(run: F) -> F:
        _algorithms[operation][name] = run
        return run

    return register


def algorithms(operation: str) -> list[str]:
    """The names of all algorithms for `operation`."""
    return sorted(_algorithms[operation])


def choose(operation: str, nbytes: int, size: int, asked: str | None) -> Choice:
    """The algorithm for `nbytes` (of the largest tensor that a rank gives or has) on `size` ranks.

    `asked`, else ONESIDED_<OPERATION> in the environment, else by size. Unsupported if there is none of that name.
    """
    variable = f"ONESIDED_{operation.upper()}"
    name, why = asked, "asked for by the call"
    if name is None:
        name, why = os.environ.get(variable) or None, f"asked for by {variable}"
    if name is None:
        name, why = by_size(operation, nbytes, size)
    run = _algorithms[operation].get(name)
    if run is None:
        raise Unsupported(
            f"there is no algorithm {name!r} for {operation} ({why}): there are {', '.join(algorithms(operation))}"
        )
    return Choice(name, why, run)


ONE_SHOT_NBYTES = 32 << 10  # of all that one rank sends
CHAIN_NBYTES = 4 << 20
DIRECT_RANKS = 16  # beyond, a rank would speak with too many at once


def by_size(operation: str, nbytes: int, size: int) -> tuple[str, str]:
    """The name of an algorithm, and why."""
    few = size <= DIRECT_RANKS
    ranks = f"{size} ranks"
    if operation == "all_reduce":
        if nbytes * (size - 1) <= ONE_SHOT_NBYTES:
            return "one_shot", f"{nbytes} bytes on {ranks}: one step counts more than bytes"
        if few:
            return "two_shot", f"{nbytes} bytes on {ranks}: the fewest bytes in two steps"
        if nbytes <= ONE_SHOT_NBYTES:
            return "recursive_doubling", f"{nbytes} bytes on {ranks}: the fewest steps"
        return "ring", f"{nbytes} bytes on {ranks}: the fewest bytes, between neighbours"
    if operation == "broadcast":
        if size > 2 and nbytes >= CHAIN_NBYTES:
            return "chain", f"{nbytes} bytes on {ranks}: each rank sends them once"
        return "binomial", f"{nbytes} bytes on {ranks}: the fewest steps"
    if operation in ("all_gather", "reduce_scatter"):
        return ("direct", f"{ranks}: one step") if few else ("ring", f"{ranks}: between neighbours")
    return {"barrier": "dissemination", "reduce": "binomial"}.get(operation, "direct"), "the only one"


class Explanation(NamedTuple):
    """What `explain` says."""

    operation: str
    nbytes: int
    algorithm: str
    why: str
    others: list[str]


def explain(operation: str, nbytes: int, size: int, asked: str | None = None) -> Explanation:
    """Which algorithm runs and why, and which others could be asked for."""
    if operation not in _algorithms:
        raise Unsupported(f"there is no operation {operation!r}: {', '.join(OPERATIONS)}")
    choice = choose(operation, nbytes, size, asked)
    others = [name for name in algorithms(operation) if name != choice.name]
    return Explanation(operation, nbytes, choice.name, choice.why, others)
