"""One-sided communication for PyTorch: memory windows, put and get, atomic signals.

    from onesided import Group, Window

    group = Group.from_env()                       # or Group.join(address, name, size)
    window = Window.allocate(group, nbytes=1 << 20)
    window.put(tensor, peer=1, signal=0)           # no code runs at the peer
    window.wait_signal(0)                          # there: the bytes are visible now

Importing this package loads nothing but this file: every name is fetched from its room when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collectives import Communicator, ReduceOp
    from .communicators import new_comm
    from .errors import (
        BoundsError,
        ConnectionLost,
        DeadlineExceeded,
        HandleError,
        LayoutError,
        OnesidedError,
        RegistrationError,
        RemoteAccessError,
        StaleHandle,
        Unsupported,
    )
    from .rpc import Directory, Group, Server, run_local
    from .stats import stats
    from .transport import RdmaTransport, RemoteMemory, ShmTransport, Work, open_transport
    from .windows import Plan, Window

__version__ = "0.1.0"

__all__ = [
    "BoundsError",
    "Communicator",
    "ConnectionLost",
    "DeadlineExceeded",
    "Directory",
    "Group",
    "HandleError",
    "LayoutError",
    "OnesidedError",
    "Plan",
    "RdmaTransport",
    "ReduceOp",
    "RegistrationError",
    "RemoteAccessError",
    "RemoteMemory",
    "Server",
    "ShmTransport",
    "StaleHandle",
    "Unsupported",
    "Window",
    "Work",
    "new_comm",
    "open_transport",
    "run_local",
    "stats",
]

_ROOMS = {
    "collectives": ["Communicator", "ReduceOp"],
    "communicators": ["new_comm"],
    "errors": [
        "BoundsError",
        "ConnectionLost",
        "DeadlineExceeded",
        "HandleError",
        "LayoutError",
        "OnesidedError",
        "RegistrationError",
        "RemoteAccessError",
        "StaleHandle",
        "Unsupported",
    ],
    "rpc": ["Directory", "Group", "Server", "run_local"],
    "stats": ["stats"],
    "transport": ["RdmaTransport", "RemoteMemory", "ShmTransport", "Work", "open_transport"],
    "windows": ["Plan", "Window"],
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
