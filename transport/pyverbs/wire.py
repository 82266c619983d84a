"""What travels, in pure Python: handles, endpoints, and the messages that two rdma transports exchange over TCP.

docs/wire.md explains them. Little-endian, without padding, closed by a CRC-32 of all bytes before it. A reader takes
exactly these fields; every other byte string is a HandleError, and no length field ever makes it allocate.
"""

import contextlib
import socket
import struct
import zlib
from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from onesided import errors
from onesided.errors import ConnectionLost, HandleError, OnesidedError

VERSION = 1
RDMA = 2  # the kind of transport, whichever of its two implementations speaks
READ, WRITE = 1, 2  # what a handle permits
LONGEST_HANDLE, LONGEST_FRAME = 1024, 256 << 10
MOST_RAILS, MOST_KEYS = 8, 32768

# Of struct codes and of these: "text", a length of one byte, then UTF-8; "keys", a count of four bytes, then as many;
# "rails" and "pairs", a count of one byte, then as many rows.
Layout = Sequence[str]


def encode(magic: bytes, layout: Layout, values: Sequence[Any]) -> bytes:
    """The bytes of a handle, an endpoint or a message."""
    body = magic + struct.pack("<H", VERSION)
    for code, value in zip(layout, values, strict=True):
        if code == "text":
            text = value.encode()[:255]
            body += struct.pack("<B", len(text)) + text
        elif code == "keys":
            body += struct.pack(f"<I{len(value)}I", len(value), *value)
        elif code in ROWS:
            row_codes = "<" + "".join(LAYOUTS[ROWS[code]])
            body += struct.pack("<B", len(value)) + b"".join(struct.pack(row_codes, *row) for row in value)
        else:
            body += struct.pack("<" + code, value)
    return body + struct.pack("<I", zlib.crc32(body))


class Reader:
    """Takes fields off the front of what encode() wrote."""

    def __init__(self, data: bytes, what: str, longest: int, magic: bytes) -> None:
        if not isinstance(data, bytes):
            raise TypeError(f"{what} must be bytes, not {type(data).__name__}")
        if not 4 <= len(data) <= longest:
            raise HandleError(f"{what} of {len(data)} bytes is too short or too long ({longest} at most)")
        self.what, self.rest = what, data[:-4]
        if struct.pack("<I", zlib.crc32(self.rest)) != data[-4:]:
            raise HandleError(f"{what} is damaged: its checksum does not fit")
        if (found := self.take("4sH")) != (magic, VERSION):
            raise HandleError(f"these bytes are not {what} of version {VERSION}, but {found}")

    def take(self, codes: str, most: int | None = None) -> tuple[Any, ...]:
        """The next fields; a count among them may be `most`."""
        size = struct.calcsize("<" + codes)
        if size > len(self.rest):
            raise HandleError(f"{self.what} is cut short")
        taken, self.rest = struct.unpack("<" + codes, self.rest[:size]), self.rest[size:]
        if most is not None and taken[0] > most:
            raise HandleError(f"{self.what} has {taken[0]} entries where {most} are the most")
        return taken

    def fields(self, layout: Layout) -> list[Any]:
        """All that is left."""
        values: list[Any] = []
        for code in layout:
            if code == "text":
                values.append(self.take(f"{self.take('B')[0]}s")[0].decode(errors="replace"))
            elif code == "keys":
                values.append([self.take("I")[0] for _ in range(self.take("I", MOST_KEYS)[0])])
            elif code in ROWS:
                row, row_codes = ROWS[code], "".join(LAYOUTS[ROWS[code]])
                values.append([row(*self.take(row_codes)) for _ in range(self.take("B", MOST_RAILS)[0])])
            else:
                values += self.take(code)
        if self.rest:
            raise HandleError(f"{self.what} has {len(self.rest)} bytes too many")
        return values


# ---- Handles and endpoints -------------------------------------------------------------------------------------------

HANDLE = ("B", "B", "16s", "Q", "Q", "Q", "I", "16s")
ENDPOINT = ("B", "B", "16s", "16s", "Q", "16s", "I", "text")


class RemoteMemory(NamedTuple):
    """What a handle describes: a range of a peer's memory, and the key that opens it."""

    kind: int
    access: int
    transport: bytes
    memory_id: int
    offset_bytes: int
    nbytes: int
    signals: int
    key: bytes

    def to_bytes(self) -> bytes:
        """The handle."""
        return encode(b"OSHM", HANDLE, self)

    @classmethod
    def from_bytes(cls, handle: bytes) -> "RemoteMemory":
        """Reads a handle, whoever wrote it."""
        remote = cls(*Reader(handle, "a handle", LONGEST_HANDLE, b"OSHM").fields(HANDLE))
        if remote.kind not in (1, 2, 3) or remote.access not in (1, 2, 3):
            raise HandleError(f"a handle of unknown kind {remote.kind} or access {remote.access}")
        if remote.offset_bytes + remote.nbytes >= 1 << 64:
            raise HandleError("a handle's range overflows 64 bits")
        return remote


