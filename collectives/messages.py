"""Sends and receives that were started, and several at once."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onesided.windows import Countdown

from onesided._core import Message
from onesided.errors import BoundsError, DeadlineExceeded

from .work import to_seconds

if TYPE_CHECKING:
    from .communicator import Communicator

__all__ = ["Batch", "MessageWork", "tag_of"]

MOST_TAG = (1 << 63) - 1


class MessageWork:
    """Sends and receives, one or more. Over when all of them are; used as Work is."""

    def __init__(self, *messages: Message) -> None:
        self._messages = messages

    def is_completed(self) -> bool:
        """Whether all have succeeded or failed. Never blocks."""
        return all(message.done() for message in self._messages)

    def wait(self, timeout: Any = None) -> None:
        """Returns when all have succeeded; raises the first error, once all are over.

        `timeout` in seconds, or a timedelta: DeadlineExceeded ends the wait only.
        """
        until = Countdown(to_seconds(timeout))
        failure: Exception | None = None
        for message in self._messages:
            try:
                if not message.wait(until.left_s()):
                    raise DeadlineExceeded("a message is not over within the time to wait; it goes on")
            except Exception as error:
                if not message.done():
                    raise
                failure = failure or error
        if failure is not None:
            raise failure

    wait_blocking = wait

    def exception(self) -> BaseException | None:
        """The first error of those that failed; None if there is none, or they are not over. Never blocks."""
        return next((error for message in self._messages if (error := message.exception()) is not None), None)

    @property
    def source_rank(self) -> int | None:
        """The rank at the other end, once it is over and has met it."""
        return self._messages[0].rank() if self._messages else None

    def add_done_callback(self, callback: "Callable[[MessageWork], None]") -> None:
        """Has `callback(self)` called when it is over: at once, or by a thread that waits for it."""
        if self.is_completed():
            callback(self)
            return

        def call() -> None:
            for message in self._messages:
                try:
                    message.wait()
                except Exception:  # noqa: BLE001 - exception() tells it
                    continue
            callback(self)

        threading.Thread(target=call, name="onesided callback", daemon=True).start()


class Batch:
    """Sends and receives to be issued together. They run at once, whatever their order."""

    def __init__(self, comm: "Communicator") -> None:
        self._comm = comm
        self._calls: list[Callable[[Any], MessageWork]] = []

    def send(self, tensor: Any, dst: int, *, tag: int = 0) -> None:
        """Adds Communicator.send."""
        self._calls.append(lambda timeout: self._comm.send(tensor, dst, True, tag=tag, timeout=timeout))

    def recv(self, tensor: Any, src: int | None = None, *, tag: int = 0) -> None:
        """Adds Communicator.recv."""
        self._calls.append(lambda timeout: self._comm.recv(tensor, src, True, tag=tag, timeout=timeout))

    def issue(self, async_op: bool = False, *, timeout: Any = None) -> MessageWork:
        """Starts all; without `async_op`, returns when all are over. The batch is empty afterwards.

        If one of them cannot be started, those before it were.
        """
        calls, self._calls = self._calls, []
        works = [call(timeout) for call in calls]
        work = joined(works)
        if not async_op:
            work.wait()
        return work


def joined(works: Sequence[MessageWork]) -> MessageWork:
    """One for all of them."""
    return MessageWork(*(message for work in works for message in work._messages))


def tag_of(tag: int) -> int:
    """`tag`, if it is one."""
    if not isinstance(tag, int) or isinstance(tag, bool) or not 0 <= tag <= MOST_TAG:
        raise BoundsError(f"tag must be a number from 0 to 2**63 - 1, not {tag!r}")
    return tag
