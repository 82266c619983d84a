"""What windows need of the control plane. `onesided.rpc` has both; so may anything else."""

from collections.abc import Callable
from typing import Protocol

__all__ = ["Catalog", "Entry", "Exchange"]


class Exchange(Protocol):
    """A group of ranks that can tell each other bytes. All methods but `add_close_callback` are collective."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def name(self) -> str:
        """The group's name."""

    def all_gather(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Everybody's payloads, in rank order."""

    def add_close_callback(self, callback: Callable[[], None]) -> None:
        """Has `callback` called when this rank leaves."""


class Entry(Protocol):
    """A published value."""

    @property
    def value(self) -> bytes:
        """What was published."""


class Catalog(Protocol):
    """A directory of names."""

    def publish(self, name: str, value: bytes, *, lease_s: float | None = None) -> Entry:
        """Makes `value` known as `name` until it is withdrawn or this process has been dead for `lease_s`."""

    def lookup(self, name: str, *, timeout_s: float = 0) -> Entry:
        """What is known as `name`; waits for it up to `timeout_s`."""

    def withdraw(self, name: str) -> None:
        """Takes it back."""
