"""DeviceMesh over communicators, for FSDP2, DTensor and whatever else takes a mesh; needs torch."""

import json
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from onesided.collectives import Communicator
from onesided.errors import BoundsError

from . import distributed  # noqa: F401 - registers the backend

__all__ = ["init_device_mesh"]


def init_device_mesh(
    mesh_dim_comms: Sequence[Communicator],
    mesh_dim_names: Sequence[str],
    _global_comm: Communicator | None = None,
) -> DeviceMesh:
    """A mesh whose dimension i is `mesh_dim_comms[i]`, named `mesh_dim_names[i]`. Collective over all ranks.

    The communicators are parts of one, by split, that cut its ranks into a grid: `_global_comm`, which may be left out
    where one of them has all ranks. They stay the caller's: finalize them after torch.distributed is destroyed.

    Makes torch.distributed's default group of `_global_comm` if there is none yet, with the store of the environment
    (env://), as torchrun provides it.

    Raises BoundsError, on all ranks, if the communicators do not make up a grid.
    """
    comms, names = tuple(mesh_dim_comms), tuple(mesh_dim_names)
    if not comms or len(comms) != len(names):
        raise BoundsError(f"there must be a name for each of at least one communicator: {len(names)} for {len(comms)}")
    shape = [comm.size for comm in comms]
    size = math.prod(shape)
    whole = _global_comm if _global_comm is not None else next((comm for comm in comms if comm.size == size), None)
    if whole is None:
        raise BoundsError("a mesh of several dimensions needs _global_comm, the communicator of all its ranks")
    mesh = _grid(whole, comms, shape)
    if not dist.is_initialized():
        # Else env:// would be told another place than the communicator's.
        dist.init_process_group("onesided", rank=whole.rank, world_size=whole.size, pg_options=whole)
    elif dist.get_world_size() != whole.size or dist.get_rank() != whole.rank:
        raise BoundsError(f"{whole!r} is not a communicator of torch.distributed's default group")
    groups = [_group_of(comm, whole) for comm in comms]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh, mesh_dim_names=names)


def _grid(whole: Communicator, comms: Sequence[Communicator], shape: list[int]) -> torch.Tensor:
    """The rank of each place, as everybody tells its own place."""
    own = {"shape": shape, "place": [comm.rank for comm in comms]}
    said = [json.loads(one) for one in whole._gather_bytes(json.dumps(own).encode())]
    mesh = torch.full(shape, -1, dtype=torch.int)
    for rank, one in enumerate(said):
        if one["shape"] != shape or mesh[tuple(one["place"])] != -1:
            raise BoundsError(
                f"the communicators make no grid of {whole.size} ranks: rank {rank} is at {one['place']} of "
                f"{one['shape']}"
            )
        mesh[tuple(one["place"])] = rank
    if (mesh == -1).any():
        raise BoundsError(f"the communicators make no grid: {whole.size} ranks do not fill {shape}")
    return mesh


def _group_of(comm: Communicator, whole: Communicator) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if comm is whole and world is not None and getattr(world, "communicator", None) is whole:
        return world
    order = {rank: place for place, rank in enumerate(whole.world_ranks)}
    ranks = [order[rank] for rank in comm.world_ranks]
    # Each member for itself: the ranks of other parts have a group of their own to make.
    group = dist.new_group(ranks, backend="onesided", pg_options=comm, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
