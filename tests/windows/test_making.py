"""Window.allocate and create: what a window can be made of, and that a failure leaves nothing (case 15)."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from harness import Kind, Processes, Threads, pattern, raises, same

from onesided import BoundsError, Group, LayoutError, RegistrationError, RemoteAccessError, Unsupported, Window
from onesided.errors import ConnectionLost, DeadlineExceeded, OnesidedError

Ranks = Threads | Processes


# ---- allocate --------------------------------------------------------------------------------------------------------


def shapes_and_types(group: Group, kind: Kind) -> None:
    made = [
        ({"nbytes": 10}, (10,), "uint8"), ({"shape": 3, "dtype": "u1"}, (3,), "uint8"), ({"shape": (2, 3),
        "dtype": "float32"}, (2, 3), "float32"),
        ({"shape": [4, 1, 2], "dtype": np.int16}, (4, 1, 2), "int16"), ({"shape": (), "dtype": np.dtype("f8")}, (),
        "float64"),
        ({"shape": (0, 5), "dtype": "i4"}, (0, 5), "int32"), ({"nbytes": 0}, (0,), "uint8"),
        ({"shape": np.int64(7), "dtype": "u1"}, (7,), "uint8"),
        ({"shape": (np.uint8(2), 2), "dtype": bool}, (2, 2), "bool"), ({"shape": 2, "dtype": complex}, (2,),
        "complex128"),
    ]  # fmt: skip
    for how, shape, dtype in made:
        window = Window.allocate(group, **how, transport=kind.name)
        assert (window.array.shape, window.array.dtype.name) == (window.shape, window.dtype) == (shape, dtype)
        assert window.nbytes == window.array.nbytes == window.memory.nbytes
        assert not window.array.any()
        assert (window.rank, window.size) == (group.rank, group.size)
        assert window.array.flags.writeable
        if window.nbytes:
            window.array[...] = 1
            into = np.zeros_like(window.array)
            group.barrier()
            window.get(into, (group.rank + 1) % group.size)
            same(into, np.ones_like(into))
        group.barrier()
        window.close()


def test_shapes_and_types(ranks: Ranks, kind: Kind) -> None:
    ranks.run(shapes_and_types, 2, kind)


TORCH_TYPES = [
    "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "complex32", "complex64", "complex128", "uint8", "int8", "int16", "int32", "int64", "bool",
    "uint16",
    "uint32", "uint64",
]  # fmt: skip


def torch_types(group: Group, kind: Kind) -> None:
    import warnings

    import torch

    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    peer = (group.rank + 1) % group.size
    for name in TORCH_TYPES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue  # an older torch
        for given in (dtype, name):
            window = Window.allocate(group, shape=(3, 4), dtype=given, signals=1, transport=kind.name)
            tensor = window.tensor
            assert (tuple(tensor.shape), tensor.dtype) == ((3, 4), dtype)
            assert tensor.data_ptr() == window.memory.address
            source = torch.from_numpy(pattern(tensor.nbytes, group.rank) & 1).view(dtype).view(3, 4)
            window.put(source, peer, signal=0)
            window.wait_signal(0, 1)
            same(tensor.view(torch.uint8).numpy(), pattern(tensor.nbytes, (group.rank - 1) % group.size) & 1, name)
            into = torch.zeros_like(source)
            window.get(into, peer)
            assert torch.equal(into.view(torch.uint8), source.view(torch.uint8))
            if name.startswith(("bfloat", "float8", "complex32")):
                with raises(Unsupported, "numpy has no type"):
                    _ = window.array
            group.barrier()
            window.close()
    empty = Window.allocate(group, shape=(0, 4), dtype=torch.bfloat16, transport=kind.name)
    assert (tuple(empty.tensor.shape), empty.tensor.dtype) == ((0, 4), torch.bfloat16)
    scalar = Window.allocate(group, shape=(), dtype=torch.float32, transport=kind.name)
    scalar.tensor.fill_(2.5)
    assert float(scalar.array) == 2.5
    scalar.close()
    empty.close()


def test_every_type_of_torch(kind: Kind) -> None:
    Threads().run(torch_types, 2, kind)


def refused_layouts(group: Group, kind: Kind) -> None:
    bad: list[tuple[dict, type[BaseException]]] = [
        ({}, TypeError), ({"nbytes": 8, "shape": 8}, TypeError), ({"nbytes": 8, "dtype": "f4"}, TypeError),
        ({"nbytes": "8"}, TypeError), ({"nbytes": 8.0}, TypeError), ({"nbytes": True}, TypeError),
        ({"nbytes": [8]}, TypeError),
        ({"nbytes": -1}, BoundsError), ({"nbytes": 2**63}, BoundsError), ({"nbytes": 2**200}, BoundsError),
        ({"shape": (2, 2)}, TypeError), ({"shape": 8}, TypeError), ({"shape": (2, 2), "dtype": None}, TypeError),
        ({"shape": "88", "dtype": "u1"}, TypeError), ({"shape": (2, "2"), "dtype": "u1"}, TypeError),
        ({"shape": (2, -1), "dtype": "u1"}, BoundsError), ({"shape": (2, None), "dtype": "u1"}, TypeError),
        ({"shape": (2, 2.0), "dtype": "u1"}, TypeError), ({"shape": ((2,), 2), "dtype": "u1"}, TypeError),
        ({"shape": (2**62, 2**62), "dtype": "u1"}, OnesidedError),
        ({"shape": 2**62, "dtype": "f8"}, OnesidedError), ({"shape": 8, "dtype": "no such"}, LayoutError),
        ({"shape": 8, "dtype": object}, LayoutError), ({"shape": 8, "dtype": "O"}, LayoutError),
        ({"shape": 8, "dtype": ">i4"}, LayoutError), ({"shape": 8, "dtype": [("a", "i4")]}, LayoutError),
        ({"shape": 8, "dtype": 3}, LayoutError), ({"shape": 8, "dtype": "V4"}, LayoutError),
        ({"shape": 8, "dtype": "S0"}, LayoutError),
        ({"nbytes": 8, "device": "cuda"}, Unsupported), ({"nbytes": 8, "device": "meta"}, Unsupported),
        ({"nbytes": 8, "device": None}, OnesidedError), ({"nbytes": 8, "device": 0}, OnesidedError),
        ({"nbytes": 8, "access": "x"}, LayoutError), ({"nbytes": 8, "access": ""}, LayoutError),
        ({"nbytes": 8, "access": 1}, TypeError),
        ({"nbytes": 8, "access": None}, TypeError), ({"nbytes": 8, "signals": -1}, BoundsError),
        ({"nbytes": 8, "signals": "1"}, TypeError),
        ({"nbytes": 8, "signals": 2**20 + 1}, BoundsError), ({"nbytes": 8, "signals": 2**64}, BoundsError),
        ({"nbytes": 8, "transport": "no such"}, Unsupported), ({"nbytes": 8, "transport": 1}, TypeError),
        ({"nbytes": 8, "transport": None}, TypeError), ({"nbytes": 8, "timeout_s": "1"}, TypeError),
        ({"nbytes": 8, "timeout_s": -1}, BoundsError), ({"nbytes": 8, "timeout_s": float("nan")}, BoundsError),
        ({"nbytes": 1 << 50}, RegistrationError), ({"nbytes": 2**63 - 1}, RegistrationError),
    ]  # fmt: skip
    for how, error in bad:
        with raises(error):
            Window.allocate(group, **{"transport": kind.name, **how})
            raise AssertionError(f"{how} was taken")
    window = Window.allocate(group, 8, transport=kind.name)  # nothing of that has put the ranks out of step
    window.close()


def test_a_shape_needs_a_dtype(kind: Kind) -> None:
    with pytest.raises(TypeError, match="give the dtype"):
        Window.allocate(Group.local(1)[0], shape=(2, 2), transport=kind.name)


def test_layouts_that_are_refused(ranks: Ranks, kind: Kind) -> None:
    ranks.run(refused_layouts, 2, kind)


def refused_groups(kind: Kind) -> None:
    for bad in (None, "group", 1, object(), [1]):
        with pytest.raises(TypeError, match=r"group must be a Group, .* not (None|str|int|object|list)$"):
            Window.allocate(bad, 8, transport=kind.name)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="group must be a Group"):
            Window.create(bad, bytearray(8), transport=kind.name)  # type: ignore[arg-type]


def test_what_is_no_group(kind: Kind) -> None:
    refused_groups(kind)


# ---- create ----------------------------------------------------------------------------------------------------------


def over_private_memory(group: Group, kind: Kind) -> None:
    import array

    peer, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    buffers = [np.zeros(1000, np.uint8), np.zeros((10, 25), np.float32), bytearray(1000), array.array("d", bytes(1000))]
    large = np.zeros(2_000_000 if kind.slow else 40_000_000, np.uint8)
    for buffer in [*buffers, memoryview(bytearray(1000)), large]:
        window = Window.create(group, buffer, signals=1, transport=kind.name)
        assert np.shares_memory(window.array, np.asarray(buffer))
        nbytes = window.nbytes
        window.put(pattern(nbytes, group.rank), peer, signal=0)
        window.wait_signal(0, 1)
        same(buffer, pattern(nbytes, left))
        into = np.zeros(nbytes, np.uint8)
        window.get(into, peer)
        same(into, pattern(nbytes, group.rank))
        group.barrier()
        window.put(b"yz", peer, nbytes - 2, async_op=True).wait()
        window.flush()
        group.barrier()
        assert bytes(np.asarray(buffer).reshape(-1).view(np.uint8)[-2:]) == b"yz"
        with raises(BoundsError):
            window.put(b"yz", peer, nbytes - 1)
        window.close()


def test_over_private_memory(ranks: Ranks, kind: Kind) -> None:
    ranks.run(over_private_memory, 2, kind)


def over_torch(group: Group, kind: Kind) -> None:
    import torch

    peer, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for make in (
        lambda: torch.zeros(6, 7), lambda: torch.zeros(50, dtype=torch.bfloat16),
        lambda: torch.zeros(9, dtype=torch.float8_e5m2),
        lambda: torch.nn.Parameter(torch.zeros(4, 4)), lambda: torch.zeros(100)[20:60], lambda: torch.zeros(()),
        lambda: torch.zeros(8, 1, 1).expand(8, 1, 1), lambda: torch.zeros(3, dtype=torch.complex64),
    ):  # fmt: skip
        tensor = make()
        window = Window.create(group, tensor, signals=1, transport=kind.name)
        assert window.tensor is tensor
        source = torch.full_like(tensor.detach(), group.rank + 1)
        window.put(source, peer, signal=0)
        window.wait_signal(0, 1)
        assert torch.equal(
            tensor.detach().float() if tensor.dtype.itemsize < 4 else tensor.detach(),
            torch.full_like(tensor.detach(), left + 1).float()
            if tensor.dtype.itemsize < 4
            else torch.full_like(tensor.detach(), left + 1),
        )
        into = torch.zeros_like(source)
        window.get(into, peer)
        assert torch.equal(
            into.view(torch.uint8) if into.dim() else into, source.view(torch.uint8) if into.dim() else source
        )
        group.barrier()
        window.close()


def test_over_torch_tensors(kind: Kind) -> None:
    Threads().run(over_torch, 2, kind)


def over_other_windows(group: Group, kind: Kind) -> None:
    """A window over a slice of another's tensor: shared as it is, and at its own offset (NCCL #2198)."""
    peer, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    whole = Window.allocate(group, 4096, signals=1, transport=kind.name)
    first = Window.create(group, whole.array[:1024], signals=1, transport=kind.name)
    second = Window.create(group, whole.array[1024:3072], signals=1, transport=kind.name)
    third = Window.create(group, memoryview(whole.memory)[3000:4096], signals=1, transport=kind.name)
    nested = Window.create(group, second.array[100:200], signals=1, transport=kind.name)
    assert "shared" in second.describe()["memory"]["memory"] or kind.name != "shm"
    second.put(pattern(2048, group.rank), peer, signal=0)
    second.wait_signal(0, 1)
    expected = np.zeros(4096, np.uint8)
    expected[1024:3072] = pattern(2048, left)
    same(whole.array, expected)
    group.barrier()
    first.put(pattern(1024, group.rank + 50), peer, signal=0)
    third.put(b"th", peer, 1094, signal=0)
    nested.put(b"nested", peer, 94, signal=0)
    for window in (first, third, nested):
        window.wait_signal(0, 1)
    expected[:1024] = pattern(1024, left + 50)
    expected[4094:] = np.frombuffer(b"th", np.uint8)
    expected[1024 + 194 : 1024 + 200] = np.frombuffer(b"nested", np.uint8)
    same(whole.array, expected)
    group.barrier()
    nested.fetch_add(peer, 4, 1)  # offset 1024 + 100 + 4 is aligned
    for window, size in ((first, 1024), (second, 2048), (third, 1096), (nested, 100)):
        with raises(BoundsError):
            window.put(b"x", peer, size)
    group.barrier()
    before = whole.array.copy()
    whole.close()  # the others stay
    second.put(b"still", peer, signal=0)
    second.wait_signal(0, 2)
    before[1024:1029] = np.frombuffer(b"still", np.uint8)
    same(second.array, before[1024:3072])
    group.barrier()
    for window in (first, second, third, nested):
        window.close()


