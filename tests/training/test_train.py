"""A fit from text to a folder: what it changes, that it can be stopped at any moment, and how it says no."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bifocals import FocusConfig, attach, lens_of, load
from bifocals.evaluation.perplexity import block_loss
from bifocals.testing import tiny_model, tiny_tokenizer, tiny_tokens
from bifocals.training.checkpoint import CheckpointError
from bifocals.training.data import Blocks, load_blocks
from bifocals.training.mass import MassOptions
from bifocals.training.options import LoraOptions, TrainOptions
from bifocals.training.run import calibration, run_baseline, train
from bifocals.training.trainer import LensTrainer
from bifocals.training.watch import CollapseWatch

FOCUS = FocusConfig(groups=4, window=8, sinks=1)
QUICK = {"focus": FOCUS, "length": 48, "sequences": 16, "held_out": 2}
OPTIONS = TrainOptions(steps=6, batch=2, save_every=2, watch_every=3, warm_up=2)


def fit(out, options=OPTIONS, model=None, **changes):
    model = tiny_model("llama", dtype=torch.float32) if model is None else model
    return train(model, tiny_tokenizer(), ["pydoc"], out, options, **{**QUICK, **changes})


def losses_of(out):
    return json.loads((out / "results.json").read_text())["losses"]


@pytest.mark.parametrize("sparse", [False, True], ids=["soft", "sparse"])
@pytest.mark.parametrize("objective", ["lm", "distill"])
def test_fitting_lowers_the_loss_and_leaves_the_base_alone(objective, sparse, tmp_path):
    model = tiny_model("gpt2", dtype=torch.float32, attn_pdrop=0.1, resid_pdrop=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = TrainOptions(objective=objective, sparse=sparse, steps=20, batch=2, rate=2e-2, watch_every=20)
    results = fit(tmp_path / "out", options, model, sequences=2)
    losses = results["losses"]["lens"]
    assert sum(losses[-5:]) < sum(losses[:5])
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert lens_of(model).mode == "hard"


def test_a_fitted_lens_reads_no_token_ahead(tmp_path):
    model = tiny_model("llama")
    fit(tmp_path / "out", model=model)
    tokens = tiny_tokens(1, 40)
    changed = tokens.clone()
    changed[0, 30:] = 5
    for mode in ("soft", "sparse", "hard"):
        lens_of(model).mode = mode
        with torch.no_grad():
            assert torch.equal(model(tokens).logits[:, :30], model(changed).logits[:, :30])


def test_the_folder_holds_a_lens_its_results_and_no_base(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    seen = []
    results = fit(tmp_path / "out", model=model, report=seen.append)
    assert [each.step for each in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1].hard_loss is not None
    assert 0 < seen[-1].far_kept < 1
    assert 0 < seen[-1].mass_kept < 1
    assert results["held_out"]["rows"][0]["setting"] == "dense"
    again = tiny_model("llama", dtype=torch.float32)
    load(again, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(tiny_tokens()).logits, model(tiny_tokens()).logits)
    checkpoint = tmp_path / "out" / "checkpoints" / "lens" / "checkpoint-6"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "state.json", "state.safetensors", "trainer_state.json"
    ]  # fmt: skip
    lens_bytes = sum(tensor.nbytes for tensor in lens_of(model).state_dict().values())
    assert (checkpoint / "state.safetensors").stat().st_size < 4 * lens_bytes + 20_000
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint-6"]


def test_gradients_added_up_over_micro_batches_are_those_of_the_batch(tmp_path):
    potentials = []
    for micro_batch in (1, 4):
        model = tiny_model("llama")
        options = TrainOptions(steps=3, batch=4, micro_batch=micro_batch, warm_up=0)
        found = fit(tmp_path / str(micro_batch), options, model)["losses"]["lens"]
        potentials.append((torch.tensor(found), lens_of(model).routers["1"].potential))
    torch.testing.assert_close(potentials[0], potentials[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sparse", [False, True], ids=["soft", "sparse"])
def test_full_fine_tuning_trains_the_base_after_the_lens_and_saves_both(sparse, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", dtype=torch.float32)
    before = model.model.embed_tokens.weight.clone()
    options = TrainOptions(steps=2, full_steps=3, sparse=sparse, batch=2, save_every=2)
    results = fit(tmp_path / "out", options, model)
    assert [len(losses) for losses in results["losses"].values()] == [2, 3]
    assert not torch.equal(model.model.embed_tokens.weight, before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    load(again, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(again(tiny_tokens()).logits, model(tiny_tokens()).logits)


def whole_run(out, report=lambda progress: None, **changes):
    model = tiny_model("llama", dtype=torch.float32)
    options = TrainOptions(steps=2, full_steps=3, batch=2, save_every=2)
    return model, fit(out, options, model, report=report, **changes)


def test_a_whole_model_that_is_trained_keeps_no_checkpoint_and_is_not_trained_again(tmp_path, monkeypatch):
    model, results = whole_run(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"run.json", "results.json", "model", "adapter_config.json", "adapter_model.safetensors"}
    left = tmp_path / "out" / "checkpoints" / "everything" / "checkpoint-3"  # as if stopped before it was removed
    left.mkdir(parents=True)
    monkeypatch.setattr(LensTrainer, "train_from", None)
    again, told = whole_run(tmp_path / "out", resume=True)
    assert told == results == json.loads((tmp_path / "out" / "results.json").read_text())
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert lens_of(again).mode == "hard"
    with torch.no_grad():
        assert torch.equal(again(tiny_tokens()).logits, model(tiny_tokens()).logits)
    with pytest.raises(CheckpointError, match=r"measured on 2 sequences held out: expected as many, got 1"):
        whole_run(tmp_path / "out", resume=True, held_out=1)


def test_a_whole_model_whose_results_are_not_written_goes_on_from_its_checkpoints(tmp_path):
    model, results = whole_run(tmp_path / "whole")

    def stop(progress):
        if (progress.phase, progress.step) == ("everything", 3):
            raise Stopped

    with pytest.raises(Stopped):
        whole_run(tmp_path / "out", report=stop)
    seen = []
    again, told = whole_run(tmp_path / "out", resume=True, report=lambda progress: seen.append(progress.step))
    assert seen == [3]
    assert told["losses"] == results["losses"]
    assert told["held_out"] == results["held_out"]
    with torch.no_grad():
        assert torch.equal(again(tiny_tokens()).logits, model(tiny_tokens()).logits)


KILLED = {
    "lens": TrainOptions(steps=24, batch=2, save_every=3, watch_every=5),
    "lens and everything": TrainOptions(steps=8, full_steps=8, batch=2, save_every=3, watch_every=5),
}


@pytest.mark.parametrize("options", KILLED.values(), ids=KILLED)
def test_killed_at_any_moment_a_run_resumes_to_the_same_losses_bit_for_bit(options, tmp_path):
    def model():
        return tiny_model("gpt2", dtype=torch.float32, attn_pdrop=0.1, resid_pdrop=0.1)

    fit(tmp_path / "whole", options, model())
    moments = random.Random(0)
    kills = 0
    while not (tmp_path / "killed" / "results.json").exists():
        child = os.fork()
        if child == 0:
            status = 1
            try:
                fit(tmp_path / "killed", options, model(), resume=(tmp_path / "killed" / "run.json").exists())
                status = 0
            finally:
                os._exit(status)
        if kills < 3:
            time.sleep(0.3 + 0.9 * moments.random())
            os.kill(child, signal.SIGKILL)
            kills += 1
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    assert kills >= 1
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")
    tensors = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert tensors[0] == tensors[1]


class Stopped(Exception):
    pass


def stop_at(step):
    def report(progress):
        if progress.step == step:
            raise Stopped

    return report


@pytest.fixture
def half_done(tmp_path):
    """A run stopped after its fifth step, so that its checkpoint is of the fourth."""
    with pytest.raises(Stopped):
        fit(tmp_path / "out", report=stop_at(5))
    return tmp_path / "out"


def test_resuming_reads_no_pickle(half_done, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a pickle was read")

    monkeypatch.setattr(torch, "load", refuse)
    fit(half_done, resume=True)
    assert len(losses_of(half_done)["lens"]) == 6


def test_a_run_resumes_only_as_what_it_was(half_done):
    with pytest.raises(CheckpointError, match="holds a run with other options"):
        fit(half_done, TrainOptions(steps=7, batch=2, save_every=2, watch_every=3, warm_up=2), resume=True)
    with pytest.raises(CheckpointError, match="with other length, tokens"):
        fit(half_done, resume=True, length=40, sequences=16)
    with pytest.raises(CheckpointError, match="with other weights"):
        fit(half_done, model=tiny_model("llama", dtype=torch.float32, seed=1), resume=True)
    with pytest.raises(ValueError, match="is not empty: expected a new folder"):
        fit(half_done)
    with pytest.raises(CheckpointError, match="Nothing to resume"):
        fit(half_done / "elsewhere", resume=True)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.safetensors", b"\x80\x04N."),
        ("state.json", b"[]"),
        ("state.json", b'{"rates": "x", "schedule": {}}'),
        ("trainer_state.json", b'{"surprise": 1}'),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_a_remedy(half_done, file, content):
    (half_done / "checkpoints" / "lens" / "checkpoint-4" / file).write_bytes(content)
    with pytest.raises(CheckpointError, match="checkpoint-4"):
        fit(half_done, resume=True)


def test_two_processes_give_the_losses_of_one(tmp_path, saved_model):
    command = ["train", str(saved_model), "--data", "pydoc", "--length", "48", "--sequences", "8", "--held-out", "1"]
    command += [
        "--window",
        "8",
        "--groups",
        "4",
        "--score",
        "cosine",
        "--objective",
        "lm",
        "--steps",
        "4",
        "--batch",
        "4",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for name, start in (("one", [sys.executable]), ("two", launch)):
        out = ["--out", str(tmp_path / name)]
        done = subprocess.run(
            [*start, "-m", "bifocals", *command, *out], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    one, two = (losses_of(tmp_path / name)["lens"] for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-6)
    assert one[0] != one[1]


def test_the_mass_objective_is_fitted_by_the_same_call(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    focus = FocusConfig.network(groups=4, window=8, sinks=1, dim=8)
    seen = []
    fit(tmp_path / "out", MassOptions(steps=4, query_steps=2, rows=8), model, focus=focus, report=seen.append)
    assert any(each.mass_kept for each in seen)
    assert {each.phase.partition(",")[0] for each in seen} == {"capture", "fit", "weigh", "fitted"}
    assert all(0 < each.step <= each.steps for each in seen)
    assert seen[-1].step == seen[-1].steps
    assert all(each.tokens_per_second > 0 for each in seen if each.seconds_left is not None)
    assert sum(each.tokens_per_second is not None for each in seen) > 3
    last = seen[-1]
    assert last.soft_loss != last.hard_loss
    assert None not in (last.soft_loss, last.hard_loss, last.mass_kept, last.far_kept, last.dominance)
    load(tiny_model("llama", dtype=torch.float32), tmp_path / "out")


def test_a_fit_by_mass_is_logged_where_it_is_asked_to(tmp_path):
    options = MassOptions(steps=4, query_steps=2, rows=8, report_every=2, report_to="tensorboard")
    seen = []
    fit(tmp_path / "out", options, focus=FocusConfig.network(groups=4, window=8, sinks=1, dim=8), report=seen.append)
    logged = EventAccumulator(str(tmp_path / "out" / "runs" / "bifocals")).Reload()
    for layer in ("0", "1"):
        told = [each for each in seen if each.phase == f"fit, layer {layer}"]
        assert len(told) > 1
        for name in ("loss", "mass_kept", "far_kept", "dominance"):
            found = [(event.step, event.value) for event in logged.Scalars(f"{name}/layer {layer}")]
            known = [(each.step, getattr(each, name)) for each in told if getattr(each, name) is not None]
            assert found == [(step, pytest.approx(value)) for step, value in known]
            assert len(known) > 1


def test_a_resumed_fit_by_mass_tells_the_losses_of_layers_finished_before(tmp_path):
    options = MassOptions(steps=4, query_steps=2, rows=8, save_every=2, report_every=1)
    how = {"focus": FocusConfig.network(groups=4, window=8, sinks=1, dim=8)}
    fit(tmp_path / "whole", options, **how)
    with pytest.raises(Stopped):
        fit(tmp_path / "stopped", options, report=stop_at(9), **how)  # the third step of the second layer
    fit(tmp_path / "stopped", options, resume=True, **how)
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")
    assert list(losses_of(tmp_path / "whole")) == ["layer 0", "layer 1"]


@pytest.mark.parametrize("baseline", ["window", "random", "kmeans"])
def test_baselines_are_measured_like_a_fit(baseline, tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    out = tmp_path / "out"
    results = run_baseline(model, tiny_tokenizer(), ["pydoc"], out, baseline, **QUICK)
    settings = [row["setting"] for row in results["held_out"]["rows"]]
    assert settings == ["dense", "window + sinks", *(["top_k 1", "top_k 2"] if baseline != "window" else [])]
    assert json.loads((out / "results.json").read_text())["baseline"] == baseline
    if baseline != "window":
        held_out = load_blocks(["pydoc"], tiny_tokenizer(), QUICK["length"], part="held-out", limit=QUICK["held_out"])
        lens_of(model).top_k = 1
        over_all = lens_of(model).measure(held_out.tokens).dominance
        assert over_all < 0.6
        assert results["held_out"]["rows"][2]["dominance"] >= over_all  # of the worst block
        load(tiny_model("llama", dtype=torch.float32), out)


def test_lora_is_trained_by_peft_and_measured_like_a_fit(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    tokens = tiny_tokens(1, 48)[0]
    before = block_loss(model, tokens)
    options = LoraOptions(steps=3, batch=2, rate=1e-2)
    results = run_baseline(model, tiny_tokenizer(), ["pydoc"], tmp_path / "out", "lora", options=options, **QUICK)
    assert len(results["losses"]["lora"]) == 3
    with lens_of(model).disabled():
        assert block_loss(model, tokens) != before
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


NETWORKS = FocusConfig.network(groups=4, window=8, sinks=1, dim=8)
SHORT = MassOptions(steps=2, query_steps=1, rows=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 16}, "expected more than 17 tokens in a row"),
        ({"sequences": 1}, "expected at least 2 rows of tokens"),
    ],
)
def test_a_fit_by_mass_that_cannot_be_done_leaves_nothing_behind(changes, message, tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path / "out", SHORT, model, focus=NETWORKS, **changes)
    assert not (tmp_path / "out").exists()
    assert lens_of(model) is None
    fit(tmp_path / "out", SHORT, model, focus=FocusConfig(groups=2, window=4))
    assert lens_of(model).focus.groups == 2


def test_networks_are_not_trained_on_fewer_sequences_than_there_are_processes_to_calibrate_them(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    lens = attach(tiny_model("llama", dtype=torch.float32), NETWORKS)
    with pytest.raises(ValueError, match="expected at least 2 rows of tokens"):
        calibration(lens, Blocks(tiny_tokens(1, 48), torch.zeros(1, dtype=torch.long), ("text",)))


def test_a_model_with_a_lens_is_not_fitted_as_another(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    attach(model, FOCUS)
    with pytest.raises(ValueError, match="The model has a lens of its own"):
        fit(tmp_path / "out", model=model, focus=NETWORKS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [OPTIONS, MassOptions(steps=4, query_steps=2, rows=8, report_every=1)])
def test_a_fit_that_is_stopped_leaves_a_lens_as_it_was_and_goes_on_in_the_same_process(options, tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    lens = attach(model, FOCUS)
    before = {name: tensor.clone() for name, tensor in lens.state_dict().items()}
    with pytest.raises(Stopped):
        fit(tmp_path / "out", options, model, report=stop_at(4))
    torch.testing.assert_close(lens.state_dict(), before, rtol=0, atol=0)
    fit(tmp_path / "out", options, model, resume=True)
    again = tiny_model("llama", dtype=torch.float32)
    attach(again, FOCUS).load_state_dict(before)
    fit(tmp_path / "whole", options, again)
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


def test_a_run_does_not_go_on_from_another_lens(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    lens = attach(model, FOCUS)
    with pytest.raises(Stopped):
        fit(tmp_path / "out", model=model, report=stop_at(1))
    lens.routers["0"].potential.add_(torch.arange(4.0))
    with pytest.raises(CheckpointError, match="holds a run with other start"):
        fit(tmp_path / "out", model=model, resume=True)


def test_a_kill_while_a_run_is_opened_leaves_a_folder_that_can_be_used(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".run.json.4711").write_text("{")
    fit(out, SHORT, focus=NETWORKS)
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_a_model_that_reads_ahead_is_fitted_by_mass_and_has_no_perplexity(family, tmp_path):
    model = tiny_model(family, dtype=torch.float32)
    for objective in ("lm", "distill"):
        with pytest.raises(ValueError, match=r"expected a decoder for the objectives lm and distill. Fit it by mass."):
            fit(tmp_path / "out", TrainOptions(objective=objective), model)
    assert not (tmp_path / "out").exists()
    found = fit(tmp_path / "out", SHORT, model, focus=NETWORKS)["held_out"]
    for row in (*found["rows"], *found["mean"]):
        assert {"perplexity", "recovered", "interval"}.isdisjoint(row)
        assert 0 < row["far_kept"] < 1
        assert 0.25 <= row["dominance"] <= 1


def test_collapse_is_reported_with_what_to_do():
    watch = CollapseWatch(groups=4)
    assert [watch.see(step, 0.6) for step in (0, 10, 40)] == [None] * 3
    assert "Lower the rate" in watch.see(50, 0.6)


def test_collapse_is_told_once_and_again_only_after_it_had_recovered():
    watch = CollapseWatch(groups=4)
    seen = [(0, 0.6), (50, 0.6), (60, 0.6), (120, 0.6), (130, 0.4), (140, 0.6), (180, 0.6), (190, 0.6), (200, 0.6)]
    assert [step for step, dominance in seen if watch.see(step, dominance)] == [50, 190]


def test_a_fit_reports_a_collapse_once_or_logs_it_where_nobody_watches(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("bifocals.training.watch.COLLAPSED", 0.5)
    monkeypatch.setattr("bifocals.training.watch.PATIENCE", 2)
    options, told = TrainOptions(steps=8, batch=2, watch_every=2), []
    fit(tmp_path / "watched", options, report=lambda progress: told.append((progress.step, progress.warning)))
    assert [step for step, warning in told if warning] == [4]
    assert not caplog.records
    fit(tmp_path / "alone", options)
    assert [record.getMessage() for record in caplog.records if "collapsing" in record.getMessage()] == [told[3][1]]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match="at step 1: expected a finite one"):
        fit(tmp_path / "out", model=model)


def test_a_lens_without_focus_is_refused(tmp_path):
    from bifocals import FocalConfig

    model = tiny_model("llama", dtype=torch.float32)
    attach(model, FocalConfig(temperature=0.5))
    with pytest.raises(ValueError, match="Expected a lens with Focus"):
        fit(tmp_path / "out", model=model)
