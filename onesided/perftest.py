"""The limit of an RDMA device, as perftest's programs (`ib_write_bw` and its kin) measure it on the same port and GID.

Each measurement starts a server and a client on this host. perftest prints no result where it cannot read the clock
rate of the processor, as in User-Mode Linux: then a shorter run is timed from outside, too, and the difference of the
durations is that of the iterations between, without start and end.
"""

import math
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from . import _core
from .errors import OnesidedError

__all__ = ["Perftest"]

BANDWIDTH = {"put": "ib_write_bw", "get": "ib_read_bw"}
LATENCY = {"put": "ib_write_lat", "signal": "ib_write_lat", "get": "ib_read_lat", "atomic": "ib_atomic_lat"}
HALVES = ("ib_write_lat",)  # what they print is half of an iteration
SHORT_S, LONG_S = 0.2, 0.8  # the two runs, without what they need to start
START_S, RUN_S = 10.0, 60.0  # no server is up, and no run is over, that late


@dataclass(frozen=True)
class Perftest:
    """perftest on one port."""

    device: str
    port: int
    gid_index: int

    @classmethod
    def on_chosen(cls, nics: list[str]) -> "Perftest | None":
        """On the first port that a transport takes; None without perftest."""
        if any(shutil.which(tool) is None for tool in {*BANDWIDTH.values(), *LATENCY.values()}):
            return None
        chosen = next(port for port in _core.survey_ports(nics) if port["chosen"])
        gid = chosen["gid"]
        assert isinstance(gid, dict)
        return cls(str(chosen["device"]), int(str(chosen["port"])), int(gid["index"]))

    def seconds(self, op: str, size: int, in_flight: int, about_s: float) -> float | None:
        """For one operation of many, `in_flight` at once; None if perftest has no such program."""
        tool = BANDWIDTH.get(op)
        return None if tool is None else self._each_s(tool, ["-s", str(size), "-t", str(in_flight)], about_s)

    def latency_s(self, op: str, size: int, about_s: float) -> float:
        """For put and signal half a round trip of writes, else an operation; `about_s`: what it might be."""
        tool = LATENCY[op]
        parts = 2 if tool in HALVES else 1
        options = [] if op == "atomic" else ["-s", str(size)]
        return self._each_s(tool, options, about_s * parts) / parts

    def _each_s(self, tool: str, options: list[str], about_s: float) -> float:
        few = max(10, int(SHORT_S / about_s))
        many = few + max(10, int(LONG_S / about_s))
        long_s, printed_s = self._run(tool, options, many)
        if printed_s is not None:
            return printed_s
        short_s, _ = self._run(tool, options, few)
        return max(long_s - short_s, 1e-9) / (many - few)

    def _run(self, tool: str, options: list[str], iterations: int) -> tuple[float, float | None]:
        """Seconds that the client took, and those for an iteration as it prints them."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [tool, "-d", self.device, "-i", str(self.port), "-x", str(self.gid_index), "-F", *options]
        command += ["-n", str(iterations), "-p", str(port)]
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, stdout=subprocess.PIPE, **quiet) as server:  # type: ignore[call-overload]
            try:
                _wait_for_listener(server, port)
                begin = time.perf_counter()
                client = subprocess.run(
                    [*command, "127.0.0.1"],
                    stdout=subprocess.PIPE,
                    timeout=RUN_S,
                    check=False,
                    **quiet,  # type: ignore[call-overload]
                )
                took_s = time.perf_counter() - begin
            except subprocess.TimeoutExpired:
                raise OnesidedError(f"{' '.join(command)}: not done after {RUN_S:g} s") from None
            finally:
                server.kill()
        if client.returncode != 0:
            raise OnesidedError(f"{' '.join(command)} failed:\n{client.stdout.strip()[-500:]}")
        return took_s, _printed_s(tool, client.stdout)


def _printed_s(tool: str, output: str) -> float | None:
    """Seconds for an iteration out of the last line of figures; None if there are none."""
    for line in reversed(output.splitlines()):
        fields = line.split()
        try:
            figures = [float(field) for field in fields]
        except ValueError:
            continue
        if len(figures) < 4:
            continue
        # "#bytes #iterations peak average[MB/sec] rate", and "#bytes #iterations t_min t_max t_typical ...[usec]"
        if tool.endswith("_bw"):
            each_s = figures[0] / (figures[3] * 2**20) if figures[3] > 0 else math.inf
        else:
            each_s = figures[4] * 1e-6 * (2 if tool in HALVES else 1)
        return each_s if 0 < each_s < math.inf else None
    return None


def _wait_for_listener(server: "subprocess.Popen[str]", port: int) -> None:
    deadline_s = time.monotonic() + START_S
    while not any(_listens(Path("/proc/net", table), port) for table in ("tcp", "tcp6")):
        if server.poll() is not None:
            said = server.stdout.read() if server.stdout is not None else ""
            raise OnesidedError(f"{server.args!r} failed:\n{said.strip()[-500:]}")
        if time.monotonic() > deadline_s:
            raise OnesidedError(f"{server.args!r} does not listen after {START_S:g} s")
        time.sleep(0.01)


def _listens(table: Path, port: int) -> bool:
    try:
        rows = table.read_text().splitlines()[1:]
    except OSError:
        return False
    return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows)
