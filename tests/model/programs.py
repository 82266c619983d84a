"""Random programs: what 2 to 4 ranks do with a window, so that every byte that is read tells who wrote it.

A program is one sequence of steps; each rank takes its own, in that order. It cannot deadlock: a wait asks for signals
that stand before it in the sequence, and nothing else waits for another rank. One generator makes them all. It asks
`below(n)` for each of its decisions; behind that is a seed for long runs, or hypothesis, whose counterexamples are
small.

A window holds words for atomics, then bytes for everything else. A write has a number from 1 to 250 (a piece of a put
each its own), and all its bytes carry that number; how, `runner.py` says. Signals carry powers of two, so that a count
tells which of them have arrived.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

Below = Callable[[int], int]

WORDS = [(offset, 8) for offset in range(0, 32, 8)] + [(offset, 4) for offset in range(32, 64, 4)]  # offset, nbytes
BYTES = 64  # where the bytes begin
LARGE = 128 << 10  # operations of more bytes are spread over all rails
FAR = BYTES + (100 << 10)  # within what a second rail brings of a large put
WINDOW_NBYTES = BYTES + LARGE + (32 << 10)
GUARD = 64  # so many bytes behind the last that is written are looked at, too

INITIAL, POISON = 0, 255  # what memory holds at first; what a buffer holds that is not, or no longer, to be read
MOST_WRITES = 250
INDEXES = 3  # signals of each rank: the last is for barriers
BARRIER = INDEXES - 1
MOST_SIGNALS = 60  # to one index: a bit for each
MOST_BARRIERS = 3  # in the middle of a program

READS = ("get", "load")
WORD_READS = ("get_words", "load_words")
OWN = ("store", "load", "load_words", "atomic_load")  # by the rank's own processor, in its own memory
ATOMICS = ("fetch_add", "compare_swap", "swap")


class Piece(NamedTuple):
    """Bytes of the window of a step's peer; `write` is the number that they get, if they are written."""

    offset: int
    nbytes: int
    write: int = INITIAL

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Step(NamedTuple):
    """One operation of one rank. What it does not need is left as it is here."""

    number: int
    rank: int
    op: str
    peer: int = -1
    pieces: tuple[Piece, ...] = ()
    many: str = ""  # how: "" put and get, "pairs" and "plan" put_many and get_many
    async_op: bool = False
    index: int = -1  # of a signal
    add: int = 0
    at_least: int = 0
    word: int = -1  # a position in WORDS
    value: int = 0  # of an atomic: what is added, or the new value
    of: int = -1  # the number of the asynchronous step that is waited for

    def __repr__(self) -> str:
        given = [(name, value) for name, value in self._asdict().items() if value != self._field_defaults.get(name)]
        return f"Step({', '.join(f'{name}={value!r}' for name, value in given)})"

    def __str__(self) -> str:
        return f"{self.number:4}  rank {self.rank}: {self._what()}"

    def _what(self) -> str:
        later = ", async" if self.async_op else ""
        then = f", then signal {self.index} += {self.add:#x}" if self.index >= 0 else ""
        if self.op in ("put", "get", "load", "store"):
            name = self.op + ("_many" if self.many else "")
            where = ", ".join(
                f"[{piece.offset}, {piece.end})" + (f" write {piece.write}" if piece.write else "")
                for piece in self.pieces
            )
            return f"{name} at rank {self.peer}: {where or 'nothing'}{then}{later}"
        if self.op == "signal":
            return f"signal at rank {self.peer}: {self.index} += {self.add:#x}{later}"
        if self.op in (*ATOMICS, "atomic_load"):
            offset, nbytes = WORDS[self.word]
            value = "" if self.op == "atomic_load" else f", {self.value:#x}"
            return f"{self.op} at rank {self.peer}: {nbytes} bytes at {offset}{value}"
        if self.op == "wait":
            return f"wait_signal {self.index} >= {self.at_least:#x}"
        if self.op == "peek":
            return f"signal_value {self.index}"
        if self.op in ("finish", "poll"):
            return f"{'wait for' if self.op == 'finish' else 'done of'} step {self.of}"
        return f"{self.op}({'' if self.peer < 0 else self.peer})"


class Program(NamedTuple):
    size: int  # ranks
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


# What a program is made of. The first is what hypothesis turns other steps into when it makes a program smaller.
MIX = [
    *["put"] * 8,
    *["get"] * 5,
    *["signal"] * 4,
    *["wait"] * 5,
    *["fetch_add"] * 3,
    *["compare_swap"] * 3,
    *["swap"] * 2,
    *["atomic_load"] * 2,
    *["fence"] * 2,
    *["flush"] * 2,
    *["finish"] * 3,
    *["poll", "peek", "store", "load", "load", "get_words", "barrier", "contention"],
    *["message"] * 3,
    *["fenced"] * 2,
]
HOW_MANY = ["", "", "", "", "pairs", "plan"]


