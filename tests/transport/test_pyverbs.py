"""Two implementations of one protocol: `pyverbs`, in Python, and `rdma`, in C++, as peers of each other.

What travels is compared on every machine; the rest needs a device (tests/softroce/run).
"""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import Process, parent, pattern, raises, same, wait_until
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onesided.transport import choose_kind
from onesided.transport.pyverbs import Connection, PyverbsTransport, wire
from onesided.transport.pyverbs.transport import Incoming

from onesided import (
    BoundsError,
    ConnectionLost,
    DeadlineExceeded,
    HandleError,
    LayoutError,
    RdmaTransport,
    RemoteAccessError,
    RemoteMemory,
    ShmTransport,
    StaleHandle,
    Unsupported,
    open_transport,
)
from onesided.errors import OnesidedError

MIB = 1 << 20
quick = settings(max_examples=300, deadline=None, database=None, derandomize=True)

# ---- What travels, on any machine ------------------------------------------------------------------------------------

TOKEN, KEY = bytes(range(16)), bytes(range(100, 116))
HANDLE = wire.RemoteMemory(wire.RDMA, 3, TOKEN, 7, 16, 4096, 2, KEY)
ENDPOINT = wire.Endpoint(wire.RDMA, 1, TOKEN, bytes(16), 9, KEY, 4711, "10.77.0.1:4711")
PAIR = wire.Pair(0, 1, ipaddress.ip_address("::ffff:10.77.0.1").packed, 0, 3, 17, 0xABCDEF, 16)
MESSAGES = [
    (wire.Hello(9, KEY, 4711), 47),
    (wire.Welcome([wire.RailAddress(PAIR.gid, 0, 3)] * 2), 58),
    (wire.Open(2, [PAIR]), 54),
    (wire.Opened(2, [PAIR] * 8), 264),
    (wire.Attach(7, KEY), 43),
    (wire.Attached(4096, 3, 2, 1 << 47, 4096, 1 << 46, [1, 2], [3, 4]), 80),
    (wire.Detach(7), 27),
    (wire.Revoke(7), 27),
    (wire.Revoked(2**64 - 1), 27),
    (wire.Failed(8, "attach: this memory was closed"), 51),
    (wire.Ended(7), 27),
    (wire.Renew(7), 27),
]
BODIES = [wire.to_frame(message, 5)[4:] for message, _ in MESSAGES]


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body) + 4) + sealed(body)


def refuses(read: Callable[[bytes], object], data: bytes) -> bool:
    try:
        read(data)
    except HandleError:
        return True
    return False


@pytest.fixture(scope="module")
def shm() -> Iterator[ShmTransport]:
    with ShmTransport() as transport:
        yield transport


def cpp_reads_endpoint(shm: ShmTransport, data: bytes) -> None:
    """As C++ reads it: this kind's endpoints are not for shm, which is said of those only that could be read."""
    try:
        shm.connect(data, timeout_s=0)
    except HandleError as error:
        if "of kind 'rdma'" not in str(error) and "of kind 'tcp'" not in str(error):
            raise
    except OnesidedError:
        pass


def test_each_reads_the_other_s_handles(shm: ShmTransport) -> None:
    theirs = RemoteMemory.from_bytes(HANDLE.to_bytes())
    assert (theirs.kind, theirs.access, theirs.signals) == ("rdma", "rw", 2)
    assert (theirs.offset_bytes, theirs.nbytes) == (16, 4096)
    assert theirs.to_bytes() == HANDLE.to_bytes()
    cut = theirs.view(100, 50)
    assert wire.RemoteMemory.from_bytes(cut.to_bytes()) == HANDLE._replace(offset_bytes=116, nbytes=50)
    with shm.allocate(300, "r", signals=5) as memory:
        ours = wire.RemoteMemory.from_bytes(memory.handle())
        assert (ours.kind, ours.access, ours.offset_bytes, ours.nbytes, ours.signals) == (1, 1, 0, 300, 5)
        assert ours.to_bytes() == memory.handle()


def test_each_reads_the_other_s_endpoints(shm: ShmTransport) -> None:
    bound = shm.bind(shared=True)
    ours = wire.Endpoint.from_bytes(bound)
    assert (ours.kind, ours.shared, ours.pid) == (1, 1, os.getpid())
    assert ours.to_bytes() == bound
    with pytest.raises(HandleError, match="of kind 'rdma'"):
        shm.connect(ENDPOINT.to_bytes())


@quick
@given(data=st.binary(max_size=200), magic=st.booleans())
def test_random_bytes_are_neither(shm: ShmTransport, data: bytes, magic: bool) -> None:
    handle = sealed(b"OSHM\1\0" + data) if magic else data
    endpoint = sealed(b"OSPE\1\0" + data) if magic else data
    assert refuses(wire.RemoteMemory.from_bytes, handle) == refuses(RemoteMemory.from_bytes, handle)
    assert refuses(wire.Endpoint.from_bytes, endpoint) == refuses(lambda it: cpp_reads_endpoint(shm, it), endpoint)
    assert refuses(wire.from_bytes, sealed(b"OSR1\1\0" + data) if magic else data)


