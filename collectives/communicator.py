"""The communicator: every operation on tensors that the ranks of a group do together."""

import itertools
import json
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from onesided.windows import Countdown, Window

from onesided._core import Lanes, Message, Messages, Span
from onesided.errors import BoundsError, DeadlineExceeded, LayoutError, OnesidedError, StaleHandle

from . import algorithms  # noqa: F401 - registers them
from .data import Data, ReduceOp, data_of, rows_of
from .hooks import Hook, Hooks, Operation
from .messages import Batch, MessageWork, tag_of
from .registry import Explanation, choose, explain
from .subgroup import Subgroup, gather_bytes, members_of
from .team import Team
from .work import Runner, Work, to_seconds

__all__ = ["Communicator"]

SLOTS = 4
SLOT_NBYTES = 256 << 10
INBOX_NBYTES = 64 << 20  # of all inboxes of a rank; with many ranks their slots are smaller
LEAST_SLOT_NBYTES = 8 << 10
LOOK_S = 0.2  # for reading how far a rank has come, once the deadline has passed


class Communicator:
    """Ranks that do operations together. All ranks issue the same operations in the same order.

    Tensors are contiguous torch tensors or numpy arrays in host memory. An operation returns when its output is there
    and its input may be changed; with `async_op` it returns a Work at once, and runs beside the caller behind those
    issued before. `timeout`, in seconds or a timedelta, is the operation's deadline in place of the communicator's.
    `algorithm` asks for one by name; all ranks must ask for the same.

    An operation that fails ends the communicator on all ranks, since what is under way between them is lost: a rank
    that dies or does not come within the deadline is named by ConnectionLost or DeadlineExceeded, by all. Later
    operations raise the same. Make a new one to go on.
    """

    def __init__(
        self,
        group: Any,
        *,
        name: str | None = None,
        timeout_s: float | None = 600.0,
        transport: str = "auto",
        slots: int = SLOTS,
        slot_nbytes: int | None = None,
    ) -> None:
        """Collective over `group`, a Group or what else tells bytes (onesided.windows, Exchange).

        `slots` of `slot_nbytes` are what each rank keeps for each other one: so much is under way before a sender
        waits.
        """
        self._group = group
        self._leave: Callable[[], object] | None = None  # the group, where nobody else does
        self._name = group.name if name is None else name
        self._timeout_s = timeout_s
        self._transport = transport
        self._asked_shape = slots, slot_nbytes
        if slot_nbytes is None:
            share = INBOX_NBYTES // (slots * group.size)
            slot_nbytes = max(LEAST_SLOT_NBYTES, min(SLOT_NBYTES, share // 4096 * 4096))
        self._shape = (slots, slot_nbytes)
        self._size, self._rank = int(group.size), int(group.rank)
        self._window = self._open()
        self._lanes = Lanes(self._window, *self._shape)
        self._letters = self._open()
        self._messages = Messages(self._letters, *self._shape)
        self._serving = threading.Lock()
        self._server: threading.Thread | None = None  # of messages that nobody waits for
        self._identified = self._window.describe()["transport"] != "shm"
        self._members = list(range(self._size))
        self._world_ranks = self._members
        self._serials = itertools.count(1)
        self._hooks = Hooks()
        self._splits = 0
        self._runner = Runner(self._name)
        self._room: Span | None = None

    def _open(self) -> Window:
        return Window.allocate(
            self._group,
            Lanes.window_nbytes(self._size, *self._shape),
            signals=2,
            origin_signals=2,
            transport=self._transport,
            timeout_s=self._timeout_s,
        )

    # ---- Who it is -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def world_ranks(self) -> list[int]:
        """Its ranks, each as the rank it has in the communicator that all splits began with."""
        return list(self._world_ranks)

    def get_rank(self) -> int:
        """This rank."""
        return self._rank

    def get_size(self) -> int:
        """How many ranks there are."""
        return self._size

    def get_name(self) -> str:
        """Its name."""
        return self._name

    def get_backend(self) -> str:
        """The backend's name, "onesided"."""
        return "onesided"

    def get_device(self) -> Any:
        """The torch.device of its tensors; needs torch."""
        import torch

        return torch.device("cpu")

    def __repr__(self) -> str:
        return f"Communicator({self._name!r}, rank {self._rank} of {self._size})"

    def set_timeout(self, timeout: Any) -> None:
        """The deadline of operations that give none, in seconds or a timedelta; None for none."""
        self._timeout_s = to_seconds(timeout)

    def explain(self, operation: str, nbytes: int, algorithm: str | None = None) -> Explanation:
        """Which algorithm `operation` takes for `nbytes`, and why."""
        return explain(operation, nbytes, self._size, algorithm)

    # ---- Running -------------------------------------------------------------------------------------------------

    def _scratch(self, like: Span, count: int) -> Span:
        """Kept from one operation to the next, as its pages are not to be touched for the first time again."""
        wanted = max(1, like.nbytes * count)
        if self._room is None or self._room.nbytes < wanted:
            self._room = None
            self._room = Span(bytearray(wanted), 1, True, self._identified)
        itemsize = like.nbytes // len(like) if len(like) else 1
        return self._room.part(0, len(like) * itemsize * count).cast(itemsize)

    def _do(
        self,
        operation: str,
        run: Callable[..., None],
        arguments: tuple[Any, ...],
        async_op: bool,
        timeout: Any,
        element: str | None = None,
        reduction: str | None = None,
        then: Callable[[], None] | None = None,
        members: list[int] | None = None,
    ) -> Work:
        """Runs `run(team, *arguments)`; with `members`, of which this rank is one, they alone are the team."""
        if self._window.closed:
            raise StaleHandle(f"{operation}: communicator {self._name!r} was finalized")
        about = Operation(self._name, operation, async_op)
        self._hooks.begin(about)
        serial = next(self._serials)
        kind = zlib.crc32(f"{operation} {element} {reduction}".encode()) & 0xFFFF
        timeout_s = self._timeout_s if timeout is None else to_seconds(timeout)
        ranks = self._members if members is None else members

        def now() -> None:
            error: BaseException | None = None
            try:
                begin()
            except BaseException as failure:
                error = failure
                self._messages.end(str(failure))
                self._hooks.tell_ended(str(failure))
                raise
            finally:
                self._hooks.end(about, error)

        def begin() -> None:
            countdown = Countdown(timeout_s)
            team = Team(
                self._lanes,
                ranks,
                ranks.index(self._rank),
                operation,
                serial << 16 | kind,
                element,
                reduction,
                countdown,
                self._scratch,
            )
            try:
                run(team, *arguments)
            except DeadlineExceeded as error:
                raise self._with_absent(error, serial, ranks) from error
            except BaseException as error:
                # Of algorithms, too: the others wait for what this rank will not send.
                self._lanes.end(f"rank {self._rank} failed in {operation}: {type(error).__name__}: {error}")
                raise
            if then is not None:
                then()

        return self._runner.run(now, operation, async_op)

    def _with_absent(self, error: DeadlineExceeded, serial: int, ranks: list[int]) -> DeadlineExceeded:
        """The error with those of `ranks` that have not begun this operation: who all others wait for, in the end."""
        absent = []
        for rank in ranks:
            if rank == self._rank:
                continue
            try:
                if self._lanes.progress_of(rank, LOOK_S) >> 16 < serial:
                    absent.append(f"rank {rank}")
            except OnesidedError as why:
                absent.append(f"rank {rank} ({why})")
        if not absent:
            return error
        return DeadlineExceeded(f"{error}; {', '.join(absent)} has not begun it (operation {serial} of {self._name!r})")

    def _in(self, tensor: Any, what: str = "the input") -> Data:
        return data_of(tensor, writable=False, identified=self._identified, what=what)

    def _out(self, tensor: Any, what: str = "the output") -> Data:
        return data_of(tensor, writable=True, identified=self._identified, what=what)

    def _root(self, root: int) -> int:
        if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < self._size:
            raise BoundsError(f"root must be one of the {self._size} ranks, not {root!r}")
        return root

    def _averaging(self, data: Data, op: ReduceOp, element: str) -> Callable[[], None] | None:
        if op is not ReduceOp.AVG:
            return None
        return lambda: data.span.divide(element, self._size)

    # ---- Collective operations -----------------------------------------------------------------------------------

    def barrier(self, async_op: bool = False, *, timeout: Any = None, algorithm: str | None = None) -> Work:
        """Is over when every rank has begun it."""
        choice = choose("barrier", 0, self._size, algorithm)
        return self._do("barrier", choice.run, (), async_op, timeout)

    def broadcast(
        self, tensor: Any, root: int, async_op: bool = False, *, timeout: Any = None, algorithm: str | None = None
    ) -> Work:
        """`tensor` of `root` goes into that of every rank."""
        data = self._out(tensor, "the tensor")
        choice = choose("broadcast", data.span.nbytes, self._size, algorithm)
        return self._do("broadcast", choice.run, (data.span, self._root(root)), async_op, timeout)

    def all_reduce(
        self,
        tensor: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """Every rank's `tensor` becomes the reduction of all of them; the same on all ranks, bit for bit."""
        data = self._out(tensor, "the tensor")
        element, reduction = data.reducible(op)
        choice = choose("all_reduce", data.span.nbytes, self._size, algorithm)
        then = self._averaging(data, op, element)
        return self._do("all_reduce", choice.run, (data.span, data.span), async_op, timeout, element, reduction, then)

    allreduce = all_reduce

    def reduce(
        self,
        tensor: Any,
        root: int,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """`tensor` of `root` becomes the reduction of all of them. Those of others keep their values."""
        data = self._out(tensor, "the tensor")
        element, reduction = data.reducible(op)
        at_root = self._root(root) == self._rank
        choice = choose("reduce", data.span.nbytes, self._size, algorithm)
        then = self._averaging(data, op, element) if at_root else None

        def run(team: Team) -> None:
            choice.run(team, data.span if at_root else team.scratch(data.span)[0], data.span, root)

        return self._do("reduce", run, (), async_op, timeout, element, reduction, then)

    def all_gather(
        self,
        tensor_list: Sequence[Any],
        tensor: Any,
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """`tensor_list[r]` becomes the `tensor` of rank r. Sizes may differ from rank to rank."""
        outputs = [self._out(one, f"output {rank}").span for rank, one in enumerate(self._each(tensor_list))]
        return self._all_gather(outputs, self._in(tensor), async_op, timeout, algorithm)

    all_gather_v = all_gather

    def all_gather_single(
        self, output: Any, input: Any, async_op: bool = False, *, timeout: Any = None, algorithm: str | None = None
    ) -> Work:
        """`output` becomes the inputs of all ranks, one after the other in the order of ranks."""
        outputs = rows_of(self._out(output), None, 0, self._size, "the output")
        return self._all_gather(outputs, self._in(input), async_op, timeout, algorithm)

    def _all_gather(self, outputs: list[Span], data: Data, async_op: bool, timeout: Any, algorithm: str | None) -> Work:
        self._same_size("all_gather", outputs[self._rank], data.span)
        choice = choose("all_gather", data.span.nbytes, self._size, algorithm)
        return self._do("all_gather", choice.run, (outputs, data.span), async_op, timeout)

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """`output` of rank r becomes the reduction of everybody's `input_list[r]`. Sizes may differ from rank to
        rank."""
        inputs = [self._in(one, f"input {rank}").span for rank, one in enumerate(self._each(input_list))]
        return self._reduce_scatter(self._out(output), inputs, op, async_op, timeout, algorithm)

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(
        self,
        output: Any,
        input: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """`output` of rank r becomes the reduction of part r, of as many as there are ranks, of everybody's `input`."""
        inputs = rows_of(self._in(input), None, 0, self._size, "the input")
        return self._reduce_scatter(self._out(output), inputs, op, async_op, timeout, algorithm)

    def _reduce_scatter(
        self, output: Data, inputs: list[Span], op: ReduceOp, async_op: bool, timeout: Any, algorithm: str | None
    ) -> Work:
        self._same_size("reduce_scatter", inputs[self._rank], output.span)
        element, reduction = output.reducible(op)
        choice = choose("reduce_scatter", output.span.nbytes, self._size, algorithm)
        then = self._averaging(output, op, element)
        arguments = (output.span, inputs)
        return self._do("reduce_scatter", choice.run, arguments, async_op, timeout, element, reduction, then)

    def all_to_all(
        self,
        output_list: Sequence[Any],
        input_list: Sequence[Any],
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """`output_list[r]` becomes the `input_list[rank]` of rank r. Sizes may differ."""
        outputs = [self._out(one, f"output {rank}").span for rank, one in enumerate(self._each(output_list))]
        inputs = [self._in(one, f"input {rank}").span for rank, one in enumerate(self._each(input_list))]
        return self._all_to_all(outputs, inputs, async_op, timeout, algorithm)

    def all_to_all_single(
        self, output: Any, input: Any, async_op: bool = False, *, timeout: Any = None, algorithm: str | None = None
    ) -> Work:
        """Part r of `output` becomes part `rank` of the `input` of rank r; of as many equal parts as there are
        ranks."""
        return self.all_to_all_v_single(output, input, None, None, async_op, timeout=timeout, algorithm=algorithm)

    def all_to_all_v_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """As all_to_all_single, with parts of so many rows (of the first dimension)."""
        outputs = self._split_rows(output, self._out(output), output_split_sizes, "the output")
        inputs = self._split_rows(input, self._in(input), input_split_sizes, "the input")
        return self._all_to_all(outputs, inputs, async_op, timeout, algorithm)

    def _split_rows(self, tensor: Any, data: Data, sizes: Sequence[int] | None, what: str) -> list[Span]:
        rows = int(tensor.shape[0]) if len(tensor.shape) else 1
        return rows_of(data, None if sizes is None else [int(size) for size in sizes], rows, self._size, what)

    def _all_to_all(
        self, outputs: list[Span], inputs: list[Span], async_op: bool, timeout: Any, algorithm: str | None
    ) -> Work:
        self._same_size("all_to_all", outputs[self._rank], inputs[self._rank])
        choice = choose("all_to_all", max(one.nbytes for one in inputs), self._size, algorithm)
        return self._do("all_to_all", choice.run, (outputs, inputs), async_op, timeout)

    def gather(
        self,
        output_list: Sequence[Any] | None,
        input: Any,
        root: int,
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """On `root`, `output_list[r]` becomes the `input` of rank r. Elsewhere it is ignored."""
        data, outputs = self._in(input), []
        if self._root(root) == self._rank:
            outputs = [self._out(one, f"output {rank}").span for rank, one in enumerate(self._each(output_list))]
            self._same_size("gather", outputs[root], data.span)
        choice = choose("gather", data.span.nbytes, self._size, algorithm)
        return self._do("gather", choice.run, (outputs, data.span, root), async_op, timeout)

    def scatter(
        self,
        output: Any,
        input_list: Sequence[Any] | None,
        root: int,
        async_op: bool = False,
        *,
        timeout: Any = None,
        algorithm: str | None = None,
    ) -> Work:
        """`output` of rank r becomes the `input_list[r]` of `root`. Elsewhere that is ignored."""
        data, inputs = self._out(output), []
        if self._root(root) == self._rank:
            inputs = [self._in(one, f"input {rank}").span for rank, one in enumerate(self._each(input_list))]
            self._same_size("scatter", inputs[root], data.span)
        choice = choose("scatter", data.span.nbytes, self._size, algorithm)
        return self._do("scatter", choice.run, (data.span, inputs, root), async_op, timeout)

    def _each(self, tensors: Sequence[Any] | None) -> Sequence[Any]:
        if tensors is None or len(tensors) != self._size:
            given = "none" if tensors is None else str(len(tensors))
            raise BoundsError(f"there must be a tensor for each of the {self._size} ranks, not {given}")
        return tensors

    def _same_size(self, operation: str, here: Span, there: Span) -> None:
        if here.nbytes != there.nbytes:
            raise LayoutError(
                f"{operation}: this rank's own part has {here.nbytes} bytes on one side and {there.nbytes} on the other"
            )

    # ---- Messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, async_op: bool = False, *, tag: int = 0, timeout: Any = None) -> MessageWork:
        """`tensor` goes to rank `dst`, which receives it under the same `tag`, 0 to 2**63 - 1.

        Messages are independent of collective operations and of other messages: none waits for one that was issued
        before it, but those from one rank to another under one tag arrive in their order. Any thread. It is over when
        `tensor` may be changed; small ones then may not have been received.

        At its deadline one of which nothing has moved is taken back, and the communicator goes on; one that is half
        sent ends it. ConnectionLost if `dst` dies, which does no harm to messages of others.
        """
        data = self._in(tensor, "the tensor")
        peer, label = self._peer(dst, "dst"), tag_of(tag)
        return self._message(lambda s: self._messages.send(peer, label, data.span, s, async_op), async_op, timeout)

    def recv(
        self, tensor: Any, src: int | None = None, async_op: bool = False, *, tag: int = 0, timeout: Any = None
    ) -> MessageWork:
        """`tensor` becomes what rank `src` sends under `tag`; without `src`, what anybody sends. `source_rank` of the
        Work tells who it was.

        It must have the size of what is sent: BoundsError otherwise, and the message is lost. At its deadline it fails
        alone; what comes of its message is thrown away.
        """
        data = self._out(tensor, "the tensor")
        peer, label = None if src is None else self._peer(src, "src"), tag_of(tag)
        return self._message(lambda s: self._messages.receive(peer, label, data.span, s, async_op), async_op, timeout)

    def batch_op_create(self) -> Batch:
        """Sends and receives that are issued together: `send(tensor, dst)` and `recv(tensor, src)`, then `issue()`."""
        return Batch(self)

    def _message(self, start: Callable[[float | None], Message], async_op: bool, timeout: Any) -> MessageWork:
        if self._window.closed:
            raise StaleHandle(f"communicator {self._name!r} was finalized")
        timeout_s = self._timeout_s if timeout is None else to_seconds(timeout)
        if async_op and self._server is None:
            self._serve()
        return MessageWork(start(timeout_s))

    def _serve(self) -> None:
        with self._serving:
            if self._server is None:
                self._server = threading.Thread(
                    target=self._messages.serve, name=f"onesided messages {self._name}", daemon=True
                )
                self._server.start()

    def _peer(self, rank: int, what: str) -> int:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self._size or rank == self._rank:
            raise BoundsError(f"{what} must be another one of the {self._size} ranks, not {rank!r}")
        return rank

    # ---- Parts and windows ---------------------------------------------------------------------------------------

    def split(self, ranks: Any, name: str | None = None, *, timeout: Any = None) -> "Communicator | None":
        """A communicator of some of the ranks, on those; None on the others. Collective over all ranks of this one.

        `ranks` are those of the part that this rank is to be in, in the order they shall have there, or a list of all
        parts: `comm.split(torch.arange(comm.size).view(-1, 8).tolist())`. A rank that shall be in none gives an empty
        list or one without itself. All members of a part must give the same one: BoundsError on every rank otherwise,
        and this communicator goes on. The part is independent of it from then on, and to be finalized by itself.
        """
        members: list[int] = []
        failure: Exception | None = None
        try:
            members = members_of(ranks, self._rank, self._size)
        except (TypeError, ValueError) as error:
            failure = error
        mine = {"members": members, "name": name, "error": None if failure is None else str(failure)}
        told = self._gather_bytes(json.dumps(mine).encode(), timeout, "split")
        if failure is not None:
            raise failure
        said = [json.loads(one) for one in told]
        for rank, one in enumerate(said):
            if one["error"] is not None:
                raise BoundsError(f"split failed on rank {rank}: {one['error']}")
        for rank, one in enumerate(said):
            for other in one["members"]:
                if said[other]["members"] != one["members"] or said[other]["name"] != one["name"]:
                    raise BoundsError(
                        f"split: rank {rank} is to be with ranks {one['members']} (name {one['name']!r}), but rank "
                        f"{other} says {said[other]['members']} (name {said[other]['name']!r})"
                    )
        self._splits += 1
        if not members:
            next(self._serials)  # the members' operation, which is not this rank's
            return None
        own_name = f"{self._name}/{self._splits}.{members[0]}" if name is None else name
        made: list[Communicator] = []
        failures: list[Exception] = []

        def make(team: Team) -> None:
            exchange = Subgroup(team.rank, team.size, own_name, lambda payload, _: gather_bytes(team, payload))
            slots, slot_nbytes = self._asked_shape
            try:
                comm = Communicator(
                    exchange,
                    timeout_s=self._timeout_s,
                    transport=self._transport,
                    slots=slots,
                    slot_nbytes=slot_nbytes,
                )
            except Exception as error:
                exchange.close()
                if self._lanes.ended():
                    raise
                failures.append(error)  # every member has failed, and has been told why: nothing is under way
                return
            exchange.gather = comm._gather_bytes
            comm._leave = exchange.close
            comm._world_ranks = [self._world_ranks[rank] for rank in members]
            made.append(comm)

        self._do("split", make, (), False, timeout, members=members)
        if failures:
            raise failures[0]
        return made[0]

    def _gather_bytes(self, payload: bytes, timeout: Any = None, operation: str = "exchange") -> list[bytes]:
        """Everybody's payloads, in the order of ranks."""
        gathered: list[bytes] = []
        self._do(operation, lambda team: gathered.extend(gather_bytes(team, payload)), (), False, timeout)
        return gathered

    def new_window(self, tensor: Any = None, **options: Any) -> Window:
        """A window on the ranks of this communicator: over `tensor` if there is one (Window.create), else new memory
        (Window.allocate), with the `options` of either. Collective."""
        options.setdefault("transport", self._transport)
        options.setdefault("timeout_s", self._timeout_s)
        if tensor is None:
            return Window.allocate(self._group, **options)
        return Window.create(self._group, tensor, **options)

    # ---- Hooks ---------------------------------------------------------------------------------------------------

    def register_pre_hook(self, hook: Callable[[Operation], object]) -> Hook:
        """Has `hook(operation)` called by whoever issues an operation, before. What it raises keeps it from being
        issued, here."""
        return Hook(self._hooks.before, hook)

    def register_post_hook(self, hook: Callable[[Operation, BaseException | None], object]) -> Hook:
        """Has `hook(operation, error)` called when one is over, by the thread that ran it. What it raises is logged."""
        return Hook(self._hooks.after, hook)

    def register_abort_hook(self, hook: Callable[[str], object]) -> Hook:
        """Has `hook(reason)` called once, when this rank aborts it or an operation here finds that it has ended. What
        it raises is logged."""
        return Hook(self._hooks.ended, hook)

    # ---- The end -------------------------------------------------------------------------------------------------

    def abort(self, reason: str = "it was aborted") -> None:
        """Ends it on all ranks, at once: operations under way and later ones raise ConnectionLost. Any thread."""
        self._lanes.end(reason)
        self._messages.end(reason)
        self._hooks.tell_ended(reason)

    def is_aborted(self) -> bool:
        """Whether it has ended on this rank, by an abort or a failure."""
        return self._lanes.ended()

    def finalize(self) -> None:
        """Lets go of all that it holds, when the collective operations that were issued here are over; messages that
        are not over fail. Not collective; calling it twice is legal."""
        self._runner.close()
        self._messages.close()
        if self._server is not None:
            self._server.join()
        self._window.close()
        self._letters.close()
        if self._leave is not None:
            self._leave()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *exception: object) -> None:
        self.finalize()
