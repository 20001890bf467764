"""Tiny models, one thread, and a cache of our own."""

import pytest
import torch

from bifocals.testing import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def alone(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    torch.manual_seed(0)


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def saved_model(tmp_path):
    """A folder with a tiny model and its tokenizer."""
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"
