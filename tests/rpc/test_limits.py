"""Arguments that cannot be right raise by name, before anything is sent."""

import math

import pytest
from onesided.rpc import address, limits

from onesided.errors import BoundsError, OnesidedError


class Index:
    def __index__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (-1, BoundsError),
        (4, BoundsError),
        (1 << 70, BoundsError),
        ("0", TypeError),
        (1.0, TypeError),
        (True, TypeError),
        (None, TypeError),
        (b"1", TypeError),
    ],
)
def test_ranks(rank: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="rank in a group of 4"):
        limits.check_rank(rank, 4)


def test_ranks_of_any_integer_type() -> None:
    assert [limits.check_rank(rank, 4) for rank in (0, 3, Index())] == [0, 3, 3]


@pytest.mark.parametrize("size", [0, -1, 65_537, 1 << 40])
def test_sizes(size: int) -> None:
    with pytest.raises(BoundsError, match="group size"):
        limits.check_size(size)


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128, "\ud800"])
def test_names_that_are_too_long_or_no_text(name: str) -> None:
    with pytest.raises(BoundsError, match="entry name"):
        limits.check_name(name, "entry name")


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "a b/c\n", "模型"])
def test_names_that_are_fine(name: str) -> None:
    assert limits.check_name(name, "entry name") == name


@pytest.mark.parametrize("name", [b"x", 3, None])
def test_names_that_are_no_str(name: object) -> None:
    with pytest.raises(TypeError, match="group name"):
        limits.check_name(name, "group name")


def test_timeouts() -> None:
    assert limits.check_timeout(None) == 60
    assert limits.check_timeout(0) == 0
    assert limits.check_timeout(math.inf) == limits.MAX_TIMEOUT_S
    for wrong, error in ((-0.1, BoundsError), (math.nan, BoundsError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match="timeout_s"):
            limits.check_timeout(wrong)


def test_leases() -> None:
    assert limits.check_lease(3) == 3.0
    for wrong, error in (
        (0, BoundsError),
        (-1, BoundsError),
        (math.inf, BoundsError),
        (math.nan, BoundsError),
        (None, TypeError),
    ):
        with pytest.raises(error, match="lease_s"):
            limits.check_lease(wrong)


def test_bytes() -> None:
    assert limits.check_bytes(bytearray(b"ab"), "value", 2) == b"ab"
    assert limits.check_bytes(memoryview(b"abcd")[::2], "value", 2) == b"ac"
    with pytest.raises(BoundsError, match="the value has 3 bytes; at most 2 fit"):
        limits.check_bytes(b"abc", "value", 2)
    for wrong in ("ab", 5, None, [1]):
        with pytest.raises(TypeError, match="value"):
            limits.check_bytes(wrong, "value", 9)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "ranks "),
        ([3], "rank 3"),
        ([1, 0], "ranks 0-1"),
        ([7, 1, 5, 6], "ranks 1, 5-7"),
        (range(0, 60, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, …"),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert limits.ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:9", ("::1", 9)),
        ("node-1.local:65535", ("node-1.local", 65535)),
    ],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert address.parse(text) == parts
    assert address.join(*parts) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":80",
        "host:",
        "host:http",
        "host:-1",
        "host:65536",
        "::1:80",
        "1:2:3",
        "host:0",
        "host: 80",
        "host:８０",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BoundsError, match="port"):
        address.parse(text)


def test_addresses_of_wrong_types() -> None:
    for wrong in (None, 80, ("h", 80), b"h:80"):
        with pytest.raises(TypeError, match="address"):
            address.parse(wrong)


def test_names_resolve_to_one_address() -> None:
    assert address.resolve("localhost") == "127.0.0.1"
    assert address.resolve("::1") == "::1"
    with pytest.raises(OnesidedError, match=r"no\.such\.host\.invalid"):
        address.resolve("no.such.host.invalid")
