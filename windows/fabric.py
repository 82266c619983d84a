"""Transports and connections that windows share: one of each per group and kind, not one per window."""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple, SupportsFloat, TypeVar

from onesided.transport import (
    Connection,
    Memory,
    RemoteMemory,
    Target,
    Transport,
    choose_kind,
    open_transport,
    unsupported_reasons,
)

from onesided import _core
from onesided.errors import BoundsError, ConnectionLost, OnesidedError, Unsupported

from .exchange import Exchange

__all__ = ["Countdown", "Fabric", "agree", "fabric_of", "shared_transport"]


L = TypeVar("L")


class Countdown:
    """What is left of one timeout that covers several steps. BoundsError and TypeError if it cannot be one."""

    def __init__(self, timeout_s: object) -> None:
        seconds = None
        if timeout_s is not None:
            if not isinstance(timeout_s, SupportsFloat) or isinstance(timeout_s, (str, bytes)):
                raise TypeError(f"timeout_s must be a number of seconds or None, not {type(timeout_s).__name__}")
            try:
                seconds = float(timeout_s)
            except OverflowError:
                raise BoundsError("timeout_s is too large; None stands for no deadline") from None
            if not seconds >= 0:
                raise BoundsError(f"timeout_s must be at least 0, not {seconds}")
        self._ends = None if seconds is None else time.monotonic() + seconds

    def left_s(self) -> float | None:
        """Seconds left, at least 0; None for ever."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())


def agree(group: Exchange, step: str, work: Callable[[], dict[str, str]], countdown: Countdown) -> list[dict[str, str]]:
    """Runs `work` on every rank and gives each rank everybody's results, in rank order.

    If it fails anywhere it fails everywhere: here with its own error, elsewhere with OnesidedError that names the rank
    and tells its error. So no rank goes on with half a window.
    """
    failure: Exception | None = None
    try:
        said = {"step": step, **work()}
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        failure = error
        said = {"step": step, "error": f"{type(error).__name__}: {error}"}
    gathered = group.all_gather(json.dumps(said).encode(), timeout_s=countdown.left_s())
    if failure is not None:
        raise failure
    answers = [read_answer(answer) for answer in gathered]
    for rank, answer in enumerate(answers):
        if answer["step"] != step:
            raise OnesidedError(
                f"the ranks of group {group.name!r} are at different steps: rank {rank} at {answer['step']!r}, "
                f"rank {group.rank} at {step!r}; every rank must create the same windows in the same order"
            )
        if "error" in answer:
            raise OnesidedError(f"{step}: rank {rank} of group {group.name!r} failed: {answer['error']}")
    return answers


def read_answer(answer: bytes) -> dict[str, str]:
    """What a rank said in agree(); of a rank that was gathering something else, a step of that name."""
    try:
        said = json.loads(answer)
    except ValueError:
        said = None
    return said if isinstance(said, dict) and "step" in said else {"step": "something else than a window"}


class Plan(NamedTuple):
    """How the ranks of a group reach each other, agreed upon by all."""

    kind: str  # "shm", "rdma", or MIXED
    why: str
    near: frozenset[int]  # the other ranks on this rank's host, if the kind is MIXED


MIXED = "shm+rdma"


def own_host() -> str:
    """What counts as one host: processes that can open each other's shared memory. ONESIDED_HOST overrules it."""
    return os.environ.get("ONESIDED_HOST") or _core.host_token().hex()


def make_plan(group: Exchange, kind: str, countdown: Countdown) -> Plan:
    """Chooses the kind for a group. Collective. Ranks that ask for "auto" take what others ask for by name."""

    def offer() -> dict[str, str]:
        reasons = {name: reason or "" for name, reason in unsupported_reasons().items()}
        if kind != "auto":
            choose_kind(kind)  # raises what is wrong with it
        return {"kind": kind, "host": own_host(), **{f"not {name}": reason for name, reason in reasons.items()}}

    offers = agree(group, "choose a transport", offer, countdown)
    asked = {offer["kind"] for offer in offers} - {"auto"}
    if len(asked) > 1:
        raise OnesidedError(f"the ranks of group {group.name!r} ask for different transports: {sorted(asked)}")
    if asked:
        chosen = asked.pop()
        return Plan(chosen, f"asked for {chosen!r}", frozenset())

    def lacking(name: str) -> list[str]:
        return [f"rank {rank}: {offer[f'not {name}']}" for rank, offer in enumerate(offers) if offer[f"not {name}"]]

    hosts = [offer["host"] for offer in offers]
    mine = frozenset(rank for rank, host in enumerate(hosts) if host == hosts[group.rank]) - {group.rank}
    ranks = f"{group.size} ranks on {len(set(hosts))} hosts"
    if len(set(hosts)) == 1 and not lacking("shm"):
        return Plan("shm", f"asked for 'auto': all {group.size} ranks are on one host", frozenset())
    if not lacking("rdma"):
        if len(set(hosts)) == group.size or lacking("shm"):
            return Plan("rdma", f"asked for 'auto': {ranks}", frozenset())
        return Plan(MIXED, f"asked for 'auto': {ranks}; shm within a host, rdma between", mine)
    reasons = [f"shm: {'; '.join(lacking('shm')) or f'there are {ranks}'}", f"rdma: {'; '.join(lacking('rdma'))}"]
    raise Unsupported(f"no transport reaches all ranks of group {group.name!r}: " + "; ".join(reasons))


