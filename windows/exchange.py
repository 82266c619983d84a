"""What windows need of the control plane. `onesided.rpc` has both; so may anything else."""

from collections.abc import Callable
from typing import Protocol

from onesided.errors import BoundsError

__all__ = ["Catalog", "Entry", "Exchange", "check_directory", "check_group"]


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

    def publish(self, name: str, value: bytes, *, lease_s: float | None = None, replace: bool = False) -> Entry:
        """Makes `value` known as `name` until it is withdrawn or this process has been dead for `lease_s`.

        RemoteAccessError if another client's lease on the name still runs, unless `replace`.
        """

    def lookup(self, name: str, *, timeout_s: float = 0) -> Entry:
        """What is known as `name`; waits for it up to `timeout_s`."""

    def withdraw(self, name: str) -> None:
        """Takes it back."""


def check_group(group: object) -> None:
    """TypeError, saying what is expected, for what is no Exchange."""
    if not all(hasattr(group, name) for name in ("rank", "size", "name", "all_gather", "add_close_callback")):
        raise TypeError(f"group must be a Group, from Group.join for instance, not {_type_of(group)}")


def check_directory(directory: object, name: object) -> None:
    """TypeError, saying what is expected, for what is no Catalog, and for a name that is no text."""
    if not all(hasattr(directory, method) for method in ("publish", "lookup", "withdraw")):
        raise TypeError(
            f"directory must be a Directory, group.directory or Directory('host:port') for instance, not "
            f"{_type_of(directory)}"
        )
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {_type_of(name)}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BoundsError(f"the name {name!r} cannot be written as UTF-8") from None


def _type_of(value: object) -> str:
    return "None" if value is None else type(value).__name__
