"""What is promised once an operation is over: of its source, of its bytes, after a deadline, after a window's end."""

import contextlib

import numpy as np
from litmus.play import LARGEST, ROOM, Bytes, Litmus, Play, contents

from onesided import ConnectionLost, DeadlineExceeded, StaleHandle, Work

DATA, SEEN = 0, 1  # signals
FLAG = 0  # the offset of a word that only atomics change
BEGIN = 64

POISON = 0xFF  # fills what nobody may read any more; contents() has no such word

# A connection that ends again and again within a second is opened more and more slowly, up to 0.64 s; on the fake
# devices most rounds end it.
FEW = 12


def poisoned(held: Bytes) -> int:
    """How many words are poison. `held` begins at a multiple of 8."""
    return int(np.count_nonzero(held[: held.size // 8 * 8].view(np.uint64) == (1 << 64) - 1))


def reuse_after_completion(play: Play) -> None:
    """P0: put x; when it is over, x becomes poison; signal.  P1: waits; reads the old x.

    P0 is up to eight rounds ahead.
    """
    slots, area = 8, ROOM // 8
    source = np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        nbytes, offset = play.place(most=area, begin=turn % slots * area, end=(turn % slots + 1) * area)
        if play.rank == 0:
            if turn > slots:
                play.wait(SEEN, turn - slots)
            x = contents(turn, nbytes, source)
            if play.chance():
                play.window.put(x, 1, offset)
            else:
                play.finish(play.window.put(x, 1, offset, async_op=True))
            x[:] = POISON
            play.delay()
            play.window.signal(1, DATA)
        else:
            x = contents(turn, nbytes, source)
            play.wait(DATA, turn)
            play.same(play.array[offset : offset + nbytes], x, "the source of a put that was over")
            play.window.signal(0, SEEN)


def test_reuse_after_completion(litmus: Litmus) -> None:
    litmus.run(reuse_after_completion, 2, 6000)


def done_then_flag(play: Play) -> None:
    """P0: put x, asynchronously; when it is done, add to the flag.  P1: sees the flag; reads x.  There is no flush."""
    source, expected = np.empty(LARGEST, np.uint8), np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        nbytes, offset = play.place(begin=BEGIN)
        if play.rank == 0:
            x = contents(turn, nbytes, source)
            play.delay()
            play.finish(play.window.put(x, 1, offset, async_op=True))
            play.window.fetch_add(1, FLAG, 1)
            play.wait(SEEN, turn)
        else:
            x = contents(turn, nbytes, expected)
            play.until(lambda turn=turn: play.window.atomic_load(FLAG) == turn, "the flag is set")
            play.same(
                play.array[offset : offset + nbytes], x, f"a put of {nbytes} bytes was done before its bytes came"
            )
            play.window.signal(0, SEEN)


def test_done_then_flag(litmus: Litmus) -> None:
    litmus.run(done_then_flag, 2, 4000)


def late_write_after_cancel(play: Play) -> int:
    """P0: put x in several pieces; waits for none of them long; all sources become poison.  P1: never sees poison.

    The bytes of a cancelled put are undefined, but they are its source's from before the deadline, or what was there.
    A put that succeeded is there. Returns how many rounds were cancelled: on one processor few are with a device, which
    moves the bytes while they are posted.
    """
    count = 6
    area = ROOM // count // 8 * 8
    sources = [np.empty(area, np.uint8) for _ in range(count)]
    verdicts = np.zeros(count, np.uint8)
    told = ROOM - count  # where P0 says which have succeeded
    cancelled = 0
    for turn in play.turns():
        sizes = [play.shared.choice([8, 4096, 4104, 65_536, 200_000, 300_000]) for _ in range(count)]
        if play.rank == 0:
            data = [contents(turn * 8 + i, nbytes, sources[i]) for i, nbytes in enumerate(sizes)]
            works = [play.window.put(x, 1, i * area, async_op=True) for i, x in enumerate(data)]
            play.delay()
            patience_s = play.own.choice([0, 5e-6, 50e-6, 300e-6])
            verdicts[:] = [succeeded(work, 0 if i else patience_s) for i, work in enumerate(works)]
            for x in reversed(data):
                x[:] = POISON
            cancelled += not verdicts.all()
            play.window.put(verdicts, 1, told, signal=DATA)
            play.wait(SEEN, turn)
        else:
            play.wait(DATA, turn)
            for i in range(count):
                held = play.array[i * area : i * area + sizes[i]]
                if found := poisoned(held):
                    play.violated(f"{found} words of put {i} are from its source after the deadline")
                if play.array[told + i]:
                    play.same(held, contents(turn * 8 + i, sizes[i], sources[i]), f"put {i}, which succeeded")
            play.window.signal(0, SEEN)
    return cancelled


def succeeded(work: Work, timeout_s: float) -> bool:
    try:
        work.wait(timeout_s)
    except DeadlineExceeded:
        return False
    return True


def test_late_write_after_cancel(litmus: Litmus) -> None:
    cancelled = litmus.run(late_write_after_cancel, 2, 2000, most_on_fake=FEW)[0]
    print(f"{cancelled} rounds were cancelled")


def late_write_after_deadline(play: Play) -> None:
    """P0: put x with a deadline, or put it and flush with one; x becomes poison.  P1: never sees poison."""
    source = np.empty(LARGEST, np.uint8)
    for turn in play.turns():
        nbytes = play.size()
        if play.rank == 0:
            x = contents(turn, nbytes, source)
            deadline_s = play.own.choice([0, 5e-6, 50e-6, 300e-6])
            try:
                if play.chance():
                    play.window.put(x, 1, 0, timeout_s=deadline_s)
                else:
                    play.window.put(x, 1, 0, async_op=True)
                    play.window.flush(1, deadline_s)
            except DeadlineExceeded:
                pass
            x[:] = POISON
            play.delay()
            with contextlib.suppress(
                ConnectionLost
            ):  # of what was cancelled: the signal would tell that, and not be sent
                play.window.flush(1)
            play.window.signal(1, DATA)
            play.wait(SEEN, turn)
        else:
            play.wait(DATA, turn)
            if found := poisoned(play.array[:nbytes]):
                play.violated(f"{found} words are from the source after the deadline")
            play.window.signal(0, SEEN)


def test_late_write_after_deadline(litmus: Litmus) -> None:
    litmus.run(late_write_after_deadline, 2, 4000, most_on_fake=FEW)


def late_write_after_close(play: Play) -> None:
    """P1, P2: put into P0's window until it is closed.  P0: closes it; writes there itself.  Nothing comes later."""
    nbytes = LARGEST
    source = contents(play.rank, nbytes)
    own = contents(0, nbytes)
    for turn in play.turns():
        window = play.allocate(nbytes)
        if play.rank == 0:
            array = window.array
            play.wait(DATA, 2 * turn)  # both have begun
            play.delay()
            window.close()
            array[:] = own
            play.meet()
            play.same(array, own, "a window was written to after its close")
        else:
            puts = 0
            try:
                while True:
                    size = play.own.choice([8, 4096, 65_536, nbytes, nbytes])
                    window.put(source[:size], 0, play.own.randrange(nbytes - size + 1))
                    if puts == 0:
                        play.window.signal(0, DATA)
                    puts += 1
                    if puts % 16 == 0:
                        window.flush(0)
            except StaleHandle:
                pass
            play.meet()
            window.close()


def test_late_write_after_close(litmus: Litmus) -> None:
    litmus.run(late_write_after_close, 3, 120)