class Fabric:
    """The transports of one rank, and its connections to the other ranks of one group. Made collectively.

    `transport` makes the memory. With a MIXED plan that is shm, and `far` makes the same memory known to devices, too.
    """

    def __init__(self, group: Exchange, plan: Plan, countdown: Countdown) -> None:
        self._windows = 0
        self._most_peers = group.size + 1
        self.plan = plan
        self.far: Transport | None = None
        self._near_connections: dict[int, Connection] = {}
        self._connections: dict[int, Connection] = {}
        others = [rank for rank in range(group.size) if rank != group.rank]

        def offer() -> dict[str, str]:
            self.transport: Transport = open_transport("shm" if plan.kind == MIXED else plan.kind, why=plan.why)
            everywhere = self.transport
            if plan.kind == MIXED:
                everywhere = self.far = open_transport("rdma", why=plan.why)
            said = {str(rank): everywhere.bind(peer=peer_name(rank)).hex() for rank in others}
            return said | {f"near {rank}": self.transport.bind(peer=peer_name(rank)).hex() for rank in plan.near}

        def connect() -> dict[str, str]:
            everywhere = self.far or self.transport
            for rank in others:
                name = f"rank {rank} of group {group.name!r}"
                endpoint = bytes.fromhex(offers[rank][str(group.rank)])
                self._connections[rank] = everywhere.connect(endpoint, name=name, timeout_s=countdown.left_s())
                if rank in plan.near:
                    endpoint = bytes.fromhex(offers[rank][f"near {group.rank}"])
                    near = self.transport.connect(endpoint, name=name, timeout_s=countdown.left_s())
                    self._near_connections[rank] = near
            return {}

        try:
            offers = agree(group, "open a transport", offer, countdown)
            agree(group, "connect", connect, countdown)
        except BaseException:
            self.close()
            raise

    def next_window(self) -> int:
        """Numbers windows; the same on every rank, as windows are created in the same order."""
        self._windows += 1
        return self._windows

    def register(self, make: "Callable[[Transport], tuple[L, Memory]]") -> "tuple[L, Registered]":
        """Makes this rank's memory, and all that the others need to know of it."""
        layout, memory = make(self.transport)
        if self.far is None:
            return layout, Registered(memory, None)
        try:
            far = self.far.register_memory(memory, memory.access, signals=memory.signals, max_peers=self._most_peers)
            return layout, Registered(far, memory)
        except BaseException:
            memory.close()
            raise

    def attach(self, rank: int, handles: dict[str, str], own: "Registered", countdown: Countdown) -> Target:
        """Opens the memory of `rank`, of which it has said `handles`; for this rank itself, `own`."""
        if rank not in self._connections:
            if self.far is None or own.near is None:
                return self.transport.loop_back(own.memory)
            return _core.mixed_target(self.transport.loop_back(own.near), self.far.loop_back(own.memory))
        remote = RemoteMemory.from_bytes(bytes.fromhex(handles["handle"]))
        target = self._connections[rank].attach(remote, countdown.left_s())
        if rank not in self._near_connections:
            return target
        near = RemoteMemory.from_bytes(bytes.fromhex(handles["near"]))
        return _core.mixed_target(self._near_connections[rank].attach(near, countdown.left_s()), target)

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return self.transport.closed

    def close(self) -> None:
        """Closes the transports, and with them every connection and memory."""
        for transport in (self.far, getattr(self, "transport", None)):
            if transport is not None:
                transport.close()


def peer_name(rank: int) -> str:
    """By which memories know a rank: its endpoint is bound for this name."""
    return f"rank {rank}"


class Registered(NamedTuple):
    """This rank's memory in a window. `near`: the same memory as peers on this host open it, if that is another way."""

    memory: Memory
    near: Memory | None

    def handles(self) -> dict[str, str]:
        """What to tell the other ranks."""
        near = {} if self.near is None else {"near": self.near.handle().hex()}
        return {"handle": self.memory.handle().hex(), **near}

    def permit(self, peer: str, access: str) -> None:
        """As Memory.permit, on every way."""
        for memory in filter(None, self):
            memory.permit(peer, access)

    def revoke(self, peer: str, countdown: Countdown) -> None:
        """As Memory.revoke, on every way."""
        for memory in filter(None, self):
            memory.revoke(peer, countdown.left_s())

    def close(self) -> None:
        """Ends access to it."""
        for memory in filter(None, self):
            memory.close()


_lock = threading.Lock()
# Held over a fork, so that no other thread leaves it locked in the child.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_fabrics: "weakref.WeakKeyDictionary[Exchange, dict[str, Fabric | None]]" = weakref.WeakKeyDictionary()
_shared: dict[tuple[int, str], Transport] = {}


def fabric_of(group: Exchange, kind: str, countdown: Countdown) -> Fabric:
    """The fabric of this rank of `group`; made, collectively, the first time. Closed with the group."""
    with _lock:
        fabric = _fabrics.get(group, {}).get(str(kind))
    if fabric is None:
        plan = make_plan(group, kind, countdown)
        with _lock:
            known = _fabrics.setdefault(group, {})
            fabric = known[kind] = known.get(plan.kind)
        if fabric is None:
            fabric = Fabric(group, plan, countdown)
            with _lock:
                known[kind] = known[plan.kind] = fabric
            group.add_close_callback(fabric.close)
    if fabric.closed:
        raise ConnectionLost(f"group {group.name!r} was closed")
    return fabric


def shared_transport(kind: str) -> Transport:
    """The transport of this process for windows outside of groups. Lives until the process ends."""
    with _lock:
        key = (os.getpid(), kind)
        transport = _shared.get(key)
        if transport is None or transport.closed:
            transport = _shared[key] = open_transport(kind)
        return transport
