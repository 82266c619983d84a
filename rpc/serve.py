"""A control plane alone in its process: what `onesided serve` runs."""

import os
import signal
import sys
from types import FrameType

from .server import Server

__all__ = ["serve"]


def serve(bind: str = "127.0.0.1:29400") -> None:
    """Serves at `bind` until SIGINT or SIGTERM comes, then closes and returns. Prints the actual address
    first.

    To be called by the main thread, which it keeps. Raises as `Server` does if it cannot listen there.
    """
    read_fd, write_fd = os.pipe()

    def stop(_number: int, _frame: FrameType | None) -> None:
        os.write(write_fd, b"x")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Server(bind) as server:
            sys.stdout.write(f"onesided control plane at {server.address}\n")
            sys.stdout.flush()
            os.read(read_fd, 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)
