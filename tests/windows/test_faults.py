"""Processes that die, stop, fork and end: what their peers see, and that nothing stays (cases 20, 28, 29, 31, 36)."""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import (
    Kind,
    Process,
    Processes,
    descriptors,
    held,
    is_asleep,
    left_in_the_system,
    no_more_than,
    parent,
    pattern,
    raises,
    same,
    wait_until,
)

from onesided import ConnectionLost, DeadlineExceeded, Group, RemoteMemory, StaleHandle, Window
from onesided.errors import OnesidedError

MIB = 1 << 20


def uses_of(window: Window, peer: int) -> dict[str, Callable[[], object]]:
    return {
        "put": lambda: window.put(b"x", peer),
        "put of nothing": lambda: window.put(b"", peer),
        "put with signal": lambda: window.put(b"x", peer, signal=0),
        "async put": lambda: window.put(b"x", peer, async_op=True).wait(),
        "get": lambda: window.get(bytearray(1), peer),
        "async get": lambda: window.get(bytearray(1), peer, async_op=True).wait(),
        "signal": lambda: window.signal(peer, 0),
        "fetch_add": lambda: window.fetch_add(peer, 0, 1),
        "compare_swap": lambda: window.compare_swap(peer, 0, 0, 1),
        "swap": lambda: window.swap(peer, 0, 1),
        "add to 4 bytes": lambda: window.fetch_add(peer, 0, 1, word_nbytes=4),
        "put_many": lambda: window.put_many([(b"x", 0), (bytes(9000), 1)], peer),
        "put_many with signal": lambda: window.put_many([(b"x", 0)], peer, signal=0),
        "put_many of nothing": lambda: window.put_many([], peer),
        "async put_many": lambda: window.put_many([(b"x", 0)], peer, async_op=True).wait(),
        "get_many": lambda: window.get_many([(bytearray(1), 0), (bytearray(9000), 1)], peer),
        "fence": lambda: window.fence(peer),
        "flush": lambda: window.flush(peer),
    }


# ---- Case 31: killed -------------------------------------------------------------------------------------------------


def survive(group: Group, kind: Kind) -> None:
    """Rank 2 is killed while idle; ranks 0 and 1 go on with each other."""
    window = Window.allocate(group, 16384, signals=5, origin_signals=1, transport=kind.name)
    group.barrier()
    if group.rank == 2:
        parent.say("ready")
        parent.hear()
        return
    other = 1 - group.rank
    parent.say("ready")
    begun = time.monotonic()
    with raises(ConnectionLost, "rank 2"):
        window.wait_signal(0, 1)  # may come from anybody
    with raises(ConnectionLost, "rank 2"):
        window.wait_signal(0, 1, source=2)
    with raises(ConnectionLost, "rank 2"):
        window.wait_signal(0)
    with raises(ConnectionLost, "rank 2"):
        window.wait_any([(0, 1), (0, 2)])
    with raises(ConnectionLost, "rank 2"):
        window.wait_signal(window.origin_signal(0, 2), 1, source=2)
    parent.say(time.monotonic() - begun)
    for name, use in uses_of(window, 2).items():
        with raises(ConnectionLost, "rank 2"):
            use()
            raise AssertionError(name)
    assert window.lost() == [2]
    window.put(b"hello", other, 8, signal=1)
    assert window.wait_signal(1, 1, source=other) == 1  # its loss is no concern of this wait
    assert bytes(window.array[8:13]) == b"hello"
    with raises(ConnectionLost, "rank 2"):
        window.wait_signal(2, 1)
    assert window.acknowledge_lost() == [2]
    window.signal(other, 4)
    assert window.wait_signal(4, 1) == 1
    with raises(DeadlineExceeded):
        window.wait_signal(2, 1, timeout_s=0.05)
    with raises(ConnectionLost):
        window.wait_signal(2, 1, source=2)
    window.flush(other)
    assert "lost" in window.describe()["peers"][2]["state"]
    window.signal(other, 3)
    window.wait_signal(3, 1)
    window.close()
    parent.say("closed")