@quick
@given(at=st.integers(0, 200), value=st.integers(0, 255), length=st.integers(0, 200), checksum=st.booleans())
def test_altered_bytes_are_refused_by_both(shm: ShmTransport, at: int, value: int, length: int, checksum: bool) -> None:
    """One byte changed, or cut short; with a fitting checksum both may take it, and then both do."""
    readers = [
        (HANDLE.to_bytes(), wire.RemoteMemory.from_bytes, RemoteMemory.from_bytes),
        (ENDPOINT.to_bytes(), wire.Endpoint.from_bytes, lambda it: cpp_reads_endpoint(shm, it)),
    ]
    for whole, ours, theirs in readers:
        body = bytearray(whole[:-4][: max(length, 5)])
        if at < len(body):
            body[at] = value
        assume(bytes(body) != whole[:-4])
        data = sealed(bytes(body)) if checksum else bytes(body) + whole[-4:]
        assert refuses(ours, data) == refuses(theirs, data)
        assert checksum or refuses(ours, data)


@pytest.mark.parametrize(("message", "nbytes"), MESSAGES, ids=lambda value: type(value).__name__)
def test_messages_have_the_sizes_of_the_document(message: Any, nbytes: int) -> None:
    frame = wire.to_frame(message, 2**64 - 1)
    assert len(frame) == 4 + nbytes
    assert struct.unpack("<I", frame[:4]) == (nbytes,)
    assert wire.from_bytes(frame[4:]) == (message, 2**64 - 1)
    received = bytearray(frame + frame + frame[:10])
    assert list(wire.take_frames(received)) == [(message, 2**64 - 1)] * 2
    assert received == frame[:10]


@quick
@given(whole=st.sampled_from(BODIES), at=st.integers(6, 80), value=st.integers(0, 255), more=st.binary(max_size=9))
def test_altered_messages_do_no_harm(whole: bytes, at: int, value: int, more: bytes) -> None:
    body = bytearray(whole[:-4] + more)
    assume(at < len(body))
    body[at] = value
    tracemalloc.start()
    try:
        with contextlib.suppress(HandleError):
            wire.from_bytes(sealed(bytes(body)))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    for length in range(len(whole) - 4):
        assert refuses(wire.from_bytes, sealed(whole[:length]))


def test_a_length_field_allocates_nothing() -> None:
    with pytest.raises(HandleError):
        list(wire.take_frames(bytearray(struct.pack("<I", wire.LONGEST_FRAME + 1))))
    assert list(wire.take_frames(bytearray(struct.pack("<I", wire.LONGEST_FRAME)))) == []
    head = b"OSR1\1\0\6" + bytes(8) + struct.pack("<QBIQQQ", 1, 3, 0, 0, 1, 0)
    for count in (1, 32768, 32769, 2**32 - 1):
        assert refuses(wire.from_bytes, sealed(head + struct.pack("<I", count)))


# ---- The kind --------------------------------------------------------------------------------------------------------


def test_auto_never_chooses_it() -> None:
    assert choose_kind() != "pyverbs"  # there is always shm
    with pytest.raises(Unsupported, match="'pyverbs'"):  # but it can be asked for
        choose_kind("no such kind")


