"""put_many, get_many and Plan: many pieces in one call, against numpy."""

import numpy as np
import pytest
from harness import Kind, Processes, Threads, in_threads, pattern, raises, same

from onesided import BoundsError, Group, LayoutError, Plan, RemoteAccessError, StaleHandle, Window

Ranks = Threads | Processes


def scattered(seed: int, count: int, most: int, nbytes: int) -> list[tuple[int, int]]:
    """Offsets and sizes of pieces that do not overlap, in random order, zero bytes among them."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(nbytes + 1, 2 * count, replace=False))
    pieces = [(int(a), min(int(b - a), most)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    pieces += [(int(at), 0) for at in rng.integers(0, nbytes + 1, 3)]
    rng.shuffle(pieces)
    return [(int(at), int(size)) for at, size in pieces]


def expected(before: "np.ndarray", pieces: "list[tuple[np.ndarray, int]]") -> "np.ndarray":  # type: ignore[type-arg]
    after = before.copy()
    for data, at in pieces:
        after[at : at + data.nbytes] = data
    return after


def scatter_and_gather(group: Group, kind: Kind) -> None:
    nbytes = 1 << 20
    window = Window.allocate(group, nbytes, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    before = np.full(nbytes, 0x5A, np.uint8)
    for turn, (count, most) in enumerate([(1, 10), (50, 5000), (300, 100), (4, 1 << 20), (0, 1)]):
        window.array[:] = before
        group.barrier()
        places = scattered(turn, count, most, nbytes) if count else []
        pieces = [(pattern(size, seed=turn * 1000 + i), at) for i, (at, size) in enumerate(places)]
        work = window.put_many(pieces, peer, signal=0, async_op=turn % 2 == 1)
        window.wait_signal(0, turn + 1)
        work.wait()
        same(window.array, expected(before, pieces))  # all ranks put the same
        back = [(np.zeros(size, np.uint8), at) for at, size in places]
        window.get_many(back, peer, async_op=turn % 2 == 0).wait()
        for (got, _), (sent, _) in zip(back, pieces, strict=True):
            same(got, sent)
        group.barrier()
    window.close()


def test_scatter_and_gather(ranks: Ranks, kind: Kind) -> None:
    ranks.run(scatter_and_gather, 2, kind)


def a_plan_is_replayed(group: Group, kind: Kind) -> None:
    rows, columns = 40, 96
    window = Window.allocate(group, shape=(rows, 3 * columns), dtype=np.float32, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    local = np.zeros((rows, 2 * columns), np.float32)
    block = local[:, 5 : 5 + columns]
    plan = Plan.strided(block, offset_bytes=4 * columns, columns=3 * columns)
    assert (len(plan), plan.nbytes) == (rows, 4 * rows * columns)
    for turn in range(1, 20):
        local[:] = np.arange(local.size).reshape(local.shape) + 1000 * turn
        window.put_many(plan, peer, signal=0)
        window.wait_signal(0, turn)
        assert (window.array[:, columns : 2 * columns] == block).all()
        assert not window.array[:, :columns].any()
        assert not window.array[:, 2 * columns :].any()
        keep, local[:] = block.copy(), -1
        window.get_many(plan, peer)
        assert (block == keep).all()
        assert (local[:, :5] == -1).all()
        assert (local[:, 5 + columns :] == -1).all()
        group.barrier()
    window.close()


def test_a_plan_is_replayed(ranks: Ranks, kind: Kind) -> None:
    """A column slice, as tensor parallelism has it; its neighbours on both sides are untouched."""
    ranks.run(a_plan_is_replayed, 2, kind)


@pytest.mark.parametrize(
    ("index", "strides", "count"),
    [
        (np.s_[:], None, 1),
        (np.s_[2:5], None, 1),
        (np.s_[:, 1:3], None, 4),
        (np.s_[:, 1:3], [400, 48], 8),
        (np.s_[1:3, ::2, 2:], None, 6),
        (np.s_[::2], [1000, 24], 2),
        (np.s_[3, 2], None, 1),
        (np.s_[:0], None, 1),
    ],
)
def test_strided_against_numpy(index: object, strides: list[int] | None, count: int) -> None:
    """Every element of the block is where the strides say, in as few pieces as can be."""
    (group,) = Group.local(1)
    with Window.allocate(group, 8192, transport="shm") as window:
        whole = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6) + 1
        view = whole[index]  # type: ignore[index]
        plan = Plan.strided(view, 64, strides)
        assert len(plan) == count
        window.put_many(plan, 0)
        at = strides or [int(np.prod(view.shape[axis + 1 :])) * 4 for axis in range(view.ndim - 1)]
        there = np.ndarray(view.shape, np.float32, window.memory, 64, (*at, 4))
        assert (there == view).all()
        assert int((window.array.view(np.float32) != 0).sum()) == view.size


def test_strided_mistakes() -> None:
    array = np.zeros((4, 6), np.float32)
    for error, use in (
        (LayoutError, lambda: Plan.strided(array[:, ::2])),
        (BoundsError, lambda: Plan.strided(array, strides_bytes=[])),
        (BoundsError, lambda: Plan.strided(array, strides_bytes=[-24])),
        (BoundsError, lambda: Plan.strided(array, columns=5)),
        (TypeError, lambda: Plan.strided(array, strides_bytes=[24], columns=6)),
        (BoundsError, lambda: Plan.strided(array, -8)),
    ):
        with raises(error):
            use()


def mistakes(group: Group, kind: Kind) -> None:
    """All pieces are checked before any byte moves, and the culprit is named."""
    window = Window.allocate(group, 1024, signals=1, transport=kind.name)
    readable = Window.allocate(group, 1024, access="r", transport=kind.name)
    peer = (group.rank + 1) % group.size
    good = (b"x" * 100, 0)
    for error, bad in (
        (BoundsError, (b"x" * 100, 925)),
        (BoundsError, (b"x", -1)),
        (BoundsError, (b"", 1025)),
        (LayoutError, (np.zeros((4, 4))[:, 1], 0)),
        (TypeError, (7, 0)),
        (TypeError, (b"x", 1.5)),
        (TypeError, [b"x", 0]),
        (TypeError, (b"x", 0, 0)),
    ):
        with raises(error):
            window.put_many([good, bad], peer, signal=0)  # type: ignore[list-item]
    with raises(LayoutError, "piece 1 is read-only"):
        window.get_many([(bytearray(8), 0), (b"12345678", 0)], peer)
    with raises(BoundsError):
        window.put_many([good], peer, signal=1)
    with raises(BoundsError):
        window.put_many([good], group.size)
    with raises(TypeError, "pieces must be a Plan or"):
        window.put_many(5, peer)  # type: ignore[arg-type]
    with raises(ZeroDivisionError):
        window.put_many(((b"x", 1 // zero) for zero in [1, 0]), peer)
    with raises(RemoteAccessError):
        readable.put_many([good], peer)
    group.barrier()
    assert not window.array.any()
    assert window.signal_value(0) == 0
    readable.close()
    window.close()
    with raises(StaleHandle):
        window.put_many([good], peer)


def test_mistakes_touch_nothing(ranks: Ranks, kind: Kind) -> None:
    ranks.run(mistakes, 2, kind)


def very_many(group: Group, kind: Kind) -> None:
    count = 100_000
    window = Window.allocate(group, shape=count, dtype=np.uint64, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    values = np.arange(count, dtype=np.uint64) + 7
    order = np.random.default_rng(1).permutation(count)
    window.put_many([(values[i : i + 1], 8 * int(i)) for i in order], peer, signal=0, async_op=True).wait()
    window.wait_signal(0)
    assert (window.array == values).all()
    group.barrier()
    window.close()


def test_one_call_of_100_000_pieces(ranks: Ranks, kind: Kind) -> None:
    """More than any queue holds: back-pressure, and nothing lost."""
    ranks.run(very_many, 2, kind)


def kept(group: Group, kind: Kind) -> None:
    """Sources that nobody else holds stay until an asynchronous scatter is over."""
    window = Window.allocate(group, 1 << 22, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    for turn in range(1, 6):
        window.put_many(
            [(np.full(1 << 18, turn + i, np.uint8), i << 18) for i in range(16)], peer, signal=0, async_op=True
        )
        window.wait_signal(0, turn)
        for i in range(16):
            assert (window.array[i << 18 : (i + 1) << 18] == turn + i).all()
        window.flush()
        group.barrier()
    window.close()


def test_sources_are_kept_alive(ranks: Ranks, kind: Kind) -> None:
    ranks.run(kept, 2, kind)


class Forgetful(Plan):
    def __init__(self) -> None:
        self.note = "without that of Plan"


def test_a_plan_that_was_not_initialized() -> None:
    with Group.local(1)[0] as group, Window.allocate(group, 64) as window:
        for use in (window.put_many, window.get_many):
            with raises(TypeError, "initialized"):
                use(Forgetful(), 0)


def test_tensors_that_get_other_storages() -> None:
    """What is put or got is in the storage that the tensor had: it is kept."""
    torch = pytest.importorskip("torch")
    nbytes = 1 << 25
    with Group.local(1)[0] as group, Window.allocate(group, nbytes, signals=1) as window:
        tensor = torch.full((nbytes,), 3, dtype=torch.uint8)
        plan = Plan([(tensor, 0)])
        work = window.put(tensor, 0, async_op=True)
        many = window.put_many([(tensor, 0)], 0, async_op=True)
        tensor.data = torch.zeros(8, dtype=torch.uint8)
        work.wait()
        many.wait()
        assert (window.array == 3).all()
        window.array[:] = 4
        window.get_many(plan, 0)
        window.array[:] = 5
        window.put_many(plan, 0)
        assert (window.array == 4).all()
        mine = torch.full((nbytes,), 6, dtype=torch.uint8)
        with Window.create(group, mine) as over:
            mine.data = torch.zeros(8, dtype=torch.uint8)
            into = np.zeros(nbytes, np.uint8)
            over.get(into, 0)
            assert (into == 6).all()


def test_an_offset_that_resizes_its_tensor() -> None:
    torch = pytest.importorskip("torch")
    with Group.local(1)[0] as group, Window.allocate(group, 1 << 20) as window:
        for use in (
            lambda tensor, offset: window.put(tensor, 0, offset),
            lambda tensor, offset: window.put_many([(tensor, 0), (b"x", offset)], 0),
        ):
            tensor = torch.full((1 << 20,), 7, dtype=torch.uint8)

            class Offset:
                def __index__(self) -> int:
                    tensor.untyped_storage().resize_(0)  # noqa: B023
                    return 0

            with raises(LayoutError, "no memory of its own"):
                use(tensor, Offset())


def test_buffers_are_free_again_in_every_thread() -> None:
    def use(window: Window) -> None:
        buffer = bytearray(100)
        window.put_many([(buffer, 0)], 0)
        buffer.append(1)
        plan = Plan([(buffer, 0)])
        with raises(BufferError):
            buffer.append(1)
        del plan
        buffer.append(1)

    with Group.local(1)[0] as group, Window.allocate(group, 200) as window:
        in_threads([lambda: use(window)])


def test_what_is_frozen_under_another_default_device() -> None:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        tensor = torch.ones(1 << 20, dtype=torch.uint8, device="cpu")
        plan = Plan([(tensor, 0)])
    with raises(RuntimeError, "resizable"):
        tensor.untyped_storage().resize_(0)
    assert plan.nbytes == 1 << 20


def test_what_a_plan_has_cannot_be_resized() -> None:
    """Its memory would be somebody else's."""
    import torch

    tensor, array = torch.zeros(1000), np.zeros(1000)
    plan = Plan([(tensor, 0), (array, 4000)])
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="resize"):
        array.resize(10)
    with Group.local(1)[0] as group, Window.allocate(group, 12_000, transport="shm") as window:
        window.put_many([(torch.ones(10), 0)], 0)  # for one call only
        other = torch.ones(1000)
        window.put_many([(other, 0)], 0)
        other.untyped_storage().resize_(0)
        window.put_many(plan, 0)
        assert not window.array.any()
