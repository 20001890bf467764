"""Pictures of attention show what the model computes."""

import sys

import pytest
import torch
from click.testing import CliRunner

from bifocals import FocalConfig, FocusConfig, attach
from bifocals.cli import main
from bifocals.maps import attention_maps
from bifocals.tape import Tape
from bifocals.testing import tiny_model, tiny_tokenizer, tiny_tokens


def weights(family, tokens, layer, head):
    """What transformers itself computes."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(tokens, output_attentions=True).attentions[layer][0, head].float()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_standard_map_is_the_base_models_and_the_focal_one_its_power(family):
    model, tokens = tiny_model(family), tiny_tokens(1, 20)
    maps = attention_maps(model, tokens[0], layer=1, head=2, temperature=0.5)
    expected = weights(family, tokens, 1, 2)
    torch.testing.assert_close(maps.attention["standard"], expected)
    squared = expected**2
    torch.testing.assert_close(maps.attention["focal"], squared / squared.sum(dim=-1, keepdim=True))
    assert list(maps.attention) == ["standard", "focal"]
    assert all(maps.effective["focal"][layer] < maps.effective["standard"][layer] for layer in ("0", "1"))


def test_the_map_of_focus_is_zero_where_the_lens_reads_nothing():
    model, tokens = tiny_model("llama"), tiny_tokens(1, 30)
    lens = attach(model, FocalConfig(temperature=0.5), FocusConfig(groups=4, top_k=1, window=4, sinks=1))
    maps = attention_maps(model, tokens[0], layer=0, head=3)
    with lens.taped(Tape()) as tape, torch.no_grad():
        model(tokens)
    reads, holds = tape.reads["0"][0, -1].float(), tape.holds["0"][0, -1].float()
    place = torch.arange(30)
    kept = (reads @ holds.T > 0) | (place[:, None] - place <= 4) | (place < 1)
    kept &= place[:, None] >= place
    assert torch.equal(maps.attention["Focus"] > 0, kept)
    torch.testing.assert_close(maps.attention["Focus"].sum(dim=-1), torch.ones(30))
    assert list(maps.attention) == ["standard", "focal", "Focus"]


def test_the_base_is_left_without_a_lens():
    model, tokens = tiny_model("llama"), tiny_tokens(1, 20)
    before = model(tokens).logits
    attention_maps(model, tokens[0], layer=0, head=0, temperature=0.5)
    with pytest.raises(ValueError, match=r"Expected a layer of 0, 1 and a head in 0\.\.3, got layer 7 and head 0"):
        attention_maps(model, tokens[0], layer=7, head=0, temperature=0.5)
    assert torch.equal(model(tokens).logits, before)


@pytest.fixture
def saved_model(tmp_path):
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_command_draws_a_picture(saved_model, tmp_path):
    out = tmp_path / "map.png"
    given = ["maps", saved_model, "--text", "the quick brown fox", "--out", str(out)]
    result = CliRunner().invoke(main, [*given, "--json", str(tmp_path / "map.json")])
    assert result.exit_code == 0, result.output
    assert "Effective tokens attended to, mean over layers: standard" in result.output
    assert out.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "map.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "map.jpg", "--text", "two words"), "expected a name that ends in .png or .svg"),
        (("--out", "map.png"), "expected --text or --file"),
        (("--out", "map.png", "--text", "x"), "at least two tokens"),
        (("--out", "map.png", "--file", sys.executable), "expected text in UTF-8, got other bytes at"),
        (("--out", "map.png", "--text", "two words", "--layer", "9"), "Expected a layer of 0, 1"),
        (("--out", "map.png", "--text", "two words", "--temperature", "0"), "Expected temperature in (0, 4]"),
    ],
)
def test_wrong_arguments_get_one_message(saved_model, arguments, message):
    result = CliRunner().invoke(main, ["maps", saved_model, *arguments])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