def test_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = PyverbsTransport.unsupported_reason()
    assert PyverbsTransport.supported() == (reason is None)
    if reason is not None:
        with pytest.raises(Unsupported, match="pyverbs"):
            open_transport("pyverbs")
    for name in ["pyverbs", *(name for name in sys.modules if name.startswith("pyverbs."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "pyverbs does not import" in str(PyverbsTransport.unsupported_reason())


# ---- Two peers -------------------------------------------------------------------------------------------------------

MAKE: dict[str, Callable[..., Any]] = {"rdma": RdmaTransport, "pyverbs": PyverbsTransport}
WAYS = [("pyverbs", "rdma"), ("rdma", "pyverbs"), ("pyverbs", "pyverbs")]


def need(*kinds: str) -> None:
    for kind in kinds:
        if reason := MAKE[kind].unsupported_reason():
            pytest.skip(f"transport {kind}: {reason}")


def device() -> str:
    """Both take the same port: a Soft-RoCE device does not reach another one of the same host."""
    with PyverbsTransport() as transport:
        return transport.rails[0].name


def bytes_of(memory: Any) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return memory.data if hasattr(memory, "data") else np.frombuffer(memory, np.uint8)


class Pair:
    """`to_b` carries a's operations to `memory`, which is b's."""

    def __init__(self, origin: str, owner: str, nics: list[str], nbytes: int = 3 * MIB) -> None:
        self.a, self.b = MAKE[origin](nics=nics), MAKE[owner](nics=nics)
        self.to_b = self.a.connect(self.b.bind(), name="b", timeout_s=20)
        self.memory = self.b.allocate(nbytes, signals=4)
        self.there = RemoteMemory.from_bytes(self.memory.handle())
        self.bytes = bytes_of(self.memory)

    def close(self) -> None:
        self.bytes = None
        for one in (self.to_b, self.memory, self.a, self.b):
            one.close()


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]} to {way[1]}")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    need(*request.param)
    pair = Pair(*request.param, [device()])
    yield pair
    pair.close()


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 4097, 100_000, 3 * MIB])
def test_write_read_and_signal(pair: Pair, nbytes: int) -> None:
    data = pattern(nbytes, seed=3)
    for offset in {0, 3 * MIB - nbytes, min(13, 3 * MIB - nbytes)}:
        pair.bytes[:] = 0x5A
        before = pair.memory.signal_value(3)
        pair.to_b.write(data, pair.there, offset, signal=3, add=5)
        assert pair.memory.wait_signal(3, before + 5, timeout_s=20) == before + 5
        same(pair.bytes[offset : offset + nbytes], data)
        assert (pair.bytes[:offset] == 0x5A).all()
        assert (pair.bytes[offset + nbytes :] == 0x5A).all()
        back = np.zeros(nbytes, np.uint8)
        pair.to_b.read(back, pair.there, offset)
        same(back, data)


def test_a_signal_is_behind_every_write(pair: Pair) -> None:
    for turn in range(1, 50):
        data = pattern(50_000, seed=turn)
        for part in range(4):
            pair.to_b.write(data, pair.there, part * 50_000)
        pair.to_b.signal(pair.there, 0)
        pair.memory.wait_signal(0, turn, timeout_s=20)
        for part in range(4):
            same(pair.bytes[part * 50_000 :][:50_000], data)


def test_signals_wrap_and_subtract(pair: Pair) -> None:
    pair.to_b.signal(pair.there, 1, add=-3)
    assert pair.memory.signal_value(1) == 2**64 - 3
    assert pair.memory.wait_signal(1, 2**64 - 5, timeout_s=5) == 2**64 - 3
    pair.to_b.signal(pair.there, 1, add=4)
    assert pair.memory.wait_signal(1, 2**64 - 1, timeout_s=5) == 1
    with pytest.raises(DeadlineExceeded):
        pair.memory.wait_signal(1, 2, timeout_s=0.05)
    assert not any(pair.memory.signal_value(index) for index in (0, 2, 3))


def test_atomics(pair: Pair) -> None:
    assert [pair.to_b.fetch_add(pair.there, 8, add) for add in (5, -2, 2**63)] == [0, 5, 3]
    words = pair.bytes.view(np.uint64)
    assert words[1] == 2**63 + 3
    assert pair.to_b.compare_swap(pair.there, 16, 0, 77) == 0
    assert pair.to_b.compare_swap(pair.there, 16, 0, 78) == 77
    assert pair.to_b.compare_swap(pair.there, 16, 77, -1) == 77
    assert words[2] == 2**64 - 1
    assert not words[3:100].any()


def test_flush(pair: Pair) -> None:
    pair.to_b.flush(pair.there)
    data = pattern(200_000)
    pair.to_b.write(data, pair.there, 3)
    pair.to_b.flush(pair.there, timeout_s=20)
    same(pair.bytes[3:200_003], data)
    assert bytes_of(pair.memory)[0] == 0


def test_mistakes_touch_nothing(pair: Pair) -> None:
    readable = pair.b.allocate(64, "r", signals=1)
    read_only = RemoteMemory.from_bytes(readable.handle())
    for error, use in (
        (BoundsError, lambda: pair.to_b.write(b"xx", pair.there, 3 * MIB - 1)),
        (BoundsError, lambda: pair.to_b.write(b"x", pair.there, -1)),
        (BoundsError, lambda: pair.to_b.write(b"x", pair.there, signal=4)),
        (BoundsError, lambda: pair.to_b.signal(pair.there, -1)),
        (BoundsError, lambda: pair.to_b.fetch_add(pair.there, 4, 1)),
        (BoundsError, lambda: pair.to_b.read(bytearray(2), pair.there.view(0, 1))),
        (RemoteAccessError, lambda: pair.to_b.write(b"x", read_only)),
        (RemoteAccessError, lambda: pair.to_b.fetch_add(read_only, 0, 1)),
        (LayoutError, lambda: pair.to_b.write(np.zeros((4, 4))[:, 1], pair.there)),
        (LayoutError, lambda: pair.to_b.read(b"12", pair.there)),
        (TypeError, lambda: pair.to_b.write([1, 2], pair.there)),
        (LayoutError, lambda: pair.b.allocate(8, "x")),
    ):
        with pytest.raises(error):
            use()
    assert not pair.bytes.any()
    pair.to_b.signal(read_only, 0)  # needs no permission
    assert readable.signal_value(0) == 1
    pair.to_b.read(bytearray(64), read_only)
    readable.close()


