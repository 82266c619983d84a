"""What flush, fence and atomics order, between two ranks and before the eyes of third ones."""

import os
from typing import Any

import numpy as np
import pytest
from litmus.play import LARGEST, ROOM, Bytes, Litmus, Play, contents, stamp_of

DATA, SEEN = 0, 1  # signals
FLAG = 0  # the offset of a word that only atomics and small puts change; the bytes up to BEGIN are its own
BEGIN = 64

Counts = np.ndarray[Any, np.dtype[np.int64]]

# ---- Flush -----------------------------------------------------------------------------------------------------------


def store_buffering(play: Play, third: bool) -> list[bool]:
    """P0: put x; flush; read y.  P1: put y; flush; read x.  Never do both miss what the other put.

    x and y lie at who reads them, or both at a third rank. Returns in which rounds this rank missed something.
    """
    if play.rank == 2:
        return []  # sleeps: it need not call anything
    half = ROOM // 2
    me, peer = play.rank, 1 - play.rank
    at_mine, at_others = (2, 2) if third else (peer, me)
    source, expected = np.empty(LARGEST, np.uint8), np.empty(LARGEST, np.uint8)
    before, seen = np.zeros(ROOM, np.uint8), np.zeros(LARGEST, np.uint8)  # what the other's half held; what it holds

    def read(nbytes: int, offset: int) -> Bytes:
        into = seen[:nbytes]
        if at_others == me:
            into[:] = play.array[offset : offset + nbytes]
        else:
            play.window.get(into, at_others, offset)
        return into

    missed = []
    for turn in play.turns():
        places = [play.place(1, LARGEST, i * half, (i + 1) * half) for i in range(2)]
        nbytes, offset = places[peer]
        y = contents(turn * 2 + peer, nbytes, expected)
        old = before[offset : offset + nbytes]
        x = contents(turn * 2 + me, places[me][0], source)
        meet_two(play, turn)
        play.delay()
        work = play.window.put(x, at_mine, places[me][1], async_op=play.chance())
        play.window.flush(at_mine)
        got = read(nbytes, offset)
        missed.append(not np.array_equal(got, y))
        if missed[-1] and not ((got == y) | (got == old)).all():
            play.violated(f"{nbytes} bytes are neither what was put nor what was there before")
        work.wait()
        old[:] = y
    return missed


def meet_two(play: Play, turn: int) -> None:
    """As play.meet(), for ranks 0 and 1 alone."""
    play.window.signal(1 - play.rank, DATA)
    play.wait(DATA, turn)


@pytest.mark.parametrize("third", [False, True], ids=["at-the-reader", "at-a-third-rank"])
def test_store_buffering(litmus: Litmus, third: bool) -> None:
    missed = litmus.run(store_buffering, 3 if third else 2, 2000, third)
    both = [turn for turn, (left, right) in enumerate(zip(missed[0], missed[1], strict=True), 1) if left and right]
    if both:
        litmus.violated(f"in rounds {both[:20]} both ranks missed what the other had put before its flush ended")


def flush_then_flag(play: Play) -> None:
    """P0: put x; flush; set the flag by an atomic.  P1: looks at the flag until it is set; reads x."""
    source, expected = np.empty(LARGEST, np.uint8), np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        nbytes, offset = play.place(begin=BEGIN)
        if play.rank == 0:
            x = contents(turn, nbytes, source)
            play.delay()
            work = play.window.put(x, 1, offset, async_op=play.chance())
            play.window.flush(1 if play.chance() else None)
            set_flag(play, turn)
            play.wait(SEEN, turn)
            work.wait()
        else:
            x = contents(turn, nbytes, expected)
            play.until(lambda turn=turn: play.window.atomic_load(FLAG) == turn, "the flag is set")
            play.same(play.array[offset : offset + nbytes], x, f"the flag was set before {nbytes} bytes were there")
            play.window.signal(0, SEEN)


def set_flag(play: Play, turn: int) -> None:
    """From the last round's number to this one's, by one of the atomics."""
    way = play.own.randrange(3)
    if way == 0:
        held = play.window.fetch_add(1, FLAG, 1)
    elif way == 1:
        held = play.window.swap(1, FLAG, turn)
    else:
        held = play.window.compare_swap(1, FLAG, turn - 1, turn)
    if held != turn - 1:
        play.violated(f"the flag held {held} before it was set to {turn}")


