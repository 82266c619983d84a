"""A group: a fixed number of members, each with a rank, that can wait for each other and tell each other
small things."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from onesided.errors import ConnectionLost, DeadlineExceeded, StaleHandle

from . import limits
from .directory import Directory
from .process import ForkGuard, close_at_exit, forget

if TYPE_CHECKING:
    import grpc

__all__ = ["Group"]

JOIN_LEAVE_S = 0.05  # for the goodbye of a join that failed: whoever pressed Ctrl-C does not wait for a server


class Seat(Protocol):
    """A member's place and its way to the others: over gRPC (client.py), or within this process
    (local.py)."""

    name: str
    size: int
    rank: int
    epoch: int

    def gather(self, sequence: int, operation: str, payload: bytes, timeout_s: float) -> list[bytes]: ...
    def gone(self) -> frozenset[int]: ...
    def leave(self) -> None: ...


class Group:
    """A membership in a group. Made by `join`, `from_env` or `local`, never by itself.

    Thread-safe; one collective at a time, in the same order at all members. A member is kept alive in the
    background; once nothing was heard of it for its lease, it is lost. A server that cannot be reached, or
    restarts, loses nobody.

    Collectives are matched by number: the first of each member belong together, then the second, and so on.
    One that fails with DeadlineExceeded at one member fails so at all of them, late ones too, and the next
    starts clean. One that is interrupted by a signal has been taken part in, and the others may complete it.
    ConnectionLost is for ever: form the group anew, by leaving it and joining again.

    A deadline ends a wait exactly, whether or not a server is there. Only one that is connected and silent (it was
    stopped, or its host vanished) is given half a second more.

    All methods but `leave` raise StaleHandle once the group was left, and OnesidedError in a forked child.
    """

    def __init__(self, seat: Seat, directory: Directory) -> None:
        self._seat = seat
        self._directory = directory
        self._guard = ForkGuard(f"group {seat.name!r}")
        self._sequence = 0
        self._turn = threading.Lock()  # held by the collective under way
        self._leaving = threading.RLock()  # held while leaving, so that all who leave return when it is done
        self._lock = threading.Lock()  # of the callbacks and `_closed`
        self._closing = self._closed = False
        self._callbacks: list[Callable[[], object]] = []
        self._at_last: Callable[[], object] = lambda: None
        close_at_exit(self, self.leave)

    @classmethod
    def join(
        cls,
        address: str,
        name: str,
        size: int,
        *,
        rank: int | None = None,
        timeout_s: float = 60.0,
        lease_s: float = limits.DEFAULT_LEASE_S,
        credentials: "grpc.ChannelCredentials | None" = None,
    ) -> "Group":
        """Joins the group `name` at the server, and returns when all its members are there.

        Where members of an earlier formation of the group are still there, it waits for the last of them to
        leave or to be lost. A rank whose holder may be dead is waited for until it shows that it lives, or
        its lease is over.

        Args:
            address: of the server, as "host:port". It may come up later than this call.
            name: of the group, 1 to 255 bytes; groups of other names are independent.
            size: how many members the group has, 1 to 65,536; the same at all of them.
            rank: which one to be; None: any that is left, in order of arrival.
            timeout_s: how long to wait for the others, in seconds.
            lease_s: after how long without a sign of life this member is lost (0.1 to 86,400 seconds). The others
                notice no sooner than that.
            credentials: of gRPC, for TLS; None: clear text.

        Raises:
            DeadlineExceeded: not all came; the message counts and names the missing, or says that no server answered.
            BoundsError: the rank is taken by a live member, all ranks are, or the group has another size.
        """
        from .client import Client

        size = limits.check_size(size)
        rank = None if rank is None else limits.check_rank(rank, size)
        name = limits.check_name(name, "group name")
        waited_s = limits.check_timeout(timeout_s)
        client = Client(address, limits.check_lease(lease_s), credentials)
        try:
            client.join(name, size, rank, waited_s)
        except BaseException:
            client.close(JOIN_LEAVE_S)  # the group may just have been formed
            raise
        return cls(client, Directory._over(client))

    @classmethod
    def from_env(
        cls, *, name: str = "world", timeout_s: float = 60.0, lease_s: float = limits.DEFAULT_LEASE_S
    ) -> "Group":
        """Joins the group of all processes of a job, as torchrun and its kin describe it in the environment.

        RANK and WORLD_SIZE say who this is. ONESIDED_ADDRESS names a server that runs already. Without it
        rank 0 embeds one, at MASTER_ADDR: on ONESIDED_PORT, else on MASTER_PORT + 1; where torchrun's agent
        holds a store at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE), on a free port that it tells the others
        through that store, which needs torch. ONESIDED_BIND makes rank 0 listen at another host than
        MASTER_ADDR.

        An embedded server lives until rank 0 has left. Rank 0 gives the others three seconds to leave first.

        Raises:
            OnesidedError: a variable is missing or is not what it should be; the message names it.
            Unsupported: torch is needed to ask torchrun's store, and is not installed.
            All that `join` raises.
        """
        from .environment import join_from_env

        return join_from_env(
            limits.check_name(name, "group name"), limits.check_timeout(timeout_s), limits.check_lease(lease_s)
        )

    @classmethod
    def local(cls, size: int, *, name: str = "local") -> "list[Group]":
        """Makes a whole group within this process, by rank, for one thread each. It uses no network, no gRPC
        and no leases; the interface and the errors are those of `join`. See also `run_local`."""
        from .local import local_group

        return local_group(limits.check_size(size), limits.check_name(name, "group name"))

    @property
    def rank(self) -> int:
        """Which member this is: 0 to size - 1."""
        return self._seat.rank

    @property
    def size(self) -> int:
        """How many members the group has, lost ones too."""
        return self._seat.size

    @property
    def name(self) -> str:
        """The name that all members joined."""
        return self._seat.name

    @property
    def epoch(self) -> int:
        """Which formation of the group this is: higher each time that it is formed under this name."""
        return self._seat.epoch

    @property
    def incarnation(self) -> int:
        """Which life of this rank this is: higher after each restart. Since a restarted member always joins a
        new formation, it equals `epoch`."""
        return self._seat.epoch

    @property
    def directory(self) -> Directory:
        """The directory of the group's server. It belongs to the group: leaving withdraws what was published
        in it."""
        return self._directory

    @property
    def closed(self) -> bool:
        """True once the group was left."""
        return self._closed

    def all_gather(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Gives `payload` to all members and returns those of all, by rank. All members call it; sizes may
        differ, and be 0, and are at most 15 MiB together.

        Args:
            timeout_s: how long to wait for the others, in seconds (None: 60).

        Raises:
            DeadlineExceeded: a member did not come; the message names it. See the class for what is next.
            ConnectionLost: a member was lost or left; the message names it.
            BoundsError: the payloads are too large; if only together, it raises at all members.
            OnesidedError: other members called another collective.
        """
        self._check()
        data = limits.check_bytes(payload, "payload", limits.MAX_GATHER_BYTES)
        return self._collective("all_gather", data, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Returns when all members have called it. Waits and raises as `all_gather` does."""
        self._check()
        self._collective("barrier", b"", timeout_s)

    def lost_ranks(self) -> frozenset[int]:
        """The ranks that were lost or have left; costs no request. News arrives with a heartbeat: up to a
        third of a lease late. It holds this member's own rank if that was silent for too long."""
        self._check()
        return self._seat.gone()

    def add_close_callback(self, callback: Callable[[], object]) -> None:
        """Runs `callback` when the group is left, before it leaves; the newest runs first. What one raises is
        raised by `leave`, once all have run and the group was left."""
        with self._lock:
            self._check()
            self._callbacks.append(callback)

    def leave(self) -> None:
        """Leaves the group: runs the close callbacks, withdraws what this member published, and tells the
        others, whose collectives fail from now on. Idempotent. Never raises because the server is gone. In a
        forked child it does nothing."""
        if self._guard.forked:
            return
        first: Exception | None = None
        with self._leaving:
            if self._closed or self._closing:  # or this is a callback of the very leave
                return
            self._closing = True
            try:
                while (callback := self._next_callback()) is not None:
                    try:
                        callback()
                    except Exception as error:  # noqa: BLE001  # every callback runs; the first failure is told
                        first = first or error
            finally:
                self._closing = False  # a second try after Ctrl-C goes on with the callbacks that are left
            forget(self)
            self._directory.close()
            self._seat.leave()
            self._at_last()
        if first is not None:
            raise first

    close = leave

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<Group {self.name!r} rank {self.rank} of {self.size}, epoch {self.epoch}{state}>"

    def _next_callback(self) -> Callable[[], object] | None:
        """Takes the newest close callback; where there is none, the group is closed in the same moment."""
        with self._lock:
            if self._callbacks:
                return self._callbacks.pop()
            self._closed = True
            return None

    def _after_leaving(self, action: Callable[[], object]) -> None:
        """Runs `action` at the very end of `leave`."""
        self._at_last = action

    def _check(self) -> None:
        self._guard.check()
        if self._closed:
            raise StaleHandle(f"group {self.name!r} was left by rank {self.rank}")

    def _collective(self, operation: str, payload: bytes, timeout_s: float | None) -> list[bytes]:
        waited_s = limits.check_timeout(timeout_s)
        deadline_s = time.monotonic() + waited_s
        if not self._turn.acquire(timeout=min(waited_s, threading.TIMEOUT_MAX)):
            raise DeadlineExceeded(
                f"{operation} of group {self.name!r}: another thread of rank {self.rank} was in a collective for "
                f"{waited_s:.3g} s"
            )
        try:
            self._check()
            self._sequence += 1
            left_s = max(deadline_s - time.monotonic(), 0.0)
            return self._seat.gather(self._sequence, operation, payload, left_s)
        except ConnectionLost as error:
            if self._closed:
                raise StaleHandle(f"group {self.name!r} was left by rank {self.rank} during its {operation}") from error
            raise
        finally:
            self._turn.release()