def test_forged_handles(pair: Pair) -> None:
    """What the owner refuses with Failed is raised as what it is."""
    ours = wire.RemoteMemory.from_bytes(pair.memory.handle())
    for error, forged in (
        (HandleError, ours._replace(key=bytes(16))),
        (HandleError, ours._replace(transport=bytes(16))),
        (HandleError, ours._replace(kind=1)),
        (StaleHandle, ours._replace(memory_id=12345)),
        (HandleError, ours._replace(nbytes=3 * MIB + 1)),
        (HandleError, ours._replace(offset_bytes=1)),
    ):
        with pytest.raises(error):
            pair.to_b.write(b"x", RemoteMemory.from_bytes(forged.to_bytes()))
    assert not pair.bytes.any()
    pair.to_b.write(b"x", pair.there)


def test_endpoints(pair: Pair) -> None:
    once, shared = pair.b.bind(), pair.b.bind(shared=True)
    for endpoint in (once, shared, shared):
        connection = pair.a.connect(endpoint, timeout_s=20)
        connection.write(b"y", pair.there)
        connection.close()
    with pytest.raises(StaleHandle):
        pair.a.connect(once, timeout_s=20)
    wrong = wire.Endpoint.from_bytes(shared)._replace(secret=bytes(16))
    with pytest.raises(HandleError):
        pair.a.connect(wrong.to_bytes(), timeout_s=20)
    with pytest.raises(HandleError):
        pair.a.connect(wrong._replace(address="nowhere").to_bytes(), timeout_s=20)
    pair.to_b.write(b"x", pair.there)


@pytest.mark.parametrize("origin", ["pyverbs", "rdma"])
def test_changed_keys_are_asked_for(origin: str) -> None:
    """The owner takes the access of somebody else: this origin gets new keys, and notices nothing."""
    need("pyverbs", "rdma")
    pair = Pair(origin, "rdma", [device()])
    for turn in range(1, 6):
        pair.to_b.write(pattern(5000, seed=turn), pair.there, signal=0)
        pair.memory.revoke("a stranger", 20)
        assert pair.memory.signal_value(0) == turn
        back = bytearray(5000)
        pair.to_b.read(back, pair.there)
        same(back, pattern(5000, seed=turn))
    pair.close()


def test_revocation_is_answered_at_once(pair: Pair) -> None:
    other = pair.b.allocate(64)
    there = RemoteMemory.from_bytes(other.handle())
    pair.to_b.write(b"x", there)
    pair.to_b.write(b"x", pair.there)
    begin = time.monotonic()
    pair.memory.close(timeout_s=20)
    assert time.monotonic() - begin < 10
    for use in (
        lambda: pair.to_b.write(b"y", pair.there),
        lambda: pair.to_b.read(bytearray(1), pair.there),
        lambda: pair.to_b.signal(pair.there, 0),
        lambda: pair.to_b.fetch_add(pair.there, 0, 1),
        pair.memory.handle,
    ):
        with pytest.raises(StaleHandle):
            use()
    pair.to_b.write(b"z", there)  # no other memory is touched by it
    assert bytes_of(other)[0] == ord("z")
    other.close()


def take_queue_pairs_away(pair: Pair) -> None:
    """The owner takes the queue pairs of the origin away, and does not say so: what is posted then gets no answer."""
    if isinstance(pair.b, PyverbsTransport):
        with pair.b.changed:
            for peer in pair.b.talking:
                if isinstance(peer, Incoming):
                    peer.close_responders()
        return
    other = pair.b.allocate(8)
    pair.to_b.write(b"x", RemoteMemory.from_bytes(other.handle()))
    with pair.a.changed:  # its thread cannot confirm the revocation
        other.close(timeout_s=0.1)
    if isinstance(pair.to_b, Connection):
        wait_until(lambda: pair.to_b.taken_away, "it is told that its queue pairs are gone")
        pair.to_b.taken_away = False  # as if it did not know


def test_a_deadline_is_a_fence_and_the_next_generation_works(pair: Pair) -> None:
    source = pattern(MIB)
    pair.to_b.write(source, pair.there)
    for turn in range(1, 4):
        take_queue_pairs_away(pair)
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            pair.to_b.write(source, pair.there, MIB, timeout_s=0.1)
        assert time.monotonic() - begin < 10
        source[:] = turn
        pair.to_b.write(source, pair.there, 2 * MIB, signal=0, timeout_s=20)
        assert pair.memory.wait_signal(0, turn, timeout_s=20) == turn
        pair.to_b.flush(pair.there, timeout_s=20)
        same(pair.bytes[2 * MIB :], source)
        assert not pair.bytes[MIB : 2 * MIB].any()  # neither what it was nor what was put there later


