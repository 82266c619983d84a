"""The encoder of the example, against NumPy in double precision and against numbers of another implementation."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
minilm = pytest.importorskip("minilm")

SENTENCES = ["A man is playing a guitar.", "Someone plays a guitar.", "The stock market fell today."]
# From BertModel of transformers 5.24 on the same checkpoint, whose result `embed` equalled bit for bit.
COSINES = [[1.0, 0.8504, -0.0497], [0.8504, 1.0, -0.0368], [-0.0497, -0.0368, 1.0]]
FIRST_NUMBERS = [
    [0.0217, -0.0049, -0.0096, -0.0634],
    [0.0204, 0.0223, -0.0128, -0.0565],
    [0.0512, 0.0157, 0.0703, 0.0692],
]


def embed(model, sentences):
    weights, tokenizer = model
    with torch.inference_mode():
        return minilm.embed(weights, *minilm.tokenize(tokenizer, sentences))


def numpy_embed(weights, ids):
    """BERT for one sentence without padding, written down once more from the paper, in float64."""
    w = {name: t.detach().numpy().astype(np.float64) for name, t in weights.items() if t.is_floating_point()}

    def dense(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.LayerNorm.weight"] + w[f"{name}.LayerNorm.bias"]

    erf = np.vectorize(math.erf)
    table = "embeddings.{}_embeddings.weight".format
    x = norm("embeddings", w[table("word")][ids] + w[table("position")][: len(ids)] + w[table("token_type")][0])
    for layer in (f"encoder.layer.{i}" for i in range(6)):
        q, k, v = (dense(f"{layer}.attention.self.{part}", x) for part in ("query", "key", "value"))
        heads = []
        for at in range(0, 384, 32):
            scores = q[:, at : at + 32] @ k[:, at : at + 32].T / math.sqrt(32)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, at : at + 32])
        x = norm(f"{layer}.attention.output", x + dense(f"{layer}.attention.output.dense", np.concatenate(heads, -1)))
        inner = dense(f"{layer}.intermediate.dense", x)
        inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
        x = norm(f"{layer}.output", x + dense(f"{layer}.output.dense", inner))
    pooled = x.mean(0)
    return pooled / np.linalg.norm(pooled)


def test_embedding_equals_numpy(model):
    weights, tokenizer = model
    got = embed(model, SENTENCES)  # padded to the longest of them, which must make no difference
    for sentence, vector in zip(SENTENCES, got, strict=True):
        want = numpy_embed(weights, tokenizer.encode(sentence).ids)
        np.testing.assert_allclose(vector.numpy(), want, atol=2e-6)


def test_embedding_equals_the_reference_implementation(model):
    vectors = embed(model, SENTENCES)
    np.testing.assert_allclose((vectors @ vectors.T).numpy(), COSINES, atol=6e-5)
    np.testing.assert_allclose(vectors[:, :4].numpy(), FIRST_NUMBERS, atol=6e-5)


def test_weights_may_be_views_over_bytes(model):
    slots = pytest.importorskip("slots")
    weights, tokenizer = model
    fields, nbytes = slots.lay_out(weights)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    there = slots.views(fields, slot)
    for name, tensor in weights.items():
        there[name].copy_(tensor)
    assert all(slot.data_ptr() <= t.data_ptr() < slot.data_ptr() + nbytes for t in there.values())
    assert torch.equal(embed((there, tokenizer), SENTENCES), embed(model, SENTENCES))
    assert slots.digest(there) == slots.digest(weights)


def test_training_lowers_the_loss_and_repeats_bit_for_bit(model):
    weights, tokenizer = model
    runs = []
    for _ in range(2):
        copy = {name: tensor.clone() for name, tensor in weights.items()}
        trainer = minilm.Trainer(copy, tokenizer, minilm.read_pairs()[:8])
        runs.append((copy, [trainer.step() for _ in range(2)]))
    (first, losses), (second, again) = runs
    assert losses[1] < losses[0]
    assert losses == again
    assert all(torch.equal(first[name], second[name]) for name in weights)
    unchanged = {name for name in weights if torch.equal(first[name], weights[name])}
    assert unchanged == {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}


def test_shipped_sentences():
    pairs, sentences = minilm.read_pairs(), minilm.read_lines()
    assert len(pairs) >= 64
    assert len({answer for _, answer in pairs}) == len(pairs)  # a second right answer would be called wrong
    assert len(sentences) == 32


def test_missing_weights_are_explained(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(FileNotFoundError, match="make setup"):
        minilm.model_folder()