def test_flush_then_flag(litmus: Litmus) -> None:
    litmus.run(flush_then_flag, 2, 4000)


def three_party(play: Play) -> None:
    """P0: put x at P2; flush; signal P1.  P1: waits; gets x from P2; signals P2.  P2: waits; reads x."""
    source, expected = np.empty(LARGEST, np.uint8), np.empty(LARGEST, np.uint8)
    fetched = np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        nbytes, offset = play.place()
        x = contents(turn, nbytes, source if play.rank == 0 else expected)
        if play.rank == 0:
            play.delay()
            work = play.window.put(x, 2, offset, async_op=play.chance())
            play.window.flush(2 if play.chance() else None)
            play.window.signal(1, DATA)
            play.wait(SEEN, turn)
            work.wait()
        elif play.rank == 1:
            got = fetched[:nbytes]
            got[:] = 0
            play.wait(DATA, turn)
            play.window.get(got, 2, offset)
            play.same(got, x, "a third rank does not see what was flushed")
            play.window.signal(2, DATA)
        else:
            play.wait(DATA, turn)
            play.same(play.array[offset : offset + nbytes], x, "the target does not see what a third rank saw")
            play.window.signal(0, SEEN)


def test_three_party(litmus: Litmus) -> None:
    litmus.run(three_party, 3, 2500)


# ---- Fence -----------------------------------------------------------------------------------------------------------


def fence_then_flag(play: Play) -> None:
    """P0: put x, asynchronously; fence; set the flag by a small put or an atomic.  P1: sees the flag; reads x."""
    source, expected = np.empty(LARGEST, np.uint8), np.empty(LARGEST, np.uint8)
    flag = np.zeros(1, np.uint64)
    for turn in play.turns():
        nbytes, offset = play.place(begin=BEGIN)
        if play.rank == 0:
            x = contents(turn, nbytes, source)
            flag[0] = turn
            work = play.window.put(x, 1, offset, async_op=play.chance(0.8))
            play.delay()
            play.window.fence(1)
            if play.chance():
                last = play.window.put(flag, 1, FLAG, async_op=play.chance(0.3))
            else:
                last = work
                set_flag(play, turn)
            play.wait(SEEN, turn)
            play.finish(work)
            play.finish(last)
        else:
            x = contents(turn, nbytes, expected)
            play.until(lambda turn=turn: play.window.atomic_load(FLAG) == turn, "the flag is set")
            play.same(
                play.array[offset : offset + nbytes], x, f"the flag came before {nbytes} bytes put before the fence"
            )
            play.window.signal(0, SEEN)


def test_fence_then_flag(litmus: Litmus) -> None:
    litmus.run(fence_then_flag, 2, 4000)


def write_after_read(play: Play) -> None:
    """P0: get x, asynchronously; fence; put x', asynchronously or not; fence; and so on. P1 does the same at P0.

    A get behind a fence has what the put before it wrote, and nothing of what the put behind it writes. Each rank alone
    writes where it reads, so it knows what each get must have. On one processor a device has often read before the put
    is posted.
    """
    peer = 1 - play.rank
    model = np.zeros(ROOM, np.uint8)  # what the peer's window holds
    sources = [np.empty(LARGEST, np.uint8) for _ in range(2)]
    got = np.empty(LARGEST, np.uint8)
    writing = None
    for turn in play.turns():
        nbytes = play.size()
        offset = play.own.randrange(ROOM - nbytes + 1)
        expected = model[offset : offset + nbytes].copy()
        x = contents(turn * 2 + play.rank, nbytes, sources[turn % 2])
        reading = play.window.get(got[:nbytes], peer, offset, async_op=play.chance(0.8))
        play.window.fence(peer)
        behind = play.window.put(x, peer, offset, async_op=play.chance(0.3))
        play.delay()
        if writing is not None:
            play.finish(writing)
        play.finish(reading)
        play.same(got[:nbytes], expected, "a get does not have what was there between the fences before and behind it")
        model[offset : offset + nbytes] = x
        play.window.fence(peer)
        writing = behind
    play.window.flush(peer)
    play.meet()
    play.window.get(got, peer, 0)
    play.same(got, model[:LARGEST], "what the peer holds at the end")


def test_write_after_read(litmus: Litmus) -> None:
    litmus.run(write_after_read, 2, 4000)


