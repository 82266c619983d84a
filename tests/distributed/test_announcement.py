"""The programs of torchcomms' announcement, with the import and the backend's name changed, under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIRST = """
import torch
import onesided

comm = onesided.new_comm("onesided", torch.device("cpu"), name="my_comm")
print(f"I am rank {comm.get_rank()} of {comm.get_size()}!\\n", end="")  # in one piece

t = torch.full((10, 20), fill_value=comm.rank, dtype=torch.float)
comm.allreduce(t, onesided.ReduceOp.SUM, async_op=False)
assert (t == 6).all()
work = comm.allreduce(t, onesided.ReduceOp.SUM, async_op=True)
work.wait()
assert (t == 24).all()

split_groups = torch.arange(comm.get_size()).view(-1, 2).tolist()
tp_comm = comm.split(split_groups)
t = torch.full((10, 20), fill_value=comm.rank, dtype=torch.float)
tp_comm.allreduce(t, onesided.ReduceOp.SUM)
assert (t == (1 if comm.rank < 2 else 5)).all()
assert (tp_comm.get_rank(), tp_comm.get_size()) == (comm.rank % 2, 2)
tp_comm.finalize()
comm.finalize()
"""

SECOND = """
import sys
import torch
import torch.distributed as dist
import onesided
from onesided.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dims = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
comm = onesided.new_comm("onesided", torch.device("cpu"), name="global")
if dims == 1:
    mesh = init_device_mesh(mesh_dim_comms=(comm,), mesh_dim_names=("global",))
else:
    rows = comm.split([[0, 1], [2, 3]])
    columns = comm.split([[0, 2], [1, 3]])
    mesh = init_device_mesh((columns, rows), ("replicate", "shard"), _global_comm=comm)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh["shard"].get_local_rank() == comm.rank % 2
    t = torch.tensor([comm.rank])
    dist.all_reduce(t, group=mesh.get_group("replicate"))
    assert t.item() == 2 * (comm.rank % 2) + 2


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def train(net, batches):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


data = torch.randn(3, 4, 8, 16)  # steps, ranks, rows
alone = model()
train(alone, [step.reshape(32, 16) for step in data])
sharded = model()
fully_shard(sharded, mesh=mesh)
train(sharded, [step[comm.rank] for step in data])
for ours, theirs in zip(sharded.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-6)
print(f"trained by {dist.get_backend()}\\n", end="")  # in one piece
dist.destroy_process_group()
if dims == 2:
    rows.finalize()
    columns.finalize()
comm.barrier()  # it is the program's own, and goes on
comm.finalize()
"""


def torchrun(tmp_path: Path, program: str, *arguments: str) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(program)
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", str(file), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line)


def test_all_reduce_and_split(tmp_path: Path) -> None:
    assert torchrun(tmp_path, FIRST) == [f"I am rank {rank} of 4!" for rank in range(4)]


@pytest.mark.parametrize("dims", ["1", "2"])
def test_fully_shard_on_a_mesh_of_communicators(tmp_path: Path, dims: str) -> None:
    assert torchrun(tmp_path, SECOND, dims) == ["trained by onesided"] * 4
