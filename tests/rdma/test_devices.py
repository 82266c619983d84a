"""Which devices are taken, and what is said of the others (cases 24 and 25), through what a program calls."""

import dataclasses
import os

import pytest
from fake_verbs import Device, FakeVerbs, Gid, GidType, LinkLayer, Port, PortState
from harness import raises
from onesided.transport import choose_kind, open_transport, unsupported_reasons

from onesided import BoundsError, Group, OnesidedError, RdmaTransport, Unsupported, Window


def gid(address: str = "10.77.0.1", index: int = 3, **options: object) -> Gid:
    return Gid(address, index, **options)  # type: ignore[arg-type]


FINE = Device("fine")
DOWN = Device("down", ports=[Port(state=PortState.DOWN)])
NO_ADDRESS = Device("empty", ports=[Port(gids=[])])
V1_ONLY = Device("old", ports=[Port(gids=[gid(type=GidType.ROCE_V1)])])
BRIDGE = Device("bridge", ports=[Port(gids=[gid("172.17.0.1", interface="docker0", is_bridge=True)])])
FAILS = Device("fails", open_fails=13)
VANISHES = Device("vanishes", vanishes=True)

NONE: dict[str, tuple[list[Device], list[str]]] = {
    "no device": ([], ["no RDMA device"]),
    "port down": ([DOWN], ["down:1", "DOWN"]),
    "does not open": ([FAILS], ["fails", "Permission denied"]),
    "vanishes": ([VANISHES], ["no RDMA device"]),  # it is listed once
    "no address": ([NO_ADDRESS], ["empty:1"]),
    "bridge": ([BRIDGE], ["bridge:1", "docker0"]),
    "several": ([DOWN, FAILS, NO_ADDRESS], ["down:1", "fails", "empty:1"]),
}


def none_usable(fake: FakeVerbs, says: list[str]) -> None:
    assert not RdmaTransport.supported()
    for part in says:
        assert part in (RdmaTransport.unsupported_reason() or ""), (part, RdmaTransport.unsupported_reason())
        assert part in (unsupported_reasons()["rdma"] or "")
        for opens in (lambda: open_transport("rdma"), RdmaTransport, lambda: choose_kind("rdma")):
            with raises(Unsupported, part):
                opens()
    with open_transport("auto") as transport:
        assert transport.kind == "shm"
    [group] = Group.local(1, name="alone")
    with Window.allocate(group, 8) as window:
        assert window.describe()["transport"] == "shm"
        window.put(b"it works", 0, signal=0)
    with raises(Unsupported, says[0]):
        Window.allocate(group, 8, transport="rdma")
    with Window.allocate(group, 8):
        pass
    group.leave()


@pytest.mark.parametrize("what", NONE)
def test_case_24_nothing_is_usable_and_why(alone, what: str) -> None:
    devices, says = NONE[what]
    alone(none_usable, says, devices=devices)


def one_usable(fake: FakeVerbs, others: list[str]) -> None:
    """Several devices, of which one is usable: it is taken, and described."""
    with open_transport("rdma") as transport:
        rails = {name: text for name, text in transport.describe().items() if name.startswith("rail")}
        assert list(rails) == ["rail 0"]
        assert "fine:1" in rails["rail 0"]
        assert "10.77.0.1" in rails["rail 0"]
        memory = transport.allocate(64, signals=1)
        transport.connect(transport.bind()).close()
        memory.close()
    for name in others:
        with raises(Unsupported, name):
            RdmaTransport(nics=[name])
    del transport, memory


@pytest.mark.parametrize("other", [DOWN, NO_ADDRESS, BRIDGE, FAILS, VANISHES], ids=lambda device: device.name)
def test_case_24_one_of_several_is_usable(alone, other: Device) -> None:
    # A bridge can be pinned, who wants it.
    alone(one_usable, [] if other is BRIDGE else [other.name], devices=[other, FINE])


# Case 25: tables of GIDs, and which entry is the right one.
TABLES: dict[str, tuple[list[Gid], int]] = {
    "v1 before v2": ([gid(index=0, type=GidType.ROCE_V1), gid(index=1)], 1),
    "link-local before global": ([gid("fe80::1", 0), gid("fe80::1", 1), gid(index=2), gid(index=3)], 2),
    "holes": ([gid("fe80::1", 0), gid(index=7)], 7),
    "IPv6 only": ([gid("fe80::1", 0), gid("2001:db8::7", 1)], 1),
    "IPv6 before IPv4": ([gid("2001:db8::7", 0), gid(index=1)], 1),
    "link-local only": ([gid("fe80::1", 0, type=GidType.ROCE_V1), gid("fe80::1", 1)], 1),
    "docker0 before eth0": ([gid("172.17.0.1", 0, interface="docker0", is_bridge=True), gid(index=1)], 1),
    "loopback": ([gid("127.0.0.1", 0, interface="lo"), gid(index=1)], 1),
    "RoCE v1 only": ([gid(index=0, type=GidType.ROCE_V1)], 0),
}


