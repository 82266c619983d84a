"""Shapes and element types of windows, named as torch and numpy name them, without importing torch."""

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from onesided.errors import BoundsError, LayoutError, Unsupported

__all__ = ["Layout", "layout_of"]

# Types that torch has and numpy has not, by name, with their size in bytes.
_TORCH_ONLY = {
    "bfloat16": 2,
    "complex32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


class Layout(NamedTuple):
    """How the bytes of a window are seen through `window.tensor` and `window.array`."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.shape) * self.itemsize

    def array(self, memory: Any) -> "np.ndarray[Any, Any]":
        """A numpy view of `memory`. Unsupported for types that numpy has not."""
        try:
            np.dtype(self.dtype)
        except TypeError:
            raise Unsupported(
                f"numpy has no type {self.dtype}: use window.tensor, or memoryview(window.memory)"
            ) from None
        if self.nbytes == 0:
            return np.empty(self.shape, dtype=self.dtype)
        return np.frombuffer(memory, dtype=self.dtype, count=math.prod(self.shape)).reshape(self.shape)

    def tensor(self, memory: Any) -> Any:
        """A torch view of `memory`."""
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise Unsupported(f"torch has no type {self.dtype}: use window.array")
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=dtype)
        if memoryview(memory).readonly:
            raise Unsupported("torch has no read-only tensors: use window.array for a window over read-only memory")
        flat = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8, count=self.nbytes))
        return flat.view(dtype).view(self.shape)


def layout_of(nbytes: object, shape: object, dtype: object) -> Layout:
    """The layout for `nbytes` bytes, or for `shape` of `dtype` (torch's, numpy's, or a name)."""
    if (nbytes is None) == (shape is None):
        raise TypeError("give the size of the window either as nbytes or as shape and dtype")
    if nbytes is not None:
        if dtype is not None:
            raise TypeError("dtype goes with shape, not with nbytes")
        return Layout((_dimension(nbytes, "nbytes"),), "uint8", 1)
    if dtype is None:
        raise TypeError("give the dtype of the shape: torch's, numpy's, or a name as in dtype='float32'")
    if isinstance(shape, (str, bytes)) or not hasattr(shape, "__iter__"):
        shape = (shape,)
    name, itemsize = _element_type(dtype)
    return Layout(tuple(_dimension(size, "a dimension of the shape") for size in shape), name, itemsize)


def _dimension(value: object, what: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer, not {'None' if value is None else type(value).__name__}")
    number = int(value.__index__())
    if not 0 <= number < 1 << 63:
        raise BoundsError(f"{what} must lie in [0, 2**63), not {number}")
    return number


def _element_type(dtype: object) -> tuple[str, int]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
        return name, int(dtype.itemsize)
    if isinstance(dtype, str) and dtype in _TORCH_ONLY:
        return dtype, _TORCH_ONLY[dtype]
    try:
        known = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError as error:
        raise LayoutError(f"{dtype!r} is not an element type: {error}") from None
    if known.hasobject or known.kind in "VSU" or not known.isnative:
        raise LayoutError(f"elements of type {known} cannot lie in a window: plain numbers in native byte order can")
    return known.name, known.itemsize