def test_case_15_two_windows_over_one_registration(ranks: Ranks, kind: Kind) -> None:
    ranks.run(over_other_windows, 2, kind)


def twice_over_one_tensor(group: Group, kind: Kind) -> None:
    array = np.zeros(2048, np.uint8)
    first = Window.create(group, array, signals=1, transport=kind.name)
    second = Window.create(group, array[1024:], signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    second.put(b"second", peer, 8, signal=0)
    first.put(b"first", peer, 8, signal=0)
    first.wait_signal(0, 1)
    second.wait_signal(0, 1)
    assert bytes(array[8:13]) == b"first"
    assert bytes(array[1032:1038]) == b"second"
    assert np.count_nonzero(array) == 11
    group.barrier()
    first.close()
    second.put(b"third", peer, 100, signal=0)
    second.wait_signal(0, 2)
    assert bytes(array[1124:1129]) == b"third"
    group.barrier()
    second.close()


def test_case_15_two_windows_over_one_private_tensor(ranks: Ranks, kind: Kind) -> None:
    ranks.run(twice_over_one_tensor, 2, kind)


class Tracked(np.ndarray):
    """An array that can be watched: plain ones cannot go by weak reference."""


def kept_alive(group: Group, kind: Kind) -> None:
    import weakref

    array = np.zeros(1 << 20, np.uint8).view(Tracked)
    watch = weakref.ref(array)
    window = Window.create(group, array, signals=1, transport=kind.name)
    del array
    gc.collect()
    assert watch() is not None
    peer = (group.rank + 1) % group.size
    window.put(pattern(1 << 20, group.rank), peer, signal=0)
    window.wait_signal(0, 1)
    same(window.array, pattern(1 << 20, (group.rank - 1) % group.size))
    group.barrier()
    window.close()
    del window
    gc.collect()
    assert watch() is None


def test_a_window_keeps_its_tensor_alive_until_it_is_closed(ranks: Ranks, kind: Kind) -> None:
    ranks.run(kept_alive, 2, kind)


def no_resizing(group: Group, kind: Kind) -> None:
    buffer = bytearray(100)
    window = Window.create(group, buffer, transport=kind.name)
    with raises(BufferError):
        buffer.extend(b"more")
    window.close()
    del window
    gc.collect()
    buffer.extend(b"more")


def test_a_bytearray_cannot_be_resized_meanwhile(ranks: Ranks, kind: Kind) -> None:
    ranks.run(no_resizing, 1, kind)


def refused_tensors(group: Group, kind: Kind) -> None:
    square = np.zeros((8, 8), np.float32)
    read_only = np.zeros(8, np.uint8)
    read_only.flags.writeable = False
    for bad in (square.T, square[:, 1:], square[::2], np.asfortranarray(square), np.array([object()]),
        read_only, b"abc",
                memoryview(b"abc"), np.zeros(4, ">i4")[:0:-1]):  # fmt: skip
        with raises(LayoutError):
            Window.create(group, bad, transport=kind.name)
    for bad in (None, 1, 1.5, "abc", [1, 2], object(), {}, (b"a",), np.float64, lambda: 0):
        with raises(TypeError):
            Window.create(group, bad, transport=kind.name)
    peer = (group.rank + 1) % group.size
    window = Window.create(group, read_only, access="r", transport=kind.name)  # others may only read it
    into = bytearray(8)
    window.get(into, peer)
    with raises(RemoteAccessError):
        window.put(b"x", peer)
    group.barrier()
    window.close()


def test_tensors_that_are_refused(ranks: Ranks, kind: Kind) -> None:
    ranks.run(refused_tensors, 2, kind)


# ---- Access ----------------------------------------------------------------------------------------------------------


def access(group: Group, kind: Kind, shared: bool) -> None:
    peer = (group.rank + 1) % group.size
    for letters in ("r", "w", "rw"):
        if shared:
            window = Window.allocate(group, 64, access=letters, signals=1, transport=kind.name)
        else:
            window = Window.create(group, np.zeros(64, np.uint8), access=letters, signals=1, transport=kind.name)
        window.array[:] = 4
        group.barrier()
        into = bytearray(b"\x09" * 8)
        if "r" in letters:
            window.get(into, peer, 8)
            assert into == b"\x04" * 8
        else:
            for async_op in (False, True):
                with raises(RemoteAccessError, "'w'"):
                    window.get(into, peer, 8, async_op=async_op)
            assert into == b"\x09" * 8
        if "w" in letters:
            window.put(b"12345678", peer, 8, signal=0)
            window.wait_signal(0, 1)
            assert bytes(window.array[8:16]) == b"12345678"
        else:
            for async_op in (False, True):
                with raises(RemoteAccessError, "'r'"):
                    window.put(b"12345678", peer, 8, signal=0, async_op=async_op)
            window.signal(peer, 0)  # needs no permission
            window.wait_signal(0, 1)
            assert (window.array == 4).all()
        group.barrier()
        window.close()


@pytest.mark.parametrize("shared", [True, False], ids=["allocated", "private"])
def test_access(ranks: Ranks, kind: Kind, shared: bool) -> None:
    ranks.run(access, 2, kind, shared)


def access_differs(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, access="r" if group.rank else "w", transport=kind.name)
    window.put(b"x", 0)
    window.get(bytearray(1), 1)
    with raises(RemoteAccessError):
        window.put(b"x", 1)
    with raises(RemoteAccessError):
        window.get(bytearray(1), 0)
    group.barrier()
    window.close()


def test_access_may_differ_by_rank(ranks: Ranks, kind: Kind) -> None:
    ranks.run(access_differs, 2, kind)


def read_only_mapping(group: Group, kind: Kind) -> None:
    """A peer's read-only window is mapped without the right to write: even a stray pointer cannot change it."""
    if kind.name != "shm":
        return
    window = Window.allocate(group, 1 << 20, access="r", transport=kind.name)
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in lines if "memfd:onesided-memory" in line]
    assert any(line.split()[1] == "r--s" for line in shared), shared
    group.barrier()
    window.close()


