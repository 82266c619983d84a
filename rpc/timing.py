"""Time and waiting for the state machine: both under the control of whoever drives it.

Nothing here locks or sleeps. The server drives it from its event loop, `local.py` under a lock, tests with a
clock that they set.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")
_PENDING = object()


class Ticket(Generic[T]):
    """The place in line of one caller that waits: decided once, by a value or an error; later decisions are
    ignored."""

    __slots__ = ("_callbacks", "_error", "_value")

    def __init__(self) -> None:
        self._value: object = _PENDING
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """True once it is decided."""
        return self._value is not _PENDING or self._error is not None

    def resolve(self, value: T) -> None:
        """Decides for `value`."""
        if not self.done:
            self._value = value
            self._decided()

    def fail(self, error: Exception) -> None:
        """Decides for `error`, which `result` raises."""
        if not self.done:
            self._error = error
            self._decided()

    def result(self) -> T:
        """Returns the value or raises the error. Only when done. Several tickets may share one error: it is
        raised as a copy, so that tracebacks of several threads do not mix."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        assert self._value is not _PENDING, "not decided yet"
        return cast(T, self._value)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Runs `callback` once it is decided, at once if it is already."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    def _decided(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Timer:
    """One thing to do at a time, unless it is cancelled before."""

    __slots__ = ("action", "when_s")

    def __init__(self, when_s: float, action: Callable[[], None] | None) -> None:
        self.when_s = when_s
        self.action = action


class Timers:
    """What is to be done when, on a clock in seconds that never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self.late_s = 0.0  # while an action runs: how long ago it was due. Large when this process stood still.
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._cancelled = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Runs `action` once `delay_s` have passed, from `run_due`."""
        timer = Timer(self.now_s() + delay_s, action)
        heapq.heappush(self._heap, (timer.when_s, next(self._count), timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """Forgets `timer`, if it has not run."""
        if timer.action is None:
            return
        timer.action = None
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled > len(self._heap) // 2:
            self._heap = [item for item in self._heap if item[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next_s(self) -> float | None:
        """The time of the earliest timer; None: there is none."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def run_due(self) -> None:
        """Runs every action whose time has come, in order of time."""
        now_s = self.now_s()
        while (when_s := self.next_s()) is not None and when_s <= now_s:
            timer = heapq.heappop(self._heap)[2]
            action, timer.action = timer.action, None
            self.late_s = now_s - when_s
            assert action is not None
            action()
        self.late_s = 0.0


class Lease:
    """Ends once `lease_s` have passed without `renew`, and then runs `on_end`.

    Renewing is an assignment: the timer looks when it fires whether the lease was renewed, and if so sleeps
    on. When the timer fires late this process stood still, and renewals may lie unread in its sockets: the
    lease is then given as long again as the process stood still, at most its own length.
    """

    STALL_S = 0.25

    __slots__ = ("_on_end", "_renewed_s", "_timer", "_timers", "lease_s")

    def __init__(self, timers: Timers, lease_s: float, on_end: Callable[[], None]) -> None:
        self.lease_s = lease_s
        self._timers = timers
        self._on_end = on_end
        self._renewed_s = timers.now_s()
        self._timer = timers.after(lease_s, self._check)

    def said(self) -> str:
        """What is known of its holder: that its lease runs. Whether it is alive, nobody knows until that ends."""
        if self.lease_s == math.inf:
            return "which has not left"
        left_s = max(self._renewed_s + self.lease_s - self._timers.now_s(), 0.0)
        return f"whose lease runs for another {left_s:.1f} s unless it is renewed"

    def renew(self) -> None:
        """Starts the lease again."""
        self._renewed_s = self._timers.now_s()

    def cancel(self) -> None:
        """Ends it without `on_end`."""
        self._timers.cancel(self._timer)

    def _check(self) -> None:
        left_s = self._renewed_s + self.lease_s - self._timers.now_s()
        if left_s <= 0 and self._timers.late_s > self.STALL_S:
            left_s = min(self._timers.late_s, self.lease_s)
        if left_s > 0:
            self._timer = self._timers.after(left_s, self._check)
        else:
            self._on_end()


class Remembered:
    """The last number given to each name that is gone, so that numbers never go back: bounded.

    Of more than `limit` names the oldest are forgotten, and from then on every name counts on from the
    largest number forgotten, which keeps the promise at the price of a gap.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._floor = 0
        self._last: dict[str, int] = {}

    def last(self, name: str) -> int:
        """The number to count on from."""
        return self._last.get(name, self._floor)

    def keep(self, name: str, number: int) -> None:
        """Remembers `number` as the last one of `name`."""
        self._last[name] = max(number, self._last.pop(name, self._floor))
        while len(self._last) > self._limit:
            oldest = next(iter(self._last))
            self._floor = max(self._floor, self._last.pop(oldest))
