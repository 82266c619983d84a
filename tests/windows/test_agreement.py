"""Creating windows is all or nothing: a rank whose arguments are wrong does not put the others out of step."""

import numpy as np
import pytest
from harness import Kind, Threads, raises

from onesided import BoundsError, Group, OnesidedError, Unsupported, Window


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"nbytes": -1}, BoundsError),
        ({"nbytes": "8"}, TypeError),
        ({"nbytes": 8, "shape": 8}, TypeError),
        ({"nbytes": 8, "device": "cuda"}, Unsupported),
        ({"nbytes": 8, "signals": -1}, BoundsError),
    ],
)
def test_the_next_window_pairs_after_wrong_arguments(
    kind: Kind, arguments: dict[str, object], error: type[Exception]
) -> None:
    def ranks(group: Group) -> None:
        if group.rank == 1:
            with raises(error):
                Window.allocate(group, transport=kind.name, **arguments)
        else:
            with raises(OnesidedError, "rank 1"):
                Window.allocate(group, nbytes=16, transport=kind.name)
        with Window.allocate(group, nbytes=24, transport=kind.name) as window:
            window.put(np.full(24, group.rank + 1, np.uint8), 1 - group.rank, signal=0)
            window.wait_signal(0, timeout_s=20)
            assert (window.array == 2 - group.rank).all()
            group.barrier()

    Threads().run(ranks, 2)


def test_an_unknown_transport_on_one_rank(kind: Kind) -> None:
    def ranks(group: Group) -> None:
        if group.rank == 1:
            with raises(Unsupported, "unknown transport 'pigeon'"):
                Window.allocate(group, nbytes=8, transport="pigeon")
        else:
            with raises(OnesidedError):
                Window.allocate(group, nbytes=8, transport=kind.name)
        Window.allocate(group, nbytes=8, transport=kind.name).close()

    Threads().run(ranks, 2)


def test_a_rank_that_gathers_something_else(kind: Kind) -> None:
    def ranks(group: Group) -> None:
        if group.rank == 1:
            group.all_gather(b"\xff not json")
        else:
            with raises(OnesidedError, "something else than a window"):
                Window.allocate(group, nbytes=8, transport=kind.name)

    Threads().run(ranks, 2)


def test_auto_is_the_kind_that_it_stands_for() -> None:
    def ranks(group: Group) -> None:
        with Window.allocate(group, nbytes=8) as one, Window.allocate(group, nbytes=8, transport="shm") as other:
            assert one.name != other.name
            assert one.describe()["transport"] == other.describe()["transport"] == "shm"
            group.barrier()

    Threads().run(ranks, 2)
