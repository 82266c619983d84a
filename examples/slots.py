"""What trainer and workers agree on: how a version lies in a window, and what a worker answers.

A worker's window holds two slots, and version v goes into slot v % 2: while one version is in use the next arrives
beside it. Inside of a slot each tensor has its place, fixed once; a worker's model is torch views over these places, so
that a version is in use the moment it has arrived, with no copy.

    worker's window    | slot 0: tensor tensor … | slot 1: tensor tensor … |       signal 0: the newest version
    trainer's window   | vectors, digest of worker 1 | of worker 2 | …             signal r: answers of worker r
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from minilm import embed
from torch import Tensor

ALIGN = 64  # one cache line, and what vector instructions like; allocated memory of torch is aligned to it too
DIGEST_BYTES = 16
NEWEST = 0  # the signal of a worker's window that counts the versions that are there


@dataclass(frozen=True)
class Field:
    """The place of one tensor inside of a slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as one row of bytes; no copy."""
    return tensor.detach().view(-1).view(torch.uint8)


def round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def lay_out(weights: Mapping[str, Tensor]) -> tuple[list[Field], int]:
    """A place for each tensor, and the bytes of the whole slot."""
    fields, end = [], 0
    for name, tensor in weights.items():
        fields.append(Field(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, tensor.nbytes))
        end = round_up(end + tensor.nbytes)
    return fields, end


def views(fields: Iterable[Field], slot: Tensor) -> dict[str, Tensor]:
    """The tensors of one slot by name, each a view over the slot's own bytes."""
    return {
        field.name: slot[field.offset_bytes :][: field.nbytes].view(getattr(torch, field.dtype)).view(field.shape)
        for field in fields
    }


def digest(weights: Mapping[str, Tensor]) -> bytes:
    """A fingerprint of every byte of every tensor and of the names."""
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in weights.items():
        total.update(name.encode())
        total.update(as_bytes(tensor).numpy().data)
    return total.digest()


@dataclass(frozen=True)
class Answer:
    """What comes of one version: the vectors of the evaluation sentences, and the digest of the weights."""

    vectors: Tensor
    digest: bytes

    @staticmethod
    @torch.inference_mode()
    def of(weights: Mapping[str, Tensor], sentences: tuple[Tensor, Tensor]) -> Answer:
        """Embeds the sentences; the one function by which trainer and workers do so."""
        return Answer(embed(weights, *sentences), digest(weights))

    @staticmethod
    def nbytes(vectors: Tensor) -> int:
        """The bytes of an answer's place in the trainer's window: the vectors, then the digest."""
        return round_up(vectors.nbytes + DIGEST_BYTES)


class Verdict(NamedTuple):
    """Whether an answer is the trainer's own, bit for bit."""

    vectors_equal: bool
    digest_equal: bool

    @staticmethod
    def of(expected: Answer, place: Tensor) -> Verdict:
        """Compares with the answer that lies at `place`; bits, not numbers: 0.0 is not -0.0, and NaN is NaN."""
        end = expected.vectors.nbytes
        return Verdict(
            torch.equal(as_bytes(expected.vectors), place[:end]),
            expected.digest == place[end : end + DIGEST_BYTES].numpy().tobytes(),
        )
