"""Without torch, with several users, with and without permissions: what a process may meet (cases 27 and 28)."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from harness import TESTS, Kind, Processes, parent, raises

from onesided import Directory, Group, Window
from onesided.errors import ConnectionLost, OnesidedError, RemoteAccessError, Unsupported

NOBODY = 65534

# ---- Case 28 ---------------------------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    """What `code` prints in a new interpreter that has nothing but the package, warnings being errors."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert ran.stderr == ""
    return ran.stdout


def test_case_28_everything_without_torch(kind: Kind) -> None:
    """All of a window's life where torch cannot be imported; a dtype of torch's may still be named."""
    said = run_python(
        f"""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "cuda", "pyverbs"):
                    raise ImportError(name + " is blocked")

        sys.meta_path.insert(0, Blocked())
        import numpy as np
        from onesided import BoundsError, Unsupported, Window, run_local, stats

        def use(group):
            peer = 1 - group.rank
            with Window.allocate(group, shape=(4, 8), dtype="float32", signals=1, transport={kind.name!r}) as window:
                window.put(np.full((4, 8), group.rank, "f4"), peer, signal=0)
                window.wait_signal(0)
                assert (window.array == peer).all()
                assert window.fetch_add(peer, 0, 0) >= 0
                try:
                    window.tensor
                except ImportError as error:
                    assert "torch" in str(error)
                window.flush()
                group.barrier()
            with Window.allocate(group, shape=8, dtype="bfloat16", signals=1, transport={kind.name!r}) as window:
                window.put(bytes(range(16)), peer, signal=0)
                window.wait_signal(0)
                assert bytes(window.memory) == bytes(range(16))
                group.barrier()
            with Window.create(group, bytearray(10), transport={kind.name!r}) as window:
                window.put(b"abc", peer)
                group.barrier()
                assert bytes(window.array[:3]) == b"abc"

        run_local(2, use)
        assert stats()[{kind.name!r}]
        assert not any(name.split(".")[0] in ("torch", "cuda", "grpc") for name in sys.modules)
        print("done")
        """
    )
    assert said == "done\n"


def test_a_tensor_is_recognised_without_importing_torch(kind: Kind) -> None:
    """torch may come later than the library, and a window made before it came has tensors then."""
    said = run_python(
        f"""
        import sys
        from onesided import Group, Window
        group = Group.local(1)[0]
        window = Window.allocate(group, shape=4, dtype="bfloat16", transport={kind.name!r})
        window.put(b"12345678", 0)
        assert "torch" not in sys.modules
        import torch
        window.put(torch.arange(4, dtype=torch.bfloat16), 0)
        print(window.tensor.tolist())
        """
    )
    assert said == "[0.0, 1.0, 2.0, 3.0]\n"


@pytest.mark.parametrize(
    "end", ["", "sys.exit()", "raise SystemExit(0)", "del group, window, work; gc.collect()", "os._exit(0)"]
)
def test_case_28_exit_status(kind: Kind, end: str) -> None:
    run_python(
        f"""
        import gc, os, sys, threading
        import numpy as np
        from onesided import Group, Window
        from onesided.errors import OnesidedError
        group = Group.local(1)[0]
        window = Window.allocate(group, 1 << 24, signals=1, transport={kind.name!r})
        work = window.put(np.ones(1 << 24, "u1"), 0, async_op=True)
        def wait():
            try:
                window.wait_signal(0, 1)
            except OnesidedError:
                pass
        for _ in range(8):  # they come back from their wait while the interpreter ends
            threading.Thread(target=wait, daemon=True).start()
        array = window.array
        {end}
        """
    )


# ---- Case 27 ---------------------------------------------------------------------------------------------------------


def listeners() -> list[str]:
    """Sockets of this process that listen on an address of a network."""
    mine = {str(fd.readlink())[8:-1] for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in Path("/proc/self/net", table).read_text().splitlines()[1:]]
        found += [f"{table} {row[1]}" for row in rows if row[9] in mine and (row[3] == "0A" or table.startswith("udp"))]
    return found


def no_listeners(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, transport=kind.name)
    with Window.expose(group.directory, f"listens {os.getpid()}", nbytes=8, transport=kind.name):
        if kind.name == "shm":
            assert listeners() == []
    group.barrier()
    window.close()


def test_case_27_shm_listens_on_no_network(processes: Processes, kind: Kind) -> None:
    processes.run(no_listeners, 2, kind)


# ---- Users and permissions -------------------------------------------------------------------------------------------

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user for the test")


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def attach_as_another_user(address: str, name: str) -> None:
    with Directory(address) as directory:
        directory.list("")  # all that is loaded late is loaded while its files can be read
        with raises(OnesidedError):
            Window.attach(directory, f"not there {name}", timeout_s=0)
        become_nobody()
        with raises((RemoteAccessError, ConnectionLost)):
            Window.attach(directory, name, timeout_s=10)


@needs_root
def test_memory_is_for_one_user(processes: Processes, spawn, kind: Kind) -> None:
    """Another user who got hold of endpoint and handle reaches nothing."""
    if kind.name != "shm":
        pytest.skip("only on shm can be seen who the peer is; elsewhere the secrets of endpoint and handle decide")
    with Directory(processes.server.address) as directory:
        with Window.expose(directory, f"root's {kind.name}", nbytes=8, transport=kind.name) as window:
            spawn("nobody").call(attach_as_another_user, processes.server.address, f"root's {kind.name}")
            window.put(b"works", 0)


def expose_as_nobody(address: str, kind: Kind, private: bool) -> None:
    with Directory(address) as directory:
        directory.list("")  # all that is loaded late is loaded while its files can be read
        become_nobody()
        tensor = np.zeros(8, np.uint8) if private else None
        with Window.expose(
            directory, f"nobody's {private}", tensor, nbytes=None if private else 8, transport=kind.name
        ) as window:
            parent.say("exposed")
            parent.hear()
            if not private:
                assert bytes(window.array[:2]) == b"ok"


def attach_as_nobody(address: str, private: bool) -> None:
    with Directory(address) as directory:
        with raises(OnesidedError):
            Window.attach(directory, "not there", timeout_s=0)
        become_nobody()
        if private:
            with raises(Unsupported, "process_vm_readv"):
                Window.attach(directory, f"nobody's {private}", timeout_s=10)
        else:
            with Window.attach(directory, f"nobody's {private}", timeout_s=10) as window:
                window.put(b"ok", 0)


@needs_root
@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_where_the_system_forbids_cross_memory_attach(processes: Processes, spawn, kind: Kind, private: bool) -> None:
    """Processes that changed their user may not be looked into: private memory says so, allocated memory works."""
    if kind.name != "shm":
        pytest.skip("only shm reaches private memory through the kernel")
    owner, user = spawn("owner"), spawn("user")
    owner.begin(expose_as_nobody, processes.server.address, kind, private)
    assert owner.said() == "exposed"
    user.call(attach_as_nobody, processes.server.address, private)
    owner.tell()
    owner.result()


def use_up_memory(kind: Kind) -> None:
    """The error names the limit; what was there before goes on."""
    import resource

    with Group.local(1)[0] as group:
        window = Window.allocate(group, 8, transport=kind.name)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        with raises(OnesidedError, "RLIMIT_AS"):
            Window.allocate(group, 512 << 20, transport=kind.name)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        window.put(b"x", 0)
        Window.allocate(group, 1 << 20, transport=kind.name).close()
        window.close()


def test_case_23_the_limit_of_memory_is_named(spawn, kind: Kind) -> None:
    with contextlib.closing(spawn("limited")) as process:
        process.call(use_up_memory, kind)
