"""`onesided bench`: what an operation costs between two processes, beside what this machine could do at best.

Every figure is a median of several rounds. Each round times, one right after the other on the same source, the limit,
the operation from Python, and the same loop in C++. All memory is touched before. Sizes are in bytes, bandwidth in GB/s
of 1e9 bytes.

The limit is a one-thread memcpy into private memory on shm; on rdma it is perftest on the first of the transport's
ports, with its GID (onesided/perftest.py). What the modes of a row are, and what stands beside each on rdma:

- "one at a time": a get, a fetch_add, a put and then a flush (which reads from the target), a put with a signal.
  limit_gbps is ib_write_bw or ib_read_bw with 128 in flight. limit_latency_us is ib_read_lat or ib_atomic_lat; for what
  goes to and fro (signals, and puts up to 64 KiB, which are then not flushed), half a round trip as of ib_write_lat.
- "completed": an asynchronous put that is waited for, then the next, to 64 KiB. limit_latency_us is ib_write_bw with
  one in flight.
- "128 in flight": asynchronous puts or gets, as many of them under way at once. limit_gbps as above.

perftest uses one port: where a transport has several rails, ONESIDED_NICS names the one to compare. Without perftest
the limits are empty. With one processor, to and fro between two that spin measures the scheduler, with perftest as
here; "completed" does not.

On a busy machine a ping-pong waits for the scheduler, a thousand times longer than for its peer. So loops end by time,
too: a round that took too long makes the next one shorter, and a loop that took too long gets fewer rounds.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from . import _core
from .errors import DeadlineExceeded, OnesidedError, Unsupported
from .perftest import Perftest
from .rpc import Group, Server
from .transport.rdma import nics_of_environment
from .windows import Window

__all__ = ["OPERATIONS", "Row", "check_plot", "limit_name", "plot", "run"]

OPERATIONS = ("put", "get", "signal", "atomic")
ROUNDS = 9
ROUND_S = {"shm": 0.02}  # a round of one kind of loop lasts about this long
OTHER_ROUND_S = 0.4  # on other kinds of transport, where the device has to come up to speed
LONG = 10  # after a round that took so many times as long, the next is to last as long as it should
IN_FLIGHT = 128  # as of perftest
PERFTEST_LATENCIES = 4  # starting it takes a second
LOOP_S = 6.0  # after so long, a loop gets no more rounds
MOST = 20_000  # operations in a round
PING_PONG_LIMIT = 64 << 10  # above, the latency of a put is the time until it is flushed, not half a round trip
START_S = 120.0  # for both processes to be there
PATIENCE_S = 3600.0  # for a rank that measures; one that has ended is noticed sooner
PAGE = 4096
SPINS = 1 << 30  # a minute or so, for an answer that comes in microseconds
ONE_AT_A_TIME, COMPLETED, MANY = "one at a time", "completed", f"{IN_FLIGHT} in flight"
SPIN_S = 1.0  # the waiter of a ping-pong spins, so that the signal is timed and not the scheduler


@dataclass(frozen=True)
class Row:
    """One measurement; the module tells of the modes and limits. `ratio` is gbps / limit_gbps.

    `latency_us`: with mode "one at a time", half a round trip of put (to 64 KiB) and signal; else that of an operation.
    """

    op: str
    transport: str
    api: str
    mode: str
    size: int
    latency_us: float
    limit_latency_us: float | None
    gbps: float
    limit_gbps: float | None
    ratio: float | None

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` writes it."""
        return asdict(self)


