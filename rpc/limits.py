"""The bounds of the control plane, and the checks that hold arguments to them.

Client and server use the same ones: the client so that a mistake of its caller raises before anything is
sent, the server because it trusts nobody.
"""

import math
from collections.abc import Iterable
from typing import SupportsFloat, SupportsIndex

from onesided.errors import BoundsError

MAX_MESSAGE_BYTES = 16 << 20  # one gRPC message, both ways
MAX_GATHER_BYTES = 15 << 20  # the payloads of all members of one all_gather together
MAX_VALUE_BYTES = 1 << 20  # one directory entry
MAX_PAGE_BYTES = 4 << 20  # the values in one page of List
MAX_NAME_BYTES = 255  # a group's or an entry's name, in UTF-8
MAX_SIZE = 65_536  # members of a group
MAX_TIMEOUT_S = 10 * 365 * 24 * 3600.0  # longer ones are cut to this: timers overflow far above it
MIN_LEASE_S, MAX_LEASE_S = 0.1, 24 * 3600.0

# The framing of one payload takes at most 6 bytes: a full gather of the largest group still fits one message.
assert MAX_GATHER_BYTES + 6 * MAX_SIZE < MAX_MESSAGE_BYTES
assert MAX_PAGE_BYTES + MAX_VALUE_BYTES + 4096 < MAX_MESSAGE_BYTES

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_LEASE_S = 10.0


def check_name(name: object, what: str) -> str:
    """Returns `name` if it is text of 1 to 255 bytes; `what` is said in the error, as in "group name"."""
    if not isinstance(name, str):
        raise TypeError(f"the {what} must be a str, not {type(name).__name__}")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        raise BoundsError(f"the {what} {name!r} cannot be written as UTF-8") from None
    if not 1 <= nbytes <= MAX_NAME_BYTES:
        raise BoundsError(f"the {what} has {nbytes} bytes; 1 to {MAX_NAME_BYTES} are allowed: {name[:40]!r}")
    return name


def check_prefix(prefix: object) -> str:
    """Returns `prefix` if it can begin a name; the empty one begins all."""
    return check_name(prefix, "prefix") if prefix != "" else ""


def check_int(value: object, what: str, low: int, high: int) -> int:
    """Returns `value` if it is an int (no bool, no float) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"the {what} must be an int, not {type(value).__name__}")
    number = int(value.__index__())
    if not low <= number <= high:
        raise BoundsError(f"the {what} is {number}; it must be {low} to {high}")
    return number


def check_size(size: object) -> int:
    """Returns `size` if a group may have that many members."""
    return check_int(size, "group size", 1, MAX_SIZE)


def check_rank(rank: object, size: int) -> int:
    """Returns `rank` if it is one of a group of `size`."""
    return check_int(rank, f"rank in a group of {size}", 0, size - 1)


def _seconds(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{what} must be a number of seconds, not {type(value).__name__}")
    seconds = float(value)
    if math.isnan(seconds):
        raise BoundsError(f"{what} is not a number")
    return seconds


def check_timeout(timeout_s: object, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Returns the seconds to wait at most: `default_s` for None. Nothing waits for ever."""
    seconds = default_s if timeout_s is None else _seconds(timeout_s, "timeout_s")
    if seconds < 0:
        raise BoundsError(f"timeout_s is {seconds:g}; it must not be negative")
    return min(seconds, MAX_TIMEOUT_S)


def check_lease(lease_s: object) -> float:
    """Returns the seconds that a lease lasts."""
    seconds = _seconds(lease_s, "lease_s")
    if not MIN_LEASE_S <= seconds <= MAX_LEASE_S:
        raise BoundsError(f"lease_s is {seconds:g}; it must be {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds")
    return seconds


def check_bytes(data: object, what: str, limit: int) -> bytes:
    """Returns `data` as bytes if it is bytes-like and no longer than `limit`."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"the {what} must be bytes, not {type(data).__name__}")
    nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if nbytes > limit:
        raise BoundsError(f"the {what} has {nbytes} bytes; at most {limit} fit")
    return bytes(data)


def ranks_text(ranks: Iterable[int]) -> str:
    """Says ranks as people do: "rank 3", "ranks 1, 4-7"; at most ten runs of them."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    if len(words) > 10:
        words = [*words[:10], "…"]
    return ("rank " if len(words) == 1 and "-" not in words[0] else "ranks ") + ", ".join(words)
