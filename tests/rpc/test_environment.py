"""Joining by what torchrun puts into the environment."""

import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from onesided.rpc import Group, Server
from onesided.rpc.environment import read

from onesided.errors import BoundsError, OnesidedError

FULL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    """A port that is free, and whose successor is."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def environment(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ONESIDED_", "TORCHELASTIC_"))}
    return {
        **clean,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }


def test_the_server_is_one_port_above_the_master() -> None:
    job = read(FULL)
    assert (job.rank, job.size, job.master_host, job.port, job.bind_host) == (1, 4, "10.0.0.1", 29501, "10.0.0.1")
    assert read({**FULL, "ONESIDED_PORT": "4000"}).port == 4000
    assert read({**FULL, "ONESIDED_BIND": "10.1.0.1"}).bind_host == "10.1.0.1"
    assert read({**FULL, "MASTER_ADDR": "[::1]"}).master_host == "::1"


def test_the_agents_store_tells_the_port() -> None:
    for word in ("True", "true", "1"):
        assert read({**FULL, "TORCHELASTIC_USE_AGENT_STORE": word}).port == 0
    assert read({**FULL, "TORCHELASTIC_USE_AGENT_STORE": "False"}).port == 29501
    assert read({**FULL, "TORCHELASTIC_USE_AGENT_STORE": "True", "ONESIDED_PORT": "4000"}).port == 4000


def test_a_running_server_needs_less() -> None:
    job = read({"RANK": "0", "WORLD_SIZE": "1", "ONESIDED_ADDRESS": "[::1]:5"})
    assert (job.rank, job.size, job.address) == (0, 1, "[::1]:5")


@pytest.mark.parametrize("names", [NAMES, *[(name,) for name in NAMES]])
def test_missing_variables_are_named(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "ONESIDED_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in FULL.items():
        if name not in names:
            monkeypatch.setenv(name, value)
    with pytest.raises(OnesidedError, match=f"needs {', '.join(names)} in the environment, as torchrun"):
        Group.from_env()
    monkeypatch.setenv(names[0], "")
    with pytest.raises(OnesidedError, match=names[0]):
        Group.from_env()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "x"),
        ("MASTER_PORT", "99999"),
        ("MASTER_PORT", "http"),
        ("ONESIDED_PORT", "-4"),
        ("TORCHELASTIC_RESTART_COUNT", "x"),
        ("MASTER_PORT", "65535"),
    ],
)
def test_wrong_variables_are_named(name: str, value: str) -> None:
    with pytest.raises(BoundsError, match=name):
        read({**FULL, name: value})
    with pytest.raises(BoundsError, match="port"):
        read({**FULL, "ONESIDED_ADDRESS": "nowhere"})


def test_a_loopback_name_across_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**FULL, "RANK": "0", "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(OnesidedError, match="set MASTER_ADDR, or ONESIDED_BIND on rank 0"):
        Group.from_env()


def test_a_port_in_use_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in environment(0, 2, 1, ONESIDED_PORT=str(port)).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(OnesidedError, match=rf":{port}: Address already in use\. ONESIDED_PORT"):
            Group.from_env()


JOB = """
    for _ in range(2):  # a second time too: the first server is gone by then, or still going
        with Group.from_env(timeout_s=30) as group:
            assert group.rank == int(os.environ["RANK"]), group
            payloads = group.all_gather(b"%d" % group.rank)
            with Group.from_env(name="other", timeout_s=30) as other:
                other.barrier()
            group.barrier()
    say("got", *payloads)
"""


@pytest.mark.parametrize("more", [{}, {"MASTER_ADDR": "localhost"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}])
def test_rank_0_embeds_the_server(spawn, more: dict[str, str]) -> None:
    port = free_port()
    children = [spawn(JOB, env=environment(rank, 3, port, **more)) for rank in range(3)]
    for child in children:
        assert child.said("got") == "b'0' b'1' b'2'"
        assert child.end() == 0
        assert child.errors == ""


def test_a_given_server_is_used(spawn, server: Server) -> None:
    children = [spawn(JOB, env=environment(rank, 2, 1, ONESIDED_ADDRESS=server.address)) for rank in range(2)]
    for child in children:
        assert child.said("got") == "b'0' b'1'"
        assert child.end() == 0


def test_rank_0_gives_the_others_time_to_leave(spawn) -> None:
    port = free_port()
    first, second = (
        spawn(
            """
        group = Group.from_env(timeout_s=30)
        group.directory.publish(f"n{group.rank}", b"v")
        group.barrier()
        if group.rank == 0:
            begun = time.monotonic()
            group.leave()
            say("left", time.monotonic() - begun)
        else:
            while [entry.name for entry in group.directory.list()] != ["n1"]: time.sleep(0.01)
            time.sleep(0.5)
            say("still", group.directory.lookup("n1").value)
    """,
            env=environment(rank, 2, port),
        )
        for rank in range(2)
    )
    assert second.said("still") == "b'v'"
    assert 0.4 < float(first.said("left")) < 3.5
    assert first.end() == second.end() == 0


def test_an_agents_store_without_torch_says_what_to_do(spawn) -> None:
    child = spawn(
        """
        sys.modules["torch"] = None
        try:
            Group.from_env()
        except Unsupported as error:
            say("refused", error)
    """,
        env=environment(0, 2, 1, TORCHELASTIC_USE_AGENT_STORE="True"),
    )
    assert "install torch, or set ONESIDED_PORT" in child.said("refused")
    assert child.end() == 0


def test_under_torchrun(tmp_path) -> None:
    pytest.importorskip("torch.distributed.run", reason="torchrun comes with torch")
    script = tmp_path / "job.py"
    script.write_text(
        "import os, time\nfrom onesided.rpc import Group\n"
        "def say(*words): print(*words, flush=True)\n"
        + textwrap.dedent(JOB)
        + textwrap.dedent("""
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise SystemExit(3)  # torchrun starts all anew, beside the same store
    """)
    )
    env = {**environment(0, 1, 1), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    for name in NAMES:
        del env[name]
    begun_s = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            "--monitor-interval",
            "0.1",
            str(script),
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.count("got b'0' b'1'")
    assert said in (3, 4), (done.stdout, done.stderr)  # one may be stopped before it says so
    assert time.monotonic() - begun_s < 90