# ---- Atomics ---------------------------------------------------------------------------------------------------------


def independent_readers(play: Play) -> Counts | None:
    """P0 counts x up at P2, P1 counts y up there.  P2 reads x, then y;  P3 reads y, then x; as long as they change.

    Words that only atomics change have one order for all: never does one reader see x change before y, and the other y
    before x. P2 reads its own memory, P3 by atomics that change nothing. Returns the readers' pairs of x and y.
    """
    x, y = 0, 8
    seen: list[tuple[int, int]] = []
    if play.rank < 2:
        for turn in play.turns():
            play.delay()
            held = play.window.fetch_add(2, (x, y)[play.rank], 1)
            if held != turn - 1:
                play.violated(f"a word that this rank alone adds to held {held} after {turn - 1}")
        play.meet()
        return None

    def read(word: int) -> int:
        if play.rank == 2:
            return play.window.atomic_load(word)
        return play.window.fetch_add(2, word, 0) if play.chance() else play.window.compare_swap(2, word, 0, 0)

    play.pin()
    while not seen or not play.window.test_signal(7, 2):  # two ranks have come to play.meet(): those that count
        first, second = ((x, y), (y, x))[play.rank - 2]
        values = {first: read(first)}
        if play.chance(0.2):
            play.delay()
        values[second] = read(second)
        pair = values[x], values[y]
        if not seen or pair != seen[-1]:
            seen.append(pair)
            if len(seen) % 500 == 0:
                play.pin()
        os.sched_yield()
    play.meet()
    return np.array(seen)


def test_independent_readers(litmus: Litmus) -> None:
    _, _, here, there = litmus.run(independent_readers, 4, 6000)
    for rank, pairs in ((2, here), (3, there)):
        if (np.diff(pairs, axis=0) < 0).any():
            litmus.violated(f"a counter went back before the eyes of rank {rank}")
    # P2 had x = a and, after that, y = b. P3 had y = d and, after that, x = c. Were c < a and b < d, then x became a
    # before y became d, as P2 saw, and after that, as P3 saw. The last pair of P3 with c < a has the largest d.
    last = np.searchsorted(there[:, 0], here[:, 0], side="left") - 1
    largest = np.where(last >= 0, there[last, 1], -1)
    wrong = np.flatnonzero(largest > here[:, 1])
    if wrong.size:
        (a, b), (c, d) = here[wrong[0]], there[last[wrong[0]]]
        litmus.violated(f"rank 2 saw x = {a}, then y = {b}; rank 3 saw y = {d}, then x = {c}: no order has both")


def mutual_exclusion(play: Play) -> None:
    """All: take the lock at P0 by compare_swap; get x, put the next; flush; free the lock by swap.  Nothing is lost."""
    area = 20_000  # the bytes that the lock guards: word 0 is the version, all is its contents
    pieces = np.empty(area, np.uint8)
    source = np.empty(area, np.uint8)
    mine = play.rank + 1
    if play.rank == 0:
        play.window.put(contents(0, area), 0, BEGIN)
        play.window.flush(0)
    play.meet()
    for _ in play.turns():
        play.until(lambda: play.window.compare_swap(0, FLAG, 0, mine) == 0, "the lock is free")
        edge = play.own.randint(0, area)
        if play.chance():
            play.window.get_many([(pieces[edge:], BEGIN + edge), (pieces[:edge], BEGIN)], 0)
        else:
            play.window.get(pieces, 0, BEGIN)
        version = stamp_of(pieces)
        play.same(pieces, contents(version, area, source), "what the lock guards is not of one version")
        x = contents(version + 1, area, source)
        if play.chance():
            play.window.put_many([(x[edge:], BEGIN + edge), (x[:edge], BEGIN)], 0)
        else:
            play.window.put(x, 0, BEGIN)
        play.window.flush(0)
        held = play.window.swap(0, FLAG, 0)
        if held != mine:
            play.violated(f"the lock of rank {play.rank} was held by {held - 1}")
        play.delay()
    play.meet()
    play.window.get(pieces, 0, BEGIN)
    play.same(pieces, contents(play.part.ranks * play.turn, area, source), "the version at the end")


def test_mutual_exclusion(litmus: Litmus) -> None:
    litmus.run(mutual_exclusion, 3, 4000)
