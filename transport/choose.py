"""Which kind of transport to use."""

import logging

from onesided.errors import Unsupported

from .contract import Transport
from .shm import ShmTransport

__all__ = ["open_transport"]

log = logging.getLogger("onesided.transport")

KINDS: dict[str, type[ShmTransport]] = {"shm": ShmTransport}


def open_transport(kind: str = "auto") -> Transport:
    """Opens a transport: "shm", or "auto" for the best kind that this system supports.

    Raises Unsupported, naming every kind that was tried and why it cannot be, or if `kind` is not one.
    """
    if not isinstance(kind, str):
        raise TypeError(f"a transport's kind must be a string, not {type(kind).__name__}")
    if kind != "auto" and kind not in KINDS:
        raise Unsupported(f"unknown transport {kind!r}: this version has {', '.join(map(repr, KINDS))} and 'auto'")
    refused = []
    for name in KINDS if kind == "auto" else [kind]:
        reason = KINDS[name].unsupported_reason()
        if reason is None:
            log.info("transport %s chosen%s", name, " by 'auto'" if kind == "auto" else "")
            return KINDS[name]()
        refused.append(f"{name}: {reason}")
    raise Unsupported("no transport can be used here: " + "; ".join(refused))
