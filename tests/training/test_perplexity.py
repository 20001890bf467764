"""Perplexity between the two ends, and the command that measures it."""

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from bifocals import FocusConfig, attach, lens_of
from bifocals.benchmarks.measuring import write_json
from bifocals.cli import main
from bifocals.evaluation.perplexity import block_loss, evaluate, recovered_share
from bifocals.testing import tiny_model, tiny_tokens
from bifocals.training.data import Blocks

FOCUS = FocusConfig(groups=4, window=4, sinks=1)


def blocks_of(*seeds):
    tokens = torch.cat([tiny_tokens(3, 40, seed=seed) for seed in seeds])
    return Blocks(tokens, torch.arange(len(seeds)).repeat_interleave(3), tuple(f"text {seed}" for seed in seeds))


def test_the_loss_of_a_block_is_the_models_own():
    model, tokens = tiny_model("llama"), tiny_tokens(1, 40)
    with torch.no_grad():
        own = model(tokens, labels=tokens).loss.item()
    assert block_loss(model, tokens[0]) == pytest.approx(own, rel=1e-6)


def test_dense_is_the_base_and_all_groups_recover_everything():
    model = tiny_model("llama")
    blocks = blocks_of(1, 2)
    base = [block_loss(model, block) for block in blocks.of(0)]
    attach(model, FOCUS)
    found = evaluate(model, blocks, (1, 4))
    dense, window, one, four = found["rows"][:4]
    assert dense["losses"] == base
    assert dense["perplexity"] == pytest.approx(math.exp(np.mean(base)))
    assert window["far_kept"] == 0
    assert window["perplexity"] != dense["perplexity"]
    assert four["recovered"] == pytest.approx(1)
    assert four["far_kept"] == four["pairs_kept"] == 1
    assert 0 < one["far_kept"] < one["pairs_kept"] < 1
    low, high = one["interval"]
    assert low <= one["recovered"] <= high
    assert one["recovered"] == pytest.approx(
        1 - math.log(one["perplexity"] / dense["perplexity"]) / math.log(window["perplexity"] / dense["perplexity"])
    )
    assert 0.25 <= one["dominance"] == max(one["dominance_by_layer"].values()) <= 1
    both = [row["recovered"] for row in found["rows"] if row["setting"] == "top_k 1"]
    assert found["mean"][0]["recovered"] == pytest.approx(np.mean(both))


def test_a_text_that_misses_no_far_pair_has_nothing_to_recover(tmp_path):
    model = tiny_model("llama")
    attach(model, FocusConfig(groups=4, window=40))
    found = evaluate(model, blocks_of(1, 2), (1,))
    for row in (found["rows"][2], *found["mean"]):
        assert row["recovered"] is row["interval"] is None
    write_json(tmp_path / "found.json", found)
    json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)


def test_dominance_is_of_the_worst_block_and_counts_the_keys_in_groups_alone():
    model = tiny_model("llama")
    lens = attach(model, FocusConfig.network(groups=4, window=4, sinks=1, dim=4, idle=0.5))
    blocks = blocks_of(1)
    for router in lens.routers.values():
        router.bars.fill_(0.3)
    row = evaluate(model, blocks, (1,))["rows"][-1]
    lens.top_k = 1
    found = [lens.measure(block[None]) for block in blocks.tokens]
    assert len(found) > 1
    assert row["dominance"] == max(each.dominance for each in found)
    assert row["dominance_by_layer"] == {
        name: max(each.layers[name].dominance for each in found) for name in found[0].layers
    }
    assert row["most_far_kept"] == max(each.far_kept for each in found) > row["far_kept"]


def test_the_window_end_is_a_model_that_sees_its_window_and_sinks_alone():
    """Without sinks it is a sliding window, which mistral has of its own."""
    model = tiny_model("mistral", sliding_window=None)
    blocks = blocks_of(1)
    attach(model, FocusConfig(groups=2, window=7, sinks=0))
    _, window = evaluate(model, blocks)["rows"]
    sliding = tiny_model("mistral", sliding_window=8)
    assert window["losses"] == pytest.approx([block_loss(sliding, block) for block in blocks.of(0)])


def test_evaluating_leaves_the_lens_as_it_was_and_a_bare_model_bare():
    model, blocks = tiny_model("llama"), blocks_of(1)
    found = evaluate(model, blocks)
    assert [row["setting"] for row in found["rows"]] == ["dense", "window + sinks"]
    assert lens_of(model) is None
    with pytest.raises(ValueError, match="expected a model with a lens"):
        evaluate(model, blocks, (1,))
    lens = attach(model, FOCUS)
    lens.mode, lens.top_k = "soft", 3
    evaluate(model, blocks, (1,))
    assert (lens.mode, lens.top_k) == ("soft", 3)


def test_the_share_recovered_is_one_at_dense_and_zero_at_window():
    assert recovered_share(2.0, 2.0, 3.0) == 1
    assert recovered_share(3.0, 2.0, 3.0) == 0
    assert np.isnan(recovered_share(2.0, 2.0, 2.0))


def test_eval_prints_a_table_and_stores_every_number(saved_model, tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    attach(AutoModelForCausalLM.from_pretrained(saved_model), FOCUS).save(tmp_path / "lens")
    arguments = ["eval", str(saved_model), "--lens", str(tmp_path / "lens"), "--data", str(tmp_path / "a.txt")]
    arguments += ["--data", "pydoc@held-out", "--length", "48", "--blocks", "3", "--top-k", "1,2"]
    result = CliRunner().invoke(main, [*arguments, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert "top_k 2" in result.output
    stored = json.loads((tmp_path / "out.json").read_text())
    assert [row["setting"] for row in stored["rows"]] == ["dense", "window + sinks", "top_k 1", "top_k 2"] * 2
    assert all(len(row["losses"]) == 3 for row in stored["rows"])
    assert stored["options"]["focus"]["groups"] == 4
    assert stored["surroundings"]["torch"] == torch.__version__
    assert stored["command"].startswith("bifocals")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "missing.txt"), "No text at"),
        (("--data", "pydoc", "--length", "10000000"), "at least one block of 10000000 tokens"),
        (("--data", "pydoc", "--lens", "./nowhere"), "No adapter at"),
        ((), "Missing option '--data'"),
    ],
)
def test_wrong_arguments_get_one_message(saved_model, arguments, message):
    result = CliRunner().invoke(main, ["eval", str(saved_model), *arguments])
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output
