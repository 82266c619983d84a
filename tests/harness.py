"""Ranks as threads and as processes, kinds of transport, and what tests look at a process by.

The processes that it starts import this module and the test's own, and no torch unless the test does. So it must import
neither pytest nor torch itself.
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import Pipe
from multiprocessing.connection import wait as wait_for_channels
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from onesided.transport import Transport

from onesided import Group, RdmaTransport, Server, ShmTransport, open_transport, run_local
from onesided.errors import ConnectionLost

TESTS = Path(__file__).resolve().parent
PATIENCE_S = 30.0  # for what happens at once on an idle machine
AFTER_FAILURE_S = 5.0  # for the other ranks to end, once one has failed

# ---- Kinds of transport ----------------------------------------------------------------------------------------------


EMULATED = os.environ.get("ONESIDED_SOFTROCE") == "1"
PATIENCE_S = 240.0 if EMULATED else 60.0  # for a test of several ranks


class Kind(NamedTuple):
    """A kind of transport, as the suite is parametrised by it. A new one joins in by a line in KINDS."""

    name: str
    unsupported_reason: Callable[[], str | None]

    def open(self) -> Transport:
        return open_transport(self.name)

    @property
    def slow(self) -> bool:
        """Whether it moves some ten MB a second, on memory touched for the first time: Soft-RoCE in User-Mode Linux.
        There tests of volume take less."""
        return self.name == "rdma" and EMULATED

    @property
    def private_atomics(self) -> bool:
        """Whether atomics reach memory that was not allocated for sharing: devices do, cross-memory attach does not."""
        return self.name != "shm"

    def __reduce__(self) -> tuple[object, ...]:  # it travels to other processes by its name
        return kind_named, (self.name,)


KINDS = [Kind("shm", ShmTransport.unsupported_reason), Kind("rdma", RdmaTransport.unsupported_reason)]


def kind_named(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


# ---- Waiting and comparing -------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Polls a condition; the failure says what did not happen."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.002)


@contextlib.contextmanager
def raises(error: type[BaseException] | tuple[type[BaseException], ...], says: str = "") -> Iterator[None]:
    """As pytest.raises, for processes that do not import it."""
    try:
        yield
    except error as raised:
        if says not in str(raised):
            raise AssertionError(f"{says!r} is not in {raised!r}") from raised
    else:
        raise AssertionError(f"no {error} was raised")


def as_bytes(values: Any) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The bytes of an array or buffer as a flat array, not copied."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return np.frombuffer(values, np.uint8)


def same(actual: Any, expected: Any, what: str = "bytes") -> None:
    """Every byte is equal; else tells where the first difference is."""
    left, right = as_bytes(actual), as_bytes(expected)
    assert left.size == right.size, f"{what}: {left.size} bytes instead of {right.size}"
    if not np.array_equal(left, right):
        at = int(np.flatnonzero(left != right)[0])
        count = int(np.count_nonzero(left != right))
        raise AssertionError(f"{what}: {count} of {left.size} differ, first at {at}: {left[at]} instead of {right[at]}")


def pattern(nbytes: int, seed: int = 0) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Bytes that differ from those of other seeds, and from themselves moved."""
    numbers = np.arange(nbytes, dtype=np.uint32)
    numbers += np.uint32(seed * 7919 + 1)
    numbers *= np.uint32(2654435761)
    numbers >>= np.uint32(13)
    return numbers.astype(np.uint8)


# ---- What a process holds --------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a process holds. Only for comparing with itself."""

    descriptors: int
    threads: int
    mappings: int
    resident_bytes: int


def held(pid: int | str = "self") -> Held:
    process = Path("/proc", str(pid))
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
        (process / "maps").read_text().count("\n"),
        resident,
    )


