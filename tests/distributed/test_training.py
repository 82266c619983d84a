"""What trains with torch.distributed: DDP, FSDP2, DeviceMesh, DTensor, ZeRO, DCP, torchrun."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from harness import Processes
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from world import world

from onesided import Group

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, of itself
    from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 3
# Older torch has the other names, and newer one warns of them.
all_gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def network() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.cat([batch(rank, step) for rank in ranks])).square().mean().backward()
        optimizer.step()


def alone(size: int) -> list[torch.Tensor]:
    """The parameters of a process that has seen the batches of all ranks."""
    model = network()
    train(model, torch.optim.AdamW(model.parameters(), 0.01), list(range(size)))
    return [parameter.detach() for parameter in model.parameters()]


def check(parameters: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-4, atol=1e-5)


def data_parallel(group: Group) -> None:
    with world(group):
        model = network()
        if group.rank != 0:
            for parameter in model.parameters():
                parameter.detach().zero_()  # DDP gives everybody those of rank 0
        wrapped = DistributedDataParallel(model)
        train(wrapped, torch.optim.AdamW(wrapped.parameters(), 0.01), [group.rank])
        check(list(model.parameters()), alone(group.size))
        mine = [torch.zeros_like(model[0].weight) for _ in range(group.size)]
        dist.all_gather(mine, model[0].weight)
        assert all(torch.equal(one, mine[0]) for one in mine), "ranks have different bits"
        # The states of the optimizer are shared out, and gradients travel in 16 bits.
        wrapped = DistributedDataParallel(network())
        wrapped.register_comm_hook(None, fp16_compress_hook)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.01)
        train(wrapped, optimizer, [group.rank])
        expected = network()
        train(expected, torch.optim.SGD(expected.parameters(), 0.01), list(range(group.size)))
        for one, other in zip(wrapped.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=1e-3)


def test_ddp_and_zero(processes: Processes) -> None:
    processes.run(data_parallel, 3)


def sharded(group: Group, folder: str) -> None:
    with world(group):
        mesh = init_device_mesh("cpu", (group.size,), mesh_dim_names=("global",))

        def made() -> torch.nn.Sequential:
            model = network()
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        model = made()
        train(model, torch.optim.AdamW(model.parameters(), 0.01), [group.rank])
        check([parameter.full_tensor() for parameter in model.parameters()], alone(group.size))
        # A checkpoint, loaded into another model.
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
        other = made()
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        for one, expected in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), expected.full_tensor())


def test_fsdp2_and_checkpoints(processes: Processes, tmp_path: Path) -> None:
    processes.run(sharded, 3, str(tmp_path / "checkpoint"))


def meshes(group: Group) -> None:
    with world(group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        whole = torch.arange(35.0).view(7, 5)  # which 2 does not divide
        tensor = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        assert torch.equal(tensor.full_tensor(), whole)
        assert torch.equal(tensor.redistribute(placements=[Shard(1), Shard(0)]).full_tensor(), whole)
        moved = tensor.redistribute(placements=[Replicate(), Shard(1)])
        assert torch.equal(moved.full_tensor(), whole)
        partial = DTensor.from_local(whole, mesh, [Partial(), Partial()], run_check=False)
        assert torch.equal(partial.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), 4 * whole)
        row = mesh["shard"]
        first = group.rank // 2 * 2
        total = functional.all_reduce(torch.tensor([float(group.rank)]), "sum", row)
        assert functional.wait_tensor(total).item() == 2 * first + 1
        gathered = all_gather_single(torch.tensor([[group.rank]]), 0, row)
        assert functional.wait_tensor(gathered).flatten().tolist() == [first, first + 1]
        scattered = reduce_scatter_single(torch.arange(4.0), "sum", 0, row)
        assert functional.wait_tensor(scattered).tolist() == [[0, 2], [4, 6]][group.rank % 2]
        hybrid = fully_shard(network(), mesh=mesh)
        train(hybrid, torch.optim.AdamW(hybrid.parameters(), 0.01), [group.rank])
        check([parameter.full_tensor() for parameter in hybrid.parameters()], alone(group.size))


def test_device_mesh_and_dtensor(processes: Processes) -> None:
    processes.run(meshes, 4)


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("onesided")
tensor = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
assert (tensor == 3).all(), tensor
print(f"rank {dist.get_rank()} of {dist.get_backend()}\\n", end="")  # in one piece
dist.destroy_process_group()
"""


def test_torchrun_finds_the_backend_by_itself(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line) == ["rank 0 of onesided", "rank 1 of onesided"]
