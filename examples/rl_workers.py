"""Starting, ordering, losing and ending the worker processes of rl_weight_broadcast.py. Knows nothing of windows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("rl_worker.py")


@dataclass
class Worker:
    """One worker process. `lost` says why the trainer goes on without it."""

    rank: int
    process: subprocess.Popen[bytes]
    lost: str | None = None


def end_of(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, in words."""
    status = process.poll()
    if status is None:
        return "still running"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def died_early(worker: Worker) -> SystemExit:
    """Without all workers there is no group, and nothing to show."""
    worker.process.wait()
    return SystemExit(f"worker {worker.rank} {end_of(worker.process)} while it was starting")


class Fleet:
    """The workers, ranks 1 to n. A context manager: none of them outlives it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.workers: list[Worker] = []

    def __enter__(self) -> Fleet:
        for rank in range(1, self.count + 1):
            # A session of its own: Ctrl-C reaches the trainer alone, which then ends the workers.
            # Its standard input stays open for as long as the trainer lives: that is how a worker outlives nobody.
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(rank)],  # the rank is there for whoever reads `ps`
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self.workers.append(Worker(rank, process))
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.process.stdin.close()  # type: ignore[union-attr]
            worker.process.stdout.close()  # type: ignore[union-attr]

    @property
    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.lost]

    def wait_imported(self) -> None:
        """Waits until every worker has imported torch and reads its order."""
        for worker in self.workers:
            if not worker.process.stdout.readline():  # type: ignore[union-attr]
                raise died_early(worker)

    def send(self, order: dict[str, Any]) -> None:
        """Sends every worker its order, with its rank in it."""
        for worker in self.workers:
            line = json.dumps({**order, "rank": worker.rank}).encode()
            try:
                worker.process.stdin.write(line + b"\n")  # type: ignore[union-attr]
                worker.process.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError:
                raise died_early(worker) from None

    def kill(self, rank: int) -> None:
        """Kills a worker that is still there, as `kill -9` by hand would."""
        self.workers[rank - 1].process.kill()

    def drop(self, worker: Worker, version: int, if_alive: str) -> str:
        """Goes on without `worker`: it died, or else is ended here, for the reason `if_alive`. Returns what to say."""
        try:
            worker.process.wait(timeout=0.5)
            why = end_of(worker.process)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            why = if_alive
        when = f"at version {version}" if version else "at the start"
        worker.lost = f"worker {worker.rank} lost {when}: {why}"
        return worker.lost

    def wait_ended(self, timeout_s: float) -> None:
        """Waits for the workers that have finished their work to leave by themselves."""
        for worker in self.live:
            try:
                worker.process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return
