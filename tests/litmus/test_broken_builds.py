"""Tests of the tests: each core that scripts/broken-core breaks on purpose fails the litmus tests of what it breaks.

It fails by what a rank sees, not by a crash or a hang; and the same tests pass on a core that was linked in the same
way but not broken. What breaks rdma is tried on fake devices: Soft-RoCE on one processor does everything in order.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILDS = ROOT / "build" / "broken"

BROKEN = {
    "signal-before-data": ["test_signals.py::test_message_passing[shm]"],
    "signal-before-pieces": ["test_signals.py::test_pieces_and_signal[shm]"],
    "signal-does-not-settle": ["test_signals.py::test_striped_put_and_signal[shm-apart]"],
    "flush-does-not-wait": [
        "test_order.py::test_store_buffering[shm-at-a-third-rank]",
        "test_order.py::test_flush_then_flag[shm]",
    ],
    "no-fence": ["test_order.py::test_fence_then_flag[shm]", "test_order.py::test_write_after_read[shm]"],
    "deadline-is-no-fence": ["test_completion.py::test_late_write_after_cancel[shm]"],
    "flush-deadline-is-no-fence": ["test_completion.py::test_late_write_after_deadline[shm]"],
    "close-does-not-wait": ["test_completion.py::test_late_write_after_close[shm]"],
    "signal-before-stripes": ["test_signals.py::test_striped_put_and_signal[fake-with]"],
    "no-fence-on-devices": ["test_order.py::test_fence_then_flag[fake]"],
    "deadline-is-no-fence-on-devices": ["test_completion.py::test_late_write_after_cancel[fake]"],
}
ROUNDS = "0.5"  # of the usual number


def build(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "broken-core"), name, str(BUILDS / name)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture(scope="module")
def built() -> Callable[[str], Path]:
    """Gives the folder of a broken core. The first time, all are built side by side: a few seconds each."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        builds: dict[str, Future[subprocess.CompletedProcess[str]]] = {
            name: pool.submit(build, name) for name in ["none", *BROKEN]
        }

    def folder_of(name: str) -> Path:
        ran = builds[name].result()
        if ran.returncode == 77:
            pytest.skip(ran.stderr.strip())
        assert ran.returncode == 0, ran.stderr
        return BUILDS / name

    return folder_of


def play(folder: Path, tests: list[str], limit_s: float = 110) -> subprocess.CompletedProcess[str]:
    """Runs litmus tests on the core in `folder`."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"]
    command += ["-q", "-p", "no:cacheprovider", *(str(ROOT / "tests" / "litmus" / test) for test in tests)]
    environment = {**os.environ, "PYTHONPATH": str(folder), "ONESIDED_LITMUS_ROUNDS": ROUNDS}
    # In that folder, as Python looks for modules first where it is started.
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_build_is_caught(built: Callable[[str], Path], name: str) -> None:
    folder = built(name)
    ran = play(folder, BROKEN[name])
    said = f"{ran.stdout}{ran.stderr}"
    if ran.returncode == 0 and f"{len(BROKEN[name])} skipped" in ran.stdout:
        pytest.skip(ran.stdout.strip())
    assert ran.returncode == 1, f"{name} was not caught:\n{said}"
    for test in BROKEN[name]:
        function = test.partition("::test_")[2].partition("[")[0]
        violations = [line for line in ran.stdout.splitlines() if f"litmus violation: {function} over" in line]
        assert violations, f"{name} was not caught by {test}, or {test} failed otherwise:\n{said}"
        assert str(folder) in violations[0], f"{test} did not use the broken core:\n{said}"


@pytest.mark.timeout(330)  # on a busy machine
def test_the_same_tests_pass_on_a_core_that_is_not_broken(built: Callable[[str], Path]) -> None:
    ran = play(built("none"), [test for tests in BROKEN.values() for test in tests], limit_s=320)
    assert ran.returncode == 0, ran.stdout + ran.stderr
