"""A torch.distributed world on the ranks of a group of the tests."""

import contextlib
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from onesided import Group


@contextlib.contextmanager
def world(group: Group, timeout_s: float = 60.0) -> Iterator[None]:
    """The default process group is of onesided, here."""
    torch.set_num_threads(1)  # many ranks share few processors
    warnings.filterwarnings("ignore", module=r"torch\.")  # torch's own, of itself
    store = None
    if group.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = int(group.all_gather(b"" if store is None else b"%d" % store.port)[0])
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "onesided", store=store, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
