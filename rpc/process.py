"""What belongs to the process as a whole: forks, and the end of the interpreter.

gRPC does not survive a fork: its threads are gone in the child and its locks may be held. So a process that
has used it is remembered, and a child forked from it gets an error at the first use instead of a hang.
"""

import atexit
import contextlib
import os
from collections.abc import Callable

from onesided.errors import OnesidedError

_grpc_pid = 0
_at_exit: dict[int, Callable[[], None]] = {}
_at_exit_pid = 0


class ForkGuard:
    """Remembers the process that made an object."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._pid = os.getpid()
        self._what = what

    @property
    def forked(self) -> bool:
        """True in a child of the process that made the object."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises OnesidedError in a forked child."""
        if self.forked:
            raise OnesidedError(
                f"{self._what} belongs to process {self._pid} and cannot be used in process {os.getpid()}, which was "
                f"forked from it: make a new one in a process that is spawned, or fork before the first use"
            )


def claim_grpc() -> None:
    """Raises OnesidedError in a child that was forked after its parent had used gRPC here. Called before each
    use."""
    global _grpc_pid
    pid = os.getpid()
    if _grpc_pid == 0:
        _grpc_pid = pid
    if _grpc_pid != pid:
        raise OnesidedError(
            f"process {pid} was forked from {_grpc_pid} after that had used the control plane: gRPC does not survive a "
            f"fork. Spawn the process (multiprocessing.get_context('spawn')), or fork before the first use"
        )


def close_at_exit(thing: object, close: Callable[[], None]) -> None:
    """Runs `close` when the interpreter ends, unless `forget` comes first. The newest runs first."""
    global _at_exit_pid
    if _at_exit_pid != os.getpid():
        _at_exit.clear()  # a child does not close what is its parent's
        _at_exit_pid = os.getpid()
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _at_exit[id(thing)] = close


def forget(thing: object) -> None:
    """`thing` is closed: nothing is left to do for it at exit."""
    _at_exit.pop(id(thing), None)


def _close_all() -> None:
    while _at_exit and _at_exit_pid == os.getpid():
        _, close = _at_exit.popitem()
        with contextlib.suppress(OnesidedError):  # nobody is left to be told
            close()
