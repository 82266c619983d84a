"""Transports and connections that windows share: one of each per group and kind, not one per window."""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import SupportsFloat

from onesided.transport import Connection, Transport, choose_kind, open_transport

from onesided.errors import BoundsError, ConnectionLost, OnesidedError, Unsupported

from .exchange import Exchange

__all__ = ["Countdown", "Fabric", "agree", "fabric_of", "shared_transport"]


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


class Fabric:
    """The transport of one rank, and its connections to the other ranks of one group. Made collectively."""

    def __init__(self, group: Exchange, kind: str, countdown: Countdown) -> None:
        self._windows = 0
        self.connections: dict[int, Connection] = {}
        others = [rank for rank in range(group.size) if rank != group.rank]

        def offer() -> dict[str, str]:
            self.transport: Transport = open_transport(kind)
            return {str(rank): self.transport.bind().hex() for rank in others}

        def connect() -> dict[str, str]:
            for rank in others:
                endpoint = bytes.fromhex(offers[rank][str(group.rank)])
                name = f"rank {rank} of group {group.name!r}"
                self.connections[rank] = self.transport.connect(endpoint, name=name, timeout_s=countdown.left_s())
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

    def close(self) -> None:
        """Closes the transport, and with it every connection and memory."""
        if hasattr(self, "transport"):
            self.transport.close()


_lock = threading.Lock()
# Held over a fork, so that no other thread leaves it locked in the child.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_fabrics: "weakref.WeakKeyDictionary[Exchange, dict[str, Fabric]]" = weakref.WeakKeyDictionary()
_shared: dict[tuple[int, str], Transport] = {}


def fabric_of(group: Exchange, kind: str, countdown: Countdown) -> Fabric:
    """The fabric of this rank of `group`; made, collectively, the first time. Closed with the group."""
    try:
        chosen = choose_kind(kind)
    except (TypeError, Unsupported):
        chosen = ""  # opening it will say why, to the other ranks too
    with _lock:
        fabric = _fabrics.get(group, {}).get(chosen)
    if fabric is not None and fabric.transport.closed:
        raise ConnectionLost(f"group {group.name!r} was closed")
    if fabric is None:
        fabric = Fabric(group, kind, countdown)
        with _lock:
            _fabrics.setdefault(group, {})[chosen] = fabric
        group.add_close_callback(fabric.close)
    return fabric


def shared_transport(kind: str) -> Transport:
    """The transport of this process for windows outside of groups. Lives until the process ends."""
    with _lock:
        key = (os.getpid(), kind)
        transport = _shared.get(key)
        if transport is None or transport.closed:
            transport = _shared[key] = open_transport(kind)
        return transport
