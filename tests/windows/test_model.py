"""Random operations against a sequential model: a bytearray and a list of counters are the oracle."""

from typing import Any

import numpy as np
from harness import Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onesided import BoundsError, Group, Window

NBYTES = 96
SIGNALS = 3
RANKS = 2

offsets = st.integers(-9, NBYTES + 9) | st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63), 2**70])
words = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, 1, -1, 2**64, -(2**63) - 1])
peers = st.integers(-1, RANKS)
indices = st.integers(-1, SIGNALS)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), peers, offsets, st.binary(max_size=40), st.none() | indices, words, st.booleans()),
        st.tuples(st.just("get"), peers, offsets, st.integers(0, 40), st.booleans()),
        st.tuples(st.just("signal"), peers, indices, words, st.booleans()),
        st.tuples(st.just("fetch_add"), peers, offsets, words),
        st.tuples(st.just("compare_swap"), peers, offsets, words, words),
        st.tuples(st.just("flush"), st.none() | peers),
    ),
    max_size=30,
)


class Model:
    """What the windows of all ranks must hold."""

    def __init__(self) -> None:
        self.memory = [bytearray(NBYTES) for _ in range(RANKS)]
        self.signals = [[0] * SIGNALS for _ in range(RANKS)]

    def apply(self, name: str, peer: Any, *args: Any) -> Any:
        if peer is not None and not 0 <= peer < RANKS:
            raise BoundsError
        return getattr(self, name)(peer, *args)

    def put(self, peer: int, offset: int, data: bytes, signal: int | None, add: int, _: bool) -> None:
        if not 0 <= offset <= NBYTES - len(data) or (signal is not None and not 0 <= signal < SIGNALS):
            raise BoundsError
        if signal is not None:
            self.signal(peer, signal, add, False)
        self.memory[peer][offset : offset + len(data)] = data

    def get(self, peer: int, offset: int, nbytes: int, _: bool) -> bytes:
        if not 0 <= offset <= NBYTES - nbytes:
            raise BoundsError
        return bytes(self.memory[peer][offset : offset + nbytes])

    def signal(self, peer: int, index: int, add: int, _: bool) -> None:
        if not 0 <= index < SIGNALS or not -(2**63) <= add < 2**64:
            raise BoundsError
        self.signals[peer][index] = (self.signals[peer][index] + add) % 2**64

    def _word(self, peer: int, offset: int, *values: int) -> int:
        if not 0 <= offset <= NBYTES - 8 or offset % 8 or not all(-(2**63) <= value < 2**64 for value in values):
            raise BoundsError
        return int.from_bytes(self.memory[peer][offset : offset + 8], "little")

    def fetch_add(self, peer: int, offset: int, add: int) -> int:
        seen = self._word(peer, offset, add)
        self.memory[peer][offset : offset + 8] = ((seen + add) % 2**64).to_bytes(8, "little")
        return seen

    def compare_swap(self, peer: int, offset: int, expected: int, desired: int) -> int:
        seen = self._word(peer, offset, expected, desired)
        if seen == expected % 2**64:
            self.memory[peer][offset : offset + 8] = (desired % 2**64).to_bytes(8, "little")
        return seen

    def flush(self, peer: int | None) -> None:
        pass


def perform(window: Window, name: str, *args: Any) -> Any:
    """The same operation on the real window. `add` that goes nowhere is not looked at by the model."""
    if name == "put":
        peer, offset, data, signal, add, async_op = args
        how = {} if signal is None else {"signal": signal, "add": add}
        window.put(data, peer, offset, **how, async_op=async_op)
        return None
    if name == "get":
        peer, offset, nbytes, async_op = args
        window.flush()  # a get is not ordered against an asynchronous put
        into = bytearray(nbytes)
        window.get(into, peer, offset, async_op=async_op).wait()
        return bytes(into)
    if name == "signal":
        window.signal(*args[:3], async_op=args[3])
        return None
    if name in ("fetch_add", "compare_swap"):
        window.flush()
        return getattr(window, name)(*args)
    window.flush(*args)
    return None


def outcome(fn: Any, *args: Any) -> Any:
    try:
        return fn(*args)
    except BoundsError:
        return BoundsError


def compare(windows: list[Window], model: Model) -> None:
    windows[0].flush()
    for rank, window in enumerate(windows):
        assert bytes(window.memory) == bytes(model.memory[rank])
        assert [window.signal_value(index) for index in range(SIGNALS)] == model.signals[rank]


def test_random_operations_match_the_model(kind: Kind) -> None:
    """Rank 0 does it all; both ranks' memories are looked at after each example."""
    groups = Group.local(RANKS, name="model")
    made: dict[int, Window] = {}
    from harness import in_threads

    def make(rank: int) -> None:
        made[rank] = Window.allocate(groups[rank], NBYTES, signals=SIGNALS, transport=kind.name)

    in_threads([lambda rank=rank: make(rank) for rank in range(RANKS)])
    windows = [made[rank] for rank in range(RANKS)]

    @settings(max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operations)
    def run(program: list[tuple[Any, ...]]) -> None:
        model = Model()
        for window in windows:
            np.frombuffer(window.memory, np.uint8)[:] = 0
            for index in range(SIGNALS):
                window.signal(window.rank, index, -window.signal_value(index) % 2**64)
        for name, *args in program:
            assert outcome(perform, windows[0], name, *args) == outcome(model.apply, name, *args), (name, args)
        compare(windows, model)

    run()
    for window in windows:
        window.close()
    for group in groups:
        group.leave()
