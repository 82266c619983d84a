"""Ranks that run programs on real windows, one after the other, and the long run of many of them.

Ranks are threads or processes. They and their windows last from one program to the next; between programs, every rank
puts its memory back to what it was, and all meet.

A byte at address a of write w holds PATTERN[a] + w, so that bytes which landed at a wrong place show as well. When a
source has been given back, it is filled with POISON.
"""

import contextlib
import itertools
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import harness
import numpy as np
from harness import Kind, Processes
from model.memory_model import Refusal, check, report
from model.programs import (
    ATOMICS,
    BYTES,
    INDEXES,
    POISON,
    WINDOW_NBYTES,
    WORDS,
    Program,
    Step,
    program_of,
)

from onesided import Group, Window
from onesided._core import Plan

Array = Any  # of bytes
RANKS = 4
PATIENCE_S = 30.0
BATCH_STEPS = 2000  # of a long run, told to the ranks at once
PATTERN = np.frombuffer(random.Random("pattern").randbytes(WINDOW_NBYTES), np.uint8)
SIZES = [(np.uint64, 0, 32), (np.uint32, 32, 64)]  # of WORDS, and where they are

# ---- One rank --------------------------------------------------------------------------------------------------------


def runs(data: Array, offset: int) -> tuple[tuple[int, int, int], ...]:
    """Whose bytes these are that were at `offset`: (begin, end, write)."""
    if len(data) == 0:
        return ()
    writes = data - PATTERN[offset : offset + len(data)]
    cuts = np.flatnonzero(writes[1:] != writes[:-1]) + 1
    begins = [0, *cuts.tolist()]
    ends = [*begins[1:], len(data)]
    return tuple((offset + a, offset + b, int(writes[a])) for a, b in zip(begins, ends, strict=True))


def words(data: Array) -> tuple[int, ...]:
    """What WORDS hold."""
    return tuple(itertools.chain.from_iterable(data[a:b].view(dtype).tolist() for dtype, a, b in SIZES))


class UnderWay(NamedTuple):
    """An asynchronous operation, with its buffers: for each piece, its write and the bytes."""

    step: Step
    work: Any
    buffers: list[tuple[int, Array]]


