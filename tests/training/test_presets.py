"""Presets are what their names say, and a tokenizer is the same whenever it is trained."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from bifocals.files import cache_folder
from bifocals.training.data import load_documents
from bifocals.training.presets import BATCH_TOKENS, PRESETS, find_preset
from bifocals.training.tokenizer import train_tokenizer

PAPER = ["0.4B", "0.78B", "1.3B", "2.7B", "6.7B", "9.5B"]


@pytest.mark.parametrize("name", PAPER)
def test_a_preset_has_the_parameters_of_its_name(name):
    with torch.device("meta"):
        model = Qwen3ForCausalLM(find_preset(name).config())
    assert model.num_parameters() == pytest.approx(float(name.removesuffix("B")) * 1e9, rel=0.02)


@pytest.mark.parametrize("name", PAPER)
def test_paper_sizes_take_batches_of_262144_tokens(name):
    preset = find_preset(name)
    assert preset.context * preset.options.batch == BATCH_TOKENS == 262_144


def test_every_preset_splits_its_width_into_heads():
    assert all(preset.hidden % preset.heads == 0 for preset in PRESETS.values())


def test_an_unknown_preset_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"Unknown preset 'giga': expected one of nano, micro, 0\.4B"):
        find_preset("giga")


def test_a_tokenizer_is_the_same_trained_twice_or_read_from_the_cache(monkeypatch, tmp_path):
    first = train_tokenizer(["pydoc"], 400).backend_tokenizer.to_str()
    assert train_tokenizer(["pydoc"], 400).backend_tokenizer.to_str() == first
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert train_tokenizer(["pydoc"], 400).backend_tokenizer.to_str() == first


def test_a_damaged_tokenizer_in_the_cache_is_trained_again():
    first = train_tokenizer(["pydoc"], 300).backend_tokenizer.to_str()
    (kept,) = (cache_folder() / "tokenizers").iterdir()
    kept.write_text('{"model": 3}')
    assert train_tokenizer(["pydoc"], 300).backend_tokenizer.to_str() == first


def test_a_tokenizer_gives_back_every_text():
    tokenizer = train_tokenizer(["pydoc"], 400)
    for text in ("  two  spaces\n\tand a tab ", "日本語 🙂 ë", load_documents("pydoc")[3]):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 400
    assert tokenizer.eos_token_id == 0


def test_a_vocabulary_must_hold_the_bytes():
    with pytest.raises(ValueError, match="more than the 256 bytes"):
        train_tokenizer(["pydoc"], 100)
