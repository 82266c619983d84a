"""Transports that exist only here: one that uses all the freedom of the memory model, and many that break it.

It runs a program by chance: ranks take their steps, effects land at their targets in parts, in any order that the
rules leave. That is the model once more, said by a machine instead of by an order. The judge must let all that it does
pass, and must find what it does with one rule broken (BUGS).
"""

import itertools
import random
from collections import defaultdict
from typing import Any

import numpy as np
from model.programs import ATOMICS, INDEXES, INITIAL, POISON, READS, WINDOW_NBYTES, WORDS, Program, Step

BUGS = {
    "signal before data": "a signal does not wait for the puts before it",
    "signal behind the last put only": "a signal waits for one put before it, not for all",
    "signal twice": "now and then a signal is added twice",
    "signal lost": "now and then a signal is not added",
    "wait wakes early": "a wait ends at any count",
    "flush does not wait": "flush returns at once",
    "flush leaves large puts out": "flush waits for what went over the first rail only",
    "flush of one peer": "flush() waits for one peer only",
    "done too early": "a work is done when the first part of it is",
    "fence is ignored": "operations behind a fence overtake those before it",
    "fence forgets gets": "a put behind a fence overtakes a get before it",
    "source read late": "now and then a put reads its source after it was given back",
    "one byte too many": "a put writes the byte behind it, too",
    "one byte short": "a put leaves out its last byte",
    "last piece lost": "put_many leaves out its last piece",
    "wrong rank": "now and then a put goes to another rank",
    "stale read": "now and then a get returns what an earlier one has found",
    "get not filled": "now and then a get leaves the end of its destination as it was",
    "put lands twice": "now and then a put lands once more later",
    "lost update": "atomics read and write in two steps",
    "torn atomic": "atomics write the lower half of their word before the upper",
    "neighbour overwritten": "atomics of 4 bytes write 8 bytes that they read before",
    "swap always": "compare_swap does not compare",
    "word returned late": "now and then an atomic returns what it left",
}


class Effect:
    """Something under way to a rank."""

    def __init__(self, step: Step, target: int, needs: set["Effect"]) -> None:
        self.step = step
        self.target = target
        self.needs = needs  # that must have landed before
        self.landed = False
        self.begun = False
        self.parts: list[tuple[int, int]] = []  # of bytes, still to be moved
        self.write = INITIAL
        self.kind = step.op
        self.into: Any = None  # of a get: what it has found, and from where on
        self.at = 0
        self.held = 0  # of an atomic in two steps


