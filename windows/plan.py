"""Plans: pieces of tensors, described once and moved again and again."""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from onesided import _core
from onesided.errors import BoundsError, LayoutError

__all__ = ["Plan"]


class Plan(_core.Plan):
    """Pieces of memory here, each with its place in a window: what `put_many` and `get_many` move in one call.

    `Plan([(tensor, offset_bytes), ...])` for any pieces, `Plan.strided` for a block of rows. The same plan serves puts
    and gets, any window and any peer. It keeps its tensors alive and where they are: they can no more be resized.
    """

    @classmethod
    def strided(
        cls, view: Any, offset_bytes: int = 0, strides_bytes: Sequence[int] | None = None, *, columns: int | None = None
    ) -> "Plan":
        """A view that may be strided, a slice of columns for instance, and a block of its shape in a window.

        `view`: a tensor or array whose last dimension is dense. In the window the block begins at `offset_bytes`, and
        `strides_bytes` says how far apart its neighbours are, a number for each dimension but the last; without it the
        block is dense. Instead, `columns` says how many elements a row has there of which the block takes a part.

        Raises LayoutError if the last dimension is not dense, BoundsError for strides that are negative or too few.
        """
        if not hasattr(view, "shape") or not (hasattr(view, "is_contiguous") or hasattr(view, "flags")):
            raise TypeError(f"view must be a tensor or an array, not {type(view).__name__}")
        shape, itemsize = tuple(int(size) for size in view.shape), item_nbytes(view)
        if not shape:
            return cls([(view, offset_bytes)])
        if columns is not None:
            if strides_bytes is not None:
                raise TypeError("give strides_bytes or columns, not both")
            if (columns := operator.index(columns)) < shape[-1]:
                raise BoundsError(f"rows of {columns} elements do not hold {shape[-1]}")
            strides_bytes = dense_strides((*shape[:-1], columns), itemsize)
        elif strides_bytes is None:
            strides_bytes = dense_strides(shape, itemsize)
        strides = [operator.index(stride) for stride in strides_bytes]
        if len(strides) != len(shape) - 1 or any(stride < 0 for stride in strides):
            raise BoundsError(
                f"strides_bytes must be {len(shape) - 1} numbers of at least 0, not {list(strides_bytes)}"
            )
        return cls(pieces(view, shape, itemsize, offset_bytes, strides))


def dense_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """How far apart neighbours are in each dimension but the last."""
    return [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape) - 1)]


def pieces(
    view: Any, shape: tuple[int, ...], itemsize: int, offset_bytes: int, strides: list[int]
) -> Iterator[tuple[Any, int]]:
    """As few as there can be: what is dense on both sides is one piece."""
    if is_dense(view) and strides == dense_strides(shape, itemsize):
        yield view, offset_bytes
    elif len(shape) == 1:
        raise LayoutError("the last dimension of this view is not dense: its elements lie apart; use x.contiguous()")
    else:
        for index in range(shape[0]):
            yield from pieces(view[index], shape[1:], itemsize, offset_bytes + index * strides[0], strides[1:])


def item_nbytes(view: Any) -> int:
    """The size of an element of a tensor or an array."""
    size = getattr(view, "itemsize", None)
    return int(size if size is not None else view.element_size())


def is_dense(view: Any) -> bool:
    """Whether its elements lie one after the other."""
    if hasattr(view, "is_contiguous"):
        return bool(view.is_contiguous())
    return bool(view.flags.c_contiguous)
