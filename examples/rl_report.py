"""What rl_weight_broadcast.py says: the progress, the closing table, the JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


@dataclass(frozen=True)
class Record:
    """One version: what it took, and how many of its copies were found equal."""

    version: int
    loss: float  # before the step that made this version
    copies: int  # workers that it was published to
    publish_seconds: float  # from the first put until the last signal was flushed
    memcpy_seconds: float  # one-thread memcpy of the same bytes, once for each worker that was started
    answers: int
    equal_vectors: int
    equal_digests: int


@dataclass(frozen=True)
class Summary:
    """What the JSON file holds."""

    versions: int
    workers: int
    bytes_per_version: int
    publish_seconds_median: float
    gbps: float
    memcpy_gbps: float
    ratio: float
    verified: bool


def summarize(records: Sequence[Record], workers: int, bytes_per_version: int) -> Summary:
    """Medians over the versions that went to the most workers, so that a lost worker does not look like speed.

    `verified`: at least one worker answered each version, and every answer was equal. A worker that is lost is
    reported, but it is no difference.
    """
    copies = max((record.copies for record in records), default=0)
    if not copies:
        return Summary(len(records), workers, bytes_per_version, 0.0, 0.0, 0.0, 0.0, verified=False)
    seconds = median(record.publish_seconds for record in records if record.copies == copies)
    gbps = copies * bytes_per_version / seconds / 1e9
    memcpy_gbps = workers * bytes_per_version / median(record.memcpy_seconds for record in records) / 1e9
    return Summary(
        versions=len(records),
        workers=workers,
        bytes_per_version=bytes_per_version,
        publish_seconds_median=seconds,
        gbps=gbps,
        memcpy_gbps=memcpy_gbps,
        ratio=gbps / memcpy_gbps,
        verified=all(r.answers == r.equal_vectors == r.equal_digests > 0 for r in records),
    )


def count(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


class Report:
    """Talks to the user: a moving bar on a terminal, plain lines everywhere else."""

    def __init__(self, console: Console, workers: int, steps: int) -> None:
        self.console, self.workers, self.steps = console, workers, steps
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=steps, doing="")
        self.records: list[Record] = []
        self.losses: list[str] = []

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False)

    def doing(self, what: str) -> None:
        self.progress.update(self.task, doing=what)

    def lost(self, what: str) -> None:
        """A worker was lost."""
        what = escape(what)
        self.losses.append(what)
        others = "the others go on" if len(self.losses) < self.workers else "none is left"
        self.say(f"[yellow]{what}; {others}[/]")

    def add(self, record: Record) -> None:
        """One version is done."""
        self.records.append(record)
        equal = min(record.equal_vectors, record.equal_digests)
        self.say(
            f"version {record.version}: loss {record.loss:.4f}, published to {count(record.copies)} in "
            f"{record.publish_seconds * 1e3:.1f} ms, {equal} of {record.answers} answers equal"
        )
        self.progress.update(self.task, advance=1)

    def close(self, bytes_per_version: int, tensors: int, how: str, json_file: Path | None) -> bool:
        """Prints the closing table, writes the JSON file, and returns whether all is verified."""
        self.progress.stop()
        summary = summarize(self.records, self.workers, bytes_per_version)
        self.console.print(self.table(summary, tensors, how))
        if summary.verified:
            self.say("[green]verified[/]: every answer is the trainer's own, bit for bit")
        else:
            self.say("[bold red]NOT VERIFIED[/]: " + self.trouble())
        if json_file:
            json_file.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
        return summary.verified

    def trouble(self) -> str:
        different = [str(r.version) for r in self.records if r.answers != min(r.equal_vectors, r.equal_digests)]
        return f"answers differ at version {', '.join(different)}" if different else "no worker was left to answer"

    def table(self, summary: Summary, tensors: int, how: str) -> Table:
        answers, vectors, digests = (
            sum(getattr(record, name) for record in self.records)
            for name in ("answers", "equal_vectors", "equal_digests")
        )
        table = Table(show_header=False, title="weights published", title_justify="left")
        rows = [
            ("versions", str(summary.versions)),
            ("bytes per version", f"{summary.bytes_per_version:,} in {tensors} tensors"),
            ("workers", str(summary.workers)),
            ("workers lost", "\n".join(self.losses) or "none"),
            ("publish, median", f"{summary.publish_seconds_median * 1e3:.1f} ms"),
            ("rate", f"{summary.gbps:.2f} GB/s, {how}"),
            ("limit: memcpy, one thread", f"{summary.memcpy_gbps:.2f} GB/s, measured in this run"),
            ("ratio to the limit", f"{summary.ratio:.2f}"),
            ("embeddings equal", f"{vectors} of {answers}"),
            ("digests equal", f"{digests} of {answers}"),
        ]
        if self.records:
            rows.append(("loss, first and last", f"{self.records[0].loss:.4f} → {self.records[-1].loss:.4f}"))
        for row in rows:
            table.add_row(*row)
        return table