def test_a_peer_that_gives_no_answer(pair: Pair) -> None:
    """Without a deadline the device gives up, after its retries."""
    pair.to_b.write(b"x", pair.there)
    take_queue_pairs_away(pair)
    with pytest.raises(ConnectionLost):
        pair.to_b.read(bytearray(1), pair.there, timeout_s=20)
    back = bytearray(1)
    pair.to_b.read(back, pair.there, timeout_s=20)
    assert back == b"x"


def test_a_key_that_the_device_refuses(pair: Pair) -> None:
    """The memory region is gone though nobody has said so: the generation ends, and the next one works."""
    if isinstance(pair.b, RdmaTransport):
        pair.to_b.write(b"x", pair.there)
        ((key, reach),) = pair.to_b.reaches.items()
        pair.to_b.reaches[key] = reach._replace(keys=[reach.keys[0] ^ 0xFF])
    else:
        gone = pair.b.allocate(8, signals=1)
        there = RemoteMemory.from_bytes(gone.handle())
        pair.to_b.read(bytearray(8), there)
        gone.regions[0].close()
    refused = pair.there if isinstance(pair.b, RdmaTransport) else there
    with pytest.raises(RemoteAccessError):
        pair.to_b.read(bytearray(8), refused)
    if isinstance(pair.b, RdmaTransport):
        pair.to_b.reaches[key] = reach
    pair.to_b.write(b"x", pair.there, signal=0)
    pair.memory.wait_signal(0, 1, timeout_s=20)


