"""Small puts from Python onto the fake of verbs, to be run under callgrind: put_cost.py FAKE SOURCE PUTS.

Calls fake_verbs_reset_counts() before anything counts, then after PUTS puts, then after twice as many: callgrind dumps
its counts there. What differs between the two is the price of PUTS puts and of nothing else.
"""

import ctypes
import itertools
import sys

import numpy as np

from onesided import RdmaTransport, _core


def source_of(name: str, transport: RdmaTransport) -> object:
    """8 bytes to put, of the kind that programs have."""
    if name == "view":
        return transport.allocate(64).view(0, 8)
    if name == "array":
        return np.arange(1, dtype=np.int64)
    import torch

    return torch.arange(1)


def main(fake: str, name: str, puts: int) -> None:
    library = ctypes.CDLL(fake)
    library.fake_verbs_table.restype = ctypes.c_void_p
    library.fake_verbs_reset(1)
    _core.use_verbs_table(library.fake_verbs_table())
    # The fake's devices have addresses that this host has not.
    with RdmaTransport(address="127.0.0.1") as here, RdmaTransport(address="127.0.0.1") as there:
        memory = there.allocate(64)
        connection = here.connect(there.bind(), timeout_s=30)
        target = connection.attach(_core.RemoteMemory.from_bytes(memory.handle()), 30)
        window = _core.Window("cost", None, [target])
        source, put = source_of(name, here), window.put

        def loop(count: int) -> None:
            for _ in itertools.repeat(None, count):  # a range would make an integer for each
                put(source, 0)

        loop(puts)
        library.fake_verbs_reset_counts()
        loop(puts)
        library.fake_verbs_reset_counts()
        loop(2 * puts)
        library.fake_verbs_reset_counts()
        window.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
