"""A rollout worker of rl_weight_broadcast.py: waits for a version of the weights, uses it where it lies, and answers.

Started by the trainer, which sends its order (one line of JSON) through standard input and keeps that pipe open for as
long as it lives. A worker never reads the checkpoint: all that it knows of the weights came through its window.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from minilm import load_tokenizer, model_folder, read_lines, settle, tokenize
from slots import NEWEST, Answer, Field, views

from onesided import ConnectionLost, Group, Window

TRAINER = 0  # its rank


def end_with_trainer() -> None:
    """Ends this process when the trainer's end of standard input closes, as it does when the trainer is killed."""
    os.read(0, 1)
    os._exit(1)


def answer_versions(window: Window, order: dict[str, Any]) -> None:
    """The worker's life: wait, embed, answer, for each version."""
    fields = [Field(**field) for field in order["fields"]]
    rank, slot_bytes = order["rank"], order["slot_bytes"]
    window.tensor.zero_()  # touches the memory, so that the first version is not slower than the others
    models = [views(fields, slot) for slot in window.tensor.split(slot_bytes)]
    sentences = tokenize(load_tokenizer(model_folder() / "tokenizer.json"), read_lines())
    window.signal(TRAINER, rank)  # ready
    for version in range(1, order["versions"] + 1):
        window.wait_signal(NEWEST, at_least=version, source=TRAINER)
        answer = Answer.of(models[version % 2], sentences)
        place = (rank - 1) * Answer.nbytes(answer.vectors)
        window.put(answer.vectors, TRAINER, place)
        # The signal tells that both puts have arrived, and that the version's slot may be written again.
        window.put(answer.digest, TRAINER, place + answer.vectors.nbytes, signal=rank)


def main() -> None:
    print("imported", flush=True)  # the trainer waits for this line, or sees that it will never come
    order = json.loads(sys.stdin.buffer.readline() or sys.exit(1))
    threading.Thread(target=end_with_trainer, daemon=True).start()
    settle()
    size, nbytes = order["size"], 2 * order["slot_bytes"]
    try:
        with (
            Group.join(order["address"], "rl", size, rank=order["rank"], timeout_s=60) as group,
            Window.allocate(group, nbytes=nbytes, signals=size, transport=order["transport"]) as window,
        ):
            answer_versions(window, order)
    except ConnectionLost:
        sys.exit(1)  # the trainer is gone, and who started it knows


if __name__ == "__main__":
    main()
