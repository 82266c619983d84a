"""The window: one memory on every rank, and how ranks come by it."""

import contextlib
import json
import logging
import operator
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from onesided.transport import Memory, RemoteMemory, Target, Transport

from onesided import _core
from onesided.errors import (
    BoundsError,
    ConnectionLost,
    DeadlineExceeded,
    HandleError,
    LayoutError,
    OnesidedError,
    RemoteAccessError,
    StaleHandle,
    Unsupported,
)

from .exchange import Catalog, Exchange, check_directory, check_group
from .fabric import Countdown, Registered, agree, fabric_of, peer_name, shared_transport
from .layout import Layout, layout_of
from .names import Name

__all__ = ["Window"]

log = logging.getLogger("onesided.windows")
log.addHandler(logging.NullHandler())

DEFAULT_SIGNALS = 64
EXPOSED_PEERS = 1024  # how many processes can attach to one exposed window at once
RECORD_VERSION = 1
RETRY_FIRST_S, RETRY_MOST_S = 0.02, 0.25  # between two tries to reach an owner that may be restarting

W = TypeVar("W", bound="Window")


class Window(_core.Window):
    """One memory on every rank of a group. Any rank writes, reads and signals any rank's, without code running there.

    Made by `allocate` or `create` (collective: every rank of the group calls it, in the same order as all others), or
    by `expose` and `attach` (through a directory: members come and go). All methods but those four may be called at
    any time from any thread, and none of them waits for another rank, but for wait_signal.

    Memory model (ARCHITECTURE.md has all of it): operations on one peer are unordered with each other. Signals are
    strong: when a waiter sees the count, every earlier put, signal and atomic from that origin to that rank on this
    window is visible, of any size, zero included. `flush(peer)` returns when all earlier ones are visible to everybody;
    `fence(peer)` puts later ones behind earlier ones without waiting, which a signal does not. Atomics are atomic
    against each other. Nothing is promised about the order in which the bytes of one put arrive.

    On the ranks of a group, `peer` is a rank. On an attached window it is 0, the owner.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        memory: Memory | None,
        targets: list[Target],
        rank: int | None,
        kind: str,
        why: str,
        *,
        tensor: object = None,
        counters: "Counters | None" = None,
        on_close: Callable[[Countdown], None] | None = None,
    ) -> None:
        super().__init__(name, memory, targets, rank)
        self._layout = layout
        self._memory = memory
        self._targets: list[Target] | None = targets
        self._kind = kind
        self._why = why
        self._tensor = tensor
        self._counters = counters
        self._registered: Registered | None = None
        self._bind: Callable[..., bytes] | None = None
        self._tickets: list[tuple[str, str]] = []  # the name given to permit(), the one that the transport knows
        self._on_close = on_close

    # ---- Making windows ------------------------------------------------------------------------------------------

    @classmethod
    def allocate(
        cls: type[W],
        group: Exchange,
        nbytes: int | None = None,
        *,
        shape: object = None,
        dtype: object = None,
        device: object = "cpu",
        access: str = "rw",
        signals: int = DEFAULT_SIGNALS,
        origin_signals: int = 0,
        transport: str = "auto",
        timeout_s: float | None = 60.0,
    ) -> W:
        """A window over new memory on every rank, zeroed. Collective.

        The size is `nbytes`, or `shape` of `dtype` (torch's, numpy's, or a name; there is no default); it may differ
        from rank to rank and be zero. `access` is what the others may do here: "r", "w" or "rw". `signals`: how many
        counters each rank has, 2**20 at most. `origin_signals`: how many it has besides for each origin, see
        origin_signal(); then all ranks must say the same numbers.

        Raises RegistrationError if the memory cannot be had, DeadlineExceeded if a rank does not come, OnesidedError if
        it failed on another rank; then no rank has a window.
        """

        counters = Counters(signals, origin_signals)

        def make(made_by: Transport) -> tuple[Layout, Memory]:
            check_device(device)
            layout, total = layout_of(nbytes, shape, dtype), counters.total(group.size)
            return layout, made_by.allocate(layout.nbytes, access, signals=total, max_peers=group.size + 1)

        return cls._collect(group, make, counters, transport, timeout_s)

    @classmethod
    def create(
        cls: type[W],
        group: Exchange,
        tensor: object,
        *,
        access: str = "rw",
        signals: int = DEFAULT_SIGNALS,
        origin_signals: int = 0,
        transport: str = "auto",
        timeout_s: float | None = 60.0,
    ) -> W:
        """A window over a tensor, array or buffer that each rank has. Collective. Nothing is copied.

        A tensor over allocated memory (of another window, or of transport.allocate) is shared as it is. Any other stays
        where it is and is reached through the kernel, where the system permits one process to reach into another: it
        raises Unsupported, telling why, where not. Atomics need allocated memory. The tensor is kept alive until the
        window is closed, and can no more be resized.

        Raises LayoutError for a strided or read-only one. Otherwise as allocate().
        """

        counters = Counters(signals, origin_signals)

        def make(made_by: Transport) -> tuple[Layout, Memory]:
            layout, total = layout_like(tensor), counters.total(group.size)
            return layout, made_by.register_memory(tensor, access, signals=total, max_peers=group.size + 1)

        return cls._collect(group, make, counters, transport, timeout_s, tensor=tensor)

    @classmethod
    def expose(
        cls: type[W],
        directory: Catalog,
        name: str,
        tensor: object = None,
        *,
        nbytes: int | None = None,
        shape: object = None,
        dtype: object = None,
        access: str = "rw",
        lease_s: float | None = None,
        signals: int = DEFAULT_SIGNALS,
        transport: str = "auto",
        max_peers: int = EXPOSED_PEERS,
        public: bool = True,
        replace: bool = False,
    ) -> W:
        """A window of this process alone, published under `name` for whoever attaches. Not collective.

        Over `tensor`, as in create(), or over new memory, as in allocate(). This process is its rank 0. With `public`,
        whoever can read the directory may attach; else only those that have a ticket, see permit(). The name disappears
        when the window is closed or forgotten, or when this process ends and its lease is over.

        Raises RemoteAccessError if the name belongs to another open window of this process, or to another process whose
        lease has not ended: that of one that was killed runs on for a while. With `replace` the name is taken over; a
        window that had it goes on, nameless, for those who have attached.
        """
        check_directory(directory, name)
        if tensor is not None and not (nbytes is shape is dtype is None):
            raise TypeError("give either a tensor or the size of new memory, not both")
        layout = layout_of(nbytes, shape, dtype) if tensor is None else layout_like(tensor)
        made_by = shared_transport(transport)
        if isinstance(max_peers, int) and max_peers < 1:
            raise BoundsError(f"max_peers must be at least 1, not {max_peers}")
        slots = max_peers + 1 if isinstance(max_peers, int) else max_peers  # this process itself, too
        memory = (
            made_by.allocate(layout.nbytes, access, signals=signals, max_peers=slots)
            if tensor is None
            else made_by.register_memory(tensor, access, signals=signals, max_peers=slots)
        )
        why = f"exposed over {made_by.kind}"
        window: W | None = None
        try:
            if not public:
                memory.permit("", "")
            targets = [made_by.loop_back(memory, f"the owner of window {name!r}")]
            window = cls(name, layout, memory, targets, 0, made_by.kind, why, tensor=tensor)
            record = {
                "version": RECORD_VERSION,
                "kind": made_by.kind,
                "endpoint": made_by.bind(shared=True).hex() if public else "",
                "handle": memory.handle().hex(),
                "shape": layout.shape,
                "dtype": layout.dtype,
            }
            published = Name(directory, name, json.dumps(record).encode())
            published.publish(window, lease_s, replace)
        except BaseException:
            if window is None:
                memory.close()
            else:
                window.close()
            raise
        window._on_close = published.withdraw
        window._registered, window._bind = Registered(memory, None), made_by.bind
        log.info("window %r exposed: %d bytes over %s", name, layout.nbytes, made_by.kind)
        return window

    @classmethod
    def attach(cls: type[W], directory: Catalog, name: str, *, ticket: str = "", timeout_s: float = 10.0) -> W:
        """Opens a window that another process has exposed. Not collective.

        Waits up to `timeout_s` for the name to appear and for its owner to answer. An owner that has died may be
        restarting: the name is looked up again until then. The window has one rank, 0: its owner. It has no memory and
        no signals here. `ticket`: what the owner's permit() has returned, for a window that is not public.

        Raises DeadlineExceeded if the name does not appear, ConnectionLost if its owner has died and no other came,
        StaleHandle if it was closed, HandleError if the entry is no window, RemoteAccessError if it is not public or
        the access was revoked; all of them name the window.
        """
        check_directory(directory, name)
        countdown = Countdown(timeout_s)
        try:
            return cls._attach(directory, name, ticket, timeout_s, countdown)
        except OnesidedError as error:
            if repr(name) in str(error):
                raise
            raise about(f"attaching to window {name!r}", error) from error

    @classmethod
    def _attach(cls: type[W], directory: Catalog, name: str, ticket: str, timeout_s: float, countdown: Countdown) -> W:
        pause_s = RETRY_FIRST_S
        value = directory.lookup(name, timeout_s=timeout_s).value
        gone: OnesidedError | None = None
        while True:
            record = read_record(name, value)
            if ticket:
                record = record._replace(endpoint=read_ticket(ticket))
            elif not record.endpoint:
                raise RemoteAccessError(
                    f"window {name!r} is not public: its owner gives out tickets, see Window.permit"
                )
            try:
                return cls._attach_to(record, name, countdown)
            except DeadlineExceeded:
                if gone is None:
                    raise
                raise gone from None  # that the last try had no time left says less than why there were others before
            except (ConnectionLost, StaleHandle) as error:
                gone = error
                left_s = countdown.left_s()
                time.sleep(pause_s if left_s is None else min(pause_s, left_s))
                pause_s = min(2 * pause_s, RETRY_MOST_S)
                left_s = countdown.left_s()
                if left_s == 0:
                    raise
                with contextlib.suppress(DeadlineExceeded):  # why the owner is gone says more than that no other came
                    value = directory.lookup(name, timeout_s=left_s or timeout_s).value

    @classmethod
    def _attach_to(cls: type[W], record: "Record", name: str, countdown: Countdown) -> W:
        made_by = shared_transport(record.kind)
        owner = f"the owner of window {name!r}"
        connection = made_by.connect(record.endpoint, name=owner, timeout_s=countdown.left_s())
        try:
            target = connection.attach(record.remote, countdown.left_s())
        except BaseException:
            connection.close()
            raise
        layout = record.layout
        why = f"its owner exposed it over {record.kind}"
        return cls(
            name,
            layout,
            None,
            [target],
            None,
            made_by.kind,
            why,
            on_close=lambda countdown: connection.close(countdown.left_s()),
        )

    @classmethod
    def _collect(
        cls: type[W],
        group: Exchange,
        make: Callable[[Transport], tuple[Layout, Memory]],
        counters: "Counters",
        kind: str,
        timeout_s: float | None,
        tensor: object = None,
    ) -> W:
        """`make` checks the arguments, too: a rank whose arguments are wrong must tell the others, or its next window
        would meet their present one.
        """
        check_group(group)
        countdown = Countdown(timeout_s)
        fabric = fabric_of(group, kind, countdown)
        name = f"{group.name}/{fabric.next_window()}"
        made: list[tuple[Layout, Registered]] = []
        targets: list[Target] = []

        def register() -> dict[str, str]:
            made.append(fabric.register(make))
            return {**made[0][1].handles(), "counters": counters.spelled()}

        def attach_all() -> dict[str, str]:
            own = made[0][1]
            counters.check_agreed([said["counters"] for said in handles])
            targets.extend(fabric.attach(rank, handles[rank], own, countdown) for rank in range(group.size))
            return {}

        try:
            handles = agree(group, f"create window {name!r}", register, countdown)
            agree(group, f"open window {name!r}", attach_all, countdown)
        except BaseException:
            targets.clear()
            for _, registered in made:
                registered.close()
            raise
        layout, registered = made[0]
        why = fabric.plan.why
        log.info("window %r: %d bytes here, %d ranks, over %s", name, layout.nbytes, group.size, fabric.plan.kind)
        window = cls(
            name,
            layout,
            registered.memory,
            targets,
            group.rank,
            fabric.plan.kind,
            why,
            tensor=tensor,
            counters=counters,
        )
        window._registered = registered
        if near := registered.near:
            window._on_close = lambda countdown: near.close(countdown.left_s())
        return window

    # ---- This rank's memory -----------------------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        """This rank's memory, as a buffer and for views of it. Unsupported on an attached window."""
        if self.closed:
            raise StaleHandle(f"window {self.name!r} is closed")
        if self._memory is None:
            raise Unsupported(f"window {self.name!r} is attached: its memory is its owner's; use get()")
        return self._memory

    @property
    def nbytes(self) -> int:
        """Size of this rank's memory in bytes; on an attached window, of its owner's."""
        return int(self.memory.nbytes) if self._memory is not None else self._layout.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `tensor` and `array` here; on an attached window, of its owner's."""
        return self._layout.shape

    @property
    def dtype(self) -> str:
        """The element type by the name that torch and numpy have for it, "float32" for instance."""
        return self._layout.dtype

    @property
    def array(self) -> Any:
        """A numpy array over this rank's memory, in the window's shape and type. Never a copy; valid after close()."""
        return self._layout.array(self.memory)

    @property
    def tensor(self) -> Any:
        """A torch tensor over this rank's memory, in the window's shape and type. Never a copy; valid after close().

        For a window made over a tensor, that tensor. Needs torch: without it, use `array`.
        """
        memory = self.memory
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(self._tensor, torch.Tensor):
            return self._tensor
        return self._layout.tensor(memory)

    # ---- Signals and words of this rank ------------------------------------------------------------------------------

    def origin_signal(self, index: int, origin: int | None = None) -> int:
        """The number that signal `index` of those of rank `origin` has, on every rank; None: of this rank's own.

        Of each of the `origin_signals` there is one for every origin, so that waiters tell origins apart:
        `put(..., signal=window.origin_signal(0))` here, `wait_signal(window.origin_signal(0, r), source=r)` there.
        BoundsError for one that does not exist, Unsupported on exposed and attached windows.
        """
        if self._counters is None or self.rank is None:
            raise Unsupported(f"window {self.name!r} belongs to no group: its signals are shared by all origins")
        index, origin = operator.index(index), self.rank if origin is None else operator.index(origin)
        if not 0 <= index < self._counters.of_origin or not 0 <= origin < self.size:
            raise BoundsError(
                f"there is no signal {index} of rank {origin}: window {self.name!r} has {self._counters.of_origin} for "
                f"each of its {self.size} ranks"
            )
        return self._counters.shared + index * self.size + origin

    def atomic_add(self, offset_bytes: int, add: int, *, word_nbytes: int = 8, timeout_s: float | None = None) -> int:
        """fetch_add on a word of this rank's own memory, in the way that is atomic against the other ranks' atomics."""
        if self.rank is None:
            raise Unsupported(f"atomic_add: window {self.name!r} is attached, its memory belongs to its owner")
        return self.fetch_add(self.rank, offset_bytes, add, word_nbytes=word_nbytes, timeout_s=timeout_s)

    # ---- Who may reach it --------------------------------------------------------------------------------------------

    def permit(self, peer: str, access: str = "rw") -> str:
        """Lets one more attach to an exposed window, with rights of its own; returns its ticket, which is a secret.

        `peer` is any name, by which revoke() knows all tickets that it got; `access` is "r", "w" or "rw", at most what
        the window permits. The peer passes the ticket to attach(), as often as it likes, until it is revoked; it opens
        this window and no other. Give it over a way that others cannot read.
        Raises Unsupported on windows of a group, whose ranks know each other, and on attached ones.
        """
        if self._registered is None or self._bind is None or self.closed:
            raise self._not_mine("permit")
        if not isinstance(peer, str) or not peer:
            raise TypeError(f"peer must be a name, not {peer!r}")
        if access not in ("r", "w", "rw"):
            raise BoundsError(f'access must be "r", "w" or "rw", not {access!r}')
        # A name of its own for each ticket: it opens no other window, and stays worthless once it was revoked.
        holder = f"{peer} ({secrets.token_hex(8)})"
        self._registered.permit(holder, access)
        self._tickets.append((peer, holder))
        return self._bind(shared=True, peer=holder).hex()

    def revoke(self, peer: int | str, timeout_s: float | None = 5.0) -> None:
        """Ends the access of one peer to this rank's memory and signals, for good; not collective.

        `peer`: a rank, or the name given to permit(), all of whose tickets become worthless. (To a public window
        anybody can attach without one.) When it returns, none of that peer's operations is under way, and none succeeds
        any more: they fail with StaleHandle there. The others are not disturbed.

        Raises DeadlineExceeded if the peer was stopped in the middle of an operation on shm: call it again;
        RegistrationError if over RDMA the memory cannot be registered twice for a moment, then nothing has changed.
        """
        if self._registered is None or self.closed:
            raise self._not_mine("revoke")
        if isinstance(peer, bool) or not isinstance(peer, int if self._bind is None else str) or peer == "":
            raise TypeError(
                f"peer must be {'a rank' if self._bind is None else 'a name given to permit'}, not {peer!r}"
            )
        if isinstance(peer, int) and (not 0 <= peer < self.size or peer == self.rank):
            raise BoundsError(f"revoke: rank {peer} is not another rank of window {self.name!r}")
        countdown = Countdown(timeout_s)
        if isinstance(peer, int):
            self._registered.revoke(peer_name(peer), countdown)
            return
        for ticket in [ticket for ticket in self._tickets if ticket[0] == peer]:
            self._registered.revoke(ticket[1], countdown)
            with contextlib.suppress(ValueError):  # another thread was faster
                self._tickets.remove(ticket)

    def _not_mine(self, operation: str) -> OnesidedError:
        if self.closed:
            return StaleHandle(f"{operation}: window {self.name!r} is closed")
        return Unsupported(f"{operation}: window {self.name!r} was not exposed by this process")

    # ---- The end, and what there is to see ------------------------------------------------------------------

    def close(self, timeout_s: float | None = 5.0) -> None:
        """Ends access to this rank's memory; not collective. When it returns, no peer writes or reads it any more.

        Asynchronous operations from here end first. Later operations of others on it fail with StaleHandle; their other
        windows and peers are untouched. DeadlineExceeded if a peer's process was stopped in the middle of an operation:
        the memory then stays registered, close it again. Closing twice is legal.
        """
        if self._targets is None:
            return
        countdown = Countdown(timeout_s)
        super().close(timeout_s)
        self._targets = self._memory = self._tensor = self._registered = self._bind = None
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(countdown)

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """What was chosen and why: the transport, the path to every peer, and how this machine copies."""
        if self._targets is None:
            return {"name": self.name, "state": "closed"}
        return {
            "name": self.name,
            "state": "open",
            "rank": self.rank,
            "size": self.size,
            "nbytes": self.nbytes,
            "shape": self._layout.shape,
            "dtype": self._layout.dtype,
            "transport": self._kind,
            "why": self._why,
            "memory": None if self._memory is None else self._memory.describe(),
            "peers": [target.describe() for target in self._targets],
            "copying": _core.copy_measurements(),
        }

    def __repr__(self) -> str:
        if self._targets is None:
            return f"<Window {self.name!r}, closed>"
        where = f"rank {self.rank} of {self.size}, over {self._kind}"
        return f"<Window {self.name!r}: {self.nbytes} bytes, {where}>"


