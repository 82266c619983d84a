"""Groups in memory, and the runner of their threads."""

import subprocess
import sys
import threading
import time

import pytest
from onesided.rpc import Group, run_local

from onesided.errors import BoundsError, ConnectionLost, DeadlineExceeded


def test_results_by_rank() -> None:
    assert run_local(4, lambda group: (group.rank, group.all_gather(b"%d" % group.rank))) == [
        (rank, [b"0", b"1", b"2", b"3"]) for rank in range(4)
    ]


def test_the_first_failure_is_raised_and_frees_the_others() -> None:
    others: list[str] = []

    def act(group: Group) -> None:
        if group.rank == 2:
            raise KeyError("broken")
        with pytest.raises(ConnectionLost, match="rank 2 raised KeyError: 'broken'") as caught:
            group.barrier()
        others.append(str(caught.value))
        raise caught.value

    begun_s = time.monotonic()
    with pytest.raises(KeyError, match="broken") as caught:
        run_local(4, act)
    assert time.monotonic() - begun_s < 5
    assert len(others) == 3
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised by rank 2 of 4 in run_local"]


def test_failures_that_are_no_exceptions() -> None:
    with pytest.raises(pytest.fail.Exception, match="stop"):
        run_local(2, lambda group: pytest.fail("stop") if group.rank else group.barrier())


def test_a_member_that_fails_runs_its_close_callbacks() -> None:
    ran: list[int] = []

    def act(group: Group) -> None:
        group.add_close_callback(lambda: ran.append(group.rank))
        raise ValueError

    with pytest.raises(ValueError):
        run_local(2, act)
    assert sorted(ran) == [0, 1]


def test_a_member_that_returns_early_is_missed_at_once() -> None:
    begun_s = time.monotonic()
    with pytest.raises(ConnectionLost, match="rank 0 left"):
        run_local(2, lambda group: group.barrier() if group.rank else None)
    assert time.monotonic() - begun_s < 5


def test_the_deadline_names_who_still_runs() -> None:
    release = threading.Event()
    try:
        with pytest.raises(DeadlineExceeded, match=r"rank 1 of 2 still running after 0\.2 s"):
            run_local(2, lambda group: release.wait(30) if group.rank else None, timeout_s=0.2)
    finally:
        release.set()


def test_groups_are_left_when_the_runner_returns() -> None:
    groups = run_local(3, lambda group: group)
    assert all(group.closed for group in groups)


def test_wrong_arguments() -> None:
    for size, error in ((0, BoundsError), (-1, BoundsError), ("2", TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="group size"):
            run_local(size, lambda group: None)
        with pytest.raises(error, match="group size"):
            Group.local(size)
    with pytest.raises(BoundsError, match="group name"):
        Group.local(1, name="")


def test_two_local_groups_are_independent() -> None:
    (a,), (b,) = Group.local(1), Group.local(1)
    a.directory.publish("n", b"")
    assert b.directory.list() == []


def test_it_needs_neither_grpc_nor_torch() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('grpc', 'torch', 'google', 'numpy'):
            raise ImportError(f'{name} is not to be loaded')
sys.meta_path.insert(0, Refuse())
from onesided.rpc import Directory, Group, run_local
print(run_local(2, lambda group: group.all_gather(bytes([group.rank]))))
groups = Group.local(2)
groups[0].directory.publish('n', b'v')
print(groups[1].directory.lookup('n').value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[[b'\\x00', b'\\x01'], [b'\\x00', b'\\x01']]\nb'v'\n"
