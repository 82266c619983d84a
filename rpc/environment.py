"""Joining by the environment that torchrun and its kin set up: `Group.from_env`."""

import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onesided.errors import BoundsError, DeadlineExceeded, OnesidedError, Unsupported

from . import address as addresses
from . import limits
from .group import Group
from .process import forget

if TYPE_CHECKING:
    from .server import Server

log = logging.getLogger("onesided.rpc")

LINGER_S = 3.0  # for the others to leave, before an embedded server goes away
POLL_S = 0.02


@dataclass(frozen=True)
class Job:
    """What the environment says about this process and its job."""

    rank: int
    size: int
    address: str  # of a server that runs already, or empty
    master_host: str
    master_port: int
    port: int  # of the server that rank 0 embeds; 0: one that the agent's store tells
    bind_host: str
    agent_store: bool
    restarts: int
    spans_hosts: bool


def read(env: Mapping[str, str]) -> Job:
    """Reads the environment. Raises OnesidedError that names the variables which are missing or wrong."""
    address = env.get("ONESIDED_ADDRESS", "")
    needed = ("RANK", "WORLD_SIZE") if address else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not env.get(name)]
    if missing:
        raise OnesidedError(
            f"Group.from_env needs {', '.join(missing)} in the environment, as torchrun sets them"
            + ("" if address else "; with ONESIDED_ADDRESS, the address of a running server, RANK and WORLD_SIZE do")
        )

    def number(name: str, default: int, low: int, high: int) -> int:
        text = env.get(name) or str(default)
        try:
            return limits.check_int(int(text), name, low, high)
        except ValueError:
            raise BoundsError(f"{name} is {text!r}; it must be a number from {low} to {high}") from None

    size = number("WORLD_SIZE", 1, 1, limits.MAX_SIZE)
    rank = number("RANK", 0, 0, size - 1)
    if address:
        addresses.parse(address)
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
    master_port = number("MASTER_PORT", 1, 1, 65_535)
    fixed = number("ONESIDED_PORT", 0, 0, 65_535)
    if not address and not fixed and not agent_store and master_port == 65_535:
        raise BoundsError("MASTER_PORT is 65535, and the control plane would take the next one: set ONESIDED_PORT")
    master_host = env.get("MASTER_ADDR", "").strip("[]")
    return Job(
        rank=rank,
        size=size,
        address=address,
        master_host=master_host,
        master_port=master_port,
        port=fixed or (0 if agent_store else min(master_port + 1, 65_535)),
        bind_host=env.get("ONESIDED_BIND", "").strip("[]") or master_host,
        agent_store=agent_store,
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0, 0, 1 << 31),
        spans_hosts=number("LOCAL_WORLD_SIZE", size, 1, limits.MAX_SIZE) < size,
    )


def join_from_env(name: str, timeout_s: float, lease_s: float) -> Group:
    """See `Group.from_env`."""
    job = read(os.environ)
    deadline_s = time.monotonic() + timeout_s
    if job.address:
        return Group.join(job.address, name, job.size, rank=job.rank, timeout_s=timeout_s, lease_s=lease_s)
    key = f"onesided/{job.restarts}/{name}/{next(_uses[name])}"
    server = _Embedded.take(job) if job.rank == 0 else None
    try:
        if server is not None:
            address = server.address
            if job.port == 0:
                told = addresses.join(job.bind_host, addresses.parse(address)[1])
                _store(job, deadline_s).set(key, told)
        elif job.port == 0:
            address = _told(job, key, deadline_s)
        else:
            address = addresses.join(job.master_host, job.port)
        left_s = max(deadline_s - time.monotonic(), 0.0)
        group = Group.join(address, name, job.size, rank=job.rank, timeout_s=left_s, lease_s=lease_s)
    except BaseException:
        if server is not None:
            server.release(0.0)
        raise
    if server is not None:
        group._after_leaving(lambda: server.release(LINGER_S))
    return group


# How often each name was joined by this process: the same at all ranks, so that each use has a key of its
# own.
_uses: dict[str, Iterator[int]] = defaultdict(itertools.count)


class _Embedded:
    """The server that this process embeds for all of its groups, as long as one of them is there."""

    _lock = threading.Lock()
    _current: "_Embedded | None" = None

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._users = 0
        forget(server)  # it is closed by its last user, after the others had time to leave

    @classmethod
    def take(cls, job: Job) -> "_Embedded":
        """Starts it, or counts one more user."""
        from .server import Server

        with cls._lock:
            if cls._current is None:
                host = addresses.resolve(job.bind_host)
                if job.spans_hosts and (host == "::1" or host.startswith("127.")):
                    raise OnesidedError(
                        f"{job.bind_host!r} is {host} on rank 0, which other hosts cannot reach: set MASTER_ADDR, or "
                        f"ONESIDED_BIND on rank 0, to an address of the network between the hosts"
                    )
                try:
                    cls._current = cls(Server(addresses.join(host, job.port)))
                except OnesidedError as error:
                    raise OnesidedError(
                        f"{error}. ONESIDED_PORT on all ranks chooses another port, ONESIDED_BIND on "
                        f"rank 0 another address, ONESIDED_ADDRESS a server that runs"
                    ) from error
            cls._current._users += 1
            return cls._current

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._server.address

    def release(self, linger_s: float) -> None:
        """One user less. After the last one it is closed, once all members have left or `linger_s` have
        passed."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            _Embedded._current = None
            deadline_s = time.monotonic() + linger_s
            while self._server.members and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            self._server.close()


class _Store:
    """The agent's store, as far as it is needed."""

    def __init__(self, store: object) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Puts a value."""
        self._store.set(key, value)  # type: ignore[attr-defined]

    def get(self, key: str) -> str | None:
        """The value, or None while there is none. Does not wait, so that a signal is noticed."""
        store = self._store
        if not store.check([key]):  # type: ignore[attr-defined]
            return None
        return bytes(store.get(key)).decode()  # type: ignore[attr-defined]


def _store(job: Job, deadline_s: float) -> _Store:
    """Connects to the store of torchrun's agent."""
    try:
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]
    except ImportError as error:
        raise Unsupported(
            f"torchrun's store at MASTER_PORT can only be asked through torch ({error}): install torch, or set "
            f"ONESIDED_PORT on all ranks, or run `onesided serve` and set ONESIDED_ADDRESS"
        ) from error
    left_s = max(deadline_s - time.monotonic(), 0.001)
    try:
        return _Store(
            TCPStore(
                job.master_host,
                job.master_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=left_s),
            )
        )
    except RuntimeError as error:  # torch's DistNetworkError and its kin
        raise DeadlineExceeded(
            f"torchrun's store at {addresses.join(job.master_host, job.master_port)} does not answer: {error}"
        ) from error


def _told(job: Job, key: str, deadline_s: float) -> str:
    """Waits for rank 0 to tell where its server is."""
    store = _store(job, deadline_s)
    while (address := store.get(key)) is None:
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded("rank 0 did not tell where its control plane is: it has not called Group.from_env")
        time.sleep(POLL_S)
    return address
