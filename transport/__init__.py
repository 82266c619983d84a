"""Transports: how bytes get from one process into the memory of another.

A transport registers memory, hands out handles to it, and connects to peers; from then on operations need no code at
the target. `onesided.windows` puts ranks, names and collective creation on top, and is what most programs want.

    transport = ShmTransport()
    memory = transport.allocate(1 << 20, signals=1)         # or register_memory(tensor)
    send_to_peer(transport.bind(), memory.handle())         # by any means: onesided.rpc, a file, a pipe

    connection = transport.connect(endpoint_of_peer)        # at the peer
    remote = RemoteMemory.from_bytes(handle_of_peer)
    connection.write(tensor, remote, signal=0)

`onesided.transport.pyverbs` is the protocol of RdmaTransport once more, to be read.
"""

from onesided._core import Connection, Memory, RemoteMemory, Target, View, Work

from .choose import choose_kind, open_transport, unsupported_reasons
from .contract import Transport
from .rdma import RdmaTransport
from .shm import ShmTransport

__all__ = [
    "Connection",
    "Memory",
    "RdmaTransport",
    "RemoteMemory",
    "ShmTransport",
    "Target",
    "Transport",
    "View",
    "Work",
    "choose_kind",
    "open_transport",
    "unsupported_reasons",
]
