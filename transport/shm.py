"""Shared memory: peers on one host."""

import logging

from onesided import _core
from onesided.errors import Unsupported

from .opened import close_at_exit

__all__ = ["ShmTransport"]

log = logging.getLogger("onesided.transport")


class ShmTransport(_core.ShmTransport):
    """The transport for peers on one host, and of one user.

    Memory from allocate() lies in anonymous files (memfd) that peers map: a put is one copy, straight into the target,
    by the calling thread. Nothing is left behind when a process ends, however it ends. Any other memory given to
    register_memory() stays private; peers reach it through the kernel (cross-memory attach), where the system permits
    that. A thread answers peers that open a memory and notices those that die; it sleeps otherwise and sees no payload.

    Raises Unsupported where the system has no memfd. After a fork, the child's first use raises OnesidedError.
    """

    def __init__(self, *, why: str = "made by the program") -> None:
        if not self.supported():
            raise Unsupported(f"no shm transport on this system: {self.unsupported_reason()}")
        super().__init__()
        self._why = why
        close_at_exit(self)
        log.debug("shm transport opened")

    def describe(self) -> dict[str, str]:
        """Its kind and why it was chosen, its state, and what it holds."""
        return {**super().describe(), "why": self._why}

    def __enter__(self) -> "ShmTransport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
