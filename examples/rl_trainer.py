"""The trainer's side of rl_weight_broadcast.py: publishing to the workers, and checking what they answer."""

from __future__ import annotations

import ctypes
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from time import monotonic, perf_counter
from typing import Any

import torch
from minilm import (
    Trainer,
    load_tokenizer,
    load_weights,
    model_folder,
    nbytes,
    read_lines,
    read_pairs,
    settle,
    tokenize,
)
from rl_report import Record, Report
from rl_workers import Fleet, Worker
from slots import NEWEST, Answer, Verdict, lay_out
from torch import Tensor

from onesided import ConnectionLost, DeadlineExceeded, Group, Server, Window

LOST = (ConnectionLost, DeadlineExceeded)  # what an operation raises when the worker died or stands still
READY = 1  # a worker counts its signal up once when it is ready, then once for each version


class Publisher:
    """Publishes versions of the weights into the workers' windows, and collects what the workers make of them.

    One rule keeps a version whole: slot v % 2 is written only after version v - 2, which lay there, has been answered.
    The signal that carries version v is strong: whoever sees it sees all of the version's bytes.
    """

    def __init__(
        self, window: Window, weights: Mapping[str, Tensor], fleet: Fleet, report: Report, deadline_s: float
    ) -> None:
        self.window, self.fleet, self.report, self.deadline_s = window, fleet, report, deadline_s
        fields, self.slot_bytes = lay_out(weights)
        self.parts = [(weights[field.name].detach(), field.offset_bytes) for field in fields]

    def drop(self, worker: Worker, version: int, error: Exception) -> None:
        why = f"no answer in {self.deadline_s:g} s" if isinstance(error, DeadlineExceeded) else str(error)
        self.report.lost(self.fleet.drop(worker, version, if_alive=why))

    def wait_answers(self, version: int) -> None:
        """Waits until every worker has answered `version`; one that has not by the deadline is dropped."""
        end = monotonic() + self.deadline_s
        for worker in self.fleet.live:
            try:
                self.window.wait_signal(
                    worker.rank, at_least=READY + version, source=worker.rank, timeout_s=max(0.0, end - monotonic())
                )
            except LOST as error:
                self.drop(worker, version, error)

    def rehearse(self) -> None:
        """Waits for the workers and fills both of their slots, so that no page is touched for the first time later."""
        self.wait_answers(0)
        zeros = torch.zeros(2 * self.slot_bytes, dtype=torch.uint8)
        for worker in self.fleet.live:
            self.window.put(zeros, worker.rank)

    def publish(self, version: int) -> float:
        """Writes all tensors to all workers; returns the seconds from the first put until the last signal is there."""
        self.wait_answers(version - 2)
        slot = version % 2 * self.slot_bytes
        begin = perf_counter()
        for tensor, offset in self.parts:  # no worker has all of a version, and starts on it, long before the others
            for worker in self.fleet.live:
                try:
                    self.window.put(tensor, worker.rank, slot + offset, timeout_s=self.deadline_s)
                except LOST as error:
                    self.drop(worker, version, error)
        for worker in self.fleet.live:
            try:
                self.window.signal(worker.rank, NEWEST)
                self.window.flush(worker.rank)
            except LOST as error:
                self.drop(worker, version, error)
        return perf_counter() - begin

    def collect(self, version: int, expected: Answer) -> list[Verdict]:
        """Waits for the workers' answers and compares each with the trainer's own."""
        self.wait_answers(version)
        places = self.window.tensor.split(Answer.nbytes(expected.vectors))
        return [Verdict.of(expected, places[worker.rank - 1]) for worker in self.fleet.live]


class Memcpy:
    """The limit that publishing is measured against: the C library's memcpy of as many bytes, by one thread."""

    def __init__(self, nbytes: int, copies: int) -> None:
        self.source = torch.ones(nbytes, dtype=torch.uint8)
        self.targets = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(copies)]  # touched, as the windows are
        self.seconds()

    def seconds(self) -> float:
        """How long one copy to each target takes."""
        begin = perf_counter()
        for target in self.targets:
            ctypes.memmove(target.data_ptr(), self.source.data_ptr(), self.source.numel())
        return perf_counter() - begin


def train(options: Namespace, trainer: Trainer, publisher: Publisher, sentences: tuple[Tensor, Tensor]) -> None:
    """The loop: a step, the limit, a version to everybody, and all answers before the next step."""
    fleet, report = publisher.fleet, publisher.report
    memcpy = Memcpy(nbytes(trainer.weights), fleet.count)
    for version in range(1, options.steps + 1):
        if not fleet.live:
            break
        report.doing("training")
        loss = trainer.step()
        limit = memcpy.seconds()  # the workers are asleep, here and while they are written to
        if options.kill_worker and options.kill_worker[1] == version:
            fleet.kill(options.kill_worker[0])
        report.doing("publishing")
        seconds = publisher.publish(version)
        copies = len(fleet.live)
        report.doing("comparing")
        verdicts = publisher.collect(version, Answer.of(trainer.weights, sentences))
        vectors, digests = (sum(verdict[i] for verdict in verdicts) for i in range(2))
        report.add(Record(version, loss, copies, seconds, limit, len(verdicts), vectors, digests))


def run(options: Namespace, fleet: Fleet, report: Report) -> bool:
    """Loads the model, opens the windows, trains and publishes; returns whether all that was answered is equal."""
    report.doing("loading the model")
    settle()
    folder = model_folder()
    weights = load_weights(folder / "model.safetensors")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    sentences = tokenize(tokenizer, read_lines())
    fields, slot_bytes = lay_out(weights)
    size, answer_bytes = fleet.count + 1, Answer.nbytes(Answer.of(weights, sentences).vectors)
    with Server("127.0.0.1:0") as server:
        fleet.send(
            {
                "address": server.address,
                "size": size,
                "transport": options.transport,
                "versions": options.steps,
                "slot_bytes": slot_bytes,
                "fields": [asdict(field) for field in fields],
            }
        )
        with (
            Group.join(server.address, "rl", size, rank=0, timeout_s=60) as group,
            Window.allocate(
                group, nbytes=fleet.count * answer_bytes, signals=size, transport=options.transport
            ) as window,
        ):
            publisher = Publisher(window, weights, fleet, report, options.deadline)
            publisher.rehearse()
            pids = ", ".join(str(worker.process.pid) for worker in fleet.workers)
            report.say(f"Ready. The workers' process ids are {pids}: try `kill -9` or `kill -STOP` on one.")
            train(options, Trainer(weights, tokenizer, read_pairs()), publisher, sentences)
            how = how_bytes_moved(window.describe())
            fleet.wait_ended(timeout_s=5)
    return report.close(nbytes(weights), len(weights), how, options.json)


def how_bytes_moved(described: dict[str, Any]) -> str:
    """For the report: what moved most of the bytes."""
    if described["transport"] == "rdma":
        lanes = [text.split(",")[0] for name, text in described["peers"][-1].items() if name.startswith("lane")]
        return f"by RDMA ({', '.join(lanes)})"
    method = next(row["method"] for row in reversed(described["copying"]) if row["chosen"])
    return f"copying {method}"
