"""Sends and receives of torch.distributed, and a pipeline that is trained over them."""

import torch
import torch.distributed as dist
from harness import Processes
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from world import world

from onesided import Group

SIZE = 3


def messages(group: Group) -> None:
    with world(group):
        rank, after, before = group.rank, (group.rank + 1) % SIZE, (group.rank - 1) % SIZE
        for count in (0, 1, 1000, 1_000_000):
            mine, into = torch.full((count,), float(rank)), torch.zeros(count)
            # Blocking, in turns; then all at once, in both orders; then as a batch.
            if rank == 0:
                dist.send(mine, after)
                assert dist.recv(into, before) == before
            else:
                assert dist.recv(into, before) == before
                dist.send(mine, after)
            assert (into == before).all()
            for first in ("send", "recv"):
                into.zero_()
                works = [dist.isend(mine, after, tag=5)] if first == "send" else []
                works.append(dist.irecv(into, before, tag=5))
                if first == "recv":
                    works.append(dist.isend(mine, after, tag=5))
                for work in works:
                    work.wait()
                assert (into == before).all()
            into.zero_()
            batch = [dist.P2POp(dist.irecv, into, before), dist.P2POp(dist.isend, mine, after)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            assert (into == before).all()
        one = torch.zeros(1)
        if rank == 0:
            seen = {dist.recv(one) for _ in range(SIZE - 1)}
            assert seen == {1, 2}
            work = dist.irecv(one, 1)
            future = work.get_future()
            dist.barrier()  # collective operations go on meanwhile
            assert future.wait() == [one]
            assert one.item() == 7
        else:
            dist.send(torch.ones(1), 0)
            dist.barrier()
            if rank == 1:
                dist.send(torch.full((1,), 7.0), 0)
        # By their ranks in the world; within a group, too.
        pair = dist.new_group([2, 0])
        if rank == 2:
            dist.send(torch.full((3,), 2.0), 0, group=pair)
            dist.send_object_list(["a", {"b": 1}], dst=0, group=pair)
        if rank == 0:
            three, objects = torch.zeros(3), [None, None]
            assert dist.recv(three, 2, group=pair) == 2
            assert (three == 2).all()
            dist.recv_object_list(objects, src=2, group=pair)
            assert objects == ["a", {"b": 1}]
        dist.barrier()


def test_messages(processes: Processes) -> None:
    processes.run(messages, SIZE)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(SIZE)]


def pipeline(group: Group) -> None:
    """1F1B over three stages, against all of them in one process."""
    with world(group):
        inputs, targets = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(12, 8)
        parts, alone = stages(), nn.Sequential(*stages())
        part = parts[group.rank]
        stage = PipelineStage(part, group.rank, SIZE, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        ours = torch.optim.SGD(part.parameters(), lr=0.1)
        theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(3):
            losses: list[torch.Tensor] = []
            if group.rank == 0:
                schedule.step(inputs)
            elif group.rank == SIZE - 1:
                schedule.step(target=targets, losses=losses)
            else:
                schedule.step()
            ours.step()
            ours.zero_grad()
            loss = nn.functional.mse_loss(alone(inputs), targets)
            loss.backward()
            theirs.step()
            theirs.zero_grad()
            if losses:
                torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
        for one, other in zip(part.parameters(), alone[group.rank].parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach())


def test_pipeline(processes: Processes) -> None:
    processes.run(pipeline, SIZE)
