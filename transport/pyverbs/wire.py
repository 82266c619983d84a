"""What travels, in pure Python: handles, endpoints, and the messages that two rdma transports exchange over TCP.

docs/wire.md explains them. Little-endian, without padding, closed by a CRC-32 of all bytes before it. A reader takes
exactly these fields; every other byte string is a HandleError, and no length field ever makes it allocate.
"""

import contextlib
import io
import struct
import zlib
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

from onesided import errors

VERSION = struct.pack("<H", 1)
RDMA = 2  # the kind of transport, whichever of its two implementations speaks
READ, WRITE = 1, 2  # what a handle permits
LONGEST_FRAME = 256 << 10


def record(name: str, fields: str, valid: Callable[[Any], bool] = lambda _: True) -> Any:
    """A named tuple of fields with codes, "number:I text:text", and what must hold of them.

    The codes are those of `struct`, and these: "text", a length of one byte, then UTF-8; "keys", a count of four bytes,
    then as many; "rails" and "pairs", a count of one byte, then as many records.
    """
    names, codes = zip(*(field.split(":") for field in fields.split()), strict=True)
    return type(name, (namedtuple(name, names),), {"codes": codes, "valid": valid})


# ---- Handles and endpoints -------------------------------------------------------------------------------------------

HANDLE = "kind:B access:B transport:16s memory_id:Q offset_bytes:Q nbytes:Q signals:I key:16s"
ENDPOINT = "kind:B shared:B transport:16s host:16s number:Q secret:16s pid:I address:text"


class Portable:
    """A record that programs pass on themselves."""

    magic = b""

    def to_bytes(self) -> bytes:
        """What the peer is to be given."""
        return encode(self.magic, self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Any:
        """Reads it, whoever wrote it."""
        with decoded(data, cls.magic) as body:
            return unpack(cls, body)


class RemoteMemory(Portable, record("RemoteMemory", HANDLE)):  # type: ignore[misc]
    """A handle: a range of a peer's memory, and the key that opens it."""

    magic = b"OSHM"

    def valid(self) -> bool:
        """Whether there can be one."""
        known = self.kind in (1, 2, 3) and self.access in (1, 2, 3)
        return known and self.offset_bytes + self.nbytes < 1 << 64


class Endpoint(Portable, record("Endpoint", ENDPOINT)):  # type: ignore[misc]
    """Where a transport listens, and the secret that proves that one was told so. `host` is zeros but for shm."""

    magic = b"OSPE"

    def valid(self) -> bool:
        """Whether there can be one."""
        return self.kind in (1, 2, 3) and self.shared in (0, 1)


# ---- Messages --------------------------------------------------------------------------------------------------------

# One port of the answering side; the MTU as ibv_mtu, 1 for 256 bytes to 5 for 4096.
RailAddress = record("RailAddress", "gid:16s lid:H mtu:B")
# One queue pair: the rails of its lane (local is the connecting side), where it is, the number of its first packet, and
# how many reads and atomics of the other side it answers at once.
Pair = record(
    "Pair",
    "local_rail:B remote_rail:B gid:16s lid:H mtu:B number:I first_packet:I reads:B",
    lambda it: it.mtu in (1, 2, 3, 4, 5),
)

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
    lambda it: it.piece_nbytes > 0,
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
# The owner changes the keys of a memory: as Revoke, but it may be attached again.
Renew = record("Renew", "memory_id:Q")

MESSAGES = [Hello, Welcome, Open, Opened, Attach, Attached, Detach, Revoke, Revoked, Failed, Ended, Renew]
# What stands before each: which it is, counted from 1, and the number of the question that it is or answers.
Header = record("Header", "message:B request_id:Q", lambda it: 1 <= it.message <= len(MESSAGES))
ERRORS = [
    errors.OnesidedError, errors.ConnectionLost, errors.DeadlineExceeded, errors.RemoteAccessError, errors.BoundsError,
    errors.LayoutError, errors.HandleError, errors.RegistrationError, errors.StaleHandle, errors.Unsupported,
]  # fmt: skip


def to_frame(message: Any, request_id: int = 0) -> bytes:
    """A message as it goes over the socket: its length, then its bytes. An answer has the number of its question."""
    data = encode(b"OSR1", Header(1 + MESSAGES.index(type(message)), request_id), message)
    return struct.pack("<I", len(data)) + data


def from_bytes(data: bytes) -> tuple[Any, int]:
    """A message, and its number among the questions."""
    with decoded(data, b"OSR1") as body:
        header = unpack(Header, body)
        return unpack(MESSAGES[header.message - 1], body), header.request_id


def take_frames(received: bytearray) -> Iterator[tuple[Any, int]]:
    """Takes the whole messages off the front of what was received."""
    while len(received) >= 4:
        end = 4 + int.from_bytes(received[:4], "little")
        if end > 4 + LONGEST_FRAME:
            raise errors.HandleError("the peer does not speak this protocol")
        if len(received) < end:
            return
        data = bytes(received[4:end])
        del received[:end]
        yield from_bytes(data)


# ---- Their bytes -----------------------------------------------------------------------------------------------------

# Fields that repeat, by their code: that of their count, the most there may be, and what is repeated.
REPEATED = {"text": ("B", 255, "B"), "keys": ("I", 32768, "I"), "rails": ("B", 8, RailAddress), "pairs": ("B", 8, Pair)}


def pack(code: Any, value: Any) -> bytes:
    """The bytes of a field, by its code, or of a record, by its type."""
    if code in REPEATED:
        count, most, each = REPEATED[code]
        entries = value.encode()[:most] if code == "text" else value
        return struct.pack("<" + count, len(entries)) + b"".join(pack(each, entry) for entry in entries)
    if isinstance(code, str):
        return struct.pack("<" + code, value)
    return b"".join(map(pack, code.codes, value))


def unpack(code: Any, body: io.BytesIO) -> Any:
    """The field or record that comes next; struct.error if it is not all there."""
    if code in REPEATED:
        count, most, each = REPEATED[code]
        length = unpack(count, body)
        if length > most:
            raise errors.HandleError(f"{code} of {length} where {most} are the most")
        entries = [unpack(each, body) for _ in range(length)]
        return bytes(entries).decode(errors="replace") if code == "text" else entries
    if isinstance(code, str):
        return struct.unpack("<" + code, body.read(struct.calcsize("<" + code)))[0]
    unpacked = code(*[unpack(field, body) for field in code.codes])
    if not unpacked.valid():
        raise errors.HandleError(f"a {code.__name__} with values that none has")
    return unpacked


def encode(magic: bytes, *records: Any) -> bytes:
    """Puts what is common to all in front of records, and behind them."""
    data = magic + VERSION + b"".join(pack(type(it), it) for it in records)
    return data + struct.pack("<I", zlib.crc32(data))


@contextlib.contextmanager
def decoded(data: bytes, magic: bytes) -> Iterator[io.BytesIO]:
    """The bytes of the records, of which all must have been taken at the end."""
    if struct.pack("<I", zlib.crc32(data[:-4])) != data[-4:] or data[:6] != magic + VERSION:
        raise errors.HandleError(f"these {len(data)} bytes are damaged, or no {magic.decode()} of version 1")
    body = io.BytesIO(data[6:-4])
    try:
        yield body
    except struct.error as error:
        raise errors.HandleError("these bytes are cut short") from error
    if body.read(1):
        raise errors.HandleError("these bytes are too many")
