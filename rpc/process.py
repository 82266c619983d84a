"""What belongs to the process as a whole: forks, and the end of the interpreter.

gRPC does not survive a fork: its threads are gone in the child and its locks may be held. So a process that
has used it is remembered, and a child forked from it gets an error at the first use instead of a hang.

Nor does it survive an exception in its middle, which is where Ctrl-C may come: a call that has begun and that nobody
ends keeps its channel from closing for ever, and so does a lock that is not let go. Python's own conditions and events
are no better. Only the main thread is interrupted so: it leaves what must be whole to another, `undisturbed`, and waits
at a SimpleQueue, which is whole by itself.
"""

import atexit
import contextlib
import logging
import os
import threading
from _thread import start_new_thread  # unlike Thread.start, whole by itself
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from onesided.errors import OnesidedError

log = logging.getLogger("onesided.rpc")

T = TypeVar("T")

_errands: "SimpleQueue[Callable[[], object]] | None" = None
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


def undisturbed(call: Callable[[], T]) -> T:
    """Returns what `call` returns, or raises what it raises; in the main thread, a signal's exception may end the wait
    for it but never comes in its middle. `call` does not block for long: others may wait behind it."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    outcome: Outcome[T] = Outcome()

    def errand() -> None:
        try:
            outcome.returned(call())
        except BaseException as error:  # noqa: BLE001  # raised below
            outcome.raised(error)

    soon(errand)
    return outcome.get()


class Outcome(Generic[T]):
    """What one thread returned or raised, for another that waits for it: a future that is whole by itself."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def returned(self, value: T) -> None:
        """It has returned."""
        self._queue.put((value, None))

    def raised(self, error: BaseException) -> None:
        """It has raised."""
        self._queue.put((None, error))

    def get(self, timeout_s: float | None = None) -> T:
        """Waits, then returns the value or raises the error; queue.Empty after `timeout_s`."""
        value, error = self._queue.get(timeout=timeout_s)
        try:
            if error is not None:
                raise error
            return value  # type: ignore[no-any-return]
        finally:
            del error  # its traceback holds this frame


def soon(errand: Callable[[], object]) -> None:
    """Has `errand` run, undisturbed, after those before it; does not wait for it."""
    global _errands
    if threading.current_thread() is not threading.main_thread():
        errand()
        return
    if _errands is None:
        errands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        try:
            start_new_thread(_run_errands, (errands,))
        except RuntimeError:  # no threads begin: the interpreter ends, or there are too many
            errand()
            return
        _errands = errands
    _errands.put(errand)


def _run_errands(errands: "SimpleQueue[Callable[[], object]]") -> None:
    while True:
        try:
            errands.get()()
        except Exception:
            log.exception("an errand for the main thread failed")


class Flag:
    """As threading.Event, but whole by itself."""

    def __init__(self) -> None:
        self._set = False
        self._token: SimpleQueue[None] = SimpleQueue()  # of all who wait, the one that has it hands it on

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._set

    def set(self) -> None:
        """Sets it, for ever."""
        self._set = True
        self._token.put(None)

    def wait(self, timeout_s: float) -> None:
        """Returns when it is set, or `timeout_s` have passed."""
        if not self._set:
            with contextlib.suppress(Empty):
                self._token.put(self._token.get(timeout=timeout_s))


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
