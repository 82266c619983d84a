"""Which kind of transport to use."""

import logging
from typing import Any

from onesided.errors import Unsupported

from .contract import Transport
from .rdma import RdmaTransport
from .shm import ShmTransport

__all__ = ["choose_kind", "open_transport", "unsupported_reasons"]

log = logging.getLogger("onesided.transport")

# In the order in which "auto" tries them.
KINDS: dict[str, type[ShmTransport] | type[RdmaTransport]] = {"shm": ShmTransport, "rdma": RdmaTransport}

# Chosen by name only: for reading, and for testing the others against it.
BY_NAME = ["pyverbs"]


def class_of(kind: str) -> Any:
    """The class of a kind. That of the reference is imported when somebody asks for it."""
    if kind in KINDS:
        return KINDS[kind]
    from .pyverbs import PyverbsTransport

    return PyverbsTransport


def choose_kind(kind: str = "auto") -> str:
    """The kind that "auto" means on this system; any other kind itself, if this system supports it.

    Raises Unsupported, naming every kind that was tried and why it cannot be, or if `kind` is not one.
    """
    if not isinstance(kind, str):
        raise TypeError(f"a transport's kind must be a string, not {type(kind).__name__}")
    if kind not in ["auto", *KINDS, *BY_NAME]:
        known = ", ".join(map(repr, [*KINDS, *BY_NAME]))
        raise Unsupported(f"unknown transport {kind!r}: this version has {known} and 'auto'")
    refused = []
    for name in KINDS if kind == "auto" else [kind]:
        reason = class_of(name).unsupported_reason()
        if reason is None:
            return name
        refused.append(f"{name}: {reason}")
    raise Unsupported("no transport can be used here: " + "; ".join(refused))


def unsupported_reasons() -> dict[str, str | None]:
    """Of every kind that "auto" considers, why it cannot be used here; None if it can."""
    return {name: kind.unsupported_reason() for name, kind in KINDS.items()}


def open_transport(kind: str = "auto", *, why: str | None = None) -> Transport:
    """Opens a transport: "shm", "rdma", or "auto" for the first that this system supports. Unsupported if none is.

    "pyverbs" is the reference implementation of "rdma", with synchronous operations only (onesided.transport.pyverbs).
    For other options than the usual ones make the transport itself: RdmaTransport(nics=["mlx5_0"]). `why` is for the
    log and for describe(), if somebody else has chosen.
    """
    chosen = choose_kind(kind)
    if why is None:
        first = "" if kind == chosen else f": the first of {list(KINDS)} that works here"
        why = f"asked for {kind!r}{first}"
    log.info("transport %s opened, %s", chosen, why)
    opened: Transport = class_of(chosen)(why=why)
    return opened
