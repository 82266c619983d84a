"""Transports that the program left open end before the interpreter takes things apart."""

import atexit
import logging
import weakref
from typing import Protocol

__all__ = ["close_at_exit"]

log = logging.getLogger("onesided.transport")
log.addHandler(logging.NullHandler())


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Ends it."""


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(transport: Closable) -> None:
    """Has `transport` closed when the interpreter ends, if it is still there then."""
    _open.add(transport)


@atexit.register
def _close_all() -> None:
    for transport in list(_open):
        try:
            transport.close()
        except Exception as error:  # noqa: BLE001 - at exit there is nobody left to raise to
            log.warning("closing a transport at exit: %s", error)
