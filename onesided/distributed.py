"""The torch.distributed backend "onesided", for CPU tensors.

    import onesided.distributed  # or nothing: torch finds it by itself where onesided is installed
    torch.distributed.init_process_group("onesided")

docs/distributed.md tells what it does and what it does not. This file only makes the name known.
"""

import os
from typing import Any

import torch.distributed as dist

__all__ = ["autoload"]

NAME = "onesided"


def autoload() -> None:
    """What torch calls at the end of its own import (entry point torch.backends). Importing this file has done it."""


def _create(options: Any, _backend_options: Any) -> dist.ProcessGroup:
    from .process_group import OnesidedProcessGroup

    return OnesidedProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        name=options.group_id,
        transport=os.environ.get("ONESIDED_TRANSPORT") or "auto",
    )


if dist.is_available():
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