def test_both_ways_at_once(pair: Pair) -> None:
    """Each is origin and target, on one process's thread: the threads that answer do not depend on each other."""
    back = pair.b.connect(pair.a.bind(), name="a", timeout_s=20)
    own = pair.a.allocate(MIB, signals=1)
    here = RemoteMemory.from_bytes(own.handle())
    for turn in range(1, 20):
        data = pattern(MIB // 2, seed=turn)
        pair.to_b.write(data, pair.there, signal=0)
        back.write(pair.bytes[: MIB // 2], here, signal=0)
        own.wait_signal(0, turn, timeout_s=20)
        same(bytes_of(own)[: MIB // 2], data)
    back.close()
    own.close()


def test_the_peer_closes(pair: Pair) -> None:
    pair.to_b.write(b"x", pair.there)
    pair.b.close()
    wait_until(lambda: not pair.to_b.connected, "the end of the peer is noticed")
    for use in (lambda: pair.to_b.write(b"x", pair.there), lambda: pair.to_b.flush(pair.there)):
        with pytest.raises((ConnectionLost, StaleHandle)):  # its memory was closed first
            use()
    with pytest.raises(StaleHandle):
        pair.memory.handle()


def test_closed_here(pair: Pair) -> None:
    pair.to_b.close()
    with pytest.raises(StaleHandle):
        pair.to_b.write(b"x", pair.there)
    pair.a.close()
    for use in (pair.a.bind, lambda: pair.a.allocate(8), lambda: pair.a.connect(pair.b.bind())):
        with pytest.raises(StaleHandle):
            use()


def test_registered_memory(pair: Pair) -> None:
    data = np.zeros(1000, np.int32)
    with pytest.raises(LayoutError):
        pair.b.register_memory(np.zeros((4, 4))[:, 1])
    memory = pair.b.register_memory(data[10:])
    pair.to_b.write(np.arange(990, dtype=np.int32), RemoteMemory.from_bytes(memory.handle()))
    assert (data[10:] == np.arange(990)).all()
    assert not data[:10].any()
    memory.close()
    empty = pair.b.allocate(0, signals=1)
    pair.to_b.write(b"", RemoteMemory.from_bytes(empty.handle()), signal=0)
    assert empty.wait_signal(0, 1, timeout_s=5) == 1
    empty.close()


@pytest.mark.parametrize("kind", MAKE)
def test_a_transport_connected_to_itself(kind: str) -> None:
    """Origin, target and owner in one: none of its threads waits for another."""
    need("pyverbs", kind)
    with MAKE[kind](nics=[device()]) as transport:
        connection = transport.connect(transport.bind(), name="itself", timeout_s=20)
        memory = transport.allocate(MIB, signals=1)
        there = RemoteMemory.from_bytes(memory.handle())
        connection.write(pattern(MIB - 8), there, 8, signal=0)
        assert memory.wait_signal(0, 1, timeout_s=20) == 1
        assert connection.fetch_add(there, 0, 7) == 0
        back = bytearray(MIB)
        connection.read(back, there)
        same(back, b"\7" + bytes(7) + bytes(pattern(MIB - 8)))
        memory.close(timeout_s=20)
        with pytest.raises(StaleHandle):
            connection.write(b"x", there)
        other = transport.allocate(1)
        connection.write(b"x", RemoteMemory.from_bytes(other.handle()))
        connection.flush(RemoteMemory.from_bytes(other.handle()))
        assert bytes(bytes_of(other)) == b"x"
        connection.close()


# ---- Rails -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]} to {way[1]}")
def test_two_rails(way: tuple[str, str]) -> None:
    """Whoever has more rails than the other: equal ones are paired first."""
    need(*way)
    with RdmaTransport() as transport:
        rails = [text.split(",")[0] for name, text in transport.describe().items() if name.startswith("rail")]
    if len(rails) < 2:
        pytest.skip("one port only")
    pair = Pair(*way, rails[:2], nbytes=2 * MIB)
    for turn in range(1, 6):
        data = pattern(2 * MIB, seed=turn)
        pair.to_b.write(data, pair.there, signal=2)  # rdma spreads it over both
        pair.memory.wait_signal(2, turn, timeout_s=20)
        same(pair.bytes, data)
    pair.to_b.flush(pair.there)
    pair.close()
    for mine, theirs in ((rails[:1], rails[:2]), (rails[:2], rails[:1])):
        with MAKE[way[0]](nics=mine) as a, MAKE[way[1]](nics=theirs) as b:
            memory = b.allocate(4096, signals=1)
            connection = a.connect(b.bind(), timeout_s=20)
            connection.write(pattern(4096), RemoteMemory.from_bytes(memory.handle()), signal=0)
            assert memory.wait_signal(0, 1, timeout_s=20) == 1
            same(bytes_of(memory), pattern(4096))
            connection.close()


# ---- Peers that misbehave --------------------------------------------------------------------------------------------


@pytest.fixture(params=["rdma", "pyverbs"])
def listener(request: pytest.FixtureRequest) -> Iterator[Any]:
    need("pyverbs", request.param)
    with MAKE[request.param](nics=[device()]) as transport:
        yield transport


def talk_to(transport: Any) -> tuple[socket.socket, wire.Endpoint]:
    endpoint = wire.Endpoint.from_bytes(transport.bind())
    host, port = endpoint.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 10), endpoint


def ask(raw: socket.socket, *messages: Any) -> Any:
    """Sends messages, and reads one; None if the connection ends instead."""
    for message in messages:
        raw.sendall(message if isinstance(message, bytes) else wire.to_frame(message, 3))
    received = bytearray()
    while not (answers := list(wire.take_frames(received))):
        try:
            data = raw.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        received += data
    ((answer, number),) = answers
    assert number == 3 or (number == 0 and isinstance(answer, wire.Failed))
    return answer


def test_answers_to_strangers(listener: Any) -> None:
    memory = listener.allocate(4096, signals=3)
    handle = wire.RemoteMemory.from_bytes(memory.handle())
    raw, endpoint = talk_to(listener)
    hello = wire.Hello(endpoint.number, endpoint.secret, 1)
    with raw:
        for early in (wire.Open(1, [PAIR]), wire.Attach(handle.memory_id, handle.key), wire.Detach(1), wire.Revoke(1)):
            answer = ask(raw, early)
            assert (type(answer), answer.error) == (wire.Failed, 3)
        assert ask(raw, hello._replace(secret=bytes(16))).error == 6
        assert ask(raw, hello._replace(endpoint=12345)).error == 8
        welcome = ask(raw, hello)
        assert len(welcome.rails) == 1
        assert ask(raw, hello).error == 8  # it is used
        assert ask(raw, wire.Attach(handle.memory_id, bytes(16))).error == 6
        assert ask(raw, wire.Attach(12345, handle.key)).error == 8
        reach = ask(raw, wire.Detach(5), wire.Attach(handle.memory_id, handle.key))
        assert (reach.nbytes, reach.access, reach.signals, len(reach.keys), len(reach.words_keys)) == (4096, 3, 3, 1, 1)
        assert ask(raw, wire.Open(1, [PAIR._replace(remote_rail=1)])).error == 6
        assert ask(raw, wire.Welcome([])).error == 9
        for generation in (7, 8):
            opened = ask(raw, wire.Open(generation, [PAIR._replace(gid=welcome.rails[0].gid, remote_rail=0)] * 8))
            assert (opened.generation, len({pair.number for pair in opened.pairs})) == (generation, 8)
            assert all(pair.gid == welcome.rails[0].gid and pair.reads >= 1 for pair in opened.pairs)
    memory.close(timeout_s=10)  # its holder is gone


def test_junk_at_the_listener(listener: Any) -> None:
    begin = wire.to_frame(wire.Detach(1))
    for junk in (
        b"x" * 100, bytes(4), bytes(8), struct.pack("<I", 2**32 - 1), struct.pack("<I", wire.LONGEST_FRAME + 1),
        b"GET / HTTP/1.1\r\n\r\n", begin[:-1] + b"\0", struct.pack("<I", 4) + bytes(4),
        struct.pack("<I", 1000) + os.urandom(1000),
    ):  # fmt: skip
        raw, _ = talk_to(listener)
        with raw:
            answer = ask(raw, junk)  # it hangs up, or says first what it does not understand
            assert answer is None or isinstance(answer, wire.Failed)
    idle = [talk_to(listener)[0] for _ in range(20)]
    for raw in idle[::2]:
        raw.sendall(begin[:7])
    for which, body in enumerate(BODIES):
        for at in range(6, len(body) - 4):
            raw, endpoint = talk_to(listener)
            with raw:
                altered = bytearray(body[:-4])
                altered[at] ^= 0xFF
                hello = wire.to_frame(wire.Hello(endpoint.number, endpoint.secret, 1))
                raw.sendall(hello * (which > 0) + framed(bytes(altered)))
    with PyverbsTransport([device()]) as other:
        connection = other.connect(listener.bind(), timeout_s=20)
        memory = listener.allocate(8)
        connection.write(b"12345678", RemoteMemory.from_bytes(memory.handle()))
        assert bytes(bytes_of(memory)) == b"12345678"
    for raw in idle:
        raw.close()


class Impostor:
    """Answers a connecting side with what a test wants: by the type of the question, messages or raw bytes."""

    def __init__(self, address: str, gid: bytes, **replies: Any) -> None:
        self.listener = socket.create_server((address, 0))
        self.endpoint = ENDPOINT._replace(address="{}:{}".format(*self.listener.getsockname()))
        self.pair = PAIR._replace(gid=gid)
        self.replies: dict[str, Any] = {
            "Hello": wire.Welcome([wire.RailAddress(gid, 0, 3)]),
            "Open": lambda question: wire.Opened(question.generation, [self.pair] * len(question.pairs)),
            "Attach": wire.Attached(4096, 3, 2, 1 << 47, 4096, 1 << 46, [1], [2]),
            **replies,
        }
        self.heard: list[str] = []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        with contextlib.suppress(OSError), self.listener.accept()[0] as raw:
            received = bytearray()
            while data := raw.recv(65536):
                received += data
                for question, number in wire.take_frames(received):
                    name = type(question).__name__
                    self.heard.append(name)
                    reply = self.replies.get(name)
                    reply = reply(question) if callable(reply) else reply
                    for said in reply if isinstance(reply, list) else [reply] * (reply is not None):
                        raw.sendall(said if isinstance(said, bytes) else wire.to_frame(said, number))
                        number = 0

    def close(self) -> None:
        self.listener.close()


def hang_up(_question: Any) -> None:
    raise ConnectionAbortedError


LIES: list[tuple[str, dict[str, Any]]] = [
    ("no rails", {"Hello": wire.Welcome([])}),
    ("another answer", {"Hello": wire.Opened(1, [])}),
    ("junk", {"Hello": b"HTTP/1.1 400 Bad Request\r\n\r\n"}),
    ("a frame that is too long", {"Hello": struct.pack("<I", wire.LONGEST_FRAME + 1)}),
    ("no answer", {"Hello": b""}),
    ("the end", {"Hello": hang_up}),
    ("an unknown error", {"Hello": wire.Failed(200, "no such error")}),
    ("text that is none", {"Hello": framed(b"OSR1\1\0\x0a" + struct.pack("<QB", 1, 8) + b"\2\xff\xfe")}),
    ("no queue pairs", {"Open": wire.Opened(1, [])}),
    ("too many queue pairs", {"Open": wire.Opened(1, [PAIR] * 8)}),
    ("a queue pair nowhere", {"Open": wire.Opened(1, [PAIR._replace(gid=bytes(16))])}),
    ("failure of Open", {"Open": wire.Failed(0, "no queue pair")}),
    ("a memory without keys", {"Attach": wire.Attached(4096, 3, 2, 1, 4096, 1, [], [])}),
    ("a memory in too many pieces", {"Attach": wire.Attached(2**64 - 1, 3, 2, 1, 1, 1, [1], [1])}),
    ("a smaller memory", {"Attach": wire.Attached(8, 3, 2, 1, 8, 1, [1], [1])}),
    ("a memory without access", {"Attach": wire.Attached(4096, 0, 2, 1, 4096, 1, [1], [1])}),
    ("a memory that is closed", {"Attach": wire.Failed(8, "attach: closed")}),
    ("keys that are none", {}),
]


@pytest.mark.parametrize(("lie", "replies"), LIES, ids=[lie for lie, _ in LIES])
@pytest.mark.parametrize("origin", ["rdma", "pyverbs"])
def test_a_peer_that_lies(origin: str, lie: str, replies: dict[str, Any]) -> None:
    need("pyverbs", origin)
    with PyverbsTransport() as transport:
        rail = transport.rails[0]
        nics, host, gid = [rail.name], rail.ip, rail.address.gid
    with MAKE[origin](nics=nics) as transport:
        impostor = Impostor(host, gid, **replies)
        handle = HANDLE._replace(offset_bytes=0, nbytes=4096)
        begin = time.monotonic()
        with raises(OnesidedError):
            connection = transport.connect(impostor.endpoint.to_bytes(), timeout_s=1)
            connection.write(bytes(100), RemoteMemory.from_bytes(handle.to_bytes()), timeout_s=1)
            connection.flush(RemoteMemory.from_bytes(handle.to_bytes()), timeout_s=1)
        assert time.monotonic() - begin < 10
        impostor.close()
        # It goes on with others.
        connection = transport.connect(transport.bind(), timeout_s=20)
        memory = transport.allocate(8)
        connection.write(b"12345678", RemoteMemory.from_bytes(memory.handle()))
        connection.flush(RemoteMemory.from_bytes(memory.handle()))
        assert bytes(bytes_of(memory)) == b"12345678"
        connection.close()


def test_a_revocation_is_confirmed_once() -> None:
    """Though it comes in the middle of an operation, and others on that memory are tried later."""
    need("pyverbs")
    there = RemoteMemory.from_bytes(HANDLE._replace(offset_bytes=0).to_bytes())
    with PyverbsTransport() as transport:
        impostor = Impostor(transport.rails[0].ip, transport.rails[0].address.gid)
        impostor.replies["Attach"] = [impostor.replies["Attach"], wire.Revoke(HANDLE.memory_id)]
        with contextlib.closing(impostor):
            connection = transport.connect(impostor.endpoint.to_bytes(), timeout_s=5)
            with pytest.raises(ConnectionLost):  # there is no such queue pair
                connection.write(b"x", there, timeout_s=5)
            wait_until(lambda: "Revoked" in impostor.heard, "the revocation is confirmed")
            for _ in range(3):
                with pytest.raises(StaleHandle):
                    connection.write(b"x", there, timeout_s=5)
            connection.close()
            impostor.thread.join()
        assert impostor.heard.count("Revoked") == 1


# ---- Peers that die or stop ------------------------------------------------------------------------------------------


def expose(kind: str, nics: list[str]) -> None:
    """A peer of its own: hands out what is needed to reach it, and then uses what it is told of."""
    with MAKE[kind](nics=nics) as transport:
        memory = transport.allocate(MIB, signals=1)
        parent.say((transport.bind(), memory.handle()))
        while order := parent.hear():
            endpoint, handle = order
            connection = transport.connect(endpoint, timeout_s=20)
            there = RemoteMemory.from_bytes(handle)
            connection.write(b"x", there, signal=0)
            parent.say("written")
            while parent.hear():
                try:
                    connection.write(b"x", there, timeout_s=10)
                    connection.flush(there, timeout_s=10)
                    parent.say("written")
                except OnesidedError as error:
                    parent.say(type(error).__name__)


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]} and a process with {way[1]}")
def process(request: pytest.FixtureRequest, spawn: Callable[[], Process]) -> Iterator[tuple[Any, Process]]:
    need(*request.param)
    nics = [device()]
    child = spawn()
    child.begin(expose, request.param[1], nics)
    with MAKE[request.param[0]](nics=nics) as transport:
        yield transport, child


def test_between_processes_and_after_a_death(process: tuple[Any, Process]) -> None:
    transport, child = process
    endpoint, handle = child.said()
    connection = transport.connect(endpoint, name="child", timeout_s=20)
    there = RemoteMemory.from_bytes(handle)
    connection.write(pattern(MIB), there, signal=0)
    back = bytearray(MIB)
    connection.read(back, there)
    same(back, pattern(MIB))
    memory = transport.allocate(8, signals=1)
    child.tell((transport.bind(), memory.handle()))
    assert child.said() == "written"
    assert memory.wait_signal(0, 1, timeout_s=20) == 1
    child.kill()
    wait_until(lambda: not connection.connected, "the death is noticed")
    with pytest.raises(ConnectionLost):
        connection.write(b"x", there)
    memory.close(timeout_s=20)  # nobody is left to answer, and nobody is waited for


def test_a_stopped_peer_does_not_hold_up_revocation(process: tuple[Any, Process]) -> None:
    """At the deadline its queue pairs are taken away; when it goes on, its operations fail and touch nothing."""
    transport, child = process
    child.said()
    memory = transport.allocate(8, signals=1)
    child.tell((transport.bind(), memory.handle()))
    assert child.said() == "written"
    child.stop()
    begin = time.monotonic()
    memory.close(timeout_s=0.5)
    assert 0.4 < time.monotonic() - begin < 10
    bytes_of(memory)[:] = 0
    child.resume()
    child.tell("again")
    assert child.said() in ("StaleHandle", "ConnectionLost", "RemoteAccessError")
    assert not bytes_of(memory).any()
    child.kill()
