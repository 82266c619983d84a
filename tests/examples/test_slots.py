"""The layout of a version, and the comparison that the example's verdict rests on."""

import pytest

torch = pytest.importorskip("torch")
slots = pytest.importorskip("slots")


def small_weights():
    return {
        "bias": torch.arange(5, dtype=torch.float32),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "half": torch.ones(3, 3, dtype=torch.bfloat16),
        "ids": torch.arange(9).view(1, 9),
    }


def test_fields_are_aligned_and_do_not_overlap():
    fields, nbytes = slots.lay_out(small_weights())
    assert [field.offset_bytes % slots.ALIGN for field in fields] == [0] * 5
    ends = [0, *(field.offset_bytes + field.nbytes for field in fields)]
    assert all(end <= field.offset_bytes for end, field in zip(ends, fields, strict=False))
    assert ends[-1] <= nbytes


def test_views_give_back_what_was_laid_out():
    weights = small_weights()
    fields, nbytes = slots.lay_out(weights)
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    for field in fields:
        slot[field.offset_bytes :][: field.nbytes] = slots.as_bytes(weights[field.name])
    got = slots.views(fields, slot)
    assert got.keys() == weights.keys()
    for name, tensor in weights.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def test_digest_sees_every_byte_and_every_name():
    weights = small_weights()
    seen = {slots.digest(weights)}
    for tensor in weights.values():
        for at in range(tensor.nbytes):
            slots.as_bytes(tensor)[at] ^= 1
            seen.add(slots.digest(weights))
            slots.as_bytes(tensor)[at] ^= 1
    assert len(seen) == 1 + sum(tensor.nbytes for tensor in weights.values())
    assert slots.digest(weights) in seen
    weights["other"] = weights.pop("bias")
    assert slots.digest(weights) not in seen


@pytest.fixture
def answer():
    return slots.Answer(torch.tensor([[0.0, 1.5], [float("nan"), -2.0]]), bytes(range(16)))


def packed(answer):
    place = torch.zeros(slots.Answer.nbytes(answer.vectors), dtype=torch.uint8)
    end = answer.vectors.nbytes
    place[:end] = slots.as_bytes(answer.vectors)
    place[end : end + 16] = torch.tensor(list(answer.digest), dtype=torch.uint8)
    return place


def test_verdict_on_equal_answers(answer):
    assert slots.Verdict.of(answer, packed(answer)) == (True, True)  # NaN included: bits are compared


def test_verdict_sees_every_flipped_bit(answer):
    end = answer.vectors.nbytes
    for at in range(end + 16):
        for bit in range(8):
            place = packed(answer)
            place[at] ^= 1 << bit
            assert slots.Verdict.of(answer, place) == (at >= end, at < end)


def test_verdict_tells_zero_from_minus_zero(answer):
    other = slots.Answer(answer.vectors.clone(), answer.digest)
    other.vectors[0, 0] = -0.0
    assert slots.Verdict.of(answer, packed(other)) == (False, True)