class Maker:
    """Makes one program, step by step."""

    def __init__(self, size: int, below: Below) -> None:
        self.size = size
        self.below = below
        self.wide = below(8) == 7  # moves large pieces, and others where the last part of those is
        self.steps: list[Step] = []
        self._writes = 0
        self._signals: dict[tuple[int, int], int] = {}  # by rank and index, how many there were
        self._under_way: list[list[int]] = [[] for _ in range(size)]  # by rank, asynchronous steps
        self._extent = [BYTES] * size  # where what was written ends
        self._barriers = 0

    def add(self, rank: int, op: str, **what: Any) -> None:
        self.steps.append(Step(len(self.steps), rank, op, **what))

    def add_any(self) -> None:
        op = MIX[self.below(len(MIX))]
        rank = self.below(self.size)
        getattr(self, f"_{op}", self._atomic)(rank, op)

    # ---- Bytes ----

    def _place(self) -> tuple[int, int]:
        """Where bytes are moved: often few of them, close together."""
        below = self.below
        if self.wide and below(4) == 3:
            return BYTES + below(4096), LARGE + 1 + below(16 << 10)
        begin = FAR if self.wide and below(2) else BYTES
        size = below(16)
        if size < 9:
            return begin + below(40), 1 + below(16)
        if size < 12:
            return begin + below(128), 1 + below(256)
        if size < 14:
            return begin + below(2048), 257 + below(3840)
        return (begin + below(4096), 4097 + below(8192)) if size == 14 else (begin + below(64), 0)

    def _pieces(self, peer: int, many: str, writes: bool) -> tuple[Piece, ...]:
        pieces = []
        for _ in range(self.below(5) if many else 1):
            offset, nbytes = self._place()
            if writes:
                if self._writes == MOST_WRITES:
                    return ()
                self._writes += 1
                self._extent[peer] = max(self._extent[peer], offset + nbytes)
            pieces.append(Piece(offset, nbytes, self._writes if writes else INITIAL))
        return tuple(pieces)

    def _put(self, rank: int, op: str, peer: int = -1) -> None:
        if peer < 0:
            peer = self.below(self.size)
        async_op = self.below(2) == 1
        many = HOW_MANY[self.below(len(HOW_MANY))]
        pieces = self._pieces(peer, many, op == "put")
        if not pieces and not many:  # no number is left for a write
            self._flush(rank, "flush")
            return
        index, add = self._bit(peer) if op == "put" and self.below(4) == 3 else (-1, 0)
        if async_op:
            self._under_way[rank].append(len(self.steps))
        self.add(rank, op, peer=peer, pieces=pieces, many=many, async_op=async_op, index=index, add=add)

    _get = _put

    def _store(self, rank: int, op: str) -> None:
        """The processor of a rank in its own memory."""
        if pieces := self._pieces(rank, "", op == "store"):
            self.add(rank, op, peer=rank, pieces=pieces)

    _load = _store

    # ---- Signals ----

    def _bit(self, peer: int, index: int | None = None) -> tuple[int, int]:
        """An index of `peer` and what to add to it."""
        if index is None:
            index = self.below(BARRIER)
        sent = self._signals.get((peer, index), 0)
        if sent == MOST_SIGNALS:
            return -1, 0
        self._signals[peer, index] = sent + 1
        return index, 1 << sent

    def _signal(self, rank: int, op: str) -> None:
        peer, async_op = self.below(self.size), self.below(2) == 1
        index, add = self._bit(peer)
        if index >= 0:
            if async_op:
                self._under_way[rank].append(len(self.steps))
            self.add(rank, op, peer=peer, index=index, add=add, async_op=async_op)

    def _wait(self, rank: int, op: str) -> None:
        """For all signals that there were, or for one of them or any later one."""
        index = self.below(BARRIER)
        sent = self._signals.get((rank, index), 0)
        if sent == 0:
            self._peek(rank, "peek")
            return
        one = self.below(2 * sent)
        self.add(rank, op, index=index, at_least=1 << one if one < sent else (1 << sent) - 1)

    def _peek(self, rank: int, op: str) -> None:
        self.add(rank, op, index=self.below(BARRIER))

    def _barrier(self, rank: int = 0, op: str = "") -> None:
        """Each rank signals each other, then waits for all."""
        if rank >= 0 and self._barriers == MOST_BARRIERS:
            return
        self._barriers += 1
        for one in range(self.size):
            for peer in range(self.size):
                if peer != one:
                    index, add = self._bit(peer, BARRIER)
                    self.add(one, "signal", peer=peer, index=index, add=add)
        for one in range(self.size):
            self.add(one, "wait", index=BARRIER, at_least=(1 << self._signals[one, BARRIER]) - 1)

    def _message(self, rank: int, op: str) -> None:
        """What signals are for: a few puts, a signal, and the other looks."""
        peer = self.below(self.size)
        first = len(self.steps)
        for _ in range(1 + self.below(3)):
            self._put(rank, "put", peer)
        index, add = self._bit(peer)
        if index < 0:
            return
        self.add(rank, "signal", peer=peer, index=index, add=add, async_op=self.below(2) == 1)
        self.add(peer, "wait", index=index, at_least=(1 << self._signals[peer, index]) - 1)
        pieces = [piece for step in self.steps[first:] for piece in step.pieces]
        if pieces:
            self.add(peer, "load", peer=peer, pieces=(pieces[self.below(len(pieces))]._replace(write=INITIAL),))

    # ---- Words ----

    def _word(self) -> int:
        """Mostly a word that others use, too; two words of 4 bytes are neighbours."""
        return [0, 0, 0, 1, 4, 4, 5, 5][self.below(8)] if self.below(8) else self.below(len(WORDS))

    def _contention(self, rank: int, op: str) -> None:
        """All ranks at once change the same word, or the two of 4 bytes that lie side by side."""
        if self._barriers == MOST_BARRIERS:
            return
        self._barrier()
        peer, word = self.below(self.size), self._word()
        for _ in range(3 + self.below(6)):
            for one in range(self.size):
                pair = word if WORDS[word][1] == 8 else word ^ self.below(2)
                self._atomic(one, ATOMICS[self.below(len(ATOMICS))], peer, pair)

    def _atomic(self, rank: int, op: str, peer: int = -1, word: int = -1) -> None:
        """Mostly with values that are met once. Compare_swap expects what its rank has last seen in the word."""
        if peer < 0:
            peer, word = self.below(self.size), self._word()
        unique = len(self.steps) + 1
        if self.below(4) == 3:
            value = [0, 1, 2, -1][self.below(4)] if op == "fetch_add" else self.below(3)
        elif op == "fetch_add":
            value = unique << 8
        else:
            value = unique << (32 if WORDS[word][1] == 8 else 16) | unique
        self.add(rank, op, peer=peer, word=word, value=value)

    def _atomic_load(self, rank: int, op: str) -> None:
        self.add(rank, op, peer=rank, word=self._word())

    def _get_words(self, rank: int, op: str) -> None:
        self.add(rank, op, peer=self.below(self.size))

    # ---- Order ----

    def _fence(self, rank: int, op: str) -> None:
        self.add(rank, op, peer=self.below(self.size))

    def _fenced(self, rank: int, op: str) -> None:
        """Two operations at one place with a fence between."""
        peer, first = self.below(self.size), len(self.steps)
        self._put(rank, ("get", "put")[self.below(2)], peer)
        self.add(rank, "fence", peer=peer)
        self._put(rank, ("put", "get")[self.below(2)], peer)
        before, behind = self.steps[first], self.steps[-1]
        if before.pieces and behind.pieces and before.op != behind.op:
            offset, nbytes, _ = before.pieces[0]
            where = behind.pieces[0]._replace(offset=offset, nbytes=nbytes)
            self.steps[-1] = behind._replace(pieces=(where, *behind.pieces[1:]))
            if behind.op == "put":
                self._extent[peer] = max(self._extent[peer], where.end)

    def _flush(self, rank: int, op: str) -> None:
        self.add(rank, op, peer=self.below(self.size + 1) - 1)

    def _finish(self, rank: int, op: str) -> None:
        under_way = self._under_way[rank]
        if under_way:
            at = self.below(len(under_way))
            self.add(rank, op, of=under_way[at] if op == "poll" else under_way.pop(at))

    _poll = _finish

    def end(self) -> Program:
        """Everything becomes visible everywhere, and each rank looks at all that it has."""
        for rank in range(self.size):
            self.add(rank, "flush")
        self._barrier(-1)
        for rank in range(self.size):
            extent = self._extent[rank] - BYTES + GUARD
            self.add(rank, "load", peer=rank, pieces=(Piece(BYTES, extent),))
            self.add(rank, "load_words", peer=rank)
            for index in range(INDEXES):
                self.add(rank, "peek", index=index)
        return Program(self.size, tuple(self.steps))


def make(below: Below, most: int = 60) -> Program:
    """A program of up to `most` steps, and those of its end."""
    maker = Maker(2 + below(3), below)
    for _ in range(1 + below(most)):
        maker.add_any()
    return maker.end()


def program_of(seed: int, number: int) -> Program:
    """Program `number` of the endless sequence of `seed`."""
    draw = random.Random(f"{seed}/{number}").random
    return make(lambda n: int(draw() * n))


def programs(most: int = 25) -> Any:
    """The hypothesis strategy."""
    from hypothesis import strategies as st  # ranks in processes of their own do without

    @st.composite
    def strategy(draw: Any) -> Program:
        return make(lambda n: draw(st.integers(0, n - 1)), most)

    return strategy()