def chosen(fake: FakeVerbs, index: int, count: int) -> None:
    with RdmaTransport() as transport:
        assert f"GID {index} " in transport.describe()["rail 0"]
    pinned = count - 1
    with RdmaTransport(nics=[f"fine:1/{index}"]) as transport:
        assert f"GID {index} " in transport.describe()["rail 0"]
    os.environ["ONESIDED_NICS"] = f" fine:1/{index} ,"
    try:
        with open_transport("rdma") as transport:
            assert f"GID {index} " in transport.describe()["rail 0"]
    finally:
        del os.environ["ONESIDED_NICS"]
    for wrong in ("fine:2", f"fine:1/{pinned + 100}", "fine:1/10.99.99.99", "other", "fine:x", ""):
        with raises(OnesidedError):
            RdmaTransport(nics=[wrong])
    del transport


@pytest.mark.parametrize("table", TABLES)
def test_case_25_a_routable_entry_is_chosen(alone, table: str) -> None:
    gids, index = TABLES[table]
    alone(chosen, index, len(gids), devices=[dataclasses.replace(FINE, ports=[Port(gids=gids)])])


def infiniband(fake: FakeVerbs) -> None:
    with RdmaTransport() as a, RdmaTransport() as b:
        memory = b.allocate(64, signals=1)
        from onesided import RemoteMemory

        connection = a.connect(b.bind())
        connection.write(b"it works", RemoteMemory.from_bytes(memory.handle()), signal=0)
        assert bytes(memoryview(memory)[:8]) == b"it works"
        connection.close()
    del a, b, memory, connection


def test_infiniband_needs_no_global_header(alone) -> None:
    port = Port(link_layer=LinkLayer.INFINIBAND, lid=7, gids=[gid("fe80::1", 0, type=GidType.IB, interface="")])
    alone(infiniband, devices=[Device("ib", ports=[port])])


# ---- Endpoints -------------------------------------------------------------------------------------------------------


def endpoints(fake: FakeVerbs) -> None:
    """Case 22: bind twice, connect before the other side does, to oneself, twice."""
    from onesided import HandleError, RemoteMemory, StaleHandle

    a, b = RdmaTransport(), RdmaTransport()
    memory = b.allocate(64, signals=1)
    remote = RemoteMemory.from_bytes(memory.handle())
    first, second, shared = b.bind(), b.bind(), b.bind(shared=True)
    assert first != second
    assert shared == b.bind(shared=True)
    connections = [a.connect(endpoint) for endpoint in (second, first, shared, shared)]
    for endpoint in (first, second):
        with raises(StaleHandle):
            a.connect(endpoint)
    own = b.connect(b.bind())  # to oneself
    connections.append(own)
    for turn, connection in enumerate(connections, 1):
        connection.write(b"%8d" % turn, remote, signal=0)
        connection.flush(remote)
        assert bytes(memoryview(memory)[:8]) == b"%8d" % turn
        assert memory.signal_value(0) == turn
    for wrong in (b"", b"x" * 100, first[:-1], first + b"\0", bytes(len(first))):
        with raises(HandleError):
            a.connect(wrong)
    for at in range(0, len(first), 7):
        flipped = bytearray(b.bind())
        flipped[at] ^= 4
        with raises(HandleError):
            a.connect(bytes(flipped))
    connections[0].close()
    connections[1].write(b"still   ", remote, signal=0)
    with raises(StaleHandle):
        connections[0].write(b"x", remote)
    for connection in connections:
        connection.close()
    endpoint = b.bind()
    b.close()
    with raises(OnesidedError):
        a.connect(endpoint, timeout_s=5)
    with raises(StaleHandle):
        b.bind()
    a.close()


def test_case_22_endpoints_in_any_order(alone) -> None:
    alone(endpoints, devices=1)


def options(fake: FakeVerbs) -> None:
    """What cannot be is refused, and leaves nothing."""
    for wrong in (
        {"depth": 15}, {"depth": 32_769}, {"timeout": 0}, {"timeout": 32}, {"retries": 7}, {"mtu": 1000}, {"mtu": 8192},
        {"traffic_class": 256}, {"service_level": 16},
    ):  # fmt: skip
        with raises(BoundsError, next(iter(wrong))):
            RdmaTransport(**wrong)
    with raises(TypeError):
        RdmaTransport(nics="fake0")
    with raises(OnesidedError):
        RdmaTransport(address="not an address")
    with RdmaTransport(address="::1") as transport:
        assert "[::1]:" in transport.describe()["address"]
        transport.connect(transport.bind()).close()
    with RdmaTransport() as transport:
        assert transport.describe()["address"].startswith("127.0.0.1:")  # as ONESIDED_RDMA_ADDRESS says
    del transport


def test_options_are_checked(alone) -> None:
    alone(options, devices=1)