def run(op: str, transport: str, sizes: list[int], on_size: Callable[[int], None] | None = None) -> list[Row]:
    """Measures `op` for each size, between this process and one that it starts; calls `on_size` before each."""
    if op == "atomic":
        sizes = [8]
    with Server() as server:
        arguments = [server.address, op, transport, ",".join(map(str, sizes))]
        code = "import sys; from onesided.bench import partner; partner(*sys.argv[1:])"
        # In a session of its own, so that Ctrl-C comes to this process only. It ends when its stdin does.
        command = [sys.executable, "-c", code, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
            try:
                rows = list(_side(server.address, 0, op, transport, sizes, on_size))
                child.wait(START_S)
            finally:
                child.kill()
    return rows


def partner(address: str, op: str, transport: str, sizes: str) -> None:
    """The other process. It prints nothing: what goes wrong here, the first one tells."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with contextlib.suppress(OnesidedError):
        for _ in _side(address, 1, op, transport, [int(size) for size in sizes.split(",")], None):
            pass


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError):
        os.read(0, 1)
    os._exit(1)


def _side(
    address: str, rank: int, op: str, transport: str, sizes: list[int], on_size: Callable[[int], None] | None
) -> Iterator[Row]:
    with (
        Group.join(address, "bench", 2, rank=rank, timeout_s=START_S) as group,
        Window.allocate(group, nbytes=max(8, *sizes), signals=1, transport=transport) as window,
    ):
        kind = str(window.describe()["transport"])
        perftest = Perftest.on_chosen(nics_of_environment()) if rank == 0 and kind == "rdma" else None
        for size in sizes:
            if on_size is not None:
                on_size(size)
            yield from _Measurement(group, window, op, kind, size, perftest).rows()
        group.barrier(timeout_s=PATIENCE_S)  # the memory stays until both are done


class _Measurement:
    """Both sides of the measurement of one operation and size. Rank 0 times; rank 1 answers, or sleeps in a barrier."""

    def __init__(self, group: Group, window: Window, op: str, kind: str, size: int, perftest: Perftest | None) -> None:
        self.group, self.window, self.op, self.kind, self.size = group, window, op, kind, size
        self.leads = group.rank == 0
        self.peer = 1 - group.rank
        self.round_s = ROUND_S.get(kind, OTHER_ROUND_S)
        self.perftest = perftest
        self.source, self.private, self.target = (filled(size, byte) for byte in (group.rank + 1, 7, 7))

    def rows(self) -> Iterator[Row]:
        loops = self._loops()
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in loops}
        limits: dict[str, list[float]] = {}  # seconds for an operation, by what row they are the limit of
        # A rank that only lends its memory stays out of it: talking about each round would be part of the round.
        both = self._answers()
        run = loops if self.leads or both else {}
        paces = {key: _Pace(self, self._count(loop, both), both) for key, loop in run.items()}
        memcpy_count = max(1, min(100_000, int(self.round_s / max(self._memcpy(1), 1e-9)))) if self.leads else 1
        for _ in range(ROUNDS):
            if self.leads and self.kind == "shm":
                limits.setdefault("bandwidth", []).append(self._memcpy(memcpy_count))
            for key, loop in run.items():
                if count := paces[key].next():
                    seconds[key].append(paces[key].took(loop(count)))
            if self.perftest is not None:
                self._run_perftest(self.perftest, {key[1]: seconds[key][-1] for key in loops}, limits)
        latency = {key: self._latency(*key, statistics.median(seconds[key] or [0.0])) for key in loops}
        if not self.leads:
            return
        if self.perftest is not None and self._has_latency_limit():
            first = latency["python", ONE_AT_A_TIME]
            limits[ONE_AT_A_TIME] = [
                self.perftest.latency_s(self.op, self.size, first) for _ in range(PERFTEST_LATENCIES)
            ]
        gbps_limit = self._gbps(statistics.median(limits["bandwidth"])) if limits.get("bandwidth") else None
        for api, mode in loops:
            gbps = self._gbps(statistics.median(seconds[api, mode]))
            ratio = gbps / gbps_limit if gbps_limit else None
            limit_us = statistics.median(limits[mode]) * 1e6 if limits.get(mode) else None
            latency_us = latency[api, mode] * 1e6
            yield Row(self.op, self.kind, api, mode, self.size, latency_us, limit_us, gbps, gbps_limit, ratio)

    def _run_perftest(self, perftest: Perftest, ours: dict[str, float], limits: dict[str, list[float]]) -> None:
        """Adds to `limits`; `ours` says how long an operation takes about."""
        for mode, in_flight, limit in ((MANY, IN_FLIGHT, "bandwidth"), (COMPLETED, 1, COMPLETED)):
            if mode in ours and (each_s := perftest.seconds(self.op, self.size, in_flight, ours[mode])):
                limits.setdefault(limit, []).append(each_s)

    def _has_latency_limit(self) -> bool:
        return self.op != "put" or self._goes_to_and_fro()

    def _goes_to_and_fro(self) -> bool:
        """Whether the latency of a put is half a round trip."""
        return 8 <= self.size <= PING_PONG_LIMIT

    def _flushes(self) -> bool:
        """Whether puts to and fro are flushed. Over RDMA that would be a round trip more than ib_write_lat has."""
        return self.kind == "shm"

    def _gbps(self, seconds: float) -> float:
        return self.size / seconds / 1e9 if seconds > 0 else 0.0

    def _memcpy(self, count: int) -> float:
        return _core.bench_memcpy(self.private, self.source, count) if self.size else 0.0

    def _answers(self) -> bool:
        """Whether rank 1 takes part in the loop, or only lends its memory."""
        return self.op == "signal"

    def _count(self, loop: Callable[[int], float], both: bool) -> int:
        """How often a round runs the loop: rank 0 tries, more and more often, and tells rank 1 if `both` run it."""
        wanted = 1
        for tries in (3, 30, 300):
            if both:
                self.group.barrier(timeout_s=PATIENCE_S)
            trial = loop(tries)
            wanted = max(1, min(MOST, int(self.round_s / trial))) if trial > 0 else 1
            if both:
                wanted = self.told(wanted)
            if wanted < 10 * tries:
                break
        return wanted

    def told(self, number: int) -> int:
        """What rank 0 says, on both ranks."""
        return int(self.group.all_gather(b"%d" % number, timeout_s=PATIENCE_S)[0])

    # ---- The loops: each runs the operation `count` times and returns seconds for one ---------------------------

    def _loops(self) -> dict[tuple[str, str], Callable[[int], float]]:
        """By the row's api and mode."""
        loops = {("python", ONE_AT_A_TIME): self._python_loop(), ("core", ONE_AT_A_TIME): self._core_loop()}
        if self.kind != "shm" and self.op == "put" and self._goes_to_and_fro():
            loops["python", COMPLETED] = self._in_flight_loop(1)
        if self.kind != "shm" and self.op in ("put", "get"):
            loops["python", MANY] = self._in_flight_loop(IN_FLIGHT)
        return loops

    def _in_flight_loop(self, in_flight: int) -> Callable[[int], float]:
        begin_one = self.window.put if self.op == "put" else self.window.get
        buffer, peer = self.source if self.op == "put" else self.target, self.peer

        def loop(count: int) -> float:
            works: deque[_core.Work] = deque()
            begin = time.perf_counter()
            for _ in range(count):
                if len(works) == in_flight:
                    works.popleft().wait()
                works.append(begin_one(buffer, peer, async_op=True))
            for work in works:
                work.wait()
            return (time.perf_counter() - begin) / count

        return loop

    def _python_loop(self) -> Callable[[int], float]:
        window, source, target, peer = self.window, self.source, self.target, self.peer
        put, get, flush, fetch_add = window.put, window.get, window.flush, window.fetch_add

        def put_loop(count: int) -> float:
            begin = time.perf_counter()
            for _ in range(count):
                put(source, peer)
                flush(peer)
            return (time.perf_counter() - begin) / count

        def get_loop(count: int) -> float:
            begin = time.perf_counter()
            for _ in range(count):
                get(target, peer)
            return (time.perf_counter() - begin) / count

        def atomic_loop(count: int) -> float:
            begin = time.perf_counter()
            for _ in range(count):
                fetch_add(peer, 0, 1)
            return (time.perf_counter() - begin) / count

        return {"put": put_loop, "get": get_loop, "atomic": atomic_loop, "signal": self._signal_ping_pong}[self.op]

    def _core_loop(self) -> Callable[[int], float]:
        window, source, target, peer = self.window, self.source, self.target, self.peer
        return {
            "put": lambda count: _core.bench_put(window, peer, source, count),
            "get": lambda count: _core.bench_get(window, peer, target, count),
            "atomic": lambda count: _core.bench_fetch_add(window, peer, count),
            "signal": self._core_signal_ping_pong,
        }[self.op]

    def _signal_ping_pong(self, count: int) -> float:
        put, wait, source, peer = self.window.put, self.window.wait_signal, self.source, self.peer
        already = self.window.signal_value(0)
        self.group.barrier(timeout_s=PATIENCE_S)
        begin = time.perf_counter()
        for seen in range(already + 1, already + count + 1):
            if self.leads:
                put(source, peer, signal=0)
            wait(0, seen, timeout_s=PATIENCE_S, spin_s=SPIN_S)
            if not self.leads:
                put(source, peer, signal=0)
        return (time.perf_counter() - begin) / count / 2

    def _core_signal_ping_pong(self, count: int) -> float:
        already = self.window.signal_value(0)
        self.group.barrier(timeout_s=PATIENCE_S)
        return _core.bench_signal_latency(self.window, self.peer, self.source, count, self.leads, already)

    def _put_ping_pong(self, count: int) -> float:
        """Half a round trip of put and, perhaps, flush; each side watches the last whole word of its own memory."""
        put, flush, source, peer = self.window.put, self.window.flush, self.source, self.peer
        flushes = self._flushes()
        last = self.size // 8 - 1
        mine = words(self.window.array[: self.size])
        yours = words(source)
        mine[last] = 0
        self.group.barrier(timeout_s=PATIENCE_S)
        begin = time.perf_counter()
        for turn in range(1, count + 1):
            yours[last] = turn
            if self.leads:
                put(source, peer)
                if flushes:
                    flush(peer)
            for _ in repeat(None, SPINS):
                if mine[last] == turn:
                    break
            else:
                raise DeadlineExceeded("the other side of the ping-pong does not answer")
            if not self.leads:
                put(source, peer)
                if flushes:
                    flush(peer)
        return (time.perf_counter() - begin) / count / 2

    def _core_put_ping_pong(self, count: int) -> float:
        self.window.array[: self.size] = 0
        self.group.barrier(timeout_s=PATIENCE_S)
        return _core.bench_put_latency(self.window, self.peer, self.source, count, self.leads, self._flushes())

    def _latency(self, api: str, mode: str, duration: float) -> float:
        if self.op != "put" or mode != ONE_AT_A_TIME or not self._goes_to_and_fro():
            return duration
        loop = self._put_ping_pong if api == "python" else self._core_put_ping_pong
        rounds = []
        pace = _Pace(self, self._count(loop, both=True), both=True)
        for _ in range(ROUNDS):
            if not (count := pace.next()):
                break
            rounds.append(pace.took(loop(count)))
        return statistics.median(rounds)


class _Pace:
    """How often each round of one loop runs it. If `both` ranks do, both ask, and do what rank 0 says."""

    def __init__(self, measurement: _Measurement, count: int, both: bool) -> None:
        self.count = count
        self._measurement = measurement
        self._both = both
        self._spent_s = 0.0

    def next(self) -> int:
        """The count of the next round, which begins when all that run it are here; 0: there is none."""
        said = 0 if self._spent_s > LOOP_S else self.count
        if self._both:
            said = self._measurement.told(said)
        self.count = said or self.count
        return said

    def took(self, each_s: float) -> float:
        """Hears of the last round; returns what it is told."""
        seconds = self.count * each_s
        self._spent_s += seconds
        round_s = self._measurement.round_s
        if seconds > LONG * round_s:
            self.count = max(1, int(self.count * round_s / seconds))
        return each_s


def filled(nbytes: int, byte: int) -> Any:
    """An array of bytes that begins with a page, as perftest's do, so that both move as many pages."""
    array = np.full(nbytes + PAGE, byte, np.uint8)
    return array[-array.ctypes.data % PAGE :][:nbytes]


def words(array: Any) -> memoryview:
    """The whole 8-byte words of an array of bytes. Reading one is a third of what numpy takes for it."""
    return memoryview(array)[: len(array) // 8 * 8].cast("Q")


def limit_name(kind: str) -> str:
    """What stands beside the figures of a kind of transport."""
    return "memcpy, one thread" if kind == "shm" else "perftest"


def check_plot() -> None:
    """Raises Unsupported if plot() could not draw here."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise Unsupported(f"--plot needs matplotlib: pip install 'onesided[bench]' ({error})") from error


def plot(rows: list[Row], path: Path) -> None:
    """Draws bandwidth, with the limit's line, and latency over size into a PNG file. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bandwidth, latency) = plt.subplots(1, 2, figsize=(12, 5))
    kinds = dict.fromkeys((row.api, row.mode) for row in rows)
    for (api, mode), style in zip(kinds, ("o-", "s--", "^-", "v-"), strict=False):
        of_kind = [row for row in rows if (row.api, row.mode) == (api, mode)]
        sizes = [row.size for row in of_kind]
        bandwidth.plot(sizes, [row.gbps for row in of_kind], style, label=f"{rows[0].op}, {api}, {mode}")
        latency.plot(sizes, [row.latency_us for row in of_kind], style, label=f"{rows[0].op}, {api}, {mode}")
    limits = {row.size: row.limit_gbps for row in rows if row.limit_gbps is not None}
    if limits:
        bandwidth.plot(list(limits), list(limits.values()), "k:", label=f"limit: {limit_name(rows[0].transport)}")
    for axes, name in ((bandwidth, "bandwidth, GB/s"), (latency, "latency, µs")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size, bytes")
        axes.set_ylabel(name)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
    figure.suptitle(f"{rows[0].op} between two processes over {rows[0].transport}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)