def flush_after_a_loss(group: Group, kind: Kind) -> None:
    """What was put to a lost rank is never there: flush says so every time, until the program knows."""
    first, second = (Window.allocate(group, 64, signals=1, transport=kind.name) for _ in range(2))
    group.barrier()
    if group.rank == 1:
        parent.say("ready")
        parent.hear()
        return
    for window in (first, second):
        window.flush()
        window.put(b"x", 1)
    parent.say("ready")
    wait_until(lambda: first.lost() == second.lost() == [1], "the loss is seen")
    for _ in range(3):
        with raises(ConnectionLost, "rank 1"):
            first.flush()
    for _ in range(2):
        with raises(ConnectionLost, "rank 1"):
            second.flush(1)
        with raises(ConnectionLost, "rank 1"):
            second.flush()
    for window in (first, second):
        assert window.acknowledge_lost() == [1]
        window.flush()
        with raises(ConnectionLost, "rank 1"):
            window.flush(1)
        window.put(b"y", 0)
        window.flush()
        window.close()


def test_flush_fails_until_the_loss_is_acknowledged(processes: Processes, kind: Kind) -> None:
    team = processes.start(flush_after_a_loss, 2, kind)
    for process in team:
        assert process.said() == "ready"
    team[1].kill()
    team[0].result()


def test_case_31_a_peer_is_killed(processes: Processes, kind: Kind, capsys) -> None:
    team = processes.start(survive, 3, kind)
    for process in team:
        assert process.said() == "ready"
    wait_until(lambda: is_asleep(team[0].pid) and is_asleep(team[1].pid), "the survivors wait")
    team[2].kill()
    for process in team[:2]:
        took_s = process.said()
        with capsys.disabled():
            print(f"[noticed in {1000 * took_s:.0f} ms] ", end="")
        assert took_s < 10
    for process in team[:2]:
        assert process.said() == "closed"
        with contextlib.suppress(ConnectionLost):
            process.result()


def write_to_a_victim(group: Group, kind: Kind, private: bool) -> None:
    """Rank 1 is killed while rank 0 writes to it."""
    nbytes = 64 * MIB
    if private:
        window = Window.create(group, np.zeros(nbytes, np.uint8), signals=1, transport=kind.name)
    else:
        window = Window.allocate(group, nbytes, signals=1, transport=kind.name)
    group.barrier()
    parent.say("ready")
    if group.rank == 1:
        parent.hear()
        return
    source = np.ones(nbytes, np.uint8)
    deadline_s = time.monotonic() + 30
    with raises(ConnectionLost, "rank 1"):
        while time.monotonic() < deadline_s:
            window.put(source, 1)
    works = []
    with raises(ConnectionLost, "rank 1"):
        works.append(window.put(source, 1, async_op=True))
        works[-1].wait()
    window.put(source, 0)
    window.close()
    parent.say("closed")


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_case_31_a_target_is_killed_in_the_middle(processes: Processes, kind: Kind, private: bool) -> None:
    team = processes.start(write_to_a_victim, 2, kind, private)
    for process in team:
        assert process.said() == "ready"
    team[1].kill()
    assert team[0].said() == "closed"
    with contextlib.suppress(ConnectionLost):
        team[0].result()


def written_by_a_victim(group: Group, kind: Kind, private: bool) -> None:
    """Rank 1 is killed while it writes to rank 0, which then closes its window as if nothing had been."""
    nbytes = 64 * MIB
    if private:
        window = Window.create(group, np.zeros(nbytes, np.uint8), signals=1, transport=kind.name)
    else:
        window = Window.allocate(group, nbytes, signals=1, transport=kind.name)
    group.barrier()
    if group.rank == 1:
        source = np.ones(nbytes, np.uint8)
        while True:
            window.put(source, 0, signal=0)
    window.wait_signal(0, 3)
    parent.say("under way")
    with raises(ConnectionLost, "rank 1"):
        while True:
            window.wait_signal(0)
    begun = time.monotonic()
    window.close()
    assert time.monotonic() - begun < 10
    parent.say("closed")


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_case_31_an_origin_is_killed_in_the_middle(processes: Processes, kind: Kind, private: bool) -> None:
    team = processes.start(written_by_a_victim, 2, kind, private)
    assert team[0].said() == "under way"
    team[1].kill()
    assert team[0].said() == "closed"
    with contextlib.suppress(ConnectionLost):
        team[0].result()


# ---- Nothing stays behind --------------------------------------------------------------------------------------------


