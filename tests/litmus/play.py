"""What litmus tests are written with: a rank's part of a play, its chances, and how it says that the model was broken.

A litmus test is a small program for a few processes, played thousands of times with random sizes, offsets, delays and
processors, and a statement about what they may see (Alglave and others, "Herding Cats", 2014, has the classical ones).

All chances come from one seed, which every violation names: ONESIDED_LITMUS_SEED=seed plays the same sizes, offsets and
delays again, though not the same races. ONESIDED_LITMUS_ROUNDS=factor plays that many times as many rounds.
"""

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from harness import KINDS, Function, Processes

from onesided import ConnectionLost, Group, Window, Work, _core, run_local

if TYPE_CHECKING:
    from fake_verbs import FakeVerbs

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LARGEST = 1 << 20
ROOM = 2 << 20  # the bytes of a window
# Nothing, words and what is no word, the edges of what rdma copies (4 KiB) and of what it stripes over rails (128 KiB).
SIZES = (
    *(0, 1, 7, 8, 9, 64, 1000, 4095, 4096, 4097, 20_000, 65_536),
    *((128 << 10) - 1, 128 << 10, (128 << 10) + 1, 300_001, LARGEST),
)

STRETCHES = 32  # how often a play changes the processors of its threads
OVER = 1 << 56  # added to all signals of all ranks by each rank that fails: nobody waits for it any more
ENOUGH = 1 << 40  # added to signal 6 by rank 0 when a play has lasted long enough
ANOTHER = "another rank of this play has failed"

# ---- What is written -------------------------------------------------------------------------------------------------

