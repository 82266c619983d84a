"""`onesided bench`: the shape of what it writes, and that its figures are of the right things."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from onesided import RdmaTransport, bench, perftest
from onesided.cli import main
from onesided.perftest import Perftest

KEYS = {"op", "transport", "api", "mode", "size", "latency_us", "limit_latency_us", "gbps", "limit_gbps", "ratio"}


@pytest.mark.parametrize(
    ("op", "sizes", "measured"),
    [("put", "8,65537", [8, 65537]), ("get", "1,4096", [1, 4096]), ("signal", "8", [8]), ("atomic", "16", [8])],
)
def test_rows(op: str, sizes: str, measured: list[int], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = CliRunner().invoke(main, ["bench", op, "--transport", "shm", "--sizes", sizes, "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["size"], row["api"]) for row in rows] == [
        (size, api) for size in measured for api in ("python", "core")
    ]
    for row in rows:
        assert set(row) == KEYS
        assert (row["op"], row["transport"], row["mode"]) == (op, "shm", "one at a time")
        assert row["limit_latency_us"] is None
        assert row["latency_us"] > 0
        assert row["gbps"] > 0
        assert row["ratio"] == pytest.approx(row["gbps"] / row["limit_gbps"])


@pytest.fixture
def rdma() -> None:
    """Skips without a device."""
    if (reason := RdmaTransport.unsupported_reason()) is not None:
        pytest.skip(f"transport rdma: {reason}")


@pytest.mark.usefixtures("rdma")
@pytest.mark.parametrize(
    ("op", "modes"),
    [
        ("put", ["one at a time", "one at a time", "completed", "128 in flight"]),
        ("get", ["one at a time", "one at a time", "128 in flight"]),
        ("atomic", ["one at a time", "one at a time"]),
    ],
)
def test_rows_of_rdma_without_perftest(
    op: str, modes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    out = tmp_path / "rows.json"
    done = CliRunner().invoke(main, ["bench", op, "--transport", "rdma", "--sizes", "4097", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "apt-get install perftest" in done.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["mode"] for row in rows] == modes
    for row in rows:
        assert set(row) == KEYS
        assert row["limit_gbps"] is row["limit_latency_us"] is row["ratio"] is None


@pytest.mark.usefixtures("rdma")
def test_the_limit_of_rdma() -> None:
    limit = Perftest.on_chosen([])
    if limit is None:
        pytest.skip("apt-get install perftest")
    assert 0 < limit.latency_s("atomic", 8, 1e-4) < 1
    each_s = limit.seconds("put", 65536, 128, 1e-3)
    assert each_s is not None
    assert 0 < each_s < 1
    assert limit.seconds("atomic", 8, 128, 1e-3) is None


@pytest.mark.parametrize(
    ("tool", "line", "each_s"),
    [
        ("ib_write_bw", "65536 1000 8000.0 4000.0 0.064", 65536 / (4000 * 2**20)),
        ("ib_write_bw", "65536 1000 0.00 0.00 0.000000", None),
        ("ib_write_lat", "8 1000 0.9 20.1 1.5 1.6 0.2 2.0 9.0", 3e-6),
        ("ib_read_lat", "8 1000 0.9 20.1 1.5 1.6 0.2 2.0 9.0", 1.5e-6),
        ("ib_read_lat", "8 1000 inf inf inf inf -nan inf inf", None),
    ],
)
def test_what_perftest_prints(tool: str, line: str, each_s: float | None) -> None:
    output = f" #bytes #iterations and so on\n {line}\n-----\n"
    found = perftest._printed_s(tool, output)
    assert found == (None if each_s is None else pytest.approx(each_s))


def test_plot(tmp_path: Path) -> None:
    picture = tmp_path / "put.png"
    done = CliRunner().invoke(main, ["bench", "put", "--sizes", "8,4096", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_is_told_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("it has measured"))
    done = CliRunner().invoke(main, ["bench", "put", "--plot", str(tmp_path / "put.png")])
    assert done.exit_code != 0
    assert "--plot needs matplotlib" in done.output


def test_the_format_is_png_whatever_the_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [bench.Row("put", "shm", api, "one at a time", 8, 1.0, None, 1.0, 1.0, 1.0) for api in ("python", "core")]
    bench.plot(rows, tmp_path / "put.picture")
    assert (tmp_path / "put.picture").read_bytes().startswith(b"\x89PNG")


class Lone:
    """A measurement with nobody at the other side."""

    round_s = 0.02

    def told(self, number: int) -> int:
        return number


def test_loops_end_by_time() -> None:
    pace = bench._Pace(Lone(), 20_000, both=True)  # type: ignore[arg-type]
    assert pace.next() == 20_000
    assert pace.took(1e-6) == 1e-6
    assert pace.next() == 20_000
    pace.took(1e-4)  # 2 s
    assert pace.next() == 200
    pace.took(1e-4)
    assert pace.next() == 200
    pace.took(0.02)  # 4 s
    assert (pace.next(), pace.count) == (0, 1)


def started(arguments: list[str]) -> tuple["subprocess.Popen[str]", int]:
    """The benchmark in a session of its own, and the number of its second process."""
    command = [sys.executable, "-m", "onesided", "bench", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline_s = time.monotonic() + 30
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (pids := children.read_text().split()):
        assert time.monotonic() < deadline_s, "no second process"
        time.sleep(0.01)
    return process, int(pids[0])


def gone(pid: int) -> None:
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline_s, "the second process stays"
        time.sleep(0.01)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.5], ids=["as it begins", "at its imports", "while it measures"])
def test_ctrl_c_prints_no_traceback(after_s: float) -> None:
    process, partner = started(["put", "--sizes", "8"])
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert process.returncode != 0 or after_s > 1  # it may be done by then
    gone(partner)


def test_the_second_process_ends_with_the_first() -> None:
    process, partner = started(["put", "--sizes", "8"])
    process.kill()
    process.communicate(timeout=30)
    gone(partner)


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "onesided", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("onesided, version")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["push"], "push"),
        (["put", "--sizes", "8,x"], "whole numbers"),
        (["put", "--sizes", "0"], "begin at 1"),
        (["put", "--sizes", "-8"], "begin at 1"),
        (["put", "--transport", "pigeon"], "unknown transport 'pigeon'"),
        (["put", "--json", "/nowhere/rows.json"], "/nowhere"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code != 0
    assert says in done.output
    assert "Traceback" not in done.output
