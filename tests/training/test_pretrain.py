"""A model from scratch: what is saved, that a stopped run goes on exactly, and how it says no."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bifocals import FocalConfig, FocusConfig, fold, load
from bifocals.training.checkpoint import CheckpointError
from bifocals.training.context import ContextOptions
from bifocals.training.data import DataError, load_blocks
from bifocals.training.flops import forward_flops
from bifocals.training.options import PretrainOptions
from bifocals.training.presets import Preset
from bifocals.training.pretrain import pretrain
from bifocals.training.whole import WholeTrainer

OPTIONS = PretrainOptions(steps=6, batch=4, micro_batch=2, warm_up=2, save_every=3, evaluate_every=3)
SMALL = Preset(hidden=32, intermediate=48, layers=2, heads=2, vocabulary=300, context=32, options=OPTIONS)
FOCAL = FocalConfig(temperature=0.4)
LEARNED = FocalConfig(form="token")
REFINED = FocalConfig(form="length", per="head")
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. "


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} {TEXT}" for number in range(400)))
    return [str(path)]


def run(text, out, preset=SMALL, focal=FOCAL, **changes):
    return pretrain(preset, text, out, focal=focal, **{"held_out": 2, **changes})


def stop(progress):
    if progress.step == 5:
        raise KeyboardInterrupt


def test_a_pretrained_model_is_stock_and_folds_to_the_same_logits(text, tmp_path):
    results = run(text, tmp_path / "out")
    assert results["losses"][-1] < results["losses"][0]
    assert [each["step"] for each in results["validation"]] == [3, 6]
    assert results["held_out"]["loss"] == results["validation"][-1]["loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").eval()
    assert model.config.use_cache, "Trainer's own setting was saved"
    stock = {name for name, _ in model.named_parameters()}
    load(model, tmp_path / "out" / "lens")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        focal = model(tokens).logits
        folded = fold(model)(tokens).logits
    assert {name for name, _ in model.named_parameters()} == stock
    torch.testing.assert_close(folded, focal)


@pytest.mark.parametrize(
    ("focal", "more"),
    [(FOCAL, {}), (REFINED, {"focus": FocusConfig(groups=2, window=4, sinks=1), "is_sparse": True})],
    ids=["constant", "learned, with Focus"],
)
def test_a_stopped_run_goes_on_exactly(focal, more, text, tmp_path):
    whole = run(text, tmp_path / "whole", focal=focal, **more)
    with pytest.raises(KeyboardInterrupt):
        run(text, tmp_path / "parts", focal=focal, report=stop, **more)
    parts = run(text, tmp_path / "parts", focal=focal, resume=True, **more)
    assert parts["losses"] == whole["losses"]
    assert parts["validation"] == whole["validation"]


def test_a_stopped_run_is_measured_on_as_many_sequences_as_before(text, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(text, tmp_path / "out", report=stop)
    with pytest.raises(CheckpointError, match="a run with other held_out"):
        run(text, tmp_path / "out", held_out=1, resume=True)


def test_a_run_that_is_done_keeps_no_checkpoint_and_is_not_run_again(text, tmp_path, monkeypatch):
    results = run(text, tmp_path / "out", focal=REFINED)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"run.json", "model", "lens", "results.json", "temperatures.png"}
    monkeypatch.setattr(WholeTrainer, "train_from", None)
    assert run(text, tmp_path / "out", focal=REFINED, resume=True) == results


def test_what_temperatures_were_learned_is_stored_and_drawn(text, tmp_path):
    results = run(text, tmp_path / "out", focal=REFINED)
    stored = json.loads((tmp_path / "out" / "results.json").read_text())["validation"]
    assert stored == results["validation"]
    for layer in ("0", "1"):
        for head in stored[-1]["temperatures"][layer]:
            assert 0.1 < head["min"] <= head["mean"] <= head["max"] < 2.0
        assert len(stored[-1]["temperatures"][layer]) == 2
    assert stored[-1]["temperatures"] != stored[0]["temperatures"]
    assert (tmp_path / "out" / "temperatures.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    lens = load(model, tmp_path / "out" / "lens")
    assert all(layer.temperature.exponent.abs().sum() > 0 for layer in lens.layers.values())


def test_bits_per_byte_are_the_bits_of_the_predicted_tokens_over_their_bytes(text, tmp_path):
    results = run(text, tmp_path / "out")
    folder = tmp_path / "out" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    load(model, tmp_path / "out" / "lens")
    bits, size = 0.0, 0
    for block in load_blocks(text, tokenizer, 32, part="held-out", limit=2).tokens:
        with torch.no_grad():
            chances = model(block[None]).logits[0].double().softmax(dim=-1)
        for place in range(1, len(block)):
            bits -= math.log2(chances[place - 1, block[place]])
            size += len(tokenizer.decode(block[place : place + 1], skip_special_tokens=True).encode())
    assert results["held_out"]["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)


def test_networks_are_calibrated_on_the_shortest_sequence_that_has_far_keys(text, tmp_path):
    focus = FocusConfig.network(groups=2, top_k=1, window=26, sinks=4, dim=8)
    assert run(text, tmp_path / "out", focus=focus)["held_out"]["pairs_kept"] <= 1


def test_networks_of_focus_are_calibrated_and_cost_less_where_they_train_on_their_pattern(text, tmp_path):
    focus = FocusConfig.network(groups=4, top_k=1, window=4, sinks=1, dim=8)
    results = run(text, tmp_path / "out", focus=focus)
    assert 0.2 < results["held_out"]["pairs_kept"] < 0.7
    assert run(text, tmp_path / "sparse", focus=focus, is_sparse=True)["flops"] < results["flops"]


@pytest.mark.parametrize("rope", ["linear", "ntk", "yarn"])
def test_a_stretched_model_is_stock_and_measured_past_its_context(rope, text, tmp_path):
    longer = ContextOptions(context=64, rope=rope, factor=2.0)
    results = run(text, tmp_path / "out", longer=longer)
    assert results["length"] == 64
    assert results["beyond"]["length"] == 128
    assert len(results["beyond"]["by_part"]) == 8
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").config
    assert saved.max_position_embeddings == 64
    assert saved.rope_parameters["rope_type"] == {"ntk": "default"}.get(rope, rope)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": "yarn"}, r"a factor in \(1, 1000\]"),
        ({"factor": 2.0}, "factor 1 without rope"),
        ({"context": 1}, "context >= 2"),
    ],
)
def test_a_context_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ContextOptions(**changes)


def test_a_corpus_shorter_than_one_batch_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("".join(f"{number} {TEXT}" for number in range(20)))
    with pytest.raises(DataError, match="one batch, 4096 sequences of 32 tokens"):
        run([str(path)], tmp_path / "out", options=replace(OPTIONS, batch=4096))
    assert not (tmp_path / "out").exists()


def test_a_corpus_too_short_to_hold_a_sequence_out_is_told_so(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("".join(f"{number} {TEXT}" for number in range(20)))
    with pytest.raises(DataError, match=r"at least one block of \d+ tokens in its held-out part, got \d+"):
        run([str(path)], tmp_path / "out", longer=ContextOptions(context=200))
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_shape_is_not_resumed_and_not_overwritten(text, tmp_path):
    run(text, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="a run with other model"):
        run(text, tmp_path / "out", preset=replace(SMALL, hidden=64), resume=True)
    with pytest.raises(ValueError, match="is not empty"):
        run(text, tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_shape_is_refused(text, tmp_path):
    for name, hidden in (("small", 32), ("large", 64)):
        with pytest.raises(KeyboardInterrupt):
            run(text, tmp_path / name, preset=replace(SMALL, hidden=hidden), report=stop)
    shutil.rmtree(tmp_path / "small" / "checkpoints")
    shutil.copytree(tmp_path / "large" / "checkpoints", tmp_path / "small" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"expected .* of torch\.float32, got"):
        run(text, tmp_path / "small", resume=True)
    assert not (tmp_path / "small" / "results.json").exists()


def test_operations_fall_with_the_pairs_that_are_read():
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM(SMALL.config())
    dense, half, none = (forward_flops(model, 4096, share) for share in (1.0, 0.5, 0.0))
    assert dense - half == pytest.approx(half - none)
    assert dense - none == 4 * 2 * 32 * 4097 / 2
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 48) + 300 * 32
    assert none == 2 * matrices
