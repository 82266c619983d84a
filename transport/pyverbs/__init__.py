"""The reference implementation of the rdma transport, in Python over pyverbs.

It speaks the protocol of docs/wire.md, so it and RdmaTransport can be peers of each other. Read it to see how that
works, in this order: `wire.py`, what travels; `verbs.py`, a port and its queue pairs; `transport.py`, memory, what
peers are answered, and how each operation becomes work requests.
"""

from .transport import Connection, Memory, PyverbsTransport
from .wire import RemoteMemory

__all__ = ["Connection", "Memory", "PyverbsTransport", "RemoteMemory"]
