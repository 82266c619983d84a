"""new_comm: how ranks find each other, and what it refuses."""

import os
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Processes, raises

import onesided
from onesided import Group, OnesidedError, Unsupported, new_comm


def over_store(group: Group, port: int) -> None:
    """Twice under one name, the second while the first is there."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    os.environ.update(RANK=str(group.rank), WORLD_SIZE=str(group.size))
    with new_comm("shm", torch.device("cpu"), "one", store=store, timeout=timedelta(seconds=30)) as first:
        with new_comm("onesided", "cpu", "one", store=store) as second:
            for comm in (first, second, first):
                tensor = torch.full((5,), float(group.rank + 1))
                comm.allreduce(tensor, onesided.ReduceOp.SUM)
                assert (tensor == 3).all()
            assert (first.name, first.get_backend(), first.get_device()) == ("one", "onesided", torch.device("cpu"))
    with raises(OnesidedError, "finalized"):
        first.barrier()
    store.set(f"read {group.rank}", b"")
    if group.rank == 0:
        store.wait(["read 1"])


def test_over_a_store(processes: Processes) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes.run(over_store, 2, store.port)


def test_over_a_group() -> None:
    groups = Group.local(2)
    results: list[Any] = [None, None]

    def member(group: Group) -> None:
        with new_comm(group=group, name="ours") as comm:
            tensor = np.ones(3)
            comm.all_reduce(tensor)
            results[group.rank] = tensor.tolist()
        group.all_gather(b"")  # it is the caller's, and goes on
        group.leave()

    threads = [threading.Thread(target=member, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[2.0] * 3] * 2


def test_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ONESIDED_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(Unsupported, match="no backend 'ncclx': onesided, auto, shm, rdma"):
        new_comm("ncclx")
    with pytest.raises(Unsupported, match=r"'cuda:0'.*host memory"):
        new_comm("onesided", torch.device("cuda:0"))
    with pytest.raises(OnesidedError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        new_comm("onesided", torch.device("cpu"))
    with pytest.raises(Unsupported, match="RANK, WORLD_SIZE"):
        new_comm(store=dist.HashStore())
