"""The RDMA provider of csrc/tests/fake_verbs.h for tests in Python: devices, failures and counts that a test chooses.

It connects transports of one process only, so ranks are threads; the table of verbs is one for the whole process, so
whoever swaps it does that in a process of its own. A queue pair is named by its number; 0 is all of them.
"""

import contextlib
import ctypes
import errno as errnos
import gc
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from harness import Function, in_threads, wait_until

ROOT = Path(__file__).resolve().parent.parent


class PortState(IntEnum):
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4


class LinkLayer(IntEnum):
    INFINIBAND = 1
    ETHERNET = 2


class GidType(IntEnum):
    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


class Status(IntEnum):
    """How a work request ends: ibv_wc_status."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    FATAL_ERR = 19
    GENERAL_ERR = 21


class QpState(IntEnum):
    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7  # there is none such


@dataclass
class Gid:
    address: str
    index: int = 0
    type: GidType = GidType.ROCE_V2
    interface: str = "eth0"
    is_bridge: bool = False


@dataclass
class Port:
    state: PortState = PortState.ACTIVE
    link_layer: LinkLayer = LinkLayer.ETHERNET
    lid: int = 0
    active_mtu: int = 5  # 4096 bytes
    active_speed: int = 32  # 25 Gbit/s a lane
    active_width: int = 2  # 4 lanes
    gids: list[Gid] = field(default_factory=lambda: [Gid("10.77.0.1", 3)])


@dataclass
class Device:
    name: str
    numa_node: int = 0
    pci_path: str = ""  # empty: a software device
    ports: list[Port] = field(default_factory=lambda: [Port()])
    limits: dict[str, int] = field(default_factory=dict)  # by the names in fake_verbs.h
    open_fails: int = 0  # the errno
    vanishes: bool = False


u8, u32, u64, size, text = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_char_p

# Name: what it returns, and takes.
FUNCTIONS: dict[str, tuple[type | None, list[object]]] = {
    "table": (ctypes.c_void_p, []),
    "reset": (None, [ctypes.c_uint]),
    "begin": (None, []),
    "add_device": (None, [text, ctypes.c_int, text, ctypes.c_int, ctypes.c_int]),
    "set_limit": (ctypes.c_int, [text, u64]),
    "add_port": (None, [ctypes.c_int] * 6),
    "add_gid": (None, [text, ctypes.c_uint, ctypes.c_uint, text, ctypes.c_int]),
    "commit": (None, []),
    "deliver_immediately": (None, [u32]),
    "deliver_in_thread": (None, [u32, ctypes.c_uint]),
    "hold": (None, [u32]),
    "release": (size, [size, u32]),
    "release_all": (size, [u32]),
    "pending": (size, [u32]),
    "fail": (ctypes.c_int, [text, ctypes.c_int, u64, u64]),
    "fail_completion": (None, [ctypes.c_int, u64, u32, ctypes.c_int]),
    "peer_gone": (None, [u32, ctypes.c_int]),
    "port_down": (None, [text, u8]),
    "port_up": (None, [text, u8]),
    "device_fatal": (None, [text]),
    "qp_fatal": (None, [u32]),
    "cq_error": (None, [u32]),
    "count": (u64, [text]),
    "live": (u64, [text]),
    "traffic": (u64, [text, text]),
    "reset_counts": (None, []),
    "qp_nums": (size, [text, ctypes.POINTER(u32), size]),
    "state_of": (ctypes.c_int, [u32]),
}
NOTHING = 2**64 - 1  # the answer to a name that is not known
LIVE = ["device_lists", "contexts", "pds", "mrs", "channels", "cqs", "qps"]


@cache
def load() -> ctypes.CDLL:
    """The shared object, built first if it is out of date. Skips the test that asks where it cannot be built."""
    built = subprocess.run([ROOT / "scripts" / "fake-verbs"], capture_output=True, text=True, check=False)
    if built.returncode == 77:
        import pytest  # not in the processes that tests start

        pytest.skip(built.stderr.strip())
    if built.returncode != 0:
        raise RuntimeError(f"scripts/fake-verbs failed:\n{built.stderr}")
    library = ctypes.CDLL(built.stdout.strip())
    for name, (returned, taken) in FUNCTIONS.items():
        function = getattr(library, f"fake_verbs_{name}")
        function.restype, function.argtypes = returned, taken
    return library


class FakeVerbs:
    """What the fake can do. Its calls release the GIL, as all of ctypes."""

    def __init__(self) -> None:
        self._library = load()

    def _call(self, name: str, *arguments: object) -> int:
        encoded = [each.encode() if isinstance(each, str) else each for each in arguments]
        found: int = getattr(self._library, f"fake_verbs_{name}")(*encoded)
        return found

    @property
    def table(self) -> int:
        """The address of the table of verbs, for _core.use_verbs_table()."""
        return self._call("table")

    def reset(self, devices: int | Sequence[Device] = 2) -> None:
        """Takes other devices (a number: `fake0`, ...), and forgets injections and counts. Nothing may be in use."""
        if isinstance(devices, int):
            self._call("reset", devices)
            return
        self._call("begin")
        for device in devices:
            self._call("add_device", device.name, device.numa_node, device.pci_path, device.open_fails, device.vanishes)
            for name, value in device.limits.items():
                if self._call("set_limit", name, value) != 0:
                    raise KeyError(name)
            for port in device.ports:
                self._call(
                    "add_port",
                    *(port.state, port.link_layer, port.lid, port.active_mtu, port.active_speed, port.active_width),
                )
                for gid in port.gids:
                    self._call("add_gid", gid.address, gid.index, gid.type, gid.interface, gid.is_bridge)
        self._call("commit")

    # ---- When work requests are executed

    def deliver_immediately(self, qp_num: int = 0) -> None:
        self._call("deliver_immediately", qp_num)

    def deliver_in_thread(self, qp_num: int = 0, *, delay_us: int = 20) -> None:
        self._call("deliver_in_thread", qp_num, delay_us)

    def hold(self, qp_num: int = 0) -> None:
        self._call("hold", qp_num)

    def release(self, n: int, qp_num: int = 0) -> int:
        return self._call("release", n, qp_num)

    def release_all(self, qp_num: int = 0) -> int:
        return self._call("release_all", qp_num)

    def pending(self, qp_num: int = 0) -> int:
        return self._call("pending", qp_num)

    # ---- What fails

    def fail(self, call: str, error: int = errnos.ENOMEM, *, nth: int = 1, times: int = 1) -> None:
        """The `nth` call of e.g. "reg_mr" from here on fails with `error`, an errno, and `times` in all."""
        if self._call("fail", call, error, nth, times) != 0:
            raise KeyError(call)

    def fail_completion(self, status: Status, *, nth: int = 1, qp_num: int = 0, executed: bool = False) -> None:
        self._call("fail_completion", status, nth, qp_num, executed)

    def peer_gone(self, qp_num: int, *, gone: bool = True) -> None:
        self._call("peer_gone", qp_num, gone)

    def port_down(self, device: str, port: int = 1) -> None:
        self._call("port_down", device, port)

    def port_up(self, device: str, port: int = 1) -> None:
        self._call("port_up", device, port)

    def device_fatal(self, device: str) -> None:
        self._call("device_fatal", device)

    def qp_fatal(self, qp_num: int) -> None:
        self._call("qp_fatal", qp_num)

    def cq_error(self, qp_num: int) -> None:
        self._call("cq_error", qp_num)

    # ---- What happened; the names are those of the structures in fake_verbs.h

    def _named(self, what: str, *names: str) -> int:
        found = self._call(what, *names)
        if found == NOTHING:
            raise KeyError(names[-1])
        return found

    def count(self, name: str) -> int:
        return self._named("count", name)

    def live(self, name: str) -> int:
        return self._named("live", name)

    def alive(self) -> dict[str, int]:
        """How many there are of each kind of object that there are any of."""
        return {name: self.live(name) for name in LIVE if self.live(name) != 0}

    def traffic(self, device: str, name: str) -> int:
        return self._named("traffic", device, name)

    def reset_counts(self) -> None:
        self._call("reset_counts")

    def qp_nums(self, device: str = "") -> list[int]:
        numbers = (u32 * 4096)()
        return list(numbers[: self._call("qp_nums", device, numbers, len(numbers))])

    def state_of(self, qp_num: int) -> QpState:
        return QpState(self._call("state_of", qp_num))

    def pending_at(self) -> list[int]:
        """The queue pairs that something is held at."""
        return [number for number in self.qp_nums() if self.pending(number) != 0]


@contextmanager
def in_use(devices: int | Sequence[Device] = 2) -> Iterator[FakeVerbs]:
    """Puts the fake in the place of libibverbs. All that is made within must be closed within, and is looked for.

    After a failure it stays: what the exception still holds would be closed by libibverbs, which did not make it.
    """
    from onesided import _core

    fake = FakeVerbs()
    fake.reset(devices)
    _core.use_verbs_table(fake.table)
    os.environ["ONESIDED_RDMA_ADDRESS"] = "127.0.0.1"  # the addresses of the fake's devices are not this host's
    yield fake
    gc.collect()
    # A transport's own thread may be the last that holds a connection, for a moment.
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not fake.alive(), "nothing is left", 5)
    left = fake.alive()
    assert not left, f"left at the devices: {left}"
    assert fake.count("misuses") == 0
    del os.environ["ONESIDED_RDMA_ADDRESS"]
    _core.use_verbs_table(0)


def on_fake(function: Function, devices: int | Sequence[Device], args: Sequence[object]) -> Any:
    """Calls `function(fake, *args)` with the fake in use, and looks for what it leaves there when it has returned."""
    import fake_verbs  # this module by its name: a process that was told to call on_fake() has it under another one

    with fake_verbs.in_use(devices) as fake:
        return function.load()(fake, *args)


# ---- What uses it ----------------------------------------------------------------------------------------------------

_numbers = itertools.count(1)


@contextmanager
def windows(size: int = 2, nbytes: int = 1 << 20, *, signals: int = 4) -> Iterator[list[Any]]:
    """A window of a group of threads over rdma, by rank; closed at the end, as is the group."""
    from onesided import Group, Window

    groups = Group.local(size, name=f"fake {next(_numbers)}")
    made: list[Any] = [None] * size

    def make(rank: int) -> None:
        made[rank] = Window.allocate(groups[rank], nbytes, signals=signals, transport="rdma")

    try:
        in_threads([lambda rank=rank: make(rank) for rank in range(size)])  # type: ignore[misc]
        yield made
    finally:
        for window in made:
            if window is not None:
                window.close()
        for group in groups:
            group.leave()


class Pair:
    """Transports `a` and `b`, and a memory of `b` as `a` reaches it."""

    def __init__(self, nbytes: int, a: Any, b: Any) -> None:
        import numpy as np

        from onesided import RemoteMemory

        self.a, self.b = a, b
        self.memory = b.allocate(nbytes, signals=4)
        self.array = np.frombuffer(self.memory, np.uint8)
        self.remote = RemoteMemory.from_bytes(self.memory.handle())
        self.connection = a.connect(b.bind(), name="b", timeout_s=20)

    def close(self) -> None:
        self.connection.close()
        self.memory.close()


@contextmanager
def connected(nbytes: int = 1 << 20, *, a: Any = None, b: Any = None) -> Iterator[Pair]:
    """`a` and `b` are transports, or options for new ones, which are closed at the end."""
    from onesided import RdmaTransport

    made: list[Any] = []

    def transport(given: Any) -> Any:
        if isinstance(given, RdmaTransport):
            return given
        made.append(RdmaTransport(**(given or {})))
        return made[-1]

    try:
        pair = Pair(nbytes, transport(a), transport(b))
        try:
            yield pair
        finally:
            pair.close()
    finally:
        for each in made:
            each.close()
