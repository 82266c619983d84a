"""What can be wrong with an argument, by what it should have been: the tables behind the tests of bad input."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from onesided.errors import BoundsError, LayoutError, OnesidedError, Unsupported

Errors = type[BaseException] | tuple[type[BaseException], ...]
NOT_NUMBERS: list[Any] = ["1", b"1", [1], (1,), {}, object(), 1j, np.zeros(2), type, lambda: 0]
NOT_INTEGERS: list[Any] = [*NOT_NUMBERS, 1.0, 0.5, float("nan"), float("inf"), np.float64(1)]
HUGE = [2**63, 2**64, 2**200, -1, -(2**63), -(2**64), -(2**200)]


class Bad(NamedTuple):
    value: Any
    errors: Errors


def bad(errors: Errors, values: list[Any]) -> list[Bad]:
    return [Bad(value, errors) for value in values]


def read_only() -> "np.ndarray[Any, Any]":
    array = np.zeros(8, np.uint8)
    array.flags.writeable = False
    return array


SQUARE = np.zeros((4, 4), np.float32)
NO_BUFFERS = bad(TypeError, [None, 1, 1.5, "text", [1, 2], (b"a",), {}, object(), type, lambda: 0, range(3)])
NOT_CONTIGUOUS = [
    SQUARE.T,
    SQUARE[:, 1:],
    SQUARE[::2],
    SQUARE[::-1],
    np.asfortranarray(SQUARE),
    memoryview(b"abcd")[::2],
]
NOT_BYTES = [np.array([object()]), np.array([1, "a"], dtype=object), np.zeros(2, "M8[s]")]
STRIDED = bad(LayoutError, [*NOT_CONTIGUOUS, *NOT_BYTES])

# By the kind of argument. None is added where it is not legal.
BAD: dict[str, list[Bad]] = {
    "offset": [*bad(TypeError, [None, *NOT_INTEGERS]), *bad(BoundsError, HUGE)],
    "rank": [*bad(TypeError, [None, *NOT_INTEGERS]), *bad(BoundsError, [*HUGE, 2**31, 2**32, 1000])],
    "optional rank": [*bad(TypeError, NOT_INTEGERS), *bad(BoundsError, [*HUGE, 2**31, 2**32, 1000])],
    "index": [*bad(TypeError, [None, *NOT_INTEGERS]), *bad(BoundsError, [*HUGE, 2**31, 2**32, 2**32 + 1, 1000])],
    "optional index": [*bad(TypeError, NOT_INTEGERS), *bad(BoundsError, [*HUGE, 2**31, 2**32, 2**32 + 1, 1000])],
    "word": [*bad(TypeError, [None, *NOT_INTEGERS]), *bad(BoundsError, [2**64, 2**200, -(2**63) - 1, -(2**200)])],
    "count": [*bad(TypeError, [None, *NOT_INTEGERS]), *bad(BoundsError, [2**64, 2**200, -1, -(2**63), -(2**200)])],
    "optional count": [*bad(TypeError, NOT_INTEGERS), *bad(BoundsError, [2**64, 2**200, -1, -(2**63), -(2**200)])],
    "size": [*bad(TypeError, [None, *NOT_INTEGERS]), *bad((BoundsError, OnesidedError), [2**62, *HUGE])],
    "optional size": [*bad(TypeError, NOT_INTEGERS), *bad(BoundsError, [2**62, *HUGE])],
    "few": [*bad(TypeError, [None, *NOT_INTEGERS]), *bad(BoundsError, [2**21, 2**32, *HUGE])],
    "timeout": [
        *bad(TypeError, ["1", b"1", [1], (1,), {}, object(), 1j, type, lambda: 0, np.zeros(2)]),
        *bad(BoundsError, [-1, -0.1, float("nan"), float("-inf"), -(2**63)]),
        *bad((TypeError, BoundsError), [-(2**2000)]),
    ],
    "spin": [
        *bad(TypeError, [None, "1", b"1", [1], {}, object(), 1j, type]),
        *bad(BoundsError, [-1, float("nan"), float("-inf")]),
    ],
    "flag": bad(TypeError, [None, 1, 0, "yes", [], object(), 1.0]),
    "source": [*NO_BUFFERS, *STRIDED],
    "destination": [*NO_BUFFERS, *STRIDED, *bad(LayoutError, [b"read-only", memoryview(b"read-only"), read_only()])],
    "access": [
        *bad(TypeError, [None, 1, b"rw", ["r"], object()]),
        *bad(LayoutError, ["", "x", "RW", "rwx", "wr", "r\0"]),
    ],
    "label": bad(TypeError, [None, 1, b"name", ["name"], object()]),
    "remote": bad(TypeError, [None, 1, b"handle", "handle", [1], object(), type]),
    "memory": bad(TypeError, [None, 1, b"memory", bytearray(8), object(), type]),
    "bytes": bad(TypeError, [None, 1, "text", bytearray(8), memoryview(b"x"), [1], object()]),
}


class Use(NamedTuple):
    """A public method, with good arguments and what each should be. The key is its name, or its position."""

    name: str
    call: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, str]

    def with_each_bad_value(self) -> Iterator[tuple[str, dict[str, Any], Errors]]:
        for argument, kind in self.kinds.items():
            for value, errors in BAD[kind]:
                yield f"{self.name}({argument}={value!r:.60})", {**self.good, argument: value}, errors


def refuses(use: Use, untouched: Callable[[], bool]) -> int:
    """Every bad value of every argument raises its error, and changes nothing. Returns how many there were."""
    tried = 0
    for what, arguments, errors in use.with_each_bad_value():
        try:
            use.call(**arguments)
        except errors as error:
            if not str(error) or "incompatible function arguments" in str(error):
                raise AssertionError(f"{what} raised {type(error).__name__} without a word of ours: {error}") from error
        except BaseException as error:
            raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error
        else:
            raise AssertionError(f"{what} was taken")
        assert untouched(), f"{what} has changed memory"
        tried += 1
    try:
        use.call(**use.good, no_such_argument=1)
    except TypeError:
        return tried
    raise AssertionError(f"{use.name} took an argument that it has not")


def bad_tensors() -> Iterator[tuple[str, Any, Errors]]:
    """What torch has that is not plain memory."""
    import torch

    square = torch.zeros(4, 4)
    complex_ = torch.zeros(4, dtype=torch.complex64)
    yield "transposed", square.t(), LayoutError
    yield "column", square[:, 1], LayoutError
    yield "every other", square[::2], LayoutError
    yield "expanded", torch.zeros(1).expand(5), LayoutError
    yield "channels last", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), LayoutError
    yield "meta", torch.zeros(4, device="meta"), Unsupported
    yield "sparse", square.to_sparse(), LayoutError
    yield "sparse csr", torch.eye(4).to_sparse_csr(), LayoutError
    yield "conjugate", complex_.conj(), LayoutError
    yield "conjugate of one", torch.tensor(1 + 2j).conj(), LayoutError
    yield "negative of one", torch.tensor(1 + 2j).conj().imag, LayoutError
    yield "negative of one in a row", torch.ones(1, dtype=torch.complex64).conj().imag, LayoutError
    # Not only numbers: two neighbours of a conjugate's imaginary part, and what lies between them, are contiguous.
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        yield (
            f"negative of several, {dtype}",
            torch.ones(2, dtype=dtype).conj().imag.as_strided((3,), (1,), 1),
            LayoutError,
        )
    yield "negative view", torch._neg_view(torch.ones(4)), LayoutError
    yield "negative view of a complex", torch._neg_view(complex_), LayoutError
    yield "negative parameter", torch.nn.Parameter(torch._neg_view(torch.ones(4)), requires_grad=False), LayoutError
    yield "none", None, TypeError
    yield "mkldnn", square.to_mkldnn(), LayoutError
    yield "dtype", torch.float32, TypeError
    yield "device", torch.device("cpu"), TypeError
    yield "module", torch.nn.Linear(2, 2), TypeError
    yield "list of tensors", [square], TypeError
    yield "class", torch.Tensor, TypeError
    if hasattr(torch, "func"):
        yield "batched", torch.func.vmap(lambda x: x.sum() * x)(square).t(), LayoutError