def test_a_read_only_window_is_mapped_read_only(processes: Processes, kind: Kind) -> None:
    processes.run(read_only_mapping, 2, kind)


# ---- A failure on one rank -------------------------------------------------------------------------------------------


def one_fails(group: Group, kind: Kind) -> None:
    from harness import held

    Window.allocate(group, 64, transport=kind.name).close()
    gc.collect()
    before = held()
    for make in (
        lambda bad: Window.create(group, np.zeros((4, 4)).T if bad else np.zeros((4, 4)), transport=kind.name),
        lambda bad: Window.create(group, b"read-only" if bad else bytearray(9), transport=kind.name),
        lambda bad: Window.allocate(group, 1 << 50 if bad else 64, transport=kind.name),
        lambda bad: Window.allocate(group, 64, access="?" if bad else "r", transport=kind.name),
        lambda bad: Window.allocate(group, 64, signals=1 << 30 if bad else 1, transport=kind.name),
    ):
        for bad_rank in range(group.size):
            if group.rank == bad_rank:
                with raises((LayoutError, RegistrationError, BoundsError)):
                    make(True)
            else:
                with raises(OnesidedError, f"rank {bad_rank} of group"):
                    make(False)
    gc.collect()
    group.barrier()
    window = Window.allocate(group, 64, signals=1, transport=kind.name)
    window.signal((group.rank + 1) % group.size, 0)
    window.wait_signal(0, 1)
    group.barrier()
    window.close()
    after = held()
    if isinstance(os.environ.get("PYTEST_CURRENT_TEST"), str):
        return  # ranks as threads share the process with what else runs in it
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
    assert "memfd:onesided-memory" not in Path("/proc/self/maps").read_text()


