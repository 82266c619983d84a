"""`new_comm`: a communicator of all processes of a job, made as users of torchcomms know it."""

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from onesided.collectives import Communicator
from onesided.collectives.work import to_seconds
from onesided.errors import Unsupported
from onesided.rpc import Group

__all__ = ["new_comm"]

TRANSPORTS = {"onesided": "auto", "auto": "auto", "shm": "shm", "rdma": "rdma"}
JOIN_S = 600.0  # where there is no timeout


def new_comm(
    backend: str = "onesided",
    device: Any = "cpu",
    name: str = "comm",
    *,
    timeout: Any = 600.0,
    store: Any = None,
    group: Any = None,
) -> Communicator:
    """A communicator of all processes of the job. Collective; returns when all are there and connected.

    `backend` is "onesided", or a transport to insist on: "shm" or "rdma". `device` must be the CPU, as yet. Rank and
    size are those that torchrun and its kin put into the environment (Group.from_env tells which variables). With a
    `store` of torch.distributed, ranks find each other through it, under `name`; with a `group`, they are its members.
    `timeout`, in seconds or a timedelta, is the deadline of this call and of each later operation; None for none.

    Several may be made; those of one name must be made in the same order by all.

    Raises Unsupported for another backend or device, and what Group.from_env and Window.allocate raise.
    """
    transport = TRANSPORTS.get(backend)
    if transport is None:
        raise Unsupported(f"there is no backend {backend!r}: {', '.join(TRANSPORTS)}")
    if str(device).partition(":")[0] != "cpu":
        raise Unsupported(f"new_comm: device {str(device)!r}: tensors are in host memory ('cpu'), as yet")
    timeout_s = to_seconds(timeout)
    if group is not None:
        return Communicator(group, name=name, timeout_s=timeout_s, transport=transport)
    exchange, leave = _join(name, store, JOIN_S if timeout_s is None else timeout_s)
    try:
        comm = Communicator(exchange, name=name, timeout_s=timeout_s, transport=transport)
    except BaseException:
        leave()
        raise
    comm._leave = leave
    return comm


# How often each name was used with a store by this process: the same at all ranks, so each use has keys of its own.
_uses: dict[str, Iterator[int]] = defaultdict(itertools.count)


def _join(name: str, store: Any, timeout_s: float) -> tuple[Any, Callable[[], object]]:
    if store is None:
        group = Group.from_env(name=name, timeout_s=timeout_s)
        return group, group.leave
    from torch.distributed import PrefixStore  # type: ignore[attr-defined,unused-ignore]

    from .store_exchange import StoreExchange

    exchange = StoreExchange(PrefixStore(f"onesided/{name}/{next(_uses[name])}", store), *_place(), name)
    return exchange, exchange.close


def _place() -> tuple[int, int]:
    missing = [variable for variable in ("RANK", "WORLD_SIZE") if not os.environ.get(variable)]
    if missing:
        raise Unsupported(f"new_comm with a store needs {', '.join(missing)} in the environment, as torchrun sets them")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
