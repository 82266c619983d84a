"""Tensors and arrays as spans, and the types that they hold."""

from enum import Enum
from typing import Any, NamedTuple

from onesided._core import Span, check_reducible
from onesided.errors import BoundsError, Unsupported

__all__ = ["Data", "ReduceOp", "data_of", "rows_of"]


class ReduceOp(Enum):
    """How elements are reduced. AVG is the sum divided by the number of ranks; of integers, truncated toward zero."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    AVG = "avg"


# Of truth values, stored as the bytes 0 and 1.
_OF_BOOL = {
    ReduceOp.SUM: "bor",
    ReduceOp.MAX: "bor",
    ReduceOp.BOR: "bor",
    ReduceOp.PRODUCT: "band",
    ReduceOp.MIN: "band",
    ReduceOp.BAND: "band",
    ReduceOp.BXOR: "bxor",
}
_OF_COMPLEX = {"complex64": ("float32", 4), "complex128": ("float64", 8)}
_spelled: dict[Any, str] = {}  # the name of a type, by torch's or numpy's object for it


class Data(NamedTuple):
    """A tensor or array as a span of its elements. A complex one is a span of pairs where it is reduced."""

    span: Span
    dtype: str

    def reducible(self, op: ReduceOp) -> tuple[str, str]:
        """The names of the elements and of the reduction for the data plane. Unsupported if there is none."""
        if not isinstance(op, ReduceOp):
            raise TypeError(f"op must be a ReduceOp, not {type(op).__name__}")
        if self.dtype == "bool":
            if op not in _OF_BOOL:
                raise Unsupported(f"{op.name} of truth values")
            return "uint8", _OF_BOOL[op]
        if self.dtype in _OF_COMPLEX:
            if op not in (ReduceOp.SUM, ReduceOp.AVG):
                raise Unsupported(f"{op.name} of {self.dtype}: complex numbers can only be added")
            return _OF_COMPLEX[self.dtype][0], "sum"
        reduction = "sum" if op is ReduceOp.AVG else op.value
        check_reducible(self.dtype, reduction)
        return self.dtype, reduction


def data_of(tensor: Any, *, writable: bool, identified: bool, what: str) -> Data:
    """`tensor` as Data. TypeError if it is no tensor or array; LayoutError if it is strided, or read-only and
    `writable`."""
    dtype = getattr(tensor, "dtype", None)
    itemsize = getattr(tensor, "itemsize", None)
    if dtype is None or itemsize is None:
        raise TypeError(f"{what} must be a tensor or an array, not {type(tensor).__name__}")
    name = _spelled.get(dtype)
    if name is None:
        name = _spelled[dtype] = str(dtype).removeprefix("torch.")
    if name in _OF_COMPLEX:
        itemsize = _OF_COMPLEX[name][1]
    return Data(Span(tensor, itemsize, writable, identified), name)


def rows_of(data: Data, sizes: "list[int] | None", rows: int, ranks: int, what: str) -> list[Span]:
    """`data`, which has `rows` rows, cut into a part of `sizes[r]` rows for each rank; equal ones without sizes."""
    span = data.span
    if sizes is None:
        each, rest = divmod(len(span), ranks)
        if rest:
            raise BoundsError(f"{what} has {len(span)} elements, which {ranks} ranks cannot share equally")
        return [span.part(rank * each, (rank + 1) * each) for rank in range(ranks)]
    if len(sizes) != ranks or any(size < 0 for size in sizes) or sum(sizes) != rows:
        raise BoundsError(
            f"{what} has {rows} rows: {sizes} must be a number for each of {ranks} ranks that add up to it"
        )
    row = len(span) // rows if rows else 0
    found, begin = [], 0
    for size in sizes:
        found.append(span.part(begin * row, (begin + size) * row))
        begin += size
    return found
