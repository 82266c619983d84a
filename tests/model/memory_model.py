"""The memory model of windows, as a judge: may these ranks have seen what they saw?

It follows ARCHITECTURE.md ("Memory model") and knows nothing of transports. An operation has one or more *effects* at
its target: each piece that it writes or reads, its signal, its change of a word. Effects are ordered by *happens
before*, and by nothing else:

- What a rank *knows* to be complete happens before the effects of all that it issues from then on. It knows
  - reads, loads, stores and atomics when they return;
  - an asynchronous operation when its work is done, and all operations to a peer when flush(peer) returns;
  - where puts are complete when they return (shm), those puts;
  - a signal when it has seen it in a count, and so all that happens before that signal;
  - a change of a word when an atomic or atomic_load finds what it left there, and all that happens before that;
  - when it has seen a byte of a write: all that happens before that write (not the write's other bytes).
- All puts of an origin to a rank happen before its later signals to that rank.
- All that was issued to a peer before a fence happens before all that is issued to it behind the fence. (What a rank's
  processor does in its own memory is not issued.)

Nothing else orders two operations of one origin: not their order in the program, not a signal between them. (It is
behind the puts before it; what comes later is not behind it.)

What may be seen then:

- **Bytes.** A read may see write W in a byte unless the read happens before W, or another write of that byte comes
  between: W happens before it, and it happens before the read. Each byte is on its own, also within one put. Of two
  unordered writes either may win, but only one of them: two reads that know of both cannot disagree.
- **Signals.** A count contains every signal that happens before the look at it, each once, and nothing else.
- **Words.** All atomics on a word, and the reads that nothing disturbs, have one order that fits what each
  returned and that happens-before does not contradict.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from model.programs import ATOMICS, INITIAL, OWN, POISON, READS, WORD_READS, WORDS, Program, Step

Seen = Mapping[int, Any]
"""What the steps have returned, by their numbers:

