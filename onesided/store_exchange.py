"""Windows over a torch store: the bytes that ranks tell each other when a window or a communicator is made."""

import time
from collections.abc import Callable
from typing import Any

from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded, StaleHandle

__all__ = ["StoreExchange"]

POLL_LEAST_S, POLL_MOST_S = 0.0005, 0.05


class StoreExchange:
    """A group (onesided.windows, Exchange) whose ranks share a store of torch.distributed, TCPStore or another.

    The store must be used by this group alone, under a PrefixStore for instance. Keys of an exchange are deleted in
    the course of the next but one. The store's own death is ConnectionLost; of the ranks it knows nothing.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        if not 0 <= rank < size:
            raise BoundsError(f"rank {rank} is not one of {size}")
        self._store = store
        self.rank = rank
        self.size = size
        self.name = name
        self._serial = 0
        self._callbacks: list[Callable[[], object]] = []
        self._closed = False

    def all_gather(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Everybody's payloads, in rank order. Collective, one thread at a time.

        DeadlineExceeded names the ranks that have not come; ConnectionLost if the store cannot be reached.
        """
        if self._closed:
            raise StaleHandle(f"group {self.name!r} was closed")
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        self._serial += 1
        serial = self._serial
        self._ask(lambda: self._store.set(self._key(serial, self.rank), bytes(payload)))
        found: dict[int, bytes] = {self.rank: bytes(payload)}
        pause_s = POLL_LEAST_S
        while True:
            absent = [rank for rank in range(self.size) if rank not in found]
            for rank in absent:
                # One after the other, in their order: while this one is absent there is nothing to be done with others.
                if not self._there(serial, rank):
                    break
                found[rank] = self._take(serial, rank)
            if len(found) == self.size:
                break
            if ends is not None and time.monotonic() >= ends:
                late = [f"rank {rank}" for rank in absent if rank not in found and not self._there(serial, rank)]
                if late:
                    raise DeadlineExceeded(
                        f"exchange {serial} of group {self.name!r}: {', '.join(late)} has not come within "
                        f"{timeout_s:g} s"
                    )
                continue
            # Not Store.wait: Ctrl-C would be heard at its end only.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MOST_S)
        if serial > 1:
            # Whoever is in this exchange has read all of the one before.
            self._ask(lambda: self._store.delete_key(self._key(serial - 1, self.rank)))
        return [found[rank] for rank in range(self.size)]

    def add_close_callback(self, callback: Callable[[], object]) -> None:
        """Has `callback` called by `close`; the newest first."""
        if self._closed:
            raise StaleHandle(f"group {self.name!r} was closed")
        self._callbacks.append(callback)

    def close(self) -> None:
        """Runs the callbacks; raises what one of them raised when all have run. Not collective; idempotent."""
        self._closed = True
        failure: Exception | None = None
        while self._callbacks:
            try:
                self._callbacks.pop()()
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure is not None:
            raise failure

    def _key(self, serial: int, rank: int) -> str:
        return f"onesided/{serial}/{rank}"

    def _there(self, serial: int, rank: int) -> bool:
        return bool(self._ask(lambda: self._store.check([self._key(serial, rank)])))

    def _take(self, serial: int, rank: int) -> bytes:
        return bytes(self._ask(lambda: self._store.get(self._key(serial, rank))))

    def _ask(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are
            raise ConnectionLost(f"group {self.name!r}: its store does not answer: {error}") from error
