"""Signals are strong: when the waiter sees the count, every earlier put of that origin to that rank is visible."""

import numpy as np
import pytest
from litmus.play import LARGEST, ROOM, Bytes, Litmus, Play, contents

DATA, SEEN = 0, 1  # the signals of these plays: from who writes, and from who has looked


def message_passing(play: Play) -> None:
    """P0: put x with signal.  P1: waits; reads x."""
    source, expected = np.empty(LARGEST, np.uint8), np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        nbytes, offset = play.place()
        if play.rank == 0:
            x = contents(turn, nbytes, source)
            play.delay()
            work = play.window.put(x, 1, offset, signal=DATA, async_op=play.chance())
            play.wait(SEEN, turn)
            work.wait()
        else:
            x = contents(turn, nbytes, expected)
            play.wait(DATA, turn)
            play.same(play.array[offset : offset + nbytes], x, f"a signal came before {nbytes} bytes at {offset}")
            play.delay()
            play.window.signal(0, SEEN)


def test_message_passing(litmus: Litmus) -> None:
    litmus.run(message_passing, 2, 5000)


def many_puts_one_signal(play: Play) -> None:
    """P0: puts, asynchronous ones among them; a signal, alone or with an empty put.  P1: waits; reads them all."""
    source = np.empty(ROOM, np.uint8)
    for turn in play.turns():
        count, area = play.shared.randint(1, 6), ROOM // 6
        places = [play.place(most=area, begin=i * area, end=(i + 1) * area) for i in range(count)]
        stamps = [turn * 8 + i for i in range(count)]
        if play.rank == 0:
            works = []
            for i, (nbytes, offset) in enumerate(places):
                x = contents(stamps[i], nbytes, source[i * area :][: area // 8 * 8])
                works.append(play.window.put(x, 1, offset, async_op=play.chance(0.7)))
                play.delay()
            if play.chance():
                works.append(play.window.signal(1, DATA, async_op=play.chance()))
            else:
                works.append(play.window.put(b"", 1, signal=DATA, async_op=play.chance()))
            play.wait(SEEN, turn)
            for work in works:
                play.finish(work)
        else:
            expected = [contents(stamp, nbytes) for stamp, (nbytes, _) in zip(stamps, places, strict=True)]
            play.wait(DATA, turn)
            for i, (nbytes, offset) in reversed(list(enumerate(places))):
                said = f"a signal came before put {i} of {count}, {nbytes} bytes"
                play.same(play.array[offset : offset + nbytes], expected[i], said)
            play.delay()
            play.window.signal(0, SEEN)


def test_many_puts_one_signal(litmus: Litmus) -> None:
    litmus.run(many_puts_one_signal, 2, 3000)


def pieces_and_signal(play: Play) -> None:
    """P0: put_many of x, cut anywhere, with signal.  P1: waits; reads x."""
    source, expected = np.empty(LARGEST, np.uint8), np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        nbytes, offset = play.place()
        if play.rank == 0:
            x = contents(turn, nbytes, source)
            pieces = cut(play, x, offset)
            play.delay()
            work = play.window.put_many(pieces, 1, signal=DATA, async_op=play.chance())
            play.wait(SEEN, turn)
            work.wait()
        else:
            x = contents(turn, nbytes, expected)
            play.wait(DATA, turn)
            play.same(play.array[offset : offset + nbytes], x, f"a signal came before pieces of {nbytes} bytes")
            play.delay()
            play.window.signal(0, SEEN)


def cut(play: Play, x: Bytes, offset: int) -> list[tuple[Bytes, int]]:
    """The bytes in up to nine pieces, in any order; pieces may be empty."""
    edges = sorted(play.own.randint(0, x.size) for _ in range(play.own.randint(0, 8)))
    spans = list(zip([0, *edges], [*edges, x.size], strict=True))
    play.own.shuffle(spans)
    return [(x[begin:end], offset + begin) for begin, end in spans]


def test_pieces_and_signal(litmus: Litmus) -> None:
    litmus.run(pieces_and_signal, 2, 3000)


def striped_put_and_signal(play: Play, apart: bool) -> None:
    """P0: put x, so large that all rails carry it; a signal on one rail, with it or apart.  P1: waits; reads x."""
    source, expected = np.empty(LARGEST, np.uint8), np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        nbytes, offset = play.place(least=(128 << 10) - 1)
        if play.rank == 0:
            x = contents(turn, nbytes, source)
            if apart:
                work = play.window.put(x, 1, offset, async_op=True)
                if play.chance(0.3):
                    play.delay()
                play.window.signal(1, DATA, async_op=play.chance(0.3))
            else:
                work = play.window.put(x, 1, offset, signal=DATA, async_op=play.chance(0.3))
            play.wait(SEEN, turn)
            play.finish(work)
        else:
            x = contents(turn, nbytes, expected)
            play.wait(DATA, turn)
            play.same(play.array[offset : offset + nbytes], x, f"a signal came before a striped put of {nbytes} bytes")
            play.window.signal(0, SEEN)


@pytest.mark.parametrize("apart", [False, True], ids=["with", "apart"])
def test_striped_put_and_signal(litmus: Litmus, apart: bool) -> None:
    litmus.run(striped_put_and_signal, 2, 2000, apart)


def several_writers_one_counter(play: Play) -> None:
    """P1, P2, P3: put x, y, z at P0 with one signal.  P0: waits for all; reads all. Then all read what P0 says back."""
    writers = play.part.ranks - 1
    area = ROOM // writers
    source = np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        places = [play.place(most=64 << 10, begin=i * area, end=(i + 1) * area) for i in range(writers)]
        back, at = play.place(most=64 << 10)
        if play.rank == 0:
            expected = [contents(turn * 4 + i, nbytes) for i, (nbytes, _) in enumerate(places, 1)]
            answer = contents(turn * 4, back, source)
            play.wait(DATA, writers * turn)
            for i, (nbytes, offset) in enumerate(places):
                said = f"the count of {writers} puts came before that of rank {i + 1}"
                play.same(play.array[offset : offset + nbytes], expected[i], said)
            works = [play.window.put(answer, peer, at, signal=SEEN, async_op=play.chance()) for peer in (1, 2, 3)]
            for work in works:
                work.wait()
        else:
            nbytes, offset = places[play.rank - 1]
            answer = contents(turn * 4, back)
            play.delay()
            x = contents(turn * 4 + play.rank, nbytes, source)
            work = play.window.put(x, 0, offset, signal=DATA, async_op=play.chance())
            play.wait(SEEN, turn)
            play.same(play.array[at : at + back], answer, "a signal came before the answer")
            work.wait()


def test_several_writers_one_counter(litmus: Litmus) -> None:
    litmus.run(several_writers_one_counter, 4, 1500)