- get, load: for each piece its runs (begin, end, write)
- get_words, load_words: what each of WORDS held
- wait, peek: the count
- atomics, atomic_load: what compare_swap expected, and what was returned
- poll: whether it was done
"""


class Refusal(NamedTuple):
    """Why a history is not allowed."""

    rule: str
    where: tuple[Any, ...]  # with `rule`, tells this refusal from others
    text: str
    needs: frozenset[int]  # steps without which this could not be judged

    @property
    def key(self) -> tuple[Any, ...]:
        return self.rule, self.where


class Refused(Exception):
    def __init__(self, rule: str, where: tuple[Any, ...], text: str, needs: Iterable[Step] = ()) -> None:
        super().__init__(text)
        self.refusal = Refusal(rule, where, text, frozenset(step.number for step in needs))


def check(program: Program, seen: Seen, *, puts_complete: bool, whole: Program | None = None) -> Refusal | None:
    """None if the model allows it. `puts_complete`: a put that is not asynchronous is complete when it returns.

    When `program` is a part of the program that ran, that is `whole`: nothing is said of what was seen of the rest.
    """
    try:
        history = History(program, seen, puts_complete, whole or program)
        history.check_words()
        history.check_bytes()
    except Refused as refused:
        return refused.refusal
    return None


class Read(NamedTuple):
    """A run of bytes that a read saw of one write."""

    effect: int
    step: Step
    begin: int
    end: int
    write: int


class Write(NamedTuple):
    effect: int
    step: Step
    begin: int
    end: int
    write: int


class Access(NamedTuple):
    """An atomic on a word, or a read of it."""

    step: Step
    returned: int
    left: int  # what the word held after it

    @property
    def changes(self) -> bool:
        return self.left != self.returned


def accesses_of(program: Program, seen: Seen) -> dict[tuple[int, int], list[Access]]:
    """The atomics by rank and word."""
    found: dict[tuple[int, int], list[Access]] = defaultdict(list)
    for step in program.steps:
        if step.op not in ATOMICS and step.op != "atomic_load":
            continue
        expected, returned = seen[step.number]
        left = returned
        if step.op == "fetch_add":
            left = returned + step.value
        elif step.op == "swap" or (step.op == "compare_swap" and returned == expected):
            left = step.value
        found[step.peer, step.word].append(Access(step, returned, left % (1 << 8 * WORDS[step.word][1])))
    return found


class History:
    """A program with what was seen, and what follows from it about the order of effects.

    Sets of effects are the bits of integers.
    """

    def __init__(self, program: Program, seen: Seen, puts_complete: bool, whole: Program) -> None:
        self.program = program
        self.seen = seen
        self.puts_complete = puts_complete
        self.before: list[int] = []  # by effect, the effects that happen before it
        self.effects: dict[int, list[int]] = {}  # by step
        self.writes: list[list[Write]] = [[] for _ in range(program.size)]  # by target
        self.write_of: dict[int, Write] = {}  # by its number
        self.reads: list[tuple[int, list[Read]]] = []  # by target
        self.word_reads: list[tuple[int, Step]] = []
        self.accesses = accesses_of(program, seen)

        self._known = [0] * program.size
        self._issued: dict[tuple[int, int], int] = defaultdict(int)  # by origin and target, with all before them
        self._puts: dict[tuple[int, int], int] = defaultdict(int)
        self._fenced: dict[tuple[int, int], int] = defaultdict(int)
        self._gets: dict[tuple[int, int], list[Step]] = defaultdict(list)  # that the origin does not know complete
        self._signal_of: dict[tuple[int, int, int], int] = {}  # by target, index and what it added
        self._steps = {step.number: step for step in program.steps}
        self._writes = {piece.write for step in program.steps for piece in step.pieces} - {INITIAL}
        self._other_writes = {piece.write for step in whole.steps for piece in step.pieces} - self._writes - {INITIAL}
        self._signals: dict[tuple[int, int], list[Step]] = defaultdict(list)
        for step in program.steps:
            if step.add:
                self._signals[step.peer, step.index].append(step)
        self._other_words: set[tuple[int, int]] = set()
        self._other_signals: dict[tuple[int, int], int] = defaultdict(int)  # what they added
        for step in whole.steps:
            if step.add and step.number not in self._steps:
                self._other_signals[step.peer, step.index] |= step.add
        self._after: dict[int, Step | None] = {}  # by atomic, the one whose value it returned; None: the initial one
        for step in whole.steps:  # a word whose changes are not all in this part tells nothing
            if step.op in ATOMICS and step.number not in self._steps:
                self.accesses.pop((step.peer, step.word), None)
                self._other_words.add((step.peer, step.word))
        for key, accesses in self.accesses.items():
            self._trace(key, accesses)
        self._order()

    # ---- Happens before ----

    def _order(self) -> None:
        """Takes the steps in an order in which each comes after all that it has seen."""
        queues = [[step for step in self.program.steps if step.rank == rank] for rank in range(self.program.size)]
        at = [0] * self.program.size
        moved = True
        while moved:
            moved = False
            for rank, queue in enumerate(queues):
                while at[rank] < len(queue) and self._take(queue[at[rank]]):
                    at[rank] += 1
                    moved = True
        if stuck := [queue[i] for i, queue in zip(at, queues, strict=True) if i < len(queue)]:
            told = "\n".join(f"{step}  saw {self.seen.get(step.number, 'what it completes')}" for step in stuck)
            raise Refused("causality", (), f"each of these saw what can only come after one of them:\n{told}")

    def _take(self, step: Step) -> bool:
        """False if it has seen something that is not there yet."""
        rank, peer, op = step.rank, step.peer, step.op
        if op in ("put", "store"):
            for piece in step.pieces:
                effect = self._issue(step)
                write = Write(effect, step, piece.offset, piece.end, piece.write)
                self.writes[peer].append(write)
                self.write_of[piece.write] = write
                if op == "put":
                    self._puts[rank, peer] |= self._up_to(effect)
            if op == "store" or (self.puts_complete and not step.async_op):
                self._complete(step)
            self._signal(step)
        elif op == "signal":
            self._signal(step)
        elif op in READS:
            if not step.async_op and not self._sources_are_there(step):
                return False
            self._issue_read(step)
            if not step.async_op:
                self._complete(step)
        elif op in WORD_READS:
            self.word_reads.append((self._issue(step), step))
            self._complete(step)
        elif op in ("wait", "peek"):
            return self._look(step)
        elif op in ATOMICS or op == "atomic_load":
            source = self._after.get(step.number)
            if source is not None:
                if source.number not in self.effects:
                    return False
                self._issue(step, self._up_to(self.effects[source.number][0]))
            else:
                self._issue(step)
            self._complete(step)
        elif op == "fence":
            self._fenced[rank, peer] = self._issued[rank, peer]
        elif op == "flush":
            peers = range(self.program.size) if peer < 0 else [peer]
            gets = [get for one in peers for get in self._gets[rank, one]]
            if not all(map(self._sources_are_there, gets)):
                return False
            for get in gets:
                self._complete(get)
            for one in peers:
                self._known[rank] |= self._issued[rank, one]
        elif op == "finish" or (op == "poll" and self.seen[step.number]):
            done = self._steps.get(step.of)
            if done is not None:
                if done.op in READS and not self._sources_are_there(done):
                    return False
                self._complete(done)
        return True

    def _up_to(self, effect: int) -> int:
        return self.before[effect] | 1 << effect

    def _issue(self, step: Step, more: int = 0) -> int:
        """A new effect, behind all that has to be before it."""
        between = step.rank, step.peer
        effect = len(self.before)
        before = self._known[step.rank] | more
        if step.op not in OWN:
            before |= self._fenced[between]
        self.before.append(before)
        self.effects.setdefault(step.number, []).append(effect)
        self._issued[between] |= self._up_to(effect)
        return effect

    def _issue_read(self, step: Step) -> None:
        self.effects[step.number] = []
        for piece, runs in zip(step.pieces, self.seen[step.number], strict=True):
            at = piece.offset
            for begin, end, _ in runs:
                assert begin == at < end, f"{step} saw {runs}"
                at = end
            assert at == piece.end, f"{step} saw {runs}"
            effect = self._issue(step)
            self.reads.append((step.peer, [Read(effect, step, *run) for run in runs]))
        self._gets[step.rank, step.peer].append(step)

    def _sources_are_there(self, step: Step) -> bool:
        """Whether all writes that a read saw are issued. One that is not in the program is judged later."""
        return all(
            write in self.write_of or write not in self._writes
            for runs in self.seen[step.number]
            for _, _, write in runs
        )

    def _complete(self, step: Step) -> None:
        """The rank of `step` knows that it is complete."""
        known = 0
        for effect in self.effects.get(step.number, ()):
            known |= self._up_to(effect)
        if step.op in READS:
            for runs in self.seen[step.number]:
                for _, _, write in runs:
                    if write in self.write_of:
                        known |= self.before[self.write_of[write].effect]
            gets = self._gets[step.rank, step.peer]
            if step in gets:
                gets.remove(step)
        self._known[step.rank] |= known

    # ---- Signals ----

    def _signal(self, step: Step) -> None:
        if step.add:
            effect = self._issue(step, self._puts[step.rank, step.peer])
            self._signal_of[step.peer, step.index, step.add] = effect

    def _look(self, step: Step) -> bool:
        """A rank looks at a count, which tells what has arrived."""
        count, key = self.seen[step.number], (step.rank, step.index)
        signals = self._signals[key]
        unknown = count & ~self._other_signals[key] & ~sum(signal.add for signal in signals)
        if unknown:
            raise Refused(
                "count",
                (step.number,),
                f"{step}\nsaw a count of {count:#x}: no signal that was sent to it added {unknown:#x}",
                signals,
            )
        if count < step.at_least:
            raise Refused("wait", (step.number,), f"{step}\nhas ended at a count of {count:#x}")
        arrived = [self._signal_of.get((*key, signal.add)) for signal in signals if signal.add & count]
        if None in arrived:
            return False
        known = self._known[step.rank]
        for signal in signals:
            effect = self._signal_of.get((*key, signal.add))
            if effect is not None and known >> effect & 1 and not signal.add & count:
                raise Refused(
                    "signal",
                    (step.number, signal.add),
                    f"{step}\nsaw a count of {count:#x} without {signal.add:#x}, which happens before it:\n{signal}",
                    [signal],
                )
        for effect in arrived:
            self._known[step.rank] |= self._up_to(effect)  # type: ignore[arg-type]
        return True

    # ---- Words ----

    def _trace(self, key: tuple[int, int], accesses: list[Access]) -> None:
        """Which atomic left what each one found, if no value was there twice."""
        changes = [access for access in accesses if access.changes]
        left = {access.left: access.step for access in changes}
        if len(left) < len(changes) or 0 in left or len({access.returned for access in changes}) < len(changes):
            return
        for access in accesses:
            if access.returned != 0 and access.returned not in left:
                raise Refused(
                    "word",
                    key,
                    f"{access.step}\nreturned {access.returned:#x}, which nothing left there",
                    left.values(),
                )
            self._after[access.step.number] = left.get(access.returned)

    def check_words(self) -> None:
        for key, accesses in self.accesses.items():
            effect_of = {access.step.number: self.effects[access.step.number][0] for access in accesses}
            everything = sum(1 << effect for effect in effect_of.values())
            for effect, step in self.word_reads:
                if step.peer != key[0]:
                    continue
                after = sum(1 << one for one in effect_of.values() if self.before[one] >> effect & 1)
                if self.before[effect] & everything | after == everything:  # else it may see a word half changed
                    held = self.seen[step.number][key[1]]
                    accesses.append(Access(step, held, held))
                    effect_of[step.number] = effect
            if not has_order(accesses, effect_of, self.before):
                offset, nbytes = WORDS[key[1]]
                told = "\n".join(f"{one.step}  returned {one.returned:#x}, left {one.left:#x}" for one in accesses)
                raise Refused(
                    "word",
                    key,
                    f"no order explains what these returned, {nbytes} bytes at {offset} of rank {key[0]}:\n{told}",
                    [access.step for access in accesses],
                )
        for _, step in self.word_reads:
            for word, held in enumerate(self.seen[step.number]):
                if held and (step.peer, word) not in {*self.accesses, *self._other_words}:
                    raise Refused(
                        "word", (step.number, word), f"{step}\nsaw {held:#x} in word {word}, which none changed"
                    )

    # ---- Bytes ----

    def check_bytes(self) -> None:
        won: dict[tuple[int, int], list[Read]] = defaultdict(list)  # by two writes that nothing orders: winner, loser
        for target, reads in self.reads:
            writes = self.writes[target]
            everything = sum(1 << write.effect for write in writes)
            for read in reads:
                own = 0  # the write that was seen, and all before it
                if read.write in self._other_writes:
                    continue
                if read.write != INITIAL:
                    write = self.write_of.get(read.write)
                    if write is None:
                        poison = ": it is of a buffer that a get has not filled, or that a put had given back"
                        self._refuse(read, "which nobody wrote" + (poison if read.write == POISON else ""))
                    if write.step.peer != target or not write.begin <= read.begin <= read.end <= write.end:
                        self._refuse(
                            read, f"which is of [{write.begin}, {write.end}) at rank {write.step.peer}", write.step
                        )
                    if self.before[write.effect] >> read.effect & 1:
                        self._refuse(read, "which happens after it", write.step)
                    own = self._up_to(write.effect)
                suspects = self.before[read.effect] & everything & ~own
                if not suspects:
                    continue
                for other in writes:
                    if not suspects >> other.effect & 1 or not max(other.begin, read.begin) < min(other.end, read.end):
                        continue
                    if read.write == INITIAL or self.before[other.effect] >> write.effect & 1:
                        self._refuse(read, f"over which write {other.write} went before it", other.step)
                    self._agree(won, read, other)

    def _agree(self, won: dict[tuple[int, int], list[Read]], read: Read, other: Write) -> None:
        """`read` knows of both writes, which nothing orders: in these bytes its own has won, for all readers."""
        won[read.write, other.write].append(read)
        for contrary in won.get((other.write, read.write), ()):
            if max(contrary.begin, read.begin) < min(contrary.end, read.end):
                why = (
                    f"and knew of write {other.write}; this one saw write {other.write} there and knew of {read.write}:"
                )
                self._refuse(read, f"{why}\n{contrary.step}", contrary.step, other.step)

    def _refuse(self, read: Read, why: str, *others: Step) -> NoReturn:
        steps = [self.write_of[read.write].step] if read.write in self.write_of else []
        steps += [step for step in others if step not in steps]
        text = f"{read.step}\nsaw write {read.write} in [{read.begin}, {read.end}), {why}"
        text += "".join(f"\n{step}" for step in steps) + f"\n{self._may(read.effect, read.step, read.begin)}"
        raise Refused("bytes", (read.step.number, read.begin, read.write, why.split()[0]), text, [read.step, *steps])

    def _may(self, effect: int, step: Step, at: int) -> str:
        """What the read may see in one byte, in words."""
        before = self.before[effect]
        here = [write for write in self.writes[step.peer] if write.begin <= at < write.end]
        certain = [write for write in here if before >> write.effect & 1]
        allowed = [
            write for write in here if not before >> write.effect & 1 and not self.before[write.effect] >> effect & 1
        ]
        allowed += [
            write for write in certain if not any(self.before[one.effect] >> write.effect & 1 for one in certain)
        ]
        names = sorted([write.write for write in allowed] + ([] if certain else [INITIAL]))
        return f"In byte {at} it may see write {' or '.join(map(str, names))}" + (
            "" if certain else f" ({INITIAL}: as at first)" if names != [INITIAL] else ": what was there at first"
        )


def has_order(accesses: list[Access], effect_of: Mapping[int, int], before: list[int]) -> bool:
    """Whether a word that holds 0 at first, and goes through `accesses` in some order, gives what each returned.

    Depth first. What changes nothing is taken as soon as it fits: that takes no choice from the others.
    """
    accesses = sorted(accesses, key=lambda access: access.changes)
    masks = [1 << effect_of[access.step.number] for access in accesses]
    everything = sum(masks)
    needs = [before[effect_of[access.step.number]] & everything for access in accesses]
    tried: set[tuple[int, int]] = set()
    branches = [(0, 0)]
    while branches:
        done, held = branches.pop()
        if (done, held) in tried:
            continue
        tried.add((done, held))
        settled = False
        while not settled:
            settled = True
            for access, mask, need in zip(accesses, masks, needs, strict=True):
                if access.changes:
                    break
                if not done & mask and not need & ~done and access.returned == held:
                    done |= mask
                    settled = False
        if done == everything:
            return True
        for access, mask, need in zip(accesses, masks, needs, strict=True):
            if access.changes and not done & mask and not need & ~done and access.returned == held:
                branches.append((done | mask, access.left))
    return False


# ---- What is printed -------------------------------------------------------------------------------------------------


def narrow(program: Program, seen: Seen, refusal: Refusal, *, puts_complete: bool) -> Program:
    """The steps that suffice for this refusal.

    Without a step, less is ordered: what is refused then was refused rightly.
    """
    steps = list(program.steps)
    length = len(steps) // 2
    while length:
        at = 0
        while at < len(steps):
            rest = [step for i, step in enumerate(steps) if not at <= i < at + length or step.number in refusal.needs]
            again = None
            if len(rest) < len(steps):
                part = Program(program.size, tuple(rest))
                again = check(part, seen, puts_complete=puts_complete, whole=program)
            if again is not None and again.key == refusal.key and again.needs == refusal.needs:
                steps = rest
            else:
                at += length
        length //= 2
    return Program(program.size, tuple(steps))


def report(program: Program, seen: Seen, refusal: Refusal, *, puts_complete: bool) -> str:
    """What was not allowed, and the part of the program that shows it."""
    part = narrow(program, seen, refusal, puts_complete=puts_complete)
    again = check(part, seen, puts_complete=puts_complete, whole=program)
    lines = [f"{step}" + (f"  -> {seen[step.number]}" if step.number in seen else "") for step in part.steps]
    text = (again or refusal).text
    return (
        f"The memory model does not allow this ({refusal.rule}):\n{text}\n\n"
        f"{len(part.steps)} of the program's {len(program.steps)} steps suffice, {program.size} ranks:\n"
        + "\n".join(lines)
    )
