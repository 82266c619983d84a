"""The tests of the rdma transport on the fake devices of fake_verbs.py: what no software device can show.

They run in processes of their own, as the table of verbs is one for a whole process.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fake_verbs import Device, load, on_fake
from harness import Function, Process

__all__ = ["Alone", "alone"]


class Alone:
    """Calls `fn(fake, *args)` of a test's module in a process of its own, in which the fake is in use.

    Nothing may be left at the devices when it returns. So the process is kept for the next call, if that was well.
    """

    def __init__(self) -> None:
        self._process: Process | None = None

    def begin(self, fn: Callable[..., Any], *args: object, devices: int | Sequence[Device] = 2) -> Process:
        if self._process is not None and (self._process.busy or not self._process.alive):
            self.close()
        if self._process is None:
            self._process = Process("the process of the fake")
        self._process.begin(on_fake, Function.of(fn), devices, args)
        return self._process

    def __call__(
        self, fn: Callable[..., Any], *args: object, devices: int | Sequence[Device] = 2, timeout_s: float = 30.0
    ) -> Any:
        process = self.begin(fn, *args, devices=devices)
        try:
            return process.result(timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Skips where the fake cannot be built."""
    load()
    caller = Alone()
    yield caller
    caller.close()
