"""Every argument of every method of a window, wrong in every way: the named error, and nothing is changed."""

import warnings

import numpy as np
import pytest
from harness import Kind, Processes, Threads, raises
from inputs import Use, bad_tensors, refuses

from onesided import BoundsError, Group, LayoutError, Window
from onesided.errors import OnesidedError

Ranks = Threads | Processes


def uses_of(window: Window, peer: int) -> list[Use]:
    put = {
        "source": "source",
        "peer": "rank",
        "offset_bytes": "offset",
        "signal": "optional index",
        "add": "word",
        "timeout_s": "timeout",
    }
    get = {"destination": "destination", "peer": "rank", "offset_bytes": "offset", "timeout_s": "timeout"}
    good = {"source": bytes(8), "peer": peer, "signal": 0}
    into = {"destination": bytearray(8), "peer": peer}
    return [
        Use("put", window.put, good, {**put, "async_op": "flag"}),
        Use("put async", window.put, {**good, "async_op": True}, put),
        Use("get", window.get, into, {**get, "async_op": "flag"}),
        Use("get async", window.get, {**into, "async_op": True}, get),
        Use("signal", window.signal, {"peer": peer, "index": 0},
            {"peer": "rank", "index": "index", "add": "word", "async_op": "flag", "timeout_s": "timeout"}),
        Use("wait_signal", window.wait_signal, {"index": 0, "at_least": 0},
            {"index": "index", "at_least": "optional count", "source": "optional rank", "timeout_s": "timeout",
            "spin_s": "spin"}),
        Use("wait_signal that consumes", window.wait_signal, {"index": 0}, {"index": "index",
            "source": "optional rank", "timeout_s": "timeout"}),
        Use("signal_value", window.signal_value, {"index": 0}, {"index": "index"}),
        Use("test_signal", window.test_signal, {"index": 0, "at_least": 0}, {"index": "index", "at_least": "count"}),
        Use("fetch_add", window.fetch_add, {"peer": peer, "offset_bytes": 0, "add": 1}, {"peer": "rank",
            "offset_bytes": "offset", "add": "word"}),
        Use("compare_swap", window.compare_swap, {"peer": peer, "offset_bytes": 0, "expected": 99, "desired": 1},
            {"peer": "rank", "offset_bytes": "offset", "expected": "word", "desired": "word"}),
        Use("flush", window.flush, {}, {"peer": "optional rank", "timeout_s": "timeout"}),
        Use("close", window.close, {}, {"timeout_s": "timeout"}),
    ]  # fmt: skip


def every_argument(group: Group, kind: Kind, private: bool) -> int:
    how = {"signals": 2, "transport": kind.name}
    window = Window.create(group, np.zeros(64, np.uint8), **how) if private else Window.allocate(group, 64, **how)
    window.array[:] = 0x5A
    group.barrier()

    def untouched() -> bool:
        return (
            bool((window.array == 0x5A).all())
            and [window.signal_value(i) for i in (0, 1)] == [0, 0]
            and not window.closed
        )

    uses = uses_of(window, (group.rank + 1) % group.size)
    if private:
        uses = [use for use in uses if use.name not in ("fetch_add", "compare_swap")]
    tried = sum(refuses(use, untouched) for use in uses)
    group.barrier()
    assert untouched()
    group.barrier()
    window.put(b"works", (group.rank + 1) % group.size, signal=0)
    assert window.wait_signal(0) == 1
    window.close()
    return tried


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_every_argument_of_every_method(ranks: Ranks, kind: Kind, private: bool, capsys) -> None:
    tried = ranks.run(every_argument, 2, kind, private)
    with capsys.disabled():
        print(f"[{sum(tried)} bad arguments] ", end="")


