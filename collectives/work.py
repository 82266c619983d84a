"""Operations that were started, and the thread that runs them."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from onesided.errors import DeadlineExceeded

__all__ = ["Runner", "Work"]


class Work:
    """An operation of a communicator. Done means that its output is there and its input may be changed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Work], None]] | None = []
        self._lock = threading.Lock()
        self._pending = threading.Lock()  # held until it is over: unlike an Event, it bears Ctrl-C at any moment
        self._pending.acquire()

    @classmethod
    def completed(cls, what: str) -> "Work":
        """One that is over."""
        work = cls(what)
        work.finish(None)
        return work

    def finish(self, error: BaseException | None) -> None:
        """For who runs it: it is over."""
        with self._lock:
            self._error = error
            callbacks, self._callbacks = self._callbacks or [], None
        self._pending.release()
        for callback in callbacks:
            callback(self)

    def is_completed(self) -> bool:
        """Whether it has succeeded or failed. Never blocks."""
        return self._callbacks is None

    def wait(self, timeout: Any = None) -> None:
        """Returns when it has succeeded; raises its error if it failed.

        `timeout` in seconds, or a timedelta: DeadlineExceeded ends the wait only. The operation goes on to its own
        deadline.
        """
        seconds = to_seconds(timeout)
        if not self._pending.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX)):
            raise DeadlineExceeded(f"{self._what} is not over within {seconds:g} s; it goes on")
        self._pending.release()
        if self._error is not None:
            raise self._error

    wait_blocking = wait

    def exception(self) -> BaseException | None:
        """The error of one that failed; None if it succeeded or is not over. Never blocks."""
        return self._error

    def add_done_callback(self, callback: "Callable[[Work], None]") -> None:
        """Has `callback(self)` called when it is over, by the thread that ran it; at once if it is over."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(self)


def to_seconds(timeout: Any) -> float | None:
    """Seconds of a number or a timedelta; None for None."""
    if timeout is None:
        return None
    return float(timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout)


class Runner:
    """Runs operations in the order in which they are issued.

    One that is waited for at once runs in the caller's thread if nothing is queued: handing it over would cost more
    than a small operation takes. Others run in a thread that is started with the first of them; it sleeps when it has
    none, and computation goes on beside it, as steps let go of the GIL.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # of _queued, and of who may run
        self._queued = 0  # not over
        self._queue: SimpleQueue[tuple[Callable[[], None], Work] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()  # of the operation that runs

    def run(self, operation: Callable[[], None], what: str, async_op: bool) -> Work:
        """Runs it, or queues it. Raises its error unless `async_op`."""
        if not async_op:
            with self._lock:
                here = self._queued == 0 and self._turn.acquire(blocking=False)
            if here:
                try:
                    operation()
                finally:
                    self._turn.release()
                return DONE
        work = Work(what)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"onesided {self._name}", daemon=True)
                self._thread.start()
            self._queued += 1
            self._queue.put((operation, work))
        if not async_op:
            work.wait()
        return work

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            operation, work = item
            error: BaseException | None = None
            with self._turn:
                try:
                    operation()
                except Exception as failure:  # noqa: BLE001 - the work tells it
                    error = failure
            with self._lock:
                self._queued -= 1
            del item, operation  # what it held must not stay until the next one comes
            work.finish(error)
            del work

    def close(self) -> None:
        """Lets the thread end when its queue is empty, and waits for it."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()


DONE = Work.completed("an operation")