class Rank:
    """Runs its part of programs, and tells what it has seen."""

    def __init__(self, group: Group, kind: Kind) -> None:
        self.rank = group.rank
        self.window = Window.allocate(group, WINDOW_NBYTES, signals=INDEXES, transport=kind.name)
        self.gate = Window.allocate(group, 8, signals=group.size, transport=kind.name)  # to meet between programs
        self.met = [0] * group.size
        self.memory = self.window.array
        self.memory[BYTES:] = PATTERN[BYTES:]
        group.barrier()

    def close(self) -> None:
        self.gate.close()
        self.window.close()

    def run(self, program: Program) -> dict[int, Any]:
        """What the steps of this rank return, as check() wants it."""
        if self.rank >= program.size:
            return {}
        self.counts = [self.window.signal_value(index) for index in range(INDEXES)]
        self._meet(program.size)
        self.seen: dict[int, Any] = {}
        self.under_way: dict[int, UnderWay] = {}
        self.works: dict[int, Any] = {}
        self.last: dict[tuple[int, int], int] = {}  # what this rank last saw of a word
        for step in program.steps:
            if step.rank == self.rank:
                getattr(self, f"_{step.op}")(step)
        end = max(step.pieces[0].end for step in program.steps[-RANKS * (INDEXES + 2) :] if step.op == "load")
        self.memory[:BYTES] = 0
        self.memory[BYTES:end] = PATTERN[BYTES:end]
        return self.seen

    def _meet(self, size: int) -> None:
        """Returns when ranks 0 to size - 1 are all here."""
        others = [rank for rank in range(size) if rank != self.rank]
        for rank in others:
            self.gate.signal(rank, self.rank)
        for rank in others:
            self.met[rank] += 1
            self.gate.wait_signal(rank, self.met[rank], timeout_s=PATIENCE_S)

    # ---- Bytes ----

    def _put(self, step: Step) -> None:
        buffers = [(piece.write, PATTERN[piece.offset : piece.end] + np.uint8(piece.write)) for piece in step.pieces]
        signal = step.index if step.index >= 0 else None
        if step.many:
            pieces: Any = [(buffer, piece.offset) for (_, buffer), piece in zip(buffers, step.pieces, strict=True)]
            pieces = Plan(pieces) if step.many == "plan" else pieces
            work = self.window.put_many(pieces, step.peer, signal=signal, add=step.add, async_op=step.async_op)
        else:
            work = self.window.put(
                buffers[0][1],
                step.peer,
                step.pieces[0].offset,
                signal=signal,
                add=step.add,
                async_op=step.async_op,
            )
        self._issued(UnderWay(step, work, buffers))

    def _get(self, step: Step) -> None:
        buffers = [(0, PATTERN[piece.offset : piece.end] + np.uint8(POISON)) for piece in step.pieces]
        if step.many:
            pieces: Any = [(buffer, piece.offset) for (_, buffer), piece in zip(buffers, step.pieces, strict=True)]
            pieces = Plan(pieces) if step.many == "plan" else pieces
            work = self.window.get_many(pieces, step.peer, async_op=step.async_op)
        else:
            work = self.window.get(buffers[0][1], step.peer, step.pieces[0].offset, async_op=step.async_op)
        self._issued(UnderWay(step, work, buffers))

    def _issued(self, one: UnderWay) -> None:
        if one.step.async_op:
            self.under_way[one.step.number] = one
            self.works[one.step.number] = one.work
        else:
            self._collect(one)

    def _collect(self, one: UnderWay) -> None:
        """It is complete: reads what a get has found, and spoils the source of a put."""
        if one.step.op == "get":
            self.seen[one.step.number] = tuple(
                runs(buffer, piece.offset) for (_, buffer), piece in zip(one.buffers, one.step.pieces, strict=True)
            )
        else:
            for write, buffer in one.buffers:
                np.add(buffer, np.uint8(POISON - write), out=buffer)

    def _store(self, step: Step) -> None:
        for piece in step.pieces:
            np.add(PATTERN[piece.offset : piece.end], np.uint8(piece.write), out=self.memory[piece.offset : piece.end])

    def _load(self, step: Step) -> None:
        self.seen[step.number] = tuple(
            runs(self.memory[piece.offset : piece.end].copy(), piece.offset) for piece in step.pieces
        )

    # ---- Signals ----

    def _signal(self, step: Step) -> None:
        work = self.window.signal(step.peer, step.index, step.add, async_op=step.async_op)
        self._issued(UnderWay(step, work, []))

    def _wait(self, step: Step) -> None:
        at_least = (self.counts[step.index] + step.at_least) % 2**64
        self._count(step, self.window.wait_signal(step.index, at_least, timeout_s=PATIENCE_S))

    def _peek(self, step: Step) -> None:
        self._count(step, self.window.signal_value(step.index))

    def _count(self, step: Step, value: int) -> None:
        self.seen[step.number] = (value - self.counts[step.index]) % 2**64

    # ---- Words ----

    def _atomic(self, step: Step) -> None:
        offset, nbytes = WORDS[step.word]
        expected = self.last.get((step.peer, step.word), 0)
        values = (expected, step.value) if step.op == "compare_swap" else (step.value,)
        returned = getattr(self.window, step.op)(step.peer, offset, *values, word_nbytes=nbytes)
        self.last[step.peer, step.word] = returned
        self.seen[step.number] = (expected, returned)

    _fetch_add = _compare_swap = _swap = _atomic

    def _atomic_load(self, step: Step) -> None:
        offset, nbytes = WORDS[step.word]
        self.seen[step.number] = (0, self.window.atomic_load(offset, word_nbytes=nbytes))

    def _get_words(self, step: Step) -> None:
        data = np.full(BYTES, POISON, np.uint8)
        self.window.get(data, step.peer, 0)
        self.seen[step.number] = words(data)

    def _load_words(self, step: Step) -> None:
        self.seen[step.number] = words(self.memory[:BYTES])

    # ---- Order ----

    def _fence(self, step: Step) -> None:
        self.window.fence(step.peer)

    def _flush(self, step: Step) -> None:
        self.window.flush(None if step.peer < 0 else step.peer)
        for number, one in list(self.under_way.items()):
            if step.peer in (-1, one.step.peer):
                self._collect(self.under_way.pop(number))

    def _finish(self, step: Step) -> None:
        self.works[step.of].wait()
        self._ended(step.of)

    def _poll(self, step: Step) -> None:
        done = self.seen[step.number] = self.works[step.of].done()
        if done:
            self._ended(step.of)

    def _ended(self, number: int) -> None:
        if number in self.under_way:
            self._collect(self.under_way.pop(number))


assert all(hasattr(Rank, f"_{op}") for op in ATOMICS)

# ---- All ranks -------------------------------------------------------------------------------------------------------


class Seeds(NamedTuple):
    """Programs that each rank makes itself."""

    seed: int
    numbers: range

    def programs(self) -> Iterator[Program]:
        return (program_of(self.seed, number) for number in self.numbers)


class Given(NamedTuple):
    """A program that is told."""

    program: Program

    def programs(self) -> Iterator[Program]:
        yield self.program


Batch = Seeds | Given


def serve(group: Group, kind: Kind, hear: Callable[[], Batch | None], say: Callable[[object], None]) -> None:
    """A rank: runs what it hears until it hears None."""
    rank = Rank(group, kind)
    try:
        while (batch := hear()) is not None:
            say([rank.run(program) for program in batch.programs()])
    finally:
        rank.close()


def member(group: Group, kind: Kind) -> None:
    serve(group, kind, harness.parent.hear, harness.parent.say)


