"""Adapting a model to a temperature: where each schedule starts, what is saved, and how it says no."""

import json
import math

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from bifocals import FocalConfig, attach, fold, lens_of, load
from bifocals.cli import main
from bifocals.models import load_model
from bifocals.testing import tiny_model, tiny_tokenizer
from bifocals.training.adapt import adapt
from bifocals.training.checkpoint import CheckpointError
from bifocals.training.context import ContextOptions, put_positions, stretch
from bifocals.training.options import AdaptOptions
from bifocals.training.query_scale import expect_scalable, put_scales_into_weights, relearn_scales
from bifocals.training.whole import WholeTrainer

OPTIONS = AdaptOptions(steps=4, batch=2, warm_up=1, rate=1e-3, save_every=2, evaluate_every=2)
SHORT = ContextOptions(context=48)


@pytest.fixture
def saved_model(saved_model):
    """With text to train on beside it."""
    (saved_model / "text.txt").write_text("".join(f"{number} bottles of beer on the wall. " for number in range(200)))
    return saved_model


def run(saved_model, out, **changes):
    loaded = load_model(str(saved_model))
    how = {"options": OPTIONS, "longer": SHORT, "held_out": 2, **changes}
    return adapt(loaded.model, loaded.tokenizer, [str(saved_model / "text.txt")], out, temperature=0.4, **how)


def command(saved_model, out, *arguments):
    given = (saved_model, "--data", saved_model / "text.txt", "--out", out, "--context", 48, *arguments)
    return CliRunner().invoke(main, ["adapt", *map(str, given)])


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("schedule", ["abrupt", "anneal", "scale"])
def test_an_adapted_model_is_stock_and_folds_to_the_same_logits(schedule, saved_model, tmp_path):
    options = AdaptOptions(steps=2, batch=2, rate=1e-3, warm_up=1, schedule=schedule)
    results = run(saved_model, tmp_path / "out", options=options)
    assert list(results["held_out"]) == ["base", "base at the temperature", "adapted", "continued"]
    assert results["held_out"]["base"]["ratio"] == 1
    folder = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    assert load(model, folder / "lens").focal == FocalConfig(temperature=0.4)
    model.double()
    loss = json.loads((folder / "results.json").read_text())["runs"]["adapted"]["validation"][-1]["loss"]
    assert math.log(results["held_out"]["adapted"]["perplexity"]) == pytest.approx(loss, rel=1e-5)
    tokens = torch.arange(20)[None]
    focal = logits(model, tokens)
    torch.testing.assert_close(logits(fold(model), tokens), focal)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox", "phi3", "olmo2"])
def test_a_relearned_scale_starts_at_the_base_and_goes_into_the_weights(family):
    model, tokens = tiny_model(family), torch.arange(2, 40)[None]
    base = logits(model, tokens)
    lens = attach(model, FocalConfig(temperature=0.4))
    relearn_scales(lens)
    torch.testing.assert_close(logits(model, tokens), base)
    for number, parameter in enumerate(lens.parameters()):
        torch.nn.init.constant_(parameter, -0.001 * (number + 1))
    scaled = logits(model, tokens)
    assert (scaled - base).abs().max() > 1e-3
    put_scales_into_weights(lens)
    assert not list(lens.parameters())
    torch.testing.assert_close(logits(model, tokens), scaled)


def test_the_first_loss_of_each_schedule_is_where_it_starts(saved_model, tmp_path):
    first = {}
    for schedule in ("abrupt", "anneal", "scale"):
        options = AdaptOptions(steps=1, batch=2, warm_up=0, schedule=schedule)
        runs = run(saved_model, tmp_path / schedule, options=options)["runs"]
        first[schedule] = runs["adapted"]["losses"][0]
        base = runs["continued"]["losses"][0]
    assert first["anneal"] == base
    assert first["scale"] == pytest.approx(base, rel=1e-6)
    assert abs(first["abrupt"] - base) > 1e-4