def test_a_failure_on_one_rank_fails_everywhere_and_leaves_nothing(ranks: Ranks, kind: Kind) -> None:
    ranks.run(one_fails, 3, kind)


def one_does_not_come(group: Group, kind: Kind) -> None:
    Window.allocate(group, 8, transport=kind.name).close()
    if group.rank == 1:
        group.barrier(timeout_s=20) if False else None
        return
    with raises((DeadlineExceeded, ConnectionLost), "rank 1"):
        Window.allocate(group, 8, transport=kind.name, timeout_s=0.3)


def test_a_rank_that_does_not_come_is_named(ranks: Ranks, kind: Kind) -> None:
    ranks.run(one_does_not_come, 2, kind)


def out_of_step(group: Group, kind: Kind) -> None:
    if group.rank == 0:
        with raises(OnesidedError):
            Window.allocate(group, 8, transport=kind.name)
    else:
        with raises(OnesidedError):
            group.barrier()


def test_ranks_at_different_steps(ranks: Ranks, kind: Kind) -> None:
    ranks.run(out_of_step, 2, kind)


def many_windows(group: Group, kind: Kind) -> None:
    """Windows are independent: their bytes, their signals and their ends."""
    windows = [Window.allocate(group, 16, signals=1, transport=kind.name) for _ in range(20)]
    peer, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for number, window in enumerate(windows):
        window.put(bytes([number * 2 + group.rank]) * 16, peer, signal=0, add=number + 1)
    for number, window in enumerate(windows):
        assert window.wait_signal(0, number + 1) == number + 1
        same(window.array, bytes([number * 2 + left]) * 16)
    assert len({window.name for window in windows}) == 20
    group.barrier()
    for window in windows[::2]:
        window.close()
    group.barrier()
    for window in windows[1::2]:
        window.signal(peer, 0)
    for number, window in list(enumerate(windows))[1::2]:
        window.wait_signal(0, number + 2)
    group.barrier()
    for window in windows:
        window.close()


