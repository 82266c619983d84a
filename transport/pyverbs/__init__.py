"""The reference implementation of the rdma transport, in Python over pyverbs.

It speaks the protocol of docs/wire.md, so it and RdmaTransport can be peers of each other. Read it to see how that
works, in this order: `wire.py`, what travels; `rail.py`, a port and its queue pairs; `target.py`, memory and what peers
are answered; `origin.py`, how each operation becomes work requests; `transport.py`, which holds them together.
"""

from .origin import Connection
from .target import Memory
from .transport import PyverbsTransport
from .wire import RemoteMemory

__all__ = ["Connection", "Memory", "PyverbsTransport", "RemoteMemory"]