class Endpoint(NamedTuple):
    """Where a transport listens, and the secret that proves that one was told so."""

    kind: int
    shared: int
    transport: bytes
    host: bytes  # for shm; else zeros
    number: int
    secret: bytes
    pid: int
    address: str

    def to_bytes(self) -> bytes:
        """For connect() of the peer."""
        return encode(b"OSPE", ENDPOINT, self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Endpoint":
        """Reads an endpoint, whoever wrote it."""
        endpoint = cls(*Reader(data, "an endpoint", LONGEST_HANDLE, b"OSPE").fields(ENDPOINT))
        if endpoint.kind not in (1, 2, 3) or endpoint.shared > 1:
            raise HandleError(f"an endpoint of unknown kind {endpoint.kind} or use {endpoint.shared}")
        return endpoint


# ---- Messages --------------------------------------------------------------------------------------------------------


def record(name: str, fields: str) -> Any:
    """A named tuple whose fields have codes: "number:I text:text"."""
    names, codes = zip(*(field.split(":") for field in fields.split()), strict=True)
    made = namedtuple(name, names)  # type: ignore[misc]
    LAYOUTS[made] = codes
    return made


LAYOUTS: dict[Any, Layout] = {}

# One port of the answering side; the MTU as ibv_mtu, 1 for 256 bytes to 5 for 4096.
RailAddress = record("RailAddress", "gid:16s lid:H mtu:B")
# One queue pair: the rails of its lane (local is the connecting side), where it is, the number of its first packet, and
# how many reads and atomics of the other side it answers at once.
Pair = record("Pair", "local_rail:B remote_rail:B gid:16s lid:H mtu:B number:I first_packet:I reads:B")
ROWS = {"rails": RailAddress, "pairs": Pair}

# The connecting side: an endpoint, and its secret.
Hello = record("Hello", "endpoint:Q secret:16s pid:I")
# The rails of the other side.
Welcome = record("Welcome", "rails:rails")
# The queue pairs of a new generation, one a lane. Those of the one before end first.
Open = record("Open", "generation:I pairs:pairs")
# The queue pairs that answer them, in the same order.
Opened = record("Opened", "generation:I pairs:pairs")
# A memory, and the key that its handle had.
Attach = record("Attach", "memory_id:Q key:16s")
# Where it is, and the keys that devices want: by rail, then by piece.
Attached = record(
    "Attached",
    "nbytes:Q access:B signals:I address:Q piece_nbytes:Q words_address:Q keys:keys words_keys:keys",
)
# The connecting side has done with a memory.
Detach = record("Detach", "memory_id:Q")
# The owner closes a memory: nothing more may be posted.
Revoke = record("Revoke", "memory_id:Q")
# Nothing is under way any more.
Revoked = record("Revoked", "memory_id:Q")
# In place of Welcome, Opened or Attached: which of ERRORS, and what it says.
Failed = record("Failed", "error:B text:text")

# The target has taken its queue pairs away, as a holder of this memory did not answer in time.
Ended = record("Ended", "memory_id:Q")

MESSAGES = [None, Hello, Welcome, Open, Opened, Attach, Attached, Detach, Revoke, Revoked, Failed, Ended]
ERRORS: list[type[OnesidedError]] = [
    OnesidedError, ConnectionLost, errors.DeadlineExceeded, errors.RemoteAccessError, errors.BoundsError,
    errors.LayoutError, HandleError, errors.RegistrationError, errors.StaleHandle, errors.Unsupported,
]  # fmt: skip


def to_frame(message: Any, request_id: int = 0) -> bytes:
    """A message as it goes over the socket: its length, then its bytes. An answer has the number of its question."""
    kind = type(message)
    data = encode(b"OSR1", ("B", "Q", *LAYOUTS[kind]), (MESSAGES.index(kind), request_id, *message))
    return struct.pack("<I", len(data)) + data


def from_bytes(data: bytes) -> tuple[Any, int]:
    """A message, and its number among the questions."""
    reader = Reader(data, "a message", LONGEST_FRAME, b"OSR1")
    number, request_id = reader.take("BQ")
    if not 1 <= number < len(MESSAGES):
        raise HandleError(f"unknown message {number}")
    kind = MESSAGES[number]
    message = kind(*reader.fields(LAYOUTS[kind]))
    if kind in (Open, Opened) and not all(1 <= pair.mtu <= 5 for pair in message.pairs):
        raise HandleError("a message names an unknown MTU")
    if kind is Attached and message.piece_nbytes == 0:
        raise HandleError("a message describes a memory in pieces of no bytes")
    return message, request_id


class Framed:
    """Messages over a socket. Sending and receiving never block."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Messages leave at once, and a peer whose host has vanished is noticed within about ten seconds.
        for option, value in {
            "NODELAY": 1,
            "KEEPIDLE": 4,
            "KEEPINTVL": 2,
            "KEEPCNT": 3,
            "USER_TIMEOUT": 10_000,
        }.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        self.socket, self.received, self.unsent = sock, bytearray(), bytearray()

    def send(self, message: Any = None, request_id: int = 0) -> None:
        """Sends a message behind what is left of others; without one, what is left."""
        if message is not None:
            self.unsent += to_frame(message, request_id)
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        if len(self.unsent) > 64 * LONGEST_FRAME:
            raise ConnectionLost("the peer does not listen")

    def receive(self) -> Iterator[tuple[Any, int]]:
        """The messages that have come. ConnectionLost at the end of the stream, HandleError for what is no message."""
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(65536):
                self.received += data
                yield from take_frames(self.received)
            raise ConnectionLost("the connection has ended")


def take_frames(received: bytearray) -> Iterator[tuple[Any, int]]:
    """Takes the whole messages off the front of what was received."""
    while len(received) >= 4:
        end = 4 + int.from_bytes(received[:4], "little")
        if end > 4 + LONGEST_FRAME:
            raise HandleError("the peer does not speak this protocol")
        if len(received) < end:
            return
        data = bytes(received[4:end])
        del received[:end]
        yield from_bytes(data)
