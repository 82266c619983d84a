"""What the tests of the control plane share: servers, groups over gRPC and in memory, child processes, waiting."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from onesided.rpc import Directory, Group, Server

PATIENCE_S = 30.0  # for what happens at once on an idle machine


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Polls a condition; the failure says what did not happen."""

    def wait(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
            time.sleep(0.005)

    return wait


@pytest.fixture
def together() -> Callable[..., list]:
    """Runs `fn(item)` for each item in a thread of its own; returns what they return or raise, in order."""

    def run(fn: Callable, items: list, timeout_s: float = PATIENCE_S) -> list:
        outcomes: list = [AssertionError("still running")] * len(items)

        def one(index: int) -> None:
            try:
                outcomes[index] = fn(items[index])
            except Exception as error:  # noqa: BLE001  # the test judges it
                outcomes[index] = error

        threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(items))]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return outcomes

    return run


@pytest.fixture
def joined(server: Server, together: Callable[..., list]) -> Iterator[Callable[..., list[Group]]]:
    """Makes groups over gRPC, all members in this process."""
    made: list[Group] = []

    def make(size: int, name: str = "world", **options: object) -> list[Group]:
        groups = together(lambda rank: Group.join(server.address, name, size, rank=rank, **options), list(range(size)))
        assert all(isinstance(group, Group) for group in groups), groups
        made.extend(groups)
        return groups

    yield make
    for group in made:
        group.leave()


@pytest.fixture(params=["grpc", "local"])
def make_groups(request: pytest.FixtureRequest) -> Callable[[int], list[Group]]:
    """Makes all members of a group, over gRPC or in memory: both keep the same promises."""
    if request.param == "grpc":
        return request.getfixturevalue("joined")
    return Group.local


@pytest.fixture
def directory(server: Server) -> Iterator[Directory]:
    with Directory(server.address) as directory:
        yield directory


class Child:
    """A process of its own that runs a piece of Python, with `address` and `say(text)` at hand."""

    def __init__(self, code: str, *args: str, env: dict[str, str] | None = None) -> None:
        prelude = "import os, signal, sys, threading, time\nfrom onesided.errors import *\nfrom onesided.rpc import *\n"
        prelude += "def say(*words): print(*words, flush=True)\n"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(code), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def said(self, word: str, timeout_s: float = PATIENCE_S) -> str:
        """Waits for a line that begins with `word`; returns the rest of it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for line in list(self.lines):
                if line.split(" ")[0] == word:
                    return line[len(word) + 1 :]
            ended = self.process.poll() is not None and not self._reader.is_alive()
            if ended or time.monotonic() > deadline_s:
                self.process.kill()
                complaint = self.process.communicate()[1]
                raise AssertionError(f"the child did not say {word!r} but {self.lines}; {complaint}")
            time.sleep(0.005)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Waits for the end; returns the exit status. Prints what it complained about."""
        try:
            self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self._reader.join()
            self.errors = self.process.stderr.read() if self.process.stderr else ""
            print(self.lines, self.errors)
        return self.process.returncode

    def close(self) -> None:
        """Kills it and frees its pipes."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """Starts children that do not outlive the test."""
    children: list[Child] = []

    def start(code: str, *args: str, env: dict[str, str] | None = None) -> Child:
        children.append(Child(code, *args, env=env))
        return children[-1]

    yield start
    for child in children:
        child.close()