class Threads:
    """Ranks as threads of this process, which take turns every few operations."""

    def __init__(self, kind: Kind) -> None:
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self._to: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(RANKS)]
        self._from: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(RANKS)]
        self._groups = Group.local(RANKS, name="model")
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, kind), daemon=True, name=f"rank {rank}")
            for rank in range(RANKS)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: int, kind: Kind) -> None:
        try:
            with self._groups[rank] as group:
                serve(group, kind, self._to[rank].get, self._from[rank].put)
        except BaseException as error:  # noqa: BLE001  # raised by hear()
            self._from[rank].put(error)

    def tell(self, batch: Batch | None) -> None:
        for one in self._to:
            one.put(batch)

    def hear(self) -> list[Any]:
        said = []
        for rank, one in enumerate(self._from):
            try:
                said.append(one.get(timeout=2 * PATIENCE_S))
            except queue.Empty:
                raise AssertionError(f"rank {rank} has not ended its part") from None
            if isinstance(said[-1], BaseException):
                raise said[-1]
        return said

    def close(self) -> None:
        self.tell(None)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        sys.setswitchinterval(self._switch_interval_s)


class Separate:
    """Ranks as processes."""

    def __init__(self, kind: Kind) -> None:
        self._processes = Processes()
        try:
            self._team = self._processes.start(member, RANKS, kind)
        except BaseException:
            self._processes.close()
            raise

    def tell(self, batch: Batch | None) -> None:
        for process in self._team:
            process.tell(batch)

    def hear(self) -> list[Any]:
        return [process.said(2 * PATIENCE_S) for process in self._team]

    def close(self) -> None:
        try:
            self.tell(None)
            self._processes.finish(self._team, PATIENCE_S)
        finally:
            self._processes.close()


class Team:
    """Ranks of one kind of transport, kept over many programs. After a failure the next program gets new ones."""

    def __init__(self, kind: Kind, separate: bool) -> None:
        self.kind = kind
        self.puts_complete = kind.name == "shm"  # the docstring of put
        self._make: Callable[[Kind], Threads | Separate] = Separate if separate else Threads
        self._ranks: Threads | Separate | None = None

    def __str__(self) -> str:
        return f"{self.kind.name}, ranks as {'processes' if self._make is Separate else 'threads'}"

    def check(self, program: Program) -> None:
        """Runs it, and fails with what was not allowed."""
        self.begin(Given(program))
        (seen,) = self.end()
        refusal = self.judge(program, seen)
        if refusal is not None:
            raise AssertionError(f"{self}\n{report(program, seen, refusal, puts_complete=self.puts_complete)}")

    def judge(self, program: Program, seen: dict[int, Any]) -> Refusal | None:
        return check(program, seen, puts_complete=self.puts_complete)

    def begin(self, batch: Batch) -> None:
        if self._ranks is None:
            self._ranks = self._make(self.kind)
        self._ranks.tell(batch)

    def end(self) -> list[dict[int, Any]]:
        """What the steps of each program of the batch have returned."""
        assert self._ranks is not None
        try:
            said = self._ranks.hear()
        except BaseException:
            self.close()
            raise
        return [
            dict(itertools.chain.from_iterable(seen.items() for seen in parts)) for parts in zip(*said, strict=True)
        ]

    def close(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            with contextlib.suppress(Exception):  # a failure has been told already
                ranks.close()


# ---- Many programs ---------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    programs: int
    steps: int
    seconds: float


def batches(seed: int, steps: int) -> Iterator[tuple[Seeds, list[Program]]]:
    """Programs of `steps` steps in all, or a few more."""
    first = 0
    while steps > 0:
        programs: list[Program] = []
        wanted = min(BATCH_STEPS, steps)
        while wanted > 0:
            programs.append(program_of(seed, first + len(programs)))
            wanted -= len(programs[-1].steps)
            steps -= len(programs[-1].steps)
        yield Seeds(seed, range(first, first + len(programs))), programs
        first += len(programs)


def long_run(team: Team, steps: int, seed: int, tell: Callable[[int], object] = lambda _: None) -> Summary:
    """Runs `steps` steps of the programs of `seed`. While ranks run some, those before are judged here.

    Fails with the number of the program, what was not allowed, and the part of the program that shows it.
    """
    began_s = time.monotonic()
    programs_in_all = steps_in_all = 0
    waiting: tuple[Sequence[Program], Sequence[dict[int, Any]]] = ((), ())
    first = 0

    def judge_waiting() -> None:
        nonlocal first
        for number, (program, seen) in enumerate(zip(*waiting, strict=True), first):
            refusal = team.judge(program, seen)
            if refusal is not None:
                told = report(program, seen, refusal, puts_complete=team.puts_complete)
                raise AssertionError(f"{team}: program {number} of ONESIDED_MODEL_SEED={seed}\n{told}")
        first += len(waiting[0])

    for batch, programs in batches(seed, steps):
        team.begin(batch)
        judge_waiting()
        try:
            waiting = (programs, team.end())
        except Exception as error:
            numbers = f"{batch.numbers.start} to {batch.numbers.stop - 1}"
            raise AssertionError(f"{team}: a program among {numbers} of ONESIDED_MODEL_SEED={seed} failed") from error
        programs_in_all += len(programs)
        steps_in_all += sum(len(program.steps) for program in programs)
        tell(steps_in_all)
    judge_waiting()
    return Summary(programs_in_all, steps_in_all, time.monotonic() - began_s)
