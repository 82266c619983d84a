"""Which kind of transport to use."""

import logging

from onesided.errors import Unsupported

from .contract import Transport
from .shm import ShmTransport

__all__ = ["choose_kind", "open_transport"]

log = logging.getLogger("onesided.transport")

KINDS: dict[str, type[ShmTransport]] = {"shm": ShmTransport}


def choose_kind(kind: str = "auto") -> str:
    """The kind that "auto" means on this system; any other kind itself, if this system supports it.

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
            return name
        refused.append(f"{name}: {reason}")
    raise Unsupported("no transport can be used here: " + "; ".join(refused))


def open_transport(kind: str = "auto") -> Transport:
    """Opens a transport: "shm", or "auto" for the best kind that this system supports. Unsupported if there is none."""
    chosen = choose_kind(kind)
    why = f"asked for {kind!r}" if kind == chosen else f"asked for {kind!r}: the first of {list(KINDS)} that works here"
    log.info("transport %s opened, %s", chosen, why)
    return KINDS[chosen](why=why)