def test_queries_alone_leave_everything_else_as_it_was(saved_model, tmp_path):
    before = load_model(str(saved_model)).model.state_dict()
    run(saved_model, tmp_path / "out", options=AdaptOptions(steps=2, batch=2, rate=1e-3, warm_up=0, part="queries"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").state_dict()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj"}


@pytest.mark.parametrize("schedule", ["anneal", "scale"])
def test_a_stopped_adaptation_goes_on_exactly(schedule, saved_model, tmp_path, monkeypatch):
    options = AdaptOptions(steps=4, batch=2, warm_up=1, rate=1e-3, save_every=2, evaluate_every=2, schedule=schedule)
    whole = run(saved_model, tmp_path / "whole", options=options)
    compute_loss, calls = WholeTrainer.compute_loss, []

    def stop(self, *others, **more):
        calls.append(self.folder.name)
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return compute_loss(self, *others, **more)

    monkeypatch.setattr(WholeTrainer, "compute_loss", stop)
    with pytest.raises(KeyboardInterrupt):
        run(saved_model, tmp_path / "parts", options=options)
    monkeypatch.setattr(WholeTrainer, "compute_loss", compute_loss)
    parts = run(saved_model, tmp_path / "parts", options=options, resume=True)
    assert set(calls) == {"adapted"}
    for name in ("adapted", "continued"):
        assert parts["runs"][name]["losses"] == whole["runs"][name]["losses"]
        assert parts["runs"][name]["validation"] == whole["runs"][name]["validation"]
    assert parts["held_out"] == whole["held_out"]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_of_both_runs_stay_until_both_are_done(saved_model, tmp_path):
    out, stopped = tmp_path / "out", []

    def stop(progress):
        stopped.append(progress.step)
        if stopped == [1, 2, 3, 4, 1, 2, 3]:
            raise KeyboardInterrupt

    whole = run(saved_model, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(saved_model, out, report=stop)
    assert sorted(path.parent.name for path in out.glob("checkpoints/*/checkpoint-*")) == ["adapted", "continued"]
    seen = []
    parts = run(saved_model, out, resume=True, report=lambda progress: seen.append(progress.step))
    assert seen == [3, 4]
    assert parts["held_out"] == whole["held_out"]
    assert not (out / "checkpoints").exists()
    assert {path.parts[0] for path in files(out)} == {"run.json", "model", "lens", "results.json", "losses.png"}


def test_an_adaptation_that_is_done_is_not_run_again(saved_model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    results = run(saved_model, out)
    before = files(out)
    left = out / "checkpoints" / "adapted" / "checkpoint-4"  # as if it had been stopped before it was removed
    left.mkdir(parents=True)
    (left / "state.safetensors").write_bytes(b"large")
    monkeypatch.setattr(WholeTrainer, "train_from", None)
    loaded = load_model(str(saved_model))
    text, how = [str(saved_model / "text.txt")], {"options": OPTIONS, "longer": SHORT, "resume": True}
    assert adapt(loaded.model, loaded.tokenizer, text, out, held_out=2, **how) == results
    assert lens_of(loaded.model) is None
    assert files(out) == before
    with pytest.raises(CheckpointError, match="a run with other held_out"):
        adapt(loaded.model, loaded.tokenizer, text, out, held_out=1, **how)


def test_logs_beside_the_checkpoints_stay(saved_model, tmp_path):
    logs = tmp_path / "out" / "checkpoints" / "adapted" / "runs" / "events"

    def log(progress):
        logs.parent.mkdir(parents=True, exist_ok=True)
        logs.write_text("logged")

    run(saved_model, tmp_path / "out", report=log)
    assert [path for path in (tmp_path / "out" / "checkpoints").rglob("*") if path.is_file()] == [logs]


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_results_that_cannot_be_read_are_not_run_over(content, saved_model, tmp_path):
    run(saved_model, tmp_path / "out", options=AdaptOptions(steps=1, batch=2, warm_up=0))
    (tmp_path / "out" / "results.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"results\.json: expected the results of a run.* another folder"):
        run(saved_model, tmp_path / "out", options=AdaptOptions(steps=1, batch=2, warm_up=0), resume=True)
    assert (tmp_path / "out" / "results.json").read_bytes() == content


def test_a_model_is_adapted_at_stretched_positions_and_measured_past_its_context(saved_model, tmp_path):
    longer = ContextOptions(context=48, rope="yarn", factor=2.0)
    options = AdaptOptions(steps=1, batch=2, warm_up=0)
    results = run(saved_model, tmp_path / "out", options=options, longer=longer)
    assert results["beyond"]["length"] == 96
    assert results["context"]["rope"] == "yarn"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").config
    assert saved.rope_parameters["rope_type"] == "yarn"
    assert saved.max_position_embeddings == 512
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_more_positions_are_used_than_a_model_has(family, tmp_path):
    model = tiny_model(family, dtype=torch.float32)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall. " for number in range(1200)))
    options = AdaptOptions(steps=1, batch=1, warm_up=0)
    results = adapt(model, tiny_tokenizer(), [str(text)], tmp_path / "out", options=options, held_out=1)
    assert results["length"] == model.config.max_position_embeddings == 256
    assert (results["beyond"] is None) == (family == "gpt2")


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_a_model_that_reads_what_it_predicts_is_refused(family, saved_model, tmp_path):
    tiny_model(family, dtype=torch.float32).save_pretrained(tmp_path / family)
    tiny_tokenizer().save_pretrained(tmp_path / family)
    given = (tmp_path / family, "--data", saved_model / "text.txt", "--out", tmp_path / "out", "--context", 48)
    result = CliRunner().invoke(main, ["adapt", *map(str, given)])
    assert result.exit_code == 1
    assert "expected a decoder" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_cap_on_the_logits_is_more_than_a_scale():
    with pytest.raises(ValueError, match=r"caps its logits.*use schedule 'anneal'"):
        expect_scalable(attach(tiny_model("gemma2"), FocalConfig(temperature=0.4)))


@pytest.mark.parametrize("rope", ["linear", "ntk", "yarn"])
def test_positions_put_on_a_model_are_those_of_a_model_made_with_them(rope, tmp_path):
    model, tokens = tiny_model("llama"), torch.arange(2, 60)[None]
    plain = logits(model, tokens)
    put_positions(model, stretch(model.config, ContextOptions(context=512, rope=rope, factor=2.0)))
    stretched = logits(model, tokens)
    assert (stretched - plain).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
    assert again.config.max_position_embeddings == 512
    torch.testing.assert_close(logits(again, tokens), stretched)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "deepseek_v3", "phi3"])
def test_ntk_divides_the_slowest_frequency_by_the_factor_and_keeps_the_fastest(family):
    model = tiny_model(family)
    before = frequencies(model)
    put_positions(model, stretch(model.config, ContextOptions(rope="ntk", factor=2.0)))
    change = before / frequencies(model)
    assert change[0] == 1
    assert change[-1].item() == pytest.approx(2.0, rel=1e-5)


def frequencies(model):
    return next(module.inv_freq for module in model.modules() if hasattr(module, "inv_freq")).clone()


def test_a_model_without_rotary_positions_is_not_stretched():
    with pytest.raises(ValueError, match="expected a model with plain rotary positions"):
        stretch(tiny_model("gpt2").config, ContextOptions(rope="yarn", factor=2.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", 0), "Expected temperature in (0, 4], got 0.0"),
        (("--temperature", 5), "Expected temperature in (0, 4], got 5.0"),
        (("--batch", 5000), "Expected text for one batch, 5000 sequences of 48 tokens"),
        (("--context", 9999), "at most the model's 256 tokens, got 9999"),
        (("--steps", 0), "Expected steps >= 1"),
        (("--shard",), "shard: expected several processes, got one"),
    ],
)
def test_wrong_arguments_get_one_message_and_write_nothing(saved_model, tmp_path, arguments, message):
    given = map(
        str, (saved_model, "--data", saved_model / "text.txt", "--out", tmp_path / "out", "--context", 48, *arguments)
    )
    result = CliRunner().invoke(main, ["adapt", *given])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_the_command_shows_all_four_models(saved_model, tmp_path):
    given = map(
        str, (saved_model, "--data", saved_model / "text.txt", "--out", tmp_path / "out", "--context", 48, "--steps", 1)
    )
    result = CliRunner().invoke(main, ["adapt", *given, "--held-out", "1", "--warm-up", "0"])
    assert result.exit_code == 0, result.output
    for name in ("base at the temperature", "adapted", "continued"):
        assert name in result.output