def no_more_than(before: Held, what: str) -> None:
    """This process holds no more than `before`, but for what the allocator and gRPC keep or make for themselves."""
    wait_until(lambda: held().descriptors <= before.descriptors, f"{what}: {before.descriptors} descriptors again", 5)
    after = held()
    said = f"{what}: {before} became {after}"
    assert after.threads <= before.threads + 4, said
    assert after.mappings <= before.mappings + 10, said
    assert after.resident_bytes <= before.resident_bytes + (4 << 20), said


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process lead to, numbers left out, sorted."""
    found = []
    for entry in Path("/proc", str(pid), "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(str(entry.readlink()).split(":[")[0])
    return sorted(found)


def left_in_the_system() -> set[str]:
    """What could stay behind: files in /dev/shm, files of our name in the temporary folder, and names of sockets."""
    found = {str(path) for path in Path("/dev/shm").glob("*")}
    found |= {str(path) for path in Path(tempfile.gettempdir()).glob("*onesided*")}
    for line in Path("/proc/net/unix").read_text().splitlines():
        if "@onesided-" in line:
            found.add(line.split()[-1])
    return found


def is_asleep(pid: int) -> bool:
    """True if a thread waits in the kernel; the number of a process is that of its main thread."""
    return Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0] == "S"


def is_stopped(pid: int) -> bool:
    return all(
        (task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        for task in Path("/proc", str(pid), "task").iterdir()
    )


# ---- A process of its own --------------------------------------------------------------------------------------------


class Function(NamedTuple):
    """A module's function, by the file that it stands in: test modules have no name that another process can import."""

    file: str
    name: str

    @classmethod
    def of(cls, fn: Callable[..., object]) -> "Function":
        assert "<" not in fn.__qualname__, f"{fn.__qualname__} is not at the top of its module"
        return cls(fn.__code__.co_filename, fn.__qualname__)

    def load(self) -> Callable[..., Any]:
        if self.file == __file__:
            return globals()[self.name]
        name = f"loaded_{Path(self.file).stem}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.file)
            assert spec is not None
            assert spec.loader is not None
            module: ModuleType = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return getattr(sys.modules[name], self.name)


class Parent:
    """The test, as a function in another process speaks with it."""

    def __init__(self) -> None:
        self.channel: Channel | None = None

    def say(self, value: object = None) -> None:
        assert self.channel is not None
        self.channel.send(("said", value, None))

    def hear(self) -> Any:
        assert self.channel is not None
        word, value = self.channel.recv()
        assert word == "told", word
        return value


parent = Parent()


def serve(descriptor: int, parent_pid: int) -> None:
    """A process's main: calls what the test asks for, until it hangs up."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan stays, however the test ends
    if os.getppid() != parent_pid:
        return
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parent.channel = channel = Channel(descriptor)
    while True:
        try:
            word, (function, args) = channel.recv()
        except EOFError:
            return
        if word != "call":  # was meant for a function that has ended
            continue
        try:
            answer = ("returned", function.load()(*args), None)
        except BaseException as error:  # noqa: BLE001  # it is the test's to judge
            answer = ("raised", error, traceback.format_exc())
        try:
            channel.send(answer)
        except (TypeError, AttributeError, ValueError):  # it cannot be pickled
            channel.send((answer[0], repr(answer[1]) if answer[0] == "returned" else None, answer[2]))


class Process:
    """A process of its own that calls functions of test modules. Killed with close(), and when the test ends."""

    def __init__(self, name: str = "child", environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.busy = False  # with a function that has neither returned nor raised
        self._channel, theirs = Pipe()
        command = f"import harness; harness.serve({theirs.fileno()}, {os.getpid()})"
        self._popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", command],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **(environment or {})},
            cwd=TESTS,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.pid = self._popen.pid

    @property
    def channel(self) -> Channel:
        return self._channel

    def begin(self, fn: Callable[..., object], *args: object) -> None:
        """Starts a function; said() and result() tell what becomes of it."""
        self.busy = True
        self._channel.send(("call", (Function.of(fn), args)))

    def tell(self, value: object = None) -> None:
        """For `parent.hear()` of the function."""
        self._channel.send(("told", value))

    def said(self, timeout_s: float = PATIENCE_S) -> Any:
        """What the function gives to `parent.say()`."""
        return self._receive("said", timeout_s)

    def result(self, timeout_s: float = PATIENCE_S) -> Any:
        """What the function returns; raises what it raises."""
        return self._receive("returned", timeout_s)

    def call(self, fn: Callable[..., object], *args: object, timeout_s: float = PATIENCE_S) -> Any:
        self.begin(fn, *args)
        return self.result(timeout_s)

    def _receive(self, wanted: str, timeout_s: float) -> Any:
        if not self._channel.poll(timeout_s):
            self.dump_stacks()
            raise AssertionError(f"{self.name} (process {self.pid}) has not {wanted} anything within {timeout_s:g} s")
        word, value = self.take()
        if word != wanted:
            raise AssertionError(f"{self.name} {word} {value!r} and was to have {wanted} something")
        return value

    def take(self) -> tuple[str, Any]:
        """The next word of the process. Raises what its function raised, with the traceback from there."""
        try:
            word, value, trace = self._channel.recv()
        except (EOFError, ConnectionResetError):
            status = self._popen.wait(PATIENCE_S)
            raise AssertionError(f"{self.name} (process {self.pid}) ended with status {status}") from None
        self.busy = word == "said"
        if word != "raised":
            return word, value
        if value is None:
            raise AssertionError(f"{self.name} failed:\n{trace}")
        if hasattr(value, "add_note"):
            value.add_note(f"raised by {self.name} (process {self.pid}):\n{trace}")
        raise value

    def dump_stacks(self) -> None:
        """Writes the stacks of the process to its stderr, which is ours."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.2)  # for it to write; nothing depends on it

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        self.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(self.pid), f"{self.name} is stopped")

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it has ended and nothing of it is left."""
        self._popen.kill()
        self._popen.wait(PATIENCE_S)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Lets it end by itself; returns the exit status."""
        self._channel.close()
        return self._popen.wait(timeout_s)

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def close(self) -> None:
        self.kill()
        self._channel.close()