WEYL = 0x9E3779B97F4A7C15  # odd, so every stamp has its own word; no byte is 0 or 255, so neighbours share no byte
WORD = (1 << 64) - 1
INDICES = np.arange(LARGEST // 8 + 1, dtype=np.uint64)


def contents(stamp: int, nbytes: int, out: Bytes | None = None) -> Bytes:
    """Bytes that tell who wrote them and where: word i is `stamp * WEYL + i`. They go to the front of `out`."""
    count = -(-nbytes // 8)
    words = np.empty(count, np.uint64) if out is None else out[: 8 * count].view(np.uint64)
    np.add(INDICES[:count], np.uint64(stamp * WEYL & WORD), out=words)
    return words.view(np.uint8)[:nbytes]


def stamp_of(held: Bytes, index: int = 0) -> int:
    """The stamp of what word `index` belongs to."""
    word = int.from_bytes(held[8 * index : 8 * index + 8].tobytes(), "little")
    return (word - index) * pow(WEYL, -1, 1 << 64) & WORD


def stamp_at(held: Bytes, at: int) -> str:
    """Whose word it is that byte `at` lies in, in words."""
    begin = at // 8 * 8
    word = held[begin : begin + 8].tobytes()
    if len(word) == 8 and (stamp := stamp_of(held, at // 8)) < 1 << 32:
        return f"stamp {stamp}"
    return f"{word.hex()}, of no put to this place"


class Violation(AssertionError):
    """Somebody saw what the memory model forbids."""


# ---- A rank ----------------------------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """How the ranks of a play reach each other: by a kind of transport, or in another way that is worth a test.

    A window that spans hosts has two kinds. The fake devices of tests/fake_verbs.py are rdma's, within one process,
    whose threads are the ranks: they do the requests of each queue pair in order, and those of different ones in any
    order, as real rails do and Soft-RoCE on one processor does not.
    """

    name: str
    transport: str
    spans_hosts: bool = False
    fake: bool = False


REACHES = {kind.name: Reach(kind.name, kind.name) for kind in KINDS}
REACHES["shm+rdma"] = Reach("shm+rdma", "auto", spans_hosts=True)
REACHES["fake"] = Reach("fake", "rdma", fake=True)


class Part(NamedTuple):
    """What a play is, the same for all of its ranks."""

    function: Function
    reach: Reach
    ranks: int
    rounds: int
    seed: int
    enough_s: float  # after so long there are no more rounds
    limit_s: float  # for the whole play, and so for one wait; only a hang lasts so long


class Play:
    """One rank of a play. Its window has ROOM bytes; `shared` gives all ranks the same draws, `own` each its own."""

    def __init__(self, group: Group, part: Part) -> None:
        self.group = group
        self.rank = group.rank
        self.part = part
        self.turn = 0
        self.shared = random.Random(f"{part.seed} of {part.function.name}")
        self.own = random.Random(f"{part.seed} of {part.function.name}, rank {group.rank}")
        self.processors = os.sched_getaffinity(0)
        self.window = self.allocate(ROOM)
        self.array: Bytes = self.window.array
        self._met = 0

    def allocate(self, nbytes: int) -> Window:
        return Window.allocate(self.group, nbytes, signals=8, transport=self.part.reach.transport)

    def turns(self) -> Iterator[int]:
        """The numbers of the rounds, from 1. Each stretch of rounds has its threads on other processors.

        Rank 0 ends the play after a stretch when it has lasted too long, as on a machine that has much else to do: all
        ranks that take turns have as many.
        """
        stretch = max(4, self.part.rounds // STRETCHES)
        enough_s = time.monotonic() + self.part.enough_s
        for turn in range(1, self.part.rounds + 1):
            if turn % stretch == 1:
                if turn > 1 and self._is_enough(turn // stretch, enough_s):
                    return
                self.pin()
            self.turn = turn
            yield turn

    def _is_enough(self, stretches: int, enough_s: float) -> bool:
        """Asked by all ranks after each stretch, and decided by rank 0. Uses signal 6."""
        if self.rank == 0:
            is_enough = time.monotonic() > enough_s
            for peer in range(1, self.part.ranks):
                self.window.signal(peer, 6, 1 + ENOUGH * is_enough)
            self.window.flush()  # what is cancelled next would take it along
            return is_enough
        self.wait(6, stretches)
        return self.window.signal_value(6) >= ENOUGH

    def pin(self) -> None:
        """Binds the calling thread, and the other threads of this process, each to one processor or to none."""
        here, others = (
            self.processors if self.own.random() < 0.4 else {self.own.choice(sorted(self.processors))} for _ in "12"
        )
        me = threading.get_native_id()
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), here if int(thread.name) == me else others)

    def unpin(self) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), self.processors)

    # ---- Chances

    def size(self, least: int = 0, most: int = LARGEST) -> int:
        return self.shared.choice([size for size in SIZES if least <= size <= most])

    def place(self, least: int = 0, most: int = LARGEST, begin: int = 0, end: int = ROOM) -> tuple[int, int]:
        """A size and an offset within [begin, end), the same on all ranks."""
        nbytes = self.size(least, min(most, end - begin))
        return nbytes, self.shared.randrange(begin, end - nbytes + 1)

    def chance(self, of: float = 0.5) -> bool:
        return self.own.random() < of

    def delay(self) -> None:
        """Mostly nothing, or a spin of a few microseconds; now and then a longer one, or a turn for other processes."""
        chance = self.own.random()
        if chance < 0.4:
            return
        if chance < 0.9:
            for _ in range(self.own.randrange(80 if chance < 0.8 else 4000)):
                pass
        else:
            os.sched_yield()

    # ---- Waiting

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Looks until it is so. What it looks at has to be what the model synchronises by."""
        deadline_s = time.monotonic() + self.part.limit_s
        while not condition():
            os.sched_yield()
            if self.is_over():
                raise ConnectionLost(ANOTHER)
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{self.where()}: not within {self.part.limit_s:g} s: {what}")

    def wait(self, index: int, count: int) -> None:
        """Waits for a signal: by spinning, asleep, or by looking, all of which promise the same."""
        way = self.own.randrange(4)
        if way == 0:
            self.until(lambda: self.window.test_signal(index, count), f"signal {index} has reached {count}")
        elif way == 1:
            self.until(lambda: self.window.signal_value(index) >= count, f"signal {index} has reached {count}")
        else:
            self.window.wait_signal(index, count, timeout_s=self.part.limit_s, spin_s=(0, 50e-6)[way % 2])
        if self.is_over():
            raise ConnectionLost(ANOTHER)

    def meet(self) -> None:
        """Returns when all ranks of the play have come here as often as this one. Uses signal 7."""
        self._met += 1
        for peer in range(self.part.ranks):
            if peer != self.rank:
                self.window.signal(peer, 7)
        self.window.flush()
        self.wait(7, (self.part.ranks - 1) * self._met)

    def finish(self, work: Work) -> None:
        """Until an operation is done, in one of the ways to find out."""
        if self.chance():
            work.wait(self.part.limit_s)
        else:
            self.until(work.done, "the operation is done")
            assert work.exception() is None

    # ---- What was seen

    def where(self) -> str:
        name, rank = self.part.function.name, self.rank
        return f"{name} over {self.part.reach.name}, round {self.turn} of {self.part.rounds}, rank {rank}"

    def violated(self, what: str) -> None:
        raise Violation(violation(self.where(), what, self.part.seed))

    def same(self, seen: Bytes, expected: Bytes, what: str) -> None:
        """All bytes are as expected. Looks at the last ones first: they are written last."""
        last = seen[-64:].copy()
        held = seen.copy()
        held[held.size - last.size :] = last
        if not np.array_equal(held, expected):
            differ = np.flatnonzero(held != expected)
            begin, end = int(differ[0]), int(differ[-1])
            first, last_one, wanted = stamp_at(held, begin), stamp_at(held, end), stamp_at(expected, begin)
            self.violated(
                f"{what}: {differ.size} of {held.size} bytes are not there, from byte {begin} ({first}) to byte {end} "
                f"({last_one}), instead of {wanted}"
            )

    def is_over(self) -> bool:
        return self.window.signal_value(0) >= OVER

    def over(self) -> None:
        """Tells all ranks that this one has failed."""
        for peer in range(self.group.size):
            for index in range(8):
                with contextlib.suppress(Exception):
                    self.window.signal(peer, index, OVER, timeout_s=1.0)


def violation(where: str, what: str, seed: int) -> str:
    return f"litmus violation: {where}: {what}; ONESIDED_LITMUS_SEED={seed}, core {_core.__file__}"


def take_part(group: Group, part: Part, args: tuple[object, ...]) -> Any:
    """What a process does for Litmus.run: opens the window, and plays its rank of the function."""
    # This module by its name: here it has another one, and exceptions travel by name.
    from litmus.play import Play, Violation

    if part.reach.spans_hosts:
        os.environ["ONESIDED_HOST"] = "b" if group.rank >= 2 else "a"  # this process counts as one on that host
    try:
        play = Play(group, part)
        try:
            seen = part.function.load()(play, *args) if group.rank < part.ranks else None
        except Exception as error:
            if play.is_over() and not isinstance(error, Violation):  # what came of its end is not what to tell
                raise ConnectionLost(ANOTHER) from error
            play.over()
            raise
        finally:
            play.unpin()
        group.barrier(timeout_s=part.limit_s)
        play.window.close()
        return seen
    finally:
        os.environ.pop("ONESIDED_HOST", None)


def in_one_process(group: Group, part: Part, args: tuple[object, ...]) -> Sequence[Any]:
    """What the one process of a play on fake devices does: its threads play the ranks."""
    import fake_verbs
    from litmus.play import scattered, take_part

    failures: list[BaseException] = []  # the others are told of one before run_local is

    def play_rank(rank: Group) -> Any:
        try:
            return take_part(rank, part, args)
        except ConnectionLost:
            raise
        except BaseException as failure:
            failures.append(failure)
            raise

    part.function.load()  # once, not by each thread
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(50e-6)  # the ranks and the devices take turns
    try:
        with fake_verbs.in_use(2) as fake, scattered(fake, part.seed):
            return run_local(part.ranks, play_rank, timeout_s=part.limit_s)
    except ConnectionLost:
        if failures:
            raise failures[0] from None
        raise
    finally:
        sys.setswitchinterval(interval_s)


@contextlib.contextmanager
def scattered(fake: "FakeVerbs", seed: int) -> Iterator[None]:
    """The fake's devices do what is posted when chance says so: now and then a queue pair stands still for a while."""
    chance = random.Random(f"{seed} of the devices")
    over = threading.Event()

    def deliver() -> None:
        idle: set[int] = set()
        while not over.wait(20e-6):
            pending = fake.pending_at()
            awake = [pair for pair in pending if pair not in idle]
            if not awake or chance.random() < 0.1:
                idle = {pair for pair in pending if chance.random() < 0.5}
                continue
            fake.release(chance.randint(1, 8), chance.choice(awake))

    fake.hold()
    devices = threading.Thread(target=deliver, daemon=True)
    devices.start()
    try:
        yield
    finally:
        over.set()
        devices.join()
        fake.deliver_immediately()


# ---- The test --------------------------------------------------------------------------------------------------------

FACTOR = float(os.environ.get("ONESIDED_LITMUS_ROUNDS", "1"))
SEED = int(os.environ.get("ONESIDED_LITMUS_SEED") or random.SystemRandom().randrange(1 << 32))
SHARE_OF_DEVICES = 1 / 16  # of the rounds; also of all kinds where there is one processor, and each look costs a switch
# Under qemu with two processors, Soft-RoCE loses packets when a thread moves to the other one (out_of_seq_request and
# completer_retry_err of /sys/class/infiniband count them), and each loss costs half a second or more.
LOSSY = os.environ.get("ONESIDED_SOFTROCE") == "1" and len(os.sched_getaffinity(0)) > 1
ENOUGH_S = 15.0 * max(1.0, FACTOR) * (4 if LOSSY else 1)
LIMIT_S = 100.0 * max(1.0, FACTOR) * (4 if LOSSY else 1)


class Litmus:
    """Plays functions on processes that reach each other in one way."""

    def __init__(self, processes: Processes, reach: Reach) -> None:
        self.processes = processes
        self.reach = reach

    def run(
        self, fn: Callable[..., Any], ranks: int, rounds: int, *args: object, most_on_fake: int | None = None
    ) -> list[Any]:
        """Plays `fn(play, *args)` for so many rounds; fewer on devices. Returns what the ranks return."""
        fast = self.reach.name == "shm" and len(os.sched_getaffinity(0)) > 1
        count = max(8, int(rounds * FACTOR * (1 if fast else SHARE_OF_DEVICES)))
        if self.reach.fake and most_on_fake is not None:
            count = min(count, max(6, int(most_on_fake * FACTOR)))
        self.part = Part(Function.of(fn), self.reach, ranks, count, SEED, ENOUGH_S, LIMIT_S)
        if self.reach.fake:
            try:
                return list(self.processes.run(in_one_process, 1, self.part, args, timeout_s=LIMIT_S)[0])
            except BaseException:
                self.processes.restart()  # the fake stays in use after a failure
                raise
        # A third rank, on another host, makes of a play for two one that spans hosts.
        size = max(ranks, 3) if self.reach.spans_hosts else ranks
        seen = self.processes.run(take_part, size, self.part, args, timeout_s=LIMIT_S)
        return list(seen[:ranks])

    def violated(self, what: str) -> None:
        """The ranks together saw what is forbidden."""
        raise Violation(violation(f"{self.part.function.name} over {self.reach.name}", what, SEED))
