"""The control plane: who is here, what they publish, and for how long. It never touches payload.

    from onesided.rpc import Group, Server

    with Server() as server:                                # in any process
        group = Group.join(server.address, "trainers", 4)   # in each of four
        handles = group.all_gather(my_handle)
        group.directory.publish("weights", my_handle)

`onesided.rpc.serve.serve` runs a server alone. `import onesided.rpc` loads neither grpc nor torch: what needs
them loads them.
"""

import os
from typing import TYPE_CHECKING

from .catalog import Entry, Event
from .directory import Directory, Watch
from .group import Group
from .local import run_local

if TYPE_CHECKING:
    from .server import Server

# gRPC writes news to stderr, as that a server it was connected to has ended. What matters of them is in our errors and
# log; only gRPC's errors are let through, unless the user asks for more. It reads this as it loads.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__ = ["Directory", "Entry", "Event", "Group", "Server", "Watch", "run_local"]


def __getattr__(name: str) -> object:
    if name == "Server":
        from .server import Server

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