def test_windows_are_independent(ranks: Ranks, kind: Kind) -> None:
    ranks.run(many_windows, 2, kind)


def described(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, shape=(2, 3), dtype="float32", access="rw", signals=5, transport="auto")
    said = window.describe()
    assert said["state"] == "open"
    assert (said["name"], said["rank"], said["size"]) == (window.name, group.rank, group.size)
    assert (said["nbytes"], said["shape"], said["dtype"]) == (24, (2, 3), "float32")
    assert said["transport"] in said["why"] or "auto" in said["why"]
    assert (said["memory"]["access"], said["memory"]["signals"], said["memory"]["nbytes"]) == ("rw", "5", "24")
    assert len(said["peers"]) == group.size
    for rank, peer in enumerate(said["peers"]):
        assert peer["state"] == "open"
        assert f"rank {rank}" in peer["peer"] or rank == group.rank
        assert peer["path"]
    assert repr(window.name) in repr(window)
    assert window.name in str(window.describe())
    group.barrier()
    window.close()
    private = Window.create(group, bytearray(8), transport=kind.name)
    assert "cross-memory" in private.describe()["memory"]["memory"] or kind.name != "shm"
    group.barrier()
    private.close()


def test_describe(ranks: Ranks, kind: Kind) -> None:
    ranks.run(described, 2, kind)


def with_statement(group: Group, kind: Kind) -> None:
    with raises(ZeroDivisionError):
        with Window.allocate(group, 8, transport=kind.name) as window:
            raise ZeroDivisionError
    assert window.closed


def test_with_closes(ranks: Ranks, kind: Kind) -> None:
    ranks.run(with_statement, 1, kind)


def leaves(group: Group, kind: Kind) -> None:
    """Leaving the group ends its windows; making another raises."""
    from onesided import StaleHandle

    window = Window.allocate(group, 8, signals=1, transport=kind.name)
    group.barrier()
    group.leave()
    with raises(OnesidedError):
        window.put(b"x", (group.rank + 1) % group.size)
    with raises((StaleHandle, ConnectionLost)):
        Window.allocate(group, 8, transport=kind.name)
    window.close()


def test_leaving_the_group_ends_its_windows(ranks: Ranks, kind: Kind) -> None:
    ranks.run(leaves, 2, kind)
