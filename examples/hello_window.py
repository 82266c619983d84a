"""Two processes: one writes into the other's memory, and tells it so."""

import multiprocessing

from onesided import Group, Server, Window


def reader(address: str) -> None:
    with Group.join(address, "hello", 2, rank=1) as group, Window.allocate(group, nbytes=64) as window:
        window.wait_signal(0, source=0)
        print("received:", window.array[:5].tobytes().decode())


if __name__ == "__main__":
    with Server("127.0.0.1:0") as server:
        child = multiprocessing.get_context("spawn").Process(target=reader, args=[server.address])
        child.start()
        with Group.join(server.address, "hello", 2, rank=0) as group, Window.allocate(group, nbytes=64) as window:
            window.put(b"hello", peer=1, signal=0)
            child.join()