class Simulated:
    """Runs one program."""

    def __init__(self, program: Program, seed: object, bug: str = "", puts_complete: bool = False) -> None:
        self.random = random.Random(f"{seed}")
        self.program = program
        self.bug = bug
        self.puts_complete = puts_complete
        self.bytes = [np.zeros(WINDOW_NBYTES + 1, np.uint8) for _ in range(program.size)]
        self.words = [[0] * len(WORDS) for _ in range(program.size)]
        self.signals = [[0] * INDEXES for _ in range(program.size)]
        self.last: dict[tuple[int, int, int], int] = defaultdict(int)  # what a rank last saw of a word
        self.under_way: list[Effect] = []
        self.effects: dict[int, list[Effect]] = {}
        self.fenced: dict[tuple[int, int], set[Effect]] = defaultdict(set)
        self.blocked: list[Step | None] = [None] * program.size  # issued, and not returned
        self.seen: dict[int, Any] = {}
        self.found: dict[int, Any] = {}  # for a stale read

    def run(self) -> dict[int, Any] | None:
        queues = [[step for step in self.program.steps if step.rank == rank][::-1] for rank in range(self.program.size)]
        haste = self.random.random()  # how much sooner ranks go on than effects land
        while True:
            ready = [rank for rank, queue in enumerate(queues) if self._can_go(rank, queue)]
            landable = [effect for effect in self.under_way if all(one.landed for one in effect.needs)]
            if not ready and not landable:
                break
            if self.random.random() < 0.9:
                landable = [effect for effect in landable if effect.kind != "stray put"] or landable
            if ready and (not landable or self.random.random() < haste):
                rank = self.random.choice(ready)
                blocked, self.blocked[rank] = self.blocked[rank], None
                if blocked is None:
                    self._take(queues[rank].pop())
                elif blocked.op in READS:
                    self._collect(blocked)
            else:
                self._land(self.random.choice(landable))
        return None if any(queues) else self.seen

    def _happens(self, bug: str, one_in: int = 1) -> bool:
        return self.bug == bug and self.random.randrange(one_in) == 0

    # ---- Ranks ----

    def _can_go(self, rank: int, queue: list[Step]) -> bool:
        blocked = self.blocked[rank]
        if blocked is not None:
            return self._is_done(blocked)
        if not queue:
            return False
        step = queue[-1]
        if step.op == "wait":
            return self.bug == "wait wakes early" or self.signals[rank][step.index] >= step.at_least
        if step.op == "finish":
            return self._is_done(self._step(step.of))
        if step.op == "flush":
            if self.bug == "flush does not wait":
                return True
            peers = range(self.program.size) if step.peer < 0 else [step.peer]
            if step.peer < 0 and self.bug == "flush of one peer":
                peers = [0]
            return not any(
                effect.step.rank == rank
                and effect.target in peers
                and effect.kind != "stray put"
                and not (self.bug == "flush leaves large puts out" and sum(b - a for a, b in effect.parts) > 4096)
                for effect in self.under_way
            )
        return True

    def _step(self, number: int) -> Step:
        return self.program.steps[number]

    def _is_done(self, step: Step) -> bool:
        effects = self.effects[step.number]
        if self.bug == "done too early" and step.async_op:
            return not effects or any(effect.begun or effect.landed for effect in effects)
        return all(effect.landed for effect in effects)

    def _take(self, step: Step) -> None:
        rank, peer, op = step.rank, step.peer, step.op
        if op == "put":
            self._put(step)
        elif op == "get":
            self.effects[step.number] = [self._read(step, piece.offset, piece.end) for piece in step.pieces]
            if not step.async_op:
                self.blocked[rank] = step
        elif op == "signal":
            self.effects[step.number] = [self._signal(step)]
        elif op in ATOMICS or op == "get_words":
            self.effects[step.number] = [self._issue(step, op)]
            self.blocked[rank] = step
        elif op == "store":
            for piece in step.pieces:
                self.bytes[rank][piece.offset : piece.end] = piece.write
        elif op == "load":
            self.seen[step.number] = tuple(runs(self.bytes[rank], piece.offset, piece.end) for piece in step.pieces)
        elif op == "load_words":
            self.seen[step.number] = tuple(self.words[peer])
        elif op == "atomic_load":
            self.seen[step.number] = (0, self.words[rank][step.word])
        elif op in ("wait", "peek"):
            self.seen[step.number] = self.signals[rank][step.index]
        elif op == "fence":
            if self.bug != "fence is ignored":
                self.fenced[rank, peer] = {
                    effect
                    for effect in self.under_way
                    if effect.step.rank == rank
                    and effect.target == peer
                    and not (self.bug == "fence forgets gets" and effect.kind == "get")
                }
        elif op == "poll":
            done = self.seen[step.number] = self._is_done(self._step(step.of))
            if done:
                self._collect(self._step(step.of))
        elif op == "finish":
            self._collect(self._step(step.of))
        elif op == "flush":
            for number in list(self.effects):
                one = self._step(number)
                if one.rank == rank and peer in (-1, one.peer):
                    self._collect(one)

    def _put(self, step: Step) -> None:
        effects = self.effects[step.number] = []
        pieces = step.pieces
        if step.many and self._happens("last piece lost"):
            pieces = pieces[:-1]
        for piece in pieces:
            target = step.peer
            if self._happens("wrong rank", 8):
                target = self.random.randrange(self.program.size)
            effect = self._issue(step, "put", target)
            effect.write = POISON if self._happens("source read late", 8) else piece.write
            end = piece.end
            if piece.nbytes:
                end += (self.bug == "one byte too many") - (self.bug == "one byte short")
            effect.parts = self._parts(piece.offset, end)
            effects.append(effect)
            if self._happens("put lands twice", 8):
                again = self._issue(step, "stray put")  # nobody waits for it
                again.write, again.parts = piece.write, [(piece.offset, end)]
        if self.puts_complete and not step.async_op:
            self.blocked[step.rank] = step
        if step.add:
            self.effects[step.number] = [*effects, self._signal(step)]
            if self.blocked[step.rank] is not None:  # the put has to be complete, not the signal
                self.effects[step.number] = effects

    def _collect(self, step: Step) -> None:
        """The origin looks at what a get has found."""
        if step.op not in READS or step.number in self.seen:
            return
        found = []
        for effect in self.effects[step.number]:
            if self._happens("get not filled", 8):
                effect.into[len(effect.into) // 2 :] = POISON
            found.append(runs(effect.into, 0, len(effect.into), effect.at))
        self.seen[step.number] = tuple(found)

    # ---- Effects ----

    def _issue(self, step: Step, kind: str, target: int | None = None) -> Effect:
        target = step.peer if target is None else target
        effect = Effect(step, target, {one for one in self.fenced[step.rank, target] if not one.landed})
        effect.kind = kind
        self.under_way.append(effect)
        return effect

    def _signal(self, step: Step) -> Effect:
        effect = self._issue(step, "signal")
        if self.bug != "signal before data":
            puts = [one for one in self.under_way if one.kind == "put" and one.step.rank == step.rank]
            puts = [one for one in puts if one.target == step.peer]
            effect.needs |= set(puts[-1:] if self.bug == "signal behind the last put only" else puts)
        return effect

    def _read(self, step: Step, begin: int, end: int) -> Effect:
        effect = self._issue(step, "get")
        effect.at = begin
        effect.into = np.full(end - begin, POISON, np.uint8)
        effect.parts = self._parts(begin, end)
        return effect

    def _parts(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Cut into up to four, to be moved in any order."""
        if begin >= end:
            return []
        cuts = sorted({begin, end, *(self.random.randint(begin, end) for _ in range(self.random.randrange(4)))})
        return list(itertools.pairwise(cuts))

    def _land(self, effect: Effect) -> None:
        """A part of it happens."""
        if effect.kind in ("put", "stray put", "get"):
            memory = self.bytes[effect.target]
            if effect.parts:
                begin, end = effect.parts.pop(self.random.randrange(len(effect.parts)))
                if effect.kind != "get":
                    memory[begin:end] = effect.write
                else:
                    whole = self.found.get(effect.target) if self._happens("stale read", 3) else None
                    if effect.target not in self.found:
                        self.found[effect.target] = memory.copy()
                    effect.into[begin - effect.at : end - effect.at] = (memory if whole is None else whole)[begin:end]
            effect.landed = not effect.parts
        elif effect.kind == "signal":
            times = 0 if self._happens("signal lost", 30) else 2 if self._happens("signal twice", 8) else 1
            self.signals[effect.target][effect.step.index] += effect.step.add * times
            effect.landed = True
        elif effect.kind == "get_words":
            self.seen[effect.step.number] = tuple(self.words[effect.target])
            effect.landed = True
        else:
            self._change(effect)
        effect.begun = True
        if effect.landed:
            self.under_way.remove(effect)

    def _change(self, effect: Effect) -> None:
        step, words = effect.step, self.words[effect.target]
        nbytes = WORDS[step.word][1]
        pair = step.word ^ 1
        if self.bug == "lost update" and not effect.begun:
            effect.held = words[step.word]
            return
        if self.bug == "neighbour overwritten" and nbytes == 4 and not effect.begun:
            effect.held = words[pair]
            return
        if self.bug == "torn atomic" and effect.begun:
            words[step.word] = effect.held
            effect.landed = True
            return
        held = effect.held if self.bug == "lost update" else words[step.word]
        expected = self.last[step.rank, step.peer, step.word]
        left = held
        if step.op == "fetch_add":
            left = (held + step.value) % (1 << 8 * nbytes)
        elif step.op == "swap" or held == expected or self._happens("swap always"):
            left = step.value
        words[step.word] = left
        if self.bug == "neighbour overwritten" and nbytes == 4:
            words[pair] = effect.held
        returned = left if self._happens("word returned late", 8) else held
        self.seen[step.number] = (expected, returned)
        self.last[step.rank, step.peer, step.word] = returned
        effect.landed = True
        if self.bug == "torn atomic":
            half = (1 << 4 * nbytes) - 1
            words[step.word] = held & ~half | left & half
            effect.held, effect.landed = left, False


def runs(memory: "np.ndarray[Any, np.dtype[np.uint8]]", begin: int, end: int, at: int | None = None) -> Any:
    """What stands in [begin, end), as (begin, end, write); `at`: the address of its first byte, if that is another."""
    if begin == end:
        return ()
    shift = 0 if at is None else at - begin
    part = memory[begin:end]
    cuts = [begin, *(begin + 1 + np.flatnonzero(part[1:] != part[:-1])).tolist(), end]
    return tuple((a + shift, b + shift, int(memory[a])) for a, b in itertools.pairwise(cuts))


def simulate(program: Program, seed: object, bug: str = "", puts_complete: bool = False) -> dict[int, Any] | None:
    """What the steps of a program return, as check() wants it; the same for the same seed. None if it does not end."""
    assert bug in BUGS or not bug, bug
    return Simulated(program, seed, bug, puts_complete).run()
