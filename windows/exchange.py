"""What windows need of the control plane. `onesided.rpc` has both; so may anything else."""

from collections.abc import Callable
from typing import Protocol

__all__ = ["Catalog", "Entry", "Exchange"]


class Exchange(Protocol):
    """A group of ranks that can tell each other bytes. All methods but `add_close_callback` are collective."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    def all_gather(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]: ...
    def add_close_callback(self, callback: Callable[[], None]) -> None: ...


class Entry(Protocol):
    """A published value."""

    @property
    def value(self) -> bytes: ...


class Catalog(Protocol):
    """A directory of names."""

    def publish(self, name: str, value: bytes, *, lease_s: float | None = None) -> Entry: ...
    def lookup(self, name: str, *, timeout_s: float = 0) -> Entry: ...
    def withdraw(self, name: str) -> None: ...
