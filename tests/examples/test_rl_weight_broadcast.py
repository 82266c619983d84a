"""The main example as a user runs it: to its end, with workers lost, with bytes altered, and interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
minilm = pytest.importorskip("minilm")
slots = pytest.importorskip("slots")

PROGRAM = Path(minilm.__file__).with_name("rl_weight_broadcast.py")
KEYS = {
    "versions",
    "workers",
    "bytes_per_version",
    "publish_seconds_median",
    "gbps",
    "memcpy_gbps",
    "ratio",
    "verified",
}


@pytest.fixture(autouse=True)
def _needs_the_model(model):
    pass


class Run:
    """The example in a process of its own, with a mark by which all that it starts is found again."""

    def __init__(self, tmp_path, *arguments):
        self.mark = uuid.uuid4().hex
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir()
        self.shared = set(Path("/dev/shm").iterdir())
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            env={
                **os.environ,
                "RUN_MARK": self.mark,
                "TMPDIR": str(self.temporary),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),  # torch makes this folder, used or not
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def processes(self):
        """The process ids of the example and of all that it started."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def until(self, pattern):
        """Reads what it says until a line matches."""
        for line in self.process.stdout:
            self.said += line
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the example ended without saying {pattern!r}:\n{self.said}")

    def end(self):
        """Waits for its end; returns its exit status."""
        self.said += self.process.stdout.read()
        return self.process.wait(timeout=30)

    def assert_nothing_left(self):
        wait_for(lambda: not self.processes(), "all processes to end")
        assert list(self.temporary.iterdir()) == []
        assert set(Path("/dev/shm").iterdir()) <= self.shared


def wait_for(condition, what, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s in vain for {what}"
        time.sleep(0.01)


def test_two_workers_two_steps(tmp_path):
    with Run(tmp_path, "--workers", 2, "--steps", 2, "--json", tmp_path / "out.json") as run:
        assert run.end() == 0, run.said
        run.assert_nothing_left()
    got = json.loads((tmp_path / "out.json").read_text())
    assert got.keys() == KEYS
    assert got["verified"] is True
    assert (got["versions"], got["workers"], got["bytes_per_version"]) == (2, 2, 90_856_960)
    assert got["gbps"] == pytest.approx(2 * got["bytes_per_version"] / got["publish_seconds_median"] / 1e9)
    assert got["ratio"] == pytest.approx(got["gbps"] / got["memcpy_gbps"])
    assert "embeddings equal" in run.said
    assert "4 of 4" in run.said
    assert "\x1b" not in run.said  # plain lines where nobody sees colours


def test_lost_workers_are_reported_and_the_others_go_on(tmp_path):
    """One is killed by the option, one stands still past its deadline; the third one's answers are all equal."""
    options = ("--workers", 3, "--steps", 3, "--deadline", 4, "--kill-worker", "1@2", "--json", tmp_path / "out.json")
    with Run(tmp_path, *options) as run:
        pids = run.until(r"process ids are (\d+), (\d+), (\d+)").groups()
        run.until(r"version 1: .*3 of 3 answers equal")
        os.kill(int(pids[1]), signal.SIGSTOP)
        assert run.end() == 0, run.said
        run.assert_nothing_left()
    assert "worker 1 lost at version 2: killed by SIGKILL" in run.said
    assert "worker 2 lost at version 2: no answer in 4 s; the others go on" in run.said
    assert "version 3" in run.said
    assert "1 of 1 answers equal" in run.said
    got = json.loads((tmp_path / "out.json").read_text())
    assert got["verified"] is True
    assert got["versions"] == 3


def window_of(pid, nbytes):
    """Where a process has its window in its address space."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if "memfd:" in line and end - begin >= nbytes:
            return begin
    raise AssertionError(f"process {pid} has no window of {nbytes} bytes")


def test_one_byte_altered_from_outside_is_found(tmp_path, model):
    """A worker is held while version 2 arrives in its window; meanwhile one bit of that version is flipped there."""
    fields, slot_bytes = slots.lay_out(model[0])
    last = fields[-1]
    with Run(tmp_path, "--workers", 1, "--steps", 2) as run:
        pid = int(run.until(r"process ids are (\d+)").group(1))
        run.until(r"version 1: .*1 of 1 answers equal")
        os.kill(pid, signal.SIGSTOP)
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            begin = window_of(pid, 2 * slot_bytes)  # version 2 goes to slot 0

            def arrived():
                memory.seek(begin + last.offset_bytes)
                return any(memory.read(last.nbytes))

            wait_for(arrived, "the last tensor of version 2")
            target = next(field for field in fields if field.name == "encoder.layer.3.output.dense.weight")
            memory.seek(begin + target.offset_bytes + 4003)
            (byte,) = memory.read(1)
            memory.seek(-1, os.SEEK_CUR)
            memory.write(bytes([byte ^ 0x04]))
        os.kill(pid, signal.SIGCONT)
        assert run.end() == 1, run.said
        run.assert_nothing_left()
    assert "NOT VERIFIED: answers differ at version 2" in run.said
    assert "1 of 2" in run.said


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    with Run(tmp_path, "--workers", 2, "--steps", 50) as run:
        run.until("version 1:")
        os.kill(run.process.pid, signal.SIGINT)
        begin = time.monotonic()
        assert run.end() == 130, run.said
        assert time.monotonic() - begin < 20
        run.assert_nothing_left()
    assert "Traceback" not in run.said


def test_workers_do_not_outlive_a_killed_trainer(tmp_path):
    with Run(tmp_path, "--workers", 2, "--steps", 50) as run:
        run.until("version 1:")
        run.process.kill()
        run.process.wait()
        run.assert_nothing_left()
        run.end()
    assert "Traceback" not in run.said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "'0' is not a number from 1 on"),
        (["--steps", "x"], "'x' is not a number from 1 on"),
        (["--kill-worker", "4@1"], "no worker 4"),
        (["--kill-worker", "1@9"], "no version 9"),
        (["--kill-worker", "1"], "'1' is not like 2@3"),
        (["--json", "/no/such/folder/out.json"], "no folder"),
        (["--json", "/"], "is a folder"),
        (["--deadline", "-1"], "'-1' is not a number of seconds"),
        (["--deadline", "nan"], "'nan' is not a number of seconds"),
    ],
)
def test_wrong_options_are_explained(options, message, capsys):
    program = pytest.importorskip("rl_weight_broadcast")
    with pytest.raises(SystemExit) as raised:
        program.parse(options)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_help_is_quick():
    """Only a run imports torch."""
    command = [sys.executable, "-X", "importtime", str(PROGRAM), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--kill-worker" in done.stdout
    assert "Exit status" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "grpc", "onesided._core"}