def hold_windows(group: Group, kind: Kind) -> None:
    windows = [Window.allocate(group, MIB, signals=4, transport=kind.name) for _ in range(5)]
    windows.append(Window.create(group, np.zeros(MIB, np.uint8), transport=kind.name))
    for window in windows:
        window.put(b"x", (group.rank + 1) % group.size)
    exposed = Window.expose(group.directory, f"{group.name} left {group.rank}", nbytes=MIB, transport=kind.name)
    group.barrier()
    attached = Window.attach(group.directory, f"{group.name} left {(group.rank + 1) % group.size}")
    group.barrier()
    parent.say("ready")
    parent.hear()
    for window in (attached, exposed, *windows):
        window.close()


def survive_and_let_go(group: Group, kind: Kind) -> None:
    """As hold_windows, but lives on, and says what it holds before and after."""
    before = descriptors(os.getpid())
    with contextlib.suppress(ConnectionLost):
        hold_windows(group, kind)
    group.leave()
    gc.collect()
    from onesided.windows.fabric import shared_transport

    shared_transport(kind.name)
    wait_until(
        lambda: len(of_peers(descriptors(os.getpid()))) <= len(of_peers(before)), "nothing of the peer is held", 10
    )
    parent.say("done")


def of_peers(found: list[str]) -> list[str]:
    """The descriptors that lead to memory and processes."""
    return [entry for entry in found if "memfd" in entry or "pidfd" in entry]