# ---- Ranks -----------------------------------------------------------------------------------------------------------

_numbers = itertools.count(1)


def _unique(what: str) -> str:
    return f"{what}-{os.getpid()}-{next(_numbers)}"


class Threads:
    """Ranks as threads of this process."""

    separate = False

    def run(self, fn: Callable[..., Any], size: int, *args: object, timeout_s: float = PATIENCE_S) -> Sequence[Any]:
        """Runs `fn(group, *args)` on every rank; returns what they return, raises what the first raised."""
        return run_local(size, lambda group: fn(group, *args), timeout_s=timeout_s, name=_unique("threads"))


def as_member(address: str, name: str, size: int, rank: int, function: Function, args: tuple[object, ...]) -> Any:
    """What a process does for Processes: takes part in a group, and calls the test's function."""
    with Group.join(address, name, size, rank=rank) as group:
        return function.load()(group, *args)


class Processes:
    """Ranks as processes, which are kept from one test to the next."""

    separate = True

    def __init__(self) -> None:
        self.server = Server()
        self.processes: list[Process] = []

    def start(self, fn: Callable[..., Any], size: int, *args: object) -> list[Process]:
        """Starts `fn(group, *args)` on every rank; the processes tell the rest."""
        for process in self.processes:
            if process.busy:  # a test has failed, or has killed it
                process.close()
        self.processes = [process for process in self.processes if process.alive]
        while len(self.processes) < size:
            self.processes.append(Process())
        team = self.processes[:size]
        name = _unique("processes")
        for rank, process in enumerate(team):
            process.name = f"rank {rank} of {size}"
            process.begin(as_member, self.server.address, name, size, rank, Function.of(fn), args)
        return team

    def run(self, fn: Callable[..., Any], size: int, *args: object, timeout_s: float = PATIENCE_S) -> Sequence[Any]:
        """As Threads.run."""
        return self.finish(self.start(fn, size, *args), timeout_s)

    def finish(self, team: Sequence[Process], timeout_s: float = PATIENCE_S) -> list[Any]:
        """What the processes' functions return, by rank; raises what the first raised. At the deadline, or when one has
        failed and others do not end, ends those, so that the next test begins with new ones."""
        running = {process.channel: process for process in team}
        results: dict[Process, Any] = {}
        first: BaseException | None = None
        deadline_s = time.monotonic() + timeout_s
        while running and (ready := wait_for_channels(list(running), max(0.0, deadline_s - time.monotonic()))):
            for channel in ready:
                process = running[channel]
                try:
                    word, value = process.take()
                except BaseException as error:  # noqa: BLE001  # raised below, when the others have ended
                    del running[channel]
                    if first is None or (isinstance(first, ConnectionLost) and not isinstance(error, ConnectionLost)):
                        first = error  # the loss of a rank is told by others before its own failure is
                    deadline_s = min(deadline_s, time.monotonic() + AFTER_FAILURE_S)
                    continue
                if word == "returned":
                    results[process] = value
                    del running[channel]
        for process in running.values():
            process.dump_stacks()
            process.close()
        if first is not None:
            raise first
        assert not running, f"still running after {timeout_s:g} s: {', '.join(p.name for p in running.values())}"
        return [results[process] for process in team]

    def restart(self) -> None:
        """The next test gets new processes."""
        for process in self.processes:
            process.close()
        self.processes.clear()

    def close(self) -> None:
        self.restart()
        self.server.close()


# ---- Threads of one test ---------------------------------------------------------------------------------------------


def in_threads(fns: Sequence[Callable[[], object]], timeout_s: float = PATIENCE_S) -> None:
    """Runs functions side by side; raises the first failure, and names by number who does not end."""
    failures: list[BaseException] = []

    def one(fn: Callable[[], object]) -> None:
        try:
            fn()
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    threads = [threading.Thread(target=one, args=(fn,), daemon=True, name=f"number {i}") for i, fn in enumerate(fns)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if failures:
        raise failures[0]
    late = [thread.name for thread in threads if thread.is_alive()]
    assert not late, f"still running after {timeout_s:g} s: {late}"
