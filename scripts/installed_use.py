"""Uses whatever onesided is installed, without torch: a server, two ranks, a put that signals.

Prints `received: hello`. Run by `make check-install` and by a test.
"""

import sys
import threading

from onesided import Group, Server, Window

NBYTES = 64


def write(address: str) -> None:
    """Rank 0: puts five bytes into its peer's memory and tells it so."""
    with Group.join(address, "use", 2, rank=0) as group, Window.allocate(group, nbytes=NBYTES) as window:
        window.put(b"hello", peer=1, signal=0)
        window.flush(1)


def main() -> None:
    """Rank 1, in the main thread: waits for the bytes and prints them."""
    with Server("127.0.0.1:0") as server:
        writer = threading.Thread(target=write, args=[server.address])
        writer.start()
        with Group.join(server.address, "use", 2, rank=1) as group, Window.allocate(group, nbytes=NBYTES) as window:
            window.wait_signal(0, source=0, timeout_s=30)
            print("received:", window.array[:5].tobytes().decode())
        writer.join()
    if "torch" in sys.modules:
        raise SystemExit("torch was imported, though nothing here needs it")


if __name__ == "__main__":
    main()
