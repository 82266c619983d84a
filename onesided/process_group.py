"""The process group of the torch.distributed backend "onesided": torch's calls, told to a Communicator."""

# The stubs of torch have further forms of these methods, with one tensor each, which torch.distributed does not use.
# mypy: disable-error-code="override,assignment"

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onesided.collectives import Communicator, MessageWork
from onesided.collectives import ReduceOp as Op
from onesided.collectives import Work as CoreWork
from onesided.errors import ConnectionLost, DeadlineExceeded, StaleHandle, Unsupported

from .store_exchange import StoreExchange

__all__ = ["OnesidedProcessGroup"]

_OPS = [(getattr(dist.ReduceOp, op.name), op) for op in Op]


@contextlib.contextmanager
def _as_torch_says() -> Iterator[None]:
    """Errors of communication as DistBackendError, a RuntimeError, which programs for torch expect; ours is its cause.
    What the caller did wrong stays what it is, a ValueError for instance."""
    try:
        yield
    except (ConnectionLost, DeadlineExceeded, StaleHandle) as error:
        raise _translated(error) from error


def _translated(error: BaseException) -> BaseException:
    if not isinstance(error, (ConnectionLost, DeadlineExceeded, StaleHandle)):
        return error
    told = dist.DistBackendError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


class OnesidedWork(dist.Work):
    """Operations that were issued together, as torch's Work. Over when all of them are."""

    def __init__(self, works: Sequence[CoreWork | MessageWork], result: list[Any]) -> None:
        super().__init__()
        self._works = list(works)
        self._result = result
        self._future: torch.futures.Future[list[Any]] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True when all are over. DistBackendError for what failed, and after `timeout` (zero: none), which ends the
        wait only."""
        ends = time.monotonic() + timeout.total_seconds() if timeout > timedelta(0) else None
        with _as_torch_says():
            for work in self._works:
                work.wait(None if ends is None else max(0.0, ends - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        """Whether all are over. Never blocks."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are over and none has failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The first error, or None."""
        errors = (work.exception() for work in self._works)
        return next((_translated(error) for error in errors if error is not None), None)

    def result(self) -> list[Any]:
        """The tensors that were written."""
        return self._result

    def _source_rank(self) -> int:
        """Of a receive from anybody: who it was. -1 where that is not known."""
        source = getattr(self._works[0], "source_rank", None) if self._works else None
        return -1 if source is None else int(source)

    def synchronize(self) -> None:
        """As wait."""
        self.wait()

    def get_future(self) -> "torch.futures.Future[list[Any]]":
        """A future of `result()`, set by the thread that ends the last operation."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._tell_after(list(self._works))
        return self._future

    def _tell_after(self, works: list[Any]) -> None:
        if works:
            works.pop().add_done_callback(lambda _: self._tell_after(works))
        else:
            self._tell()

    def _tell(self) -> None:
        assert self._future is not None
        error = self.exception()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type] # torch says Future[T] for it


class OnesidedProcessGroup(dist.ProcessGroup):
    """A torch.distributed process group over a Communicator. Made by init_process_group and new_group.

    Operations are those of Communicator, with its promises: all members issue the same ones in the same order, a
    failure ends the group on all of them and names who was lost or late, and results are the same bits on all ranks.
    """

    def __init__(self, comm: Communicator, *, name: str, shutdown: Callable[[], object] | None = None) -> None:
        """Over `comm`, which `shutdown` ends; without that it goes on to live after this group."""
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg] # a form for subclasses, which the stubs have not
        self._comm = comm
        self._name = name
        self._shutdown = shutdown
        self._coalesced: list[OnesidedWork] | None = None

    @classmethod
    def over_store(
        cls, store: Any, rank: int, size: int, timeout: timedelta, *, name: str, transport: str
    ) -> "OnesidedProcessGroup":
        """One with a communicator of its own, whose ranks find each other through a store. Collective."""
        exchange = StoreExchange(store, rank, size, name)
        try:
            with _as_torch_says():
                comm = Communicator(exchange, name=name, timeout_s=timeout.total_seconds(), transport=transport)
        except BaseException:
            exchange.close()
            raise

        def shutdown() -> None:
            comm.finalize()
            exchange.close()

        return cls(comm, name=name, shutdown=shutdown)

    @property
    def communicator(self) -> Communicator:
        """What does the work; for what torch has no call for, as `explain`."""
        return self._comm

    @property
    def group_name(self) -> str:
        """The name by which torch knows it."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name."""
        return "onesided"

    def __repr__(self) -> str:
        return f"OnesidedProcessGroup({self._name!r}, rank {self._comm.rank} of {self._comm.size})"

    # ---- Issuing -------------------------------------------------------------------------------------------------

    def _issue(self, opts: Any, result: list[Any], *calls: Callable[..., CoreWork | MessageWork]) -> OnesidedWork:
        """Makes the calls, in order. A program that does not want to go on meanwhile is spared the other thread."""
        given = getattr(opts, "timeout", None)
        timeout = given if given is not None and given > timedelta(0) else None
        async_op = bool(getattr(opts, "asyncOp", True)) or self._coalesced is not None
        with _as_torch_says():
            work = OnesidedWork([call(async_op=async_op, timeout=timeout) for call in calls], result)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, _device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: Any = None) -> OnesidedWork:
        works, self._coalesced = self._coalesced or [], None
        return OnesidedWork(
            [part for work in works for part in work._works], [one for work in works for one in work._result]
        )

    # ---- Collective operations -----------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> OnesidedWork:
        """See torch.distributed.broadcast."""
        opts = opts or dist.BroadcastOptions()
        calls = [_call(self._comm.broadcast, _plain(one), opts.rootRank) for one in tensors]
        return self._issue(opts, tensors, *calls)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> OnesidedWork:
        """See torch.distributed.all_reduce."""
        opts = opts or dist.AllreduceOptions()
        op, factor = _op(opts)
        for one in tensors:
            if factor is not None:
                _plain(one).mul_(factor)
        return self._issue(opts, tensors, *[_call(self._comm.all_reduce, _plain(one), op) for one in tensors])

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> OnesidedWork:
        """See torch.distributed.reduce. Tensors of other ranks keep their values."""
        opts = opts or dist.ReduceOptions()
        op, factor = _op(opts)
        if factor is not None:
            raise Unsupported("reduce: PREMUL_SUM is there for all_reduce and reduce_scatter")
        calls = [_call(self._comm.reduce, _plain(one), opts.rootRank, op) for one in tensors]
        return self._issue(opts, tensors, *calls)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> OnesidedWork:
        """See torch.distributed.all_gather. Sizes may differ from rank to rank."""
        calls = [
            _call(self._comm.all_gather, _plain_all(into), _plain(one))
            for into, one in zip(outputs, inputs, strict=True)
        ]
        return self._issue(opts, outputs, *calls)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> OnesidedWork:
        """See torch.distributed.all_gather_coalesced: `outputs[r]` are all tensors of rank r."""
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> OnesidedWork:  # noqa: A002
        """See torch.distributed.all_gather_into_tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> OnesidedWork:
        """Several of all_gather_single."""
        pairs = zip(outputs, inputs, strict=True)
        calls = [_call(self._comm.all_gather_single, _plain(into), _plain(one)) for into, one in pairs]
        return self._issue(opts, outputs, *calls)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> OnesidedWork:
        """See torch.distributed.reduce_scatter."""
        opts = opts or dist.ReduceScatterOptions()
        op, factor = _op(opts)
        calls = [
            _call(self._comm.reduce_scatter, _plain(into), [_scaled(one, factor) for one in given], op)
            for into, given in zip(outputs, inputs, strict=True)
        ]
        return self._issue(opts, outputs, *calls)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> OnesidedWork:  # noqa: A002
        """See torch.distributed.reduce_scatter_tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> OnesidedWork:
        """Several of reduce_scatter_single."""
        opts = opts or dist.ReduceScatterOptions()
        op, factor = _op(opts)
        calls = [
            _call(self._comm.reduce_scatter_single, _plain(into), _scaled(one, factor), op)
            for into, one in zip(outputs, inputs, strict=True)
        ]
        return self._issue(opts, outputs, *calls)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> OnesidedWork:
        """See torch.distributed.all_to_all."""
        return self._issue(opts, outputs, _call(self._comm.all_to_all, _plain_all(outputs), _plain_all(inputs)))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int] | None,
        input_split_sizes: list[int] | None,
        opts: Any = None,
    ) -> OnesidedWork:
        """See torch.distributed.all_to_all_single. No sizes, or none in the list, stand for equal ones."""
        sizes = output_split_sizes or None, input_split_sizes or None
        return self._issue(opts, [output], _call(self._comm.all_to_all_v_single, _plain(output), _plain(input), *sizes))

    alltoall_base = all_to_all_single

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> OnesidedWork:
        """See torch.distributed.gather."""
        opts = opts or dist.GatherOptions()
        calls = [
            _call(self._comm.gather, _plain_all(outputs[index]) if outputs else None, _plain(one), opts.rootRank)
            for index, one in enumerate(inputs)
        ]
        return self._issue(opts, outputs, *calls)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> OnesidedWork:
        """See torch.distributed.scatter."""
        opts = opts or dist.ScatterOptions()
        calls = [
            _call(self._comm.scatter, _plain(into), _plain_all(inputs[index]) if inputs else None, opts.rootRank)
            for index, into in enumerate(outputs)
        ]
        return self._issue(opts, outputs, *calls)

    def barrier(self, opts: Any = None) -> OnesidedWork:
        """See torch.distributed.barrier."""
        return self._issue(opts, [], _call(self._comm.barrier))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """A barrier whose error names every rank that has not come, with `wait_all_ranks` or without."""
        with _as_torch_says():
            self._comm.barrier(timeout=timeout)

    # ---- Messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> OnesidedWork:
        """See torch.distributed.isend."""
        return self._issue(None, tensors, *[_call(self._comm.send, _plain(one), rank, tag=tag) for one in tensors])

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> OnesidedWork:
        """See torch.distributed.irecv."""
        return self._issue(None, tensors, *[_call(self._comm.recv, _plain(one), rank, tag=tag) for one in tensors])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> OnesidedWork:
        """See torch.distributed.irecv without a source."""
        return self._issue(None, tensors, *[_call(self._comm.recv, _plain(one), None, tag=tag) for one in tensors])

    # ---- The end -------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations that give none."""
        self._comm.set_timeout(timeout)

    def abort(self) -> None:
        """Ends the group on all ranks, at once. Any thread."""
        self._comm.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Lets go of everything, when what was issued here is over. Not collective."""
        if self._shutdown is not None:
            self._shutdown()


def _call(operation: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[..., Any]:
    return lambda **options: operation(*arguments, **named, **options)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _plain_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_plain(one) for one in tensors]


def _scaled(tensor: torch.Tensor, factor: Any) -> torch.Tensor:
    return _plain(tensor) if factor is None else _plain(tensor) * factor


def _op(opts: Any) -> tuple[Op, Any]:
    """Ours for torch's, and what to multiply with before (PREMUL_SUM)."""
    given = opts.reduceOp
    if given == dist.ReduceOp.PREMUL_SUM:
        return Op.SUM, given.__getstate__()[1]
    for torchs, ours in _OPS:
        if given == torchs:
            return ours, None
    raise Unsupported(f"there is no reduction {given}")
