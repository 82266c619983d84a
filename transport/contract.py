"""What every kind of transport offers."""

from typing import Protocol

from onesided._core import Connection, Memory, Target

__all__ = ["Transport"]


class Transport(Protocol):
    """Registers memory, hands out handles, connects. Thread-safe; not to be used in a forked child.

    `connect` and `bind` may happen in any order on the two sides: an endpoint is good from the moment that it exists.
    The connection carries this side's operations; the peer's own go over the connection that it makes.
    """

    @property
    def kind(self) -> str:
        """'shm' or 'rdma'."""

    @property
    def closed(self) -> bool:
        """True once close() was called."""

    def allocate(self, nbytes: int, access: str = "rw", *, signals: int = 0, max_peers: int = 256) -> Memory:
        """New memory that peers can reach in the best way of this kind."""

    def register_memory(self, buffer: object, access: str = "rw", *, signals: int = 0, max_peers: int = 256) -> Memory:
        """Makes a tensor or buffer known. Never copies; strided memory raises LayoutError."""

    def bind(self, *, shared: bool = False, peer: str = "") -> bytes:
        """An endpoint for one connection, or for any number if `shared`."""

    def connect(self, endpoint: bytes, *, name: str = "", timeout_s: float | None = 30.0) -> Connection:
        """Connects to the peer that bound `endpoint`."""

    def loop_back(self, memory: Memory, name: str = "this rank") -> Target:
        """This process's own memory, as a window's target."""

    def close(self, timeout_s: float | None = 5.0) -> None:
        """Drains, then frees; children first. Closing twice is legal."""

    def describe(self) -> dict[str, str]:
        """What it is, what it holds, and why it was chosen."""

    def __enter__(self) -> "Transport": ...

    def __exit__(self, *exception: object) -> None: ...