class Counters(NamedTuple):
    """How many signals each rank has: shared by all origins, and for each origin alone."""

    shared: int
    of_origin: int

    def total(self, ranks: int) -> int:
        """All of them. BoundsError and TypeError if they cannot be."""
        for name, value in (("signals", self.shared), ("origin_signals", self.of_origin)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if value < 0:
                raise BoundsError(f"{name} must be at least 0, not {value}")
        if (total := self.shared + self.of_origin * ranks) > 1 << 20:
            raise BoundsError(
                f"{self.shared} signals and {self.of_origin} for each of {ranks} origins are too many: 2**20 at most"
            )
        return total

    def spelled(self) -> str:
        """For the other ranks."""
        return f"signals={self.shared}, origin_signals={self.of_origin}"

    def check_agreed(self, all_said: list[str]) -> None:
        """Where signals of an origin lie depends on all ranks' numbers. LayoutError if they differ."""
        for rank, said in enumerate(all_said):
            if said != self.spelled() and not (self.of_origin == 0 and said.endswith("origin_signals=0")):
                raise LayoutError(f"rank {rank} has {said}, this one {self.spelled()}: they must be the same")


def about(what: str, error: OnesidedError) -> OnesidedError:
    """The same error, which says first what it is about."""
    if isinstance(error, OSError) and error.errno is not None:
        return type(error)(error.errno, f"{what}: {error.strerror}")
    return type(error)(f"{what}: {error}")


def check_device(device: object) -> None:
    kind = str(getattr(device, "type", device)).split(":")[0]
    if kind != "cpu":
        raise Unsupported(f"windows in memory of device {str(device)!r} are not there yet: use device='cpu'")


def layout_like(tensor: object) -> Layout:
    """The layout of an existing tensor or array; plain bytes for other buffers. Registration checks what it may be."""
    shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    if shape is not None and dtype is not None:
        return layout_of(None, tuple(shape), dtype)
    try:
        return layout_of(memoryview(tensor).nbytes, None, None)  # type: ignore[arg-type]
    except TypeError:
        what = "None" if tensor is None else type(tensor).__name__
        raise TypeError(f"a window is made over a tensor, an array or a buffer, not {what}") from None


class Record(NamedTuple):
    """What a directory holds of an exposed window."""

    kind: str
    endpoint: bytes
    remote: RemoteMemory
    layout: Layout


def read_ticket(ticket: object) -> bytes:
    """The endpoint that a ticket is. HandleError for what permit() has not returned."""
    try:
        return bytes.fromhex(ticket)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise HandleError("this is no ticket of Window.permit()") from None


def read_record(name: str, value: bytes) -> Record:
    """Reads what expose() has published. HandleError for everything else."""
    try:
        said = json.loads(value)
        if said["version"] != RECORD_VERSION:
            raise HandleError(f"window {name!r} was exposed by version {said['version']} of the record format")
        if not (isinstance(said["kind"], str) and isinstance(said["dtype"], str) and isinstance(said["shape"], list)):
            raise HandleError(f"the entry {name!r} of the directory is not a window: its fields have the wrong types")
        remote = RemoteMemory.from_bytes(bytes.fromhex(said["handle"]))
        layout = layout_of(None, said["shape"], said["dtype"])
        if layout.nbytes != remote.nbytes:
            raise HandleError(f"the entry {name!r} of the directory contradicts itself about the window's size")
        return Record(said["kind"], bytes.fromhex(said["endpoint"]), remote, layout)
    except HandleError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HandleError(f"the entry {name!r} of the directory is not a window: {error}") from None
