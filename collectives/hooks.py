"""Functions that a program has called around the operations of a communicator."""

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Hook", "Hooks", "Operation"]

log = logging.getLogger("onesided.collectives")


class Operation(NamedTuple):
    """What a hook is told of. The hooks before and after an operation get the same object."""

    communicator: str
    name: str
    async_op: bool


class Hook:
    """A registered function."""

    def __init__(self, registered: "list[Callable[..., object]]", function: Callable[..., object]) -> None:
        self._registered = registered
        self._function = function
        registered.append(function)

    def remove(self) -> None:
        """Has it no longer called. Calling this twice is legal."""
        if self._function in self._registered:
            self._registered.remove(self._function)
        self._registered = []


class Hooks:
    """Those of one communicator."""

    def __init__(self) -> None:
        self.before: list[Callable[..., object]] = []
        self.after: list[Callable[..., object]] = []
        self.ended: list[Callable[..., object]] = []
        self._told = False
        self._lock = threading.Lock()

    def begin(self, operation: Operation) -> None:
        """Calls those before it; what one raises keeps the operation from being issued."""
        for function in list(self.before):
            function(operation)

    def end(self, operation: Operation, error: BaseException | None) -> None:
        """Calls those after it."""
        self._call(self.after, operation, error)

    def tell_ended(self, reason: str) -> None:
        """Calls those for the end of the communicator, the first time."""
        with self._lock:
            told, self._told = self._told, True
        if not told:
            self._call(self.ended, reason)

    def _call(self, functions: list[Callable[..., object]], *arguments: Any) -> None:
        # The operation is over: what a hook does wrong then must neither fail it nor be lost.
        for function in list(functions):
            try:
                function(*arguments)
            except Exception:
                log.exception("a hook failed")
