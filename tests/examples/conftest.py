"""Makes the examples importable, as they are for whoever runs them."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def model():
    """The MiniLM weights (not to be changed) and its tokenizer."""
    pytest.importorskip("torch", reason="the example needs torch")
    minilm = pytest.importorskip("minilm", reason="the example needs safetensors and tokenizers")
    try:
        folder = minilm.model_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    minilm.settle()
    return minilm.load_weights(folder / "model.safetensors"), minilm.load_tokenizer(folder / "tokenizer.json")
