"""Tensors of a torch without DLPack's exchange table (before 2.10) are read through their attributes."""

import pytest
import torch
from harness import Kind

from onesided import LayoutError, RemoteMemory, Unsupported


class Older(torch.Tensor):
    """As its type had no such capsule."""

    __dlpack_c_exchange_api__ = None


def older(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Older)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.complex64, torch.bool])
def test_bytes_arrive_both_ways(kind: Kind, dtype: torch.dtype) -> None:
    source = torch.arange(100).to(dtype)
    into = torch.zeros(100, dtype=dtype)
    with kind.open() as transport:
        memory = transport.allocate(source.nbytes)
        remote = RemoteMemory.from_bytes(memory.handle())
        connection = transport.connect(transport.bind())
        connection.write(older(source), remote)
        connection.write(older(source)[10:20], remote, 0)
        connection.read(older(into), remote)
    expected = source.clone()
    expected[:10] = source[10:20]
    assert torch.equal(into, expected)


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (older(torch.zeros(4, 4))[:, 1], LayoutError),
        (older(torch.zeros(4, dtype=torch.complex64)).conj(), LayoutError),
        (older(torch.tensor(1 + 2j).conj().imag), LayoutError),
        (older(torch._neg_view(torch.ones(4))), LayoutError),
        (older(torch.zeros(4, device="meta")), Unsupported),
    ],
)
def test_what_has_no_plain_bytes_is_refused(kind: Kind, tensor: torch.Tensor, error: type[Exception]) -> None:
    with kind.open() as transport:
        memory = transport.allocate(64)
        remote = RemoteMemory.from_bytes(memory.handle())
        connection = transport.connect(transport.bind())
        with pytest.raises(error):
            connection.write(tensor, remote)