def tensors(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 1024, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    window.array[:] = 0x5A
    group.barrier()
    for what, tensor, errors in bad_tensors():
        for use in (
            lambda t: window.put(t, peer, signal=0), lambda t: window.put(t, peer, async_op=True),
            lambda t: window.get(t, peer),
            lambda t: Window.create(group, t, transport=kind.name),
        ):  # fmt: skip
            try:
                use(tensor)
            except errors:
                continue
            except BaseException as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
            raise AssertionError(f"{what} was taken")
    group.barrier()
    assert (window.array == 0x5A).all()
    assert window.signal_value(0) == 0
    group.barrier()
    window.close()


def test_tensors(kind: Kind) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Threads().run(tensors, 2, kind)


def hints(group: Group, kind: Kind) -> None:
    """What is advised loses nothing: a copy as the destination, or under a window, would be."""
    import torch

    window = Window.allocate(group, 1024, signals=1, transport=kind.name)
    strided, lazy = torch.zeros(4, 4).t(), torch.ones(4, dtype=torch.complex64).conj()
    for tensor, source, destination, memory in (
        (strided, "pass x.contiguous()", "x.copy_(it)", "in place of x"),
        (np.zeros((4, 4)).T, "pass x.contiguous()", "x.copy_(it)", "in place of x"),
        (lazy, "pass x.resolve_conj().resolve_neg()", "x.copy_(it)", "in place of x"),
        (torch._neg_view(torch.ones(4)), "pass x.resolve_conj().resolve_neg()", "x.copy_(it)", "in place of x"),
    ):
        for use, says in (
            (lambda t: window.put(t, 0), source), (lambda t: window.get(t, 0), destination),
            (lambda t: Window.create(group, t, transport=kind.name), memory),
        ):  # fmt: skip
            with raises(LayoutError, says):
                use(tensor)
    into = torch.zeros(4, 4).t()
    window.put(torch.arange(16.0), 0)
    it = into.contiguous()
    window.get(it, 0)
    into.copy_(it)
    assert torch.equal(into, torch.arange(16.0).view(4, 4))
    window.close()


def test_hints(kind: Kind) -> None:
    Threads().run(hints, 1, kind)


def test_messages(kind: Kind) -> None:
    (group,) = Group.local(1)
    window = Window.allocate(group, 64, signals=1, transport=kind.name)
    for use, error, says in (
        (lambda: window.put(None, 0), TypeError, "source .* not None"),
        (lambda: window.get(None, 0), TypeError, "destination .* not None"),
        (lambda: window.put(b"", None), TypeError, "peer must be an integer, not None"),
        (lambda: window.put(b"", 0, None), TypeError, "offset_bytes must be an integer, not None"),
        (lambda: window.put(b"", 0, async_op=None), TypeError, "async_op must be True or False, not None"),
        (lambda: window.fetch_add(0, 0, None), TypeError, "add must be an integer, not None"),
        (lambda: window.wait_signal(0, spin_s=None), TypeError, "spin_s must be a number of seconds, not None"),
        (lambda: window.signal(0, 0, add=2**64), BoundsError, r"add must lie in \[-2\*\*63, 2\*\*64\)"),
        (lambda: window.signal(0, 0, add=-(2**63) - 1), BoundsError, r"add must lie in \[-2\*\*63, 2\*\*64\)"),
        (lambda: window.put(b"", 0, 2**64), BoundsError, r"offset_bytes must lie in \[0, 2\*\*64\)"),
        (lambda: Window.create(group, None, transport=kind.name), TypeError, "not None"),
    ):
        with pytest.raises(error, match=says):
            use()
    window.close()
    group.leave()


def by_position(group: Group, kind: Kind) -> None:
    """Options are keyword-only; too few and too many arguments raise TypeError."""
    window = Window.allocate(group, 64, signals=2, transport=kind.name)
    for use in (
        window.put, window.get, window.signal, window.wait_signal, window.signal_value, window.test_signal,
        window.fetch_add,
        window.compare_swap, lambda: window.put(b"x"), lambda: window.put(b"x", 0, 0, 0),
        lambda: window.get(bytearray(1), 0, 0, True),
        lambda: window.signal(0), lambda: window.signal(0, 0, 1, True), lambda: window.wait_signal(0, 1, 0),
        lambda: window.flush(0, 1, 2),
        lambda: Window.allocate(group, 8, "f4"), lambda: Window.create(group),
        lambda: Window.create(group, bytearray(8), "rw"),
        lambda: window.fetch_add(0, 0, 1, 1), lambda: window.close(1, 2), lambda: window.lost(1),
        lambda: window.describe(1),
    ):  # fmt: skip
        with raises(TypeError):
            use()
    assert not window.array.any()
    window.close()


def test_by_position(ranks: Ranks, kind: Kind) -> None:
    ranks.run(by_position, 1, kind)


def numbers_that_are_good(group: Group, kind: Kind) -> None:
    """NumPy's integers, booleans and whatever has __index__ are integers."""
    window = Window.allocate(group, 64, signals=2, transport=kind.name)

    class Index:
        def __index__(self) -> int:
            return 1

    for one in (1, np.int8(1), np.uint64(1), True, Index(), np.array(1)):
        window.put(b"x", 0, one, signal=one, add=one, timeout_s=1)
        window.get(bytearray(1), 0, one)
        window.signal(0, one, one)
        window.wait_signal(one, one, source=0)
        window.signal_value(one)
    assert window.signal_value(1) == 12
    for offset in (np.int64(8), 8):
        window.fetch_add(np.int32(0), offset, np.int16(-1))
    window.close()


def test_numbers_that_are_good(ranks: Ranks, kind: Kind) -> None:
    ranks.run(numbers_that_are_good, 1, kind)


def targets_of_others(group: Group, kind: Kind) -> None:
    """The window's own constructor is for the library; whatever is given to it, nothing breaks."""
    for arguments in ((), ("x",), (1, 2, 3, 4, 5, 6, 7)):
        with raises((TypeError, AttributeError, OnesidedError)):
            Window(*arguments)
    window = Window.allocate(group, 8, transport=kind.name)
    with raises((BoundsError, TypeError)):
        window.put(b"x", window)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empty = Window.__new__(Window)
        for name in ("put", "close", "describe", "flush", "array", "__repr__", "lost"):
            with raises((TypeError, AttributeError, OnesidedError)):
                getattr(empty, name)()
    window.close()


def test_windows_made_by_hand(ranks: Ranks, kind: Kind) -> None:
    ranks.run(targets_of_others, 1, kind)
