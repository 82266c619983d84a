"""The judge itself: histories made by hand, some to pass and some not; simulated transports, with and without a bug."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model.memory_model import Refusal, check, report
from model.programs import BYTES, INITIAL, POISON, WORDS, Maker, Piece, Program, program_of, programs
from model.simulated import BUGS, simulate

X, Y = BYTES, BYTES + 100  # two places of 8 bytes
WORD, SMALL = 0, 4  # positions in WORDS


class Told:
    """A history: what ranks did, in an order in which it can have happened, and what they say they saw."""

    def __init__(self, size: int = 3, puts_complete: bool = False) -> None:
        self._maker = Maker(size, lambda n: 0)
        self._size = size
        self._puts_complete = puts_complete
        self._sent: dict[tuple[int, int], int] = {}
        self._seen: dict[int, Any] = {}

    def _add(self, rank: int, op: str, saw: Any = None, **what: Any) -> int:
        number = len(self._maker.steps)
        self._maker.add(rank, op, **what)
        if saw is not None:
            self._seen[number] = saw
        return number

    def put(self, rank: int, peer: int, write: int, at: int = X, nbytes: int = 8, **what: Any) -> int:
        return self._add(rank, "put", peer=peer, pieces=(Piece(at, nbytes, write),), **what)

    def store(self, rank: int, write: int, at: int = X) -> int:
        return self._add(rank, "store", peer=rank, pieces=(Piece(at, 8, write),))

    def get(self, rank: int, peer: int, *saw: int, at: int = X, **what: Any) -> int:
        """`saw`: the write of each of 8 bytes, or that of all."""
        return self._add(rank, "get", self._runs(at, saw), peer=peer, pieces=(Piece(at, 8),), **what)

    def load(self, rank: int, *saw: int, at: int = X) -> int:
        return self._add(rank, "load", self._runs(at, saw), peer=rank, pieces=(Piece(at, 8),))

    def _runs(self, at: int, saw: Sequence[int]) -> Any:
        each = saw if len(saw) == 8 else 8 * saw
        return (tuple((at + i, at + i + 1, write) for i, write in enumerate(each)),)

    def signal(self, rank: int, peer: int, index: int = 0, **what: Any) -> int:
        sent = self._sent[peer, index] = self._sent.get((peer, index), 0) + 1
        return self._add(rank, "signal", peer=peer, index=index, add=1 << sent - 1, **what)

    def put_and_signal(self, rank: int, peer: int, write: int, **what: Any) -> int:
        return self.put(rank, peer, write, index=0, add=1, **what)

    def wait(self, rank: int, at_least: int = 1, saw: int = -1, index: int = 0) -> int:
        return self._add(rank, "wait", at_least if saw < 0 else saw, index=index, at_least=at_least)

    def peek(self, rank: int, saw: int, index: int = 0) -> int:
        return self._add(rank, "peek", saw, index=index)

    def atomic(self, op: str, rank: int, peer: int, value: int, saw: int, expected: int = 0, word: int = WORD) -> int:
        return self._add(rank, op, (expected, saw), peer=peer, word=word, value=value)

    def atomic_load(self, rank: int, saw: int) -> int:
        return self._add(rank, "atomic_load", (0, saw), peer=rank, word=WORD)

    def get_words(self, rank: int, peer: int, saw: int) -> int:
        held = [0] * len(WORDS)
        held[WORD] = saw
        return self._add(rank, "get_words", tuple(held), peer=peer)

    def fence(self, rank: int, peer: int) -> int:
        return self._add(rank, "fence", peer=peer)

    def flush(self, rank: int, peer: int = -1) -> int:
        return self._add(rank, "flush", peer=peer)

    def finish(self, rank: int, of: int) -> int:
        return self._add(rank, "finish", of=of)

    def poll(self, rank: int, of: int, saw: bool) -> int:
        return self._add(rank, "poll", saw, of=of)

    def refusal(self) -> Refusal | None:
        program = Program(self._size, tuple(self._maker.steps))
        found = check(program, self._seen, puts_complete=self._puts_complete)
        if found is not None:
            assert found.rule in report(program, self._seen, found, puts_complete=self._puts_complete)
        return found

    def passes(self) -> None:
        found = self.refusal()
        assert found is None, found

    def fails(self, rule: str, says: str = "") -> None:
        found = self.refusal()
        assert found is not None, "this has passed"
        assert found.rule == rule, found
        assert says in found.text, found.text


# ---- Bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saw", [(0,), (1,), (1, 0, 1, 1, 0, 0, 1, 0)])
def test_what_is_under_way_may_be_seen_or_not_byte_by_byte(saw: tuple[int, ...]) -> None:
    told = Told()
    told.put(0, 1, 1)
    told.load(1, *saw)
    told.get(2, 1, *saw)
    told.passes()


def test_a_put_is_not_there_when_it_returns_unless_that_is_promised() -> None:
    for puts_complete in (False, True):
        told = Told(puts_complete=puts_complete)
        told.put(0, 1, 1)
        told.get(0, 1, INITIAL)
        if puts_complete:
            told.fails("bytes", "it may see write 1")
        else:
            told.passes()


def test_an_asynchronous_put_is_never_there_when_it_returns() -> None:
    told = Told(puts_complete=True)
    told.put(0, 1, 1, async_op=True)
    told.get(0, 1, INITIAL)
    told.passes()


def order_by_flush(told: Told) -> None:
    told.put(0, 1, 1)
    told.flush(0, 1)


def order_by_flush_of_all(told: Told) -> None:
    told.put(0, 1, 1, async_op=True)
    told.flush(0)


def order_by_work(told: Told) -> None:
    told.finish(0, told.put(0, 1, 1, async_op=True))


def order_by_poll(told: Told) -> None:
    told.poll(0, told.put(0, 1, 1, async_op=True), True)


ORDERS = [order_by_flush, order_by_flush_of_all, order_by_work, order_by_poll]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_complete_is_seen_by_oneself_and_by_third_parties(order: Any) -> None:
    for saw in (1, INITIAL):
        for third in (False, True):
            told = Told()
            order(told)
            if third:
                told.signal(0, 2)
                told.wait(2)
            told.get(2 if third else 0, 1, saw)
            if saw == 1:
                told.passes()
            else:
                told.fails("bytes", "write 1 went before it")


def test_what_is_not_complete_need_not_be_seen() -> None:
    told = Told()
    put = told.put(0, 1, 1, async_op=True)
    told.poll(0, put, False)
    told.flush(0, 2)
    told.flush(1)
    told.get(0, 1, INITIAL)
    told.passes()


def test_two_puts_are_unordered() -> None:
    for saw in ((1,), (2,), (1, 1, 1, 1, 2, 2, 2, 2)):
        told = Told()
        told.put(0, 1, 1)
        told.put(0, 1, 2)
        told.flush(0)
        told.get(0, 1, *saw)
        told.passes()
    told = Told()
    told.put(0, 1, 1)
    told.put(0, 1, 2)
    told.flush(0)
    told.get(0, 1, INITIAL)
    told.fails("bytes", "it may see write 1 or 2")


def test_only_one_of_two_unordered_puts_wins() -> None:
    told = Told()
    told.put(0, 1, 1)
    told.put(0, 1, 2)
    told.flush(0)
    told.get(0, 1, 1, 1, 1, 1, 2, 2, 2, 2)
    told.get(0, 1, 1, 1, 1, 1, 2, 2, 2, 2)
    told.passes()
    told.get(0, 1, 1, 1, 1, 1, 1, 2, 2, 2)
    told.fails("bytes", "and knew of write 2")


@pytest.mark.parametrize("how", ["flush", "fence", "signal", "nothing"])
def test_what_puts_two_puts_in_order(how: str) -> None:
    """A signal does not: a later put is not behind it."""
    told = Told()
    told.put(0, 1, 1)
    if how == "flush":
        told.flush(0, 1)
    elif how == "fence":
        told.fence(0, 1)
    elif how == "signal":
        told.signal(0, 1)
    told.put(0, 1, 2)
    told.flush(0)
    told.get(0, 1, 1)
    if how in ("flush", "fence"):
        told.fails("bytes", "it may see write 2")
    else:
        told.passes()


def test_a_fence_orders_towards_one_peer_only() -> None:
    told = Told()
    told.put(0, 1, 1)
    told.fence(0, 2)
    told.put(0, 1, 2)
    told.flush(0)
    told.get(0, 1, 1)
    told.passes()


def test_who_sees_what_is_behind_a_fence_sees_what_was_before() -> None:
    for fence in (False, True):
        told = Told()
        told.put(0, 1, 1, X)
        if fence:
            told.fence(0, 1)
        told.put(0, 1, 2, Y)
        told.load(1, 0, 0, 0, 2, 0, 0, 0, 0, at=Y)
        told.load(1, 0, 2, 0, 2, 0, 2, 0, 0, at=Y)  # its own bytes come as they like
        told.load(1, INITIAL, at=X)
        if fence:
            told.fails("bytes", "write 1 went before it")
        else:
            told.passes()


@pytest.mark.parametrize("how", ["fence", "flush", "work", "signal", "nothing"])
def test_a_put_behind_a_fence_does_not_change_what_a_get_before_it_reads(how: str) -> None:
    told = Told()
    get = told.get(0, 1, 1, async_op=True)
    if how == "fence":
        told.fence(0, 1)
    elif how == "flush":
        told.flush(0)
    elif how == "work":
        told.finish(0, get)
    elif how == "signal":
        told.signal(0, 1)
    told.put(0, 1, 1)
    told.flush(0)
    if how == "nothing" or how == "signal":
        told.passes()
    elif how == "fence":
        told.fails("bytes", "which happens after it")
    else:
        told.fails("causality")


def test_the_future_is_not_seen() -> None:
    told = Told()
    told.get(0, 1, 1)
    told.put(0, 1, 1)
    told.fails("causality")


def test_what_was_seen_is_not_unseen_when_it_was_complete() -> None:
    told = Told()
    told.put(0, 1, 1)
    told.flush(0)
    told.put(0, 1, 2)
    told.load(1, 2)
    told.load(1, 1)  # the put of 2 is still under way, and may come byte by byte and twice
    told.load(1, INITIAL)
    told.fails("bytes", "write 1 went before it")


@pytest.mark.parametrize(("saw", "says"), [(POISON, "nobody wrote"), (9, "nobody wrote")])
def test_bytes_of_nobody(saw: int, says: str) -> None:
    told = Told()
    told.put(0, 1, 1)
    told.load(1, 1, 1, 1, saw, 1, 1, 1, 1)
    told.fails("bytes", says)


def test_bytes_at_a_wrong_place_or_rank() -> None:
    told = Told()
    told.put(0, 1, 1, nbytes=7)
    told.load(1, 1)
    told.fails("bytes", f"[{X}, {X + 7}) at rank 1")
    told = Told()
    told.put(0, 1, 1)
    told.load(2, 1)
    told.fails("bytes", "at rank 1")


def test_own_stores_are_seen_at_once_and_by_who_is_told() -> None:
    for saw in (1, INITIAL):
        told = Told()
        told.store(0, 1)
        told.signal(0, 1)
        told.wait(1)
        told.get(1, 0, saw)
        if saw:
            told.passes()
        else:
            told.fails("bytes")
    told = Told()
    told.get(0, 0, 1, async_op=True)
    told.fence(0, 0)
    told.store(0, 1)  # of the processor: behind no fence
    told.flush(0)
    told.passes()


# ---- Signals ---------------------------------------------------------------------------------------------------------


def test_a_signal_is_behind_all_puts_before_it() -> None:
    for seen in (True, False):
        for puts in (1, 2, 3):
            told = Told()
            for write in range(1, puts + 1):
                told.put(0, 1, write, X + 8 * write, async_op=write == 2)
            told.signal(0, 1, async_op=True)
            told.wait(1)
            for write in range(1, puts + 1):
                told.load(1, write if seen or write > 1 else INITIAL, at=X + 8 * write)
            if seen:
                told.passes()
            else:
                told.fails("bytes", "write 1 went before it")


def test_a_signal_of_a_put_is_behind_its_bytes() -> None:
    told = Told()
    told.put_and_signal(0, 1, 1, async_op=True)
    told.wait(1)
    told.load(1, 1, 1, 1, 1, 1, 1, 1, INITIAL)
    told.fails("bytes", "write 1 went before it")


def test_a_signal_says_nothing_of_puts_to_others_or_of_later_ones() -> None:
    told = Told()
    told.put(0, 1, 1, X)
    told.signal(0, 2)
    told.wait(2)
    told.get(2, 1, INITIAL)
    told.put(0, 2, 2, Y)
    told.load(2, INITIAL, at=Y)
    told.passes()


def test_signals_hand_on_what_was_known() -> None:
    """0 puts to 1, 1 tells 2, 2 reads from 1."""
    told = Told()
    told.put(0, 1, 1)
    told.signal(0, 1)
    told.wait(1)
    told.signal(1, 2)
    told.wait(2)
    told.get(2, 1, INITIAL)
    told.fails("bytes", "write 1 went before it")


def test_the_count_tells_whose_signals_have_come() -> None:
    """A later signal ends the wait, too; then the one that was waited for promises nothing yet."""
    told = Told()
    told.put(0, 1, 1)
    told.signal(0, 1)
    told.signal(2, 1)
    told.wait(1, at_least=1, saw=2)
    told.load(1, INITIAL)
    told.passes()
    told.peek(1, 3)
    told.load(1, INITIAL)
    told.fails("bytes")


def test_a_wait_does_not_end_early() -> None:
    told = Told()
    told.signal(0, 1)
    told.signal(0, 1)
    told.wait(1, at_least=2, saw=1)
    told.fails("wait")


def test_a_count_is_of_signals_that_were_sent() -> None:
    told = Told()
    told.signal(0, 1)
    told.peek(1, 2)
    told.fails("count")
    told = Told()
    told.peek(1, 1)
    told.signal(0, 1)
    told.passes()
    told.peek(0, 1)
    told.fails("count")  # at another rank


def test_a_signal_is_not_lost_and_does_not_go_away() -> None:
    for flushed in (True, False):
        told = Told()
        told.signal(0, 1, index=0)
        if flushed:
            told.flush(0)
        told.signal(0, 1, index=1)
        told.wait(1, index=1)
        told.peek(1, 0)
        if flushed:
            told.fails("signal")
        else:
            told.passes()
    told = Told()
    told.signal(0, 1)
    told.peek(1, 1)
    told.peek(1, 0)
    told.fails("signal")


def test_no_rank_sees_a_signal_that_follows_from_it() -> None:
    told = Told()
    told.wait(1)
    told.signal(1, 0)
    told.wait(0)
    told.signal(0, 1)
    told.fails("causality")


# ---- Words -----------------------------------------------------------------------------------------------------------


def test_sums_are_exact_and_values_distinct() -> None:
    for returned, right in [
        ((0, 1, 2), True),
        ((2, 0, 1), True),
        ((0, 0, 1), False),
        ((0, 1, 1), False),
        ((0, 1, 3), False),
    ]:
        told = Told()
        for rank, saw in enumerate(returned):
            told.atomic("fetch_add", rank, 1, 1, saw)
        if right:
            told.passes()
        else:
            told.fails("word")


def test_atomics_keep_the_order_of_one_rank() -> None:
    told = Told()
    told.atomic("fetch_add", 0, 1, 1, saw=1)
    told.atomic("fetch_add", 0, 1, 1, saw=0)
    told.fails("causality")
    told = Told()
    told.atomic("swap", 0, 1, 5, saw=0)
    told.atomic("swap", 0, 1, 0, saw=5)
    told.atomic("swap", 0, 1, 5, saw=5)
    told.fails("word")


def test_words_whose_values_come_again_are_searched_for_an_order() -> None:
    for last, right in [(0, True), (1, False)]:
        told = Told()
        for rank in (0, 1, 2):
            told.atomic("compare_swap", rank, 1, 1, saw=0, expected=0)
            told.atomic("swap", rank, 1, 0, saw=1)
        told.atomic("compare_swap", 0, 1, 2, saw=last, expected=3)
        told.atomic("compare_swap", 1, 1, 1, saw=1, expected=0)
        told.atomic("compare_swap", 2, 1, 1, saw=last, expected=0)
        if right:
            told.passes()
        else:
            told.fails("word", "no order")


def test_compare_swap_changes_nothing_unless_it_finds_what_it_expects() -> None:
    told = Told()
    told.atomic("swap", 0, 1, 7, saw=0)
    told.atomic("compare_swap", 2, 1, 9, saw=7, expected=6)
    told.atomic("fetch_add", 2, 1, 1, saw=7)
    told.passes()
    told.atomic("fetch_add", 2, 1, 1, saw=9)
    told.fails("word")


def test_atomics_wrap_at_the_size_of_their_word() -> None:
    for word, modulus in ((WORD, 2**64), (SMALL, 2**32)):
        told = Told()
        told.atomic("fetch_add", 0, 1, -1, saw=0, word=word)
        told.atomic("fetch_add", 2, 1, 3, saw=modulus - 1, word=word)
        told.atomic("fetch_add", 2, 1, 0, saw=2, word=word)
        told.passes()


@pytest.mark.parametrize("behind", ["flush", "fence", "nothing"])
@pytest.mark.parametrize("reader", ["owner", "another"])
def test_what_the_value_of_a_word_announces(behind: str, reader: str) -> None:
    """Puts before an atomic are seen by who finds its value, if a flush or a fence was between."""
    told = Told()
    told.put(0, 1, 1)
    if behind == "flush":
        told.flush(0, 1)
    elif behind == "fence":
        told.fence(0, 1)
    told.atomic("swap", 0, 1, 5, saw=0)
    if reader == "owner":
        told.atomic_load(1, 5)
        told.load(1, INITIAL)
    else:
        told.atomic("fetch_add", 2, 1, 0, saw=5)
        told.get(2, 1, INITIAL)
    if behind == "nothing":
        told.passes()
    else:
        told.fails("bytes", "write 1 went before it")


def test_an_atomic_is_complete_when_it_returns() -> None:
    told = Told()
    told.atomic("swap", 0, 1, 5, saw=0)
    told.signal(0, 2)
    told.wait(2)
    told.get_words(2, 1, saw=0)
    told.fails("word", "no order")


def test_a_plain_read_beside_an_atomic_promises_nothing() -> None:
    told = Told()
    told.atomic("swap", 0, 1, 0x0101, saw=0)
    told.get_words(2, 1, saw=0x0001)
    told.passes()


def test_words_that_nobody_changed() -> None:
    told = Told()
    told.get_words(2, 1, saw=1)
    told.fails("word", "none changed")
    told = Told()
    told.atomic_load(1, 1)
    told.fails("word", "nothing left there")


# ---- Simulated transports --------------------------------------------------------------------------------------------

PROGRAMS = 1000
"""Within so many random programs each bug has to show."""


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(0, 2**32), st.booleans())
def test_what_a_right_transport_does_passes(program: Program, seed: int, puts_complete: bool) -> None:
    seen = simulate(program, seed, puts_complete=puts_complete)
    assert seen is not None, f"this does not end:\n{program}"
    refusal = check(program, seen, puts_complete=puts_complete)
    assert refusal is None, report(program, seen, refusal, puts_complete=puts_complete)


def test_what_a_right_transport_does_passes_in_many_programs() -> None:
    for number in range(PROGRAMS):
        test_what_a_right_transport_does_passes.hypothesis.inner_test(  # type: ignore[attr-defined]
            program_of(2, number), number, number % 2 == 0
        )


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_transport_is_found(bug: str) -> None:
    for number in range(PROGRAMS):
        program = program_of(3, number)
        seen = simulate(program, number, bug)
        if seen is None:  # a wait would not end
            return
        refusal = check(program, seen, puts_complete=False)
        if refusal is not None:
            told = report(program, seen, refusal, puts_complete=False)
            assert "steps suffice" in told
            return
    raise AssertionError(f"not found in {PROGRAMS} programs: {BUGS[bug]}")
