"""The study of temperatures: it goes on where it was stopped, compares in pairs, and draws what it found."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from bifocals import FocalConfig
from bifocals.training import recall, temperature_study
from bifocals.training.options import PretrainOptions
from bifocals.training.presets import PRESETS, Preset
from bifocals.training.recall import (
    ASKED,
    FIRST_HAY,
    FIRST_QUESTION,
    FIRST_VALUE,
    KEYS,
    TASK,
    VALUES,
    draw_recall,
    recall_accuracy,
    train_recall,
)
from bifocals.training.temperature_study import main, summarise

OPTIONS = PretrainOptions(steps=2, batch=4, micro_batch=4, warm_up=1, save_every=1, evaluate_every=1)
SMALL = Preset(hidden=16, intermediate=24, layers=1, heads=2, vocabulary=300, context=32, options=OPTIONS)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The study of a tiny model on a small text."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} bottles of beer on the wall. " for number in range(400)))
    monkeypatch.setitem(PRESETS, "nano", SMALL)
    monkeypatch.setattr(temperature_study, "SOURCES", (str(path),))
    monkeypatch.setattr(temperature_study, "HELD_OUT_TOKENS", 64)
    monkeypatch.setattr(
        temperature_study,
        "trials",
        lambda: [temperature_study.Trial("temperature", setting, 0, 32) for setting in ("1.0", "0.4", "refined")],
    )


def test_a_stopped_study_goes_on_and_stores_summary_and_figure(small, tmp_path, monkeypatch):
    path = tmp_path / "study.json"
    assert CliRunner().invoke(main, ["--json", str(path), "--only", "0.4|1.0"]).exit_code == 0
    before = json.loads(path.read_text())["rows"]
    assert [row["setting"] for row in before] == ["1.0", "0.4"]
    result = CliRunner().invoke(main, ["--json", str(path)])
    assert result.output.count(" s\n") == 1
    stored = json.loads(path.read_text())
    assert stored["rows"][:2] == before
    assert stored["rows"][2]["temperatures"]["0"][1]["mean"] == pytest.approx(0.4, abs=0.05)
    assert sorted(stored["summary"]["order"]) == ["0.4", "1.0", "refined"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    listed = CliRunner().invoke(main, ["--json", str(path), "--list"]).output
    assert listed.count("done") == 3


def row(setting, seed, losses, context=256):
    validation = [{"step": 10 * (number + 1), "loss": loss} for number, loss in enumerate(losses)]
    part = "temperature" if context == 256 else "context"
    about = {"part": part, "setting": setting, "seed": seed, "context": context, "tokens_per_step": 100}
    return {**about, "held_out": {"loss": losses[-1]}, "validation": validation}


def test_temperatures_are_compared_with_standard_attention_of_the_same_seed():
    rows = [row("1.0", 0, [3.0, 2.0]), row("1.0", 1, [4.0, 3.0]), row("0.4", 0, [3.0, 1.9]), row("0.4", 1, [4.0, 2.7])]
    found = summarise(rows)
    apart = found["temperatures"]["0.4"]["more_than_standard"]
    assert apart["mean"] == pytest.approx(-0.2)
    assert apart["interval"] == pytest.approx([-0.2 - 12.706 * 0.1, -0.2 + 12.706 * 0.1])
    assert found["order"] == ["0.4", "1.0"]
    # 0.4 is at 2.0 after 10 + 10 * (1 / 1.1) of 20 steps.
    assert found["tokens_saved"]["mean"] == pytest.approx((0.5 - 0.5 / 1.1 + 0.5 - 0.5 / 1.3) / 2)


def test_tokens_saved_are_negative_where_the_temperature_ends_behind():
    saved = summarise([row("1.0", 0, [3.0, 2.0]), row("0.4", 0, [3.0, 2.5])])["tokens_saved"]
    assert saved["mean"] == pytest.approx(-0.25)


def test_every_key_asked_for_was_shown_with_its_value():
    tokens = draw_recall(50, 40, seed=1)
    assert tokens.shape == (50, 40)
    for sequence in tokens.tolist():
        needles = [divmod(token, VALUES) for token in sequence[:-ASKED] if token < FIRST_VALUE]
        assert sorted(key for key, _ in needles) == list(range(KEYS))
        asked = zip(sequence[-ASKED::2], sequence[1 - ASKED :: 2])
        assert {(question - FIRST_QUESTION, answer - FIRST_VALUE) for question, answer in asked} == set(needles)
        assert sum(token >= FIRST_HAY for token in sequence) == 40 - ASKED - KEYS


def test_recall_is_measured_at_the_values_asked_for():
    class Oracle(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            following = input_ids.roll(-1, dims=1)
            following[0] = 0  # knows nothing of the first sequence
            return type("Output", (), {"logits": torch.nn.functional.one_hot(following, 320).float()})

    assert recall_accuracy(Oracle(), draw_recall(4, 32, seed=0)) == 0.75


def test_a_recall_model_is_trained_and_asked(tmp_path):
    preset = replace(SMALL, vocabulary=320, options=OPTIONS)
    task = replace(TASK, preset=preset, lengths=(32, 64), sequences=8)
    found = train_recall(FocalConfig(temperature=0.4), 0, tmp_path / "run", task)
    assert list(found["accuracy"]) == ["32", "64"]
    assert recall.train_recall(FocalConfig(temperature=0.4), 0, tmp_path / "run", task)["accuracy"] == found["accuracy"]
