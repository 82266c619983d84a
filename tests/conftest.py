"""What every test module is held to: it leaves no process, thread or shared memory behind."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Started once for the whole run by the standard library or by grpc, and meant to stay.
STANDING = ("resource_tracker", "forkserver")


def children() -> set[str]:
    """The processes that this one started and that still run, each as `pid: command`."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue  # the thread ended meanwhile
        for pid in pids:
            try:
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if not any(name in command for name in STANDING):
                found.add(f"process {pid}: {command.strip() or 'ended, but nobody waited for it'}")
    return found


def threads() -> set[str]:
    """The Python threads that would keep the process from ending."""
    return {f"thread {t.name}" for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()}


def shared_memory() -> set[str]:
    """The descriptors of shared memory and of processes that this process holds."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(("/memfd:", "pidfd:", "anon_inode:[pidfd]")):
            found.add(f"descriptor {entry.name}: {target}")
    return found


def held() -> set[str]:
    return children() | threads() | shared_memory()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Compares what the process holds before and after each module, and gives what is ending 5 s to end."""
    before = held()
    yield
    deadline = time.monotonic() + 5
    while left := held() - before:
        if time.monotonic() > deadline:
            pytest.fail("left behind by this module:\n  " + "\n  ".join(sorted(left)))
        gc.collect()
        time.sleep(0.02)