def test_nothing_stays_behind_after_kill_9(processes: Processes, kind: Kind, tmp_path: Path, monkeypatch) -> None:
    """Neither files nor memory nor names, and the survivors hold nothing of the dead."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for processes that are started from here on
    processes.restart()
    before = left_in_the_system()
    team = processes.start(hold_windows, 2, kind)
    for process in team:
        assert process.said() == "ready"
    for process in team:
        process.kill()
    wait_until(lambda: not left_in_the_system() - before, f"gone: {left_in_the_system() - before}", 10)
    assert not list(tmp_path.iterdir())
    team = processes.start(survive_and_let_go, 2, kind)
    for process in team:
        assert process.said() == "ready"
    team[1].kill()
    team[0].tell()
    assert team[0].said() == "done"
    team[0].result()
    assert team[0].end() == 0
    wait_until(lambda: not left_in_the_system() - before, f"gone: {left_in_the_system() - before}", 10)
    assert not list(tmp_path.iterdir())


# ---- Case 31: stopped ------------------------------------------------------------------------------------------------


def stopped_in_the_middle(group: Group, kind: Kind, private: bool) -> None:
    """Rank 1 is stopped while it writes to rank 0.

    On shm nothing can keep it from writing on when it goes on, so closing raises at its deadline. A device can be told:
    closing ends the connection of who does not answer.
    """
    nbytes = 256 * MIB if kind.name == "shm" else 16 * MIB
    if private:
        window = Window.create(group, np.zeros(nbytes, np.uint8), signals=1, transport=kind.name)
    else:
        window = Window.allocate(group, nbytes, signals=1, transport=kind.name)
    group.barrier()
    if group.rank == 1:
        source = np.ones(nbytes, np.uint8)
        with raises(StaleHandle):
            while True:
                window.put(source, 0, signal=0)
        parent.say("refused")
        return
    window.wait_signal(0, 1)
    parent.say("under way")
    parent.hear()
    with raises(DeadlineExceeded):
        window.wait_signal(0, window.signal_value(0) + 1, timeout_s=0.1)
    begun = time.monotonic()
    try:
        array = window.array
        window.close(timeout_s=0.2)
        assert time.monotonic() - begun < 10
        array[:] = 7  # it is ours again
        parent.say("closed")  # it was stopped between two puts, or its device was
        parent.hear()
        assert (array == 7).all()
    except DeadlineExceeded:
        assert 0.2 <= time.monotonic() - begun < 10
        assert not window.closed
        with raises(StaleHandle):
            window.put(b"x", 0)
        parent.say("not closed")
        parent.hear()
        window.close()
        parent.say("closed")


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_case_31_a_peer_is_stopped_in_the_middle(processes: Processes, kind: Kind, private: bool) -> None:
    for _ in range(5):  # nearly every time it is stopped within a put; once is enough
        team = processes.start(stopped_in_the_middle, 2, kind, private)
        assert team[0].said() == "under way"
        team[1].stop()
        team[0].tell()
        said = team[0].said()
        team[1].resume()
        if said == "closed":
            assert team[1].said() == "refused"
        team[0].tell()
        if said == "not closed":
            assert team[0].said() == "closed"
            assert team[1].said() == "refused"
        processes.finish(team)
        if said == "not closed" or kind.name == "rdma":
            return
    pytest.fail("it was never stopped within a put")


# ---- Case 20 ---------------------------------------------------------------------------------------------------------


def closed_at_the_target(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, MIB, signals=1, transport=kind.name)
    second = Window.allocate(group, MIB, signals=1, transport=kind.name)
    group.barrier()
    if group.rank == 1:
        window.close()
        group.barrier()
        second.wait_signal(0, 1, source=0)
        same(second.array, pattern(MIB, 4))
        group.barrier()
        return
    group.barrier()
    for name, use in uses_of(window, 1).items():
        if name == "flush":
            use()  # there is nothing to flush
            continue
        with raises(StaleHandle):
            use()
            raise AssertionError(name)
    assert window.lost() == []
    window.put(b"to others", 2 if group.rank == 0 else 0)
    window.flush(2 if group.rank == 0 else 0)
    if group.rank == 0:
        second.put(pattern(MIB, 4), 1, signal=0)
    group.barrier()


def test_case_20_a_window_closed_at_the_target(processes: Processes, kind: Kind) -> None:
    processes.run(closed_at_the_target, 3, kind)


def closed_during_puts(group: Group, kind: Kind) -> None:
    """The target closes while large puts arrive; after close() has returned no byte changes any more."""
    nbytes = 32 * MIB
    for turn in range(6):
        window = Window.allocate(group, nbytes, signals=1, transport=kind.name)
        group.barrier()
        if group.rank == 0:
            array = window.array
            window.wait_signal(0, 2)
            window.close()
            after = array.copy()
            group.barrier()
            group.barrier()
            same(array, after)
        else:
            values = [np.full(nbytes, value, np.uint8) for value in (1, 2, 3)]
            with raises(StaleHandle):
                for value in range(10_000):
                    window.put(values[value % 3], 0, signal=0, async_op=turn % 2 == 1).wait()
            group.barrier()
            with raises(StaleHandle):
                window.put(values[0], 0)
            group.barrier()
        window.close()


def test_case_20_a_window_closed_while_puts_arrive(processes: Processes, kind: Kind) -> None:
    processes.run(closed_during_puts, 2, kind)


# ---- Case 36 ---------------------------------------------------------------------------------------------------------


def wait_for_one_that_ends(group: Group, kind: Kind, how: str) -> None:
    window = Window.allocate(group, 64, signals=1, transport=kind.name)
    group.barrier()
    if group.rank == 0:
        parent.say("waiting")
        with raises(ConnectionLost, "rank 1"):
            window.wait_signal(0, 1)
        parent.say("raised")
        return
    parent.hear()
    if how == "exits":
        os._exit(0)
    if how == "leaves":
        group.leave()
    parent.say("ended")


@pytest.mark.parametrize("how", ["killed", "exits", "leaves"])
def test_case_36_waiting_for_a_peer_that_ends(processes: Processes, kind: Kind, how: str) -> None:
    team = processes.start(wait_for_one_that_ends, 2, kind, how)
    assert team[0].said() == "waiting"
    wait_until(lambda: is_asleep(team[0].pid), "rank 0 waits")
    if how == "killed":
        team[1].kill()
    else:
        team[1].tell()
    assert team[0].said(5) == "raised"
    with contextlib.suppress(ConnectionLost):
        team[0].result()
    if how == "leaves":
        assert team[1].said() == "ended"
        team[1].result()


def wait_in_another_thread(group: Group, kind: Kind) -> None:
    """Waits in all threads end, those of other windows too."""
    windows = [Window.allocate(group, 64, signals=1, transport=kind.name) for _ in range(3)]
    group.barrier()
    if group.rank == 1:
        parent.hear()
        return
    ended: list[BaseException] = []

    def wait(window: Window) -> None:
        try:
            window.wait_signal(0, 1)
        except ConnectionLost as error:
            ended.append(error)

    threads = [threading.Thread(target=wait, args=(window,)) for window in windows]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(is_asleep(thread.native_id or 0) for thread in threads), "all wait")
    parent.say("waiting")
    for thread in threads:
        thread.join(5)
    assert len(ended) == 3
    parent.say("raised")


def test_case_36_all_waits_end(processes: Processes, kind: Kind) -> None:
    team = processes.start(wait_in_another_thread, 2, kind)
    assert team[0].said() == "waiting"
    team[1].kill()
    assert team[0].said(10) == "raised"
    with contextlib.suppress(ConnectionLost):
        team[0].result()


# ---- Case 29 ---------------------------------------------------------------------------------------------------------


def in_a_fork(what: Callable[[], object], ends: Callable[[], None]) -> int:
    """Runs `what` in a forked child, which then ends by `ends`; returns the child's exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            what()
            status = 0
        except BaseException as error:  # noqa: BLE001
            print(f"in the forked child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if status:
            os._exit(status)
        ends()
        os._exit(0)
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the forked child hangs")


class Forking:
    """What a process has when it forks; and all that it could do with it."""

    def __init__(self, group: Group, kind: Kind) -> None:
        self.group, self.kind = group, kind
        self.peer = (group.rank + 1) % group.size
        self.window = Window.allocate(group, 64, signals=4, transport=kind.name)
        self.private = Window.create(group, np.zeros(64, np.uint8), signals=1, transport=kind.name)
        self.transport = kind.open()
        self.memory = self.transport.allocate(64, signals=1)
        self.remote = RemoteMemory.from_bytes(self.memory.handle())
        self.connection = self.transport.connect(self.transport.bind())
        self.connection.write(b"x", self.remote)
        self.window.put(b"before", self.peer, async_op=True).wait()
        self.running = self.window.put(b"before", self.peer, async_op=True)

    def uses(self) -> dict[str, Callable[[], object]]:
        window, transport, memory, connection = self.window, self.transport, self.memory, self.connection
        return {
            **uses_of(window, self.peer),
            **{f"own {name}": use for name, use in uses_of(window, self.group.rank).items()},
            "flush of all": window.flush,
            "wait_signal": lambda: window.wait_signal(0, 1),
            "wait_signal of a memory": lambda: memory.wait_signal(0, 1),
            "private put": lambda: self.private.put(b"x", self.peer),
            "Window.allocate": lambda: Window.allocate(self.group, 8, transport=self.kind.name),
            "allocate": lambda: transport.allocate(8),
            "register": lambda: transport.register_memory(bytearray(8)),
            "bind": transport.bind,
            "connect": lambda: transport.connect(b""),
            "write": lambda: connection.write(b"x", self.remote),
            "read": lambda: connection.read(bytearray(1), self.remote),
            "attach": lambda: connection.attach(self.remote),
            "handle": memory.handle,
            "barrier": self.group.barrier,
        }

    def use_all(self) -> None:
        """In the child: each use raises, at once."""
        faulthandler.register(signal.SIGALRM, chain=True)
        for name, use in self.uses().items():
            signal.alarm(5)  # ends the child: a call that hangs is named by the stack that this prints
            with raises(OnesidedError):
                use()
                raise AssertionError(f"{name} worked")

    def close_all(self) -> None:
        for thing in (self.connection, self.memory, self.transport, self.window, self.private):
            thing.close()

    def leave_all(self) -> None:
        self.close_all()
        self.group.leave()

    def check(self) -> None:
        """In the parent and its peer: all works as before."""
        self.running.wait()
        self.window.put(b"after", self.peer, 8, signal=0)
        self.window.wait_signal(0, 1, timeout_s=10)
        assert bytes(self.window.array[8:13]) == b"after"
        self.private.put(b"after", self.peer, 8, signal=0)
        self.private.wait_signal(0, 1, timeout_s=10)
        self.window.put(pattern(64, 1), self.peer, async_op=True).wait()
        assert self.window.lost() == []
        self.connection.write(b"y", self.remote)
        assert bytes(self.memory)[:1] == b"y"
        fresh = self.transport.allocate(8)
        self.connection.write(b"z", RemoteMemory.from_bytes(fresh.handle()))


def fork_after_use(group: Group, kind: Kind, how: str) -> None:
    forking = Forking(group, kind)
    group.barrier()
    if group.rank == 0:
        what: dict[str, Callable[[], object]] = {
            "uses": forking.use_all, "closes": forking.leave_all, "collects": gc.collect, "ends": lambda: None,
        }  # fmt: skip
        assert in_a_fork(what[how], exit_as_usual if how == "ends" else lambda: None) == 0
    group.barrier()
    forking.check()
    group.barrier()
    forking.close_all()


def exit_as_usual() -> None:
    """The interpreter's own end, with all finalizers and exit handlers."""
    import atexit

    atexit._run_exitfuncs()
    gc.collect()


@pytest.mark.parametrize("how", ["uses", "closes", "ends", "collects"])
def test_case_29_fork_after_use(processes: Processes, kind: Kind, how: str) -> None:
    processes.run(fork_after_use, 2, kind, how)


def fork_and_open_anew(group: Group, kind: Kind) -> None:
    """The child may open a transport and a group of its own."""
    window = Window.allocate(group, 64, signals=1, transport=kind.name)
    window.put(np.ones(64, np.uint8), group.rank, async_op=True).wait()

    def use() -> None:
        with Group.local(1)[0] as alone:
            mine = Window.allocate(alone, 32 * MIB, signals=1, transport=kind.name)
            mine.put(np.ones(32 * MIB, np.uint8), 0, signal=0, async_op=True)
            mine.wait_signal(0, 1, timeout_s=10)
            assert (mine.array == 1).all()
            mine.close()

    assert in_a_fork(use, lambda: os._exit(0)) == 0
    window.put(b"x", group.rank)
    window.close()


def test_case_29_a_forked_child_opens_its_own(processes: Processes, kind: Kind) -> None:
    processes.run(fork_and_open_anew, 1, kind)


# ---- The end of a process --------------------------------------------------------------------------------------------


def left_open(address: str, kind: Kind) -> None:
    """Ends with everything open: windows, works, waits in other threads."""
    group = Group.local(1)[0]
    window = Window.allocate(group, 64 * MIB, signals=1, transport=kind.name)
    source = np.ones(64 * MIB, np.uint8)
    works = [window.put(source, 0, async_op=True) for _ in range(3)]

    def wait() -> None:
        with contextlib.suppress(Exception):
            window.wait_signal(0, 1)

    threading.Thread(target=wait, daemon=True).start()
    memory = window.memory
    global kept_open
    kept_open = (window, works, memory, np.frombuffer(memory, np.uint8), kind.open())


def test_case_28_the_interpreter_ends_with_everything_open(processes: Processes, spawn, kind: Kind) -> None:
    process: Process = spawn("the ending")
    process.call(left_open, processes.server.address, kind)
    assert process.end() == 0


# ---- Leaks -----------------------------------------------------------------------------------------------------------


def make_and_close_windows(group: Group, kind: Kind) -> None:
    def cycle() -> None:
        window = Window.allocate(group, 65536, signals=8, transport=kind.name)
        window.put(b"x" * 100, (group.rank + 1) % group.size, signal=0, async_op=True).wait()
        window.wait_signal(0, 1)
        group.barrier()
        window.close()

    def private_cycle() -> None:
        window = Window.create(group, np.zeros(100, np.uint8), transport=kind.name)
        window.put(b"x", (group.rank + 1) % group.size)
        group.barrier()
        window.close()

    def expose_cycle() -> None:
        with Window.expose(group.directory, f"leak {group.rank}", nbytes=100, transport=kind.name) as window:
            with Window.attach(group.directory, f"leak {group.rank}") as attached:
                attached.put(b"x", 0)
            assert window.array[0] == ord("x")

    for turn in (cycle, private_cycle, expose_cycle):
        count = 300 if kind.name == "shm" else 40  # making a queue pair takes milliseconds
        for _ in range(count // 10):
            turn()
        gc.collect()
        group.barrier()
        before = held()
        for _ in range(count):
            turn()
        gc.collect()
        group.barrier()
        no_more_than(before, turn.__name__)


def test_300_windows_leave_nothing(processes: Processes, kind: Kind) -> None:
    processes.run(make_and_close_windows, 2, kind)
