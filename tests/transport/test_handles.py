"""Handles and endpoints that were truncated, altered, made up (case 21), and peers that do not speak the protocol."""

import contextlib
import os
import socket
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Kind
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onesided.transport import Memory
from pairs import Pair, array, connected, remote

from onesided import (
    BoundsError,
    ConnectionLost,
    DeadlineExceeded,
    HandleError,
    RemoteAccessError,
    RemoteMemory,
    StaleHandle,
    Unsupported,
)

quick = settings(
    max_examples=300, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
slow = settings(quick, max_examples=60)


class World:
    """A pair, a memory of b with a canary in it, and what a forger has seen of them."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.memory: Memory = pair.b.allocate(256, signals=2)
        self.secret: Memory = pair.b.allocate(256, "r", signals=2)
        array(self.memory)[:] = array(self.secret)[:] = 0x5A
        self.handle = self.memory.handle()
        self.secret_handle = self.secret.handle()
        self.endpoint = pair.b.bind()

    def untouched(self) -> bool:
        return bool((array(self.memory) == 0x5A).all() and (array(self.secret) == 0x5A).all())


@pytest.fixture(scope="module", params=["shm", "rdma"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    from harness import kind_named

    kind = kind_named(request.param)
    if reason := kind.unsupported_reason():
        pytest.skip(f"transport {kind.name}: {reason}")
    with connected(kind) as pair:
        world = World(pair)
        yield world
        vars(world).clear()  # pytest may hold on to it for longer


def sealed(body: bytes) -> bytes:
    """With the checksum that fits: what somebody can make who knows the format."""
    return body + struct.pack("<I", zlib.crc32(body))


def refused(fn: object, *args: object) -> None:
    with pytest.raises(HandleError) as caught:
        fn(*args)  # type: ignore[operator]
    assert str(caught.value)


# ---- Bytes that no library of ours has written -----------------------------------------------------------------------


@quick
@given(data=st.binary(max_size=200))
def test_case_21_random_bytes(world: World, data: bytes) -> None:
    refused(RemoteMemory.from_bytes, data)
    refused(world.pair.a.connect, data)


@quick
@given(data=st.binary(max_size=120))
def test_case_21_random_bytes_with_magic_and_checksum(world: World, data: bytes) -> None:
    """Past the first checks, every field is bounded by what is there."""
    refused(RemoteMemory.from_bytes, sealed(world.handle[:6] + data))
    refused(world.pair.a.connect, sealed(world.endpoint[:6] + data))


def test_case_21_every_truncation(world: World) -> None:
    for whole, read in ((world.handle, RemoteMemory.from_bytes), (world.endpoint, world.pair.a.connect)):
        for length in range(len(whole)):
            refused(read, whole[:length])
            refused(read, whole[length + 1 :])
            if length < len(whole) - 4:
                refused(read, sealed(whole[:length]))


def test_case_21_every_flipped_bit(world: World) -> None:
    for whole, read in ((world.handle, RemoteMemory.from_bytes), (world.endpoint, world.pair.a.connect)):
        for bit in range(8 * len(whole)):
            altered = bytearray(whole)
            altered[bit // 8] ^= 1 << bit % 8
            refused(read, bytes(altered))


def test_case_21_oversized_and_empty(world: World) -> None:
    for read in (RemoteMemory.from_bytes, world.pair.a.connect):
        for data in (
            b"",
            b"\0",
            bytes(4),
            bytes(1024),
            bytes(1025),
            bytes(1 << 20),
            world.handle + b"\0",
            world.handle * 2,
        ):
            refused(read, data)
    refused(RemoteMemory.from_bytes, world.endpoint)
    refused(world.pair.a.connect, world.handle)
    for whole, read in ((world.handle, RemoteMemory.from_bytes), (world.endpoint, world.pair.a.connect)):
        refused(read, sealed(whole[:-4] + b"\0"))
        refused(read, sealed(whole[:-4] + bytes(900)))


def test_case_21_another_version(world: World) -> None:
    for whole, read in ((world.handle, RemoteMemory.from_bytes), (world.endpoint, world.pair.a.connect)):
        for version in (0, 2, 255, 65535):
            body = bytearray(whole[:-4])
            body[4:6] = struct.pack("<H", version)
            with pytest.raises(HandleError, match=f"version {version}"):
                read(sealed(bytes(body)))


def test_case_21_wrong_types(world: World) -> None:
    for bad in (
        None,
        1,
        "text",
        bytearray(world.handle),
        memoryview(world.handle),
        [1],
        object(),
        world.handle.decode("latin1"),
    ):
        with pytest.raises(TypeError):
            RemoteMemory.from_bytes(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            world.pair.a.connect(bad)  # type: ignore[arg-type]


@quick
@given(length=st.integers(0, 255), rest=st.binary(max_size=40))
def test_case_21_nothing_is_allocated_by_a_length_field(world: World, length: int, rest: bytes) -> None:
    """The endpoint's last field is a name with its length before it."""
    name_at = len(world.endpoint) - 4 - endpoint_name_length(world.endpoint) - 1
    body = world.endpoint[:name_at] + bytes([length]) + rest
    assume(len(rest) != length)
    tracemalloc.start()
    try:
        refused(world.pair.a.connect, sealed(body))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def endpoint_name_length(endpoint: bytes) -> int:
    """The length of the name that ends an endpoint: the byte before as many bytes as it says."""
    return next(
        n for n in range(255) if len(endpoint) >= n + 5 and endpoint[-5 - n] == n and endpoint[-4 - n : -4].isascii()
    )


# ---- Handles that were forged with a fitting checksum ----------------------------------------------------------------


@slow
@given(at=st.integers(6, 200), value=st.integers(0, 255), secret=st.booleans())
def test_case_21_forged_handles_reach_nothing(world: World, at: int, value: int, secret: bool) -> None:
    """One byte changed, checksum made good: no memory is reached that the key does not open, nor more than there is."""
    whole = world.secret_handle if secret else world.handle
    assume(at < len(whole) - 4)
    body = bytearray(whole[:-4])
    assume(body[at] != value)
    body[at] = value
    try:
        forged = RemoteMemory.from_bytes(sealed(bytes(body)))
    except HandleError:
        return
    array(world.memory)[:] = array(world.secret)[:] = 0x5A
    with contextlib.suppress(HandleError, StaleHandle, BoundsError, RemoteAccessError, Unsupported):
        world.pair.to_b.write(b"\x11" * 8, forged, 0)
        # It may still be the memory that the key is for: then within its bounds, and with no more access than it gives.
        assert not secret
        assert not world.untouched()
        array(world.memory)[:] = 0x5A
        end = max(0, forged.nbytes - 8)
        with contextlib.suppress(BoundsError):
            world.pair.to_b.write(b"\x11" * 8, forged, end)
        assert (array(world.memory) == 0x11).sum() in (0, 8)
    assert (array(world.secret) == 0x5A).all()
    array(world.memory)[:] = 0x5A


def test_case_21_a_key_opens_its_own_memory_only(world: World) -> None:
    """Any other key, any other transport, another memory's number with this key: nothing is reached."""
    whole, secret = world.handle[:-4], world.secret_handle[:-4]
    assert whole[:8] == secret[:7] + b"\x03"
    transport, number, key = slice(8, 24), slice(24, 32), slice(len(whole) - 16, len(whole))
    assert whole[transport] == secret[transport]
    for field in (transport, key):
        for at in range(field.start, field.stop):
            forged = bytearray(whole)
            forged[at] ^= 0x40
            with pytest.raises(HandleError):
                world.pair.to_b.write(b"x", RemoteMemory.from_bytes(sealed(bytes(forged))))
    for forged in (whole[: number.start] + secret[number] + whole[number.stop :], whole[: key.start] + secret[key]):
        with pytest.raises(HandleError):
            world.pair.to_b.write(b"x", RemoteMemory.from_bytes(sealed(forged)))
    for unknown in (0, 12345, 2**64 - 1):
        forged = whole[: number.start] + struct.pack("<Q", unknown) + whole[number.stop :]
        with pytest.raises(StaleHandle):
            world.pair.to_b.write(b"x", RemoteMemory.from_bytes(sealed(forged)))
    assert world.untouched()


def test_case_21_more_than_there_is(world: World) -> None:
    """offset and size beyond the memory, with a fitting checksum."""
    there = RemoteMemory.from_bytes(world.handle)
    whole = world.handle[:-4]
    size_at = whole.index(struct.pack("<QQ", 0, 256))
    for offset, nbytes in (
        (0, 257),
        (1, 256),
        (256, 1),
        (257, 0),
        (2**63, 8),
        (0, 2**63),
        (2**64 - 1, 1),
        (2**64 - 8, 16),
        (0, 2**64 - 1),
    ):
        body = whole[:size_at] + struct.pack("<QQ", offset, nbytes) + whole[size_at + 16 :]
        with pytest.raises((HandleError, BoundsError)):
            world.pair.to_b.write(b"x", RemoteMemory.from_bytes(sealed(body)))
    world.pair.to_b.write(b"Z", there, 255)
    array(world.memory)[:] = 0x5A


def test_case_21_more_access_than_given(world: World) -> None:
    whole = world.secret_handle[:-4]
    assert whole[7] == 1  # read
    for access in (2, 3):
        forged = RemoteMemory.from_bytes(sealed(whole[:7] + bytes([access]) + whole[8:]))
        with pytest.raises(RemoteAccessError):
            world.pair.to_b.write(b"x", forged)
        with pytest.raises(RemoteAccessError):
            world.pair.to_b.fetch_add(forged, 0, 1)
    assert (array(world.secret) == 0x5A).all()


@slow
@given(at=st.integers(6, 300), value=st.integers(0, 255))
def test_case_21_forged_endpoints(world: World, at: int, value: int) -> None:
    whole = world.pair.b.bind()
    assume(at < len(whole) - 4)
    body = bytearray(whole[:-4])
    assume(body[at] != value)
    body[at] = value
    with contextlib.suppress(
        HandleError, StaleHandle, ConnectionLost, Unsupported, RemoteAccessError, DeadlineExceeded
    ):
        connection = world.pair.a.connect(sealed(bytes(body)), timeout_s=5)
        connection.close()  # only what is for messages was changed, or what says whether others may use it, too
    world.pair.to_b.write(b"Z", remote(world.memory))


# ---- Peers that speak something else ---------------------------------------------------------------------------------


def talk_to(world: World) -> socket.socket:
    """A raw socket to the listener of b, as any process of the same user can open one."""
    name = world.endpoint[-4 - endpoint_name_length(world.endpoint) : -4]
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.connect(b"\0" + name)
    return raw


def test_junk_at_the_listener(world: World) -> None:
    """Any bytes, of any size, then the end: the transport goes on, and connections of others do not notice."""
    if world.pair.kind.name != "shm":
        pytest.skip("only shm listens on a Unix socket")
    for junk in (
        b"x",
        b"",
        bytes(8),
        b"OSS1",
        os.urandom(48),
        os.urandom(47),
        os.urandom(49),
        os.urandom(60_000),
        bytes(64),
    ):
        with contextlib.suppress(OSError), talk_to(world) as raw:
            raw.settimeout(5)
            raw.send(junk)
            raw.send(junk)
        world.pair.to_b.write(b"Z", remote(world.memory))
    hello = struct.pack("<IIQQ16sII", 0x3153534F, 2, 1, 1, bytes(16), 0, 0)  # asks for a memory without an introduction
    with talk_to(world) as raw:
        raw.settimeout(5)
        raw.send(hello)
        reply = raw.recv(4096)
        assert b"not connected" in reply
    many = [talk_to(world) for _ in range(100)]
    world.pair.a.connect(world.pair.b.bind(), timeout_s=10).close()
    for raw in many:
        raw.close()
    world.pair.a.connect(world.pair.b.bind(), timeout_s=10).close()


def test_descriptors_sent_by_a_stranger_are_closed(world: World) -> None:
    """Who sends descriptors cannot make the process run out of them."""
    if world.pair.kind.name != "shm":
        pytest.skip("only shm listens on a Unix socket")
    from harness import held, wait_until

    before = held().descriptors
    with Path(os.devnull).open() as null, talk_to(world) as raw:
        for _ in range(50):
            with contextlib.suppress(OSError):
                socket.send_fds(raw, [bytes(48)], [null.fileno()] * 20)
    wait_until(lambda: held().descriptors <= before, f"{before} descriptors again, not {held().descriptors}", 5)


def test_kinds_of_the_world(kind: Kind) -> None:
    """`world` above is made for every kind that is here."""
    assert kind.name in ("shm", "rdma"), "add the new kind to the fixture `world`"
