"""The torch.distributed backend "onesided", for CPU tensors.

    import onesided.distributed  # or nothing: torch finds it by itself where onesided is installed
    torch.distributed.init_process_group("onesided")

docs/distributed.md tells what it does and what it does not. This file only makes the name known.
"""

import os
from typing import Any

import torch.distributed as dist

from .errors import BoundsError

__all__ = ["autoload"]

NAME = "onesided"


def autoload() -> None:
    """What torch calls at the end of its own import (entry point torch.backends). Importing this file has done it."""


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """`backend_options` are the pg_options of init_process_group and new_group: a Communicator of exactly the group's
    ranks, in their order, for the group to use."""
    from onesided.collectives import Communicator

    from .process_group import OnesidedProcessGroup

    rank, size = options.group_rank, options.group_size
    if backend_options is None:
        return OnesidedProcessGroup.over_store(
            options.store,
            rank,
            size,
            options.timeout,
            name=options.group_id,
            transport=os.environ.get("ONESIDED_TRANSPORT") or "auto",
        )
    if not isinstance(backend_options, Communicator):
        raise TypeError(f"pg_options must be a onesided.Communicator, not {type(backend_options).__name__}")
    if (backend_options.rank, backend_options.size) != (rank, size):
        raise BoundsError(
            f"pg_options: {backend_options!r} is not a communicator of this group, in which this is rank {rank} "
            f"of {size}"
        )
    return OnesidedProcessGroup(backend_options, name=options.group_id)


if dist.is_available():
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
