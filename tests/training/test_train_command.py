"""`bifocals train`, as a user meets it."""

import json

import pytest
from click.testing import CliRunner

from bifocals.cli import main
from bifocals.display import FitDisplay


def run(*arguments):
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def test_train_fits_measures_and_writes_a_lens(saved_model, tmp_path):
    result = run(
        *(saved_model, "--data", "pydoc", "--out", tmp_path / "out", "--objective", "distill", "--steps", 2),
        *("--batch", 2, "--length", 48, "--sequences", 4, "--held-out", 1, "--window", 8, "--groups", 4),
    )
    assert result.exit_code == 0, result.output
    assert "top_k 2" in result.output
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["focus"]["score"] == "network"
    assert stored["options"]["objective"] == "distill"
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", 4), "--rank: not an option of --objective mass"),
        (("--objective", "lm", "--rows", 4), "--rows: not an option of --objective lm"),
        (("--objective", "lm", "--steps", 0), "Expected steps >= 1, got 0"),
        (("--objective", "lm", "--batch", 3, "--micro-batch", 2), "Expected batch a multiple of micro_batch 2"),
        (("--lens", "somewhere", "--groups", 4), "--lens brings its own options"),
        (("--baseline", "random", "--resume"), "measured in one go"),
        (("--resume", "--window", 4, "--rows", 8), "Nothing to resume"),
        (("--groups", 0), "Expected groups >= 1"),
    ],
)
def test_wrong_arguments_get_one_message(saved_model, tmp_path, arguments, message):
    result = run(saved_model, "--data", "pydoc", "--out", tmp_path / "out", "--length", 48, *arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--report-to", "nowhere"), "report_to: expected one of none, all"),
        (("--objective", "mass", "--report-to", "nowhere"), "report_to: expected one of none, tensorboard"),
        (("--shard",), "shard: expected several processes, got one"),
        (("--window", 43), "Expected sequences of at least 49 tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(saved_model, tmp_path, arguments, message):
    given = ("--data", "pydoc", "--out", tmp_path / "out", "--length", 48, "--objective", "lm", "--window", 4)
    result = run(saved_model, *given, *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_how_to_go_on_and_that_goes_on(saved_model, tmp_path, monkeypatch):
    given = (saved_model, "--data", "pydoc", "--out", tmp_path / "out", "--steps", 4, "--query-steps", 2, "--rows", 8)
    given += ("--length", 48, "--sequences", 4, "--held-out", 1, "--window", 8, "--groups", 4)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FitDisplay, "on_run", stop)
        stopped = run(*given)
    assert stopped.exit_code == 1
    assert "--resume goes on from it" in stopped.output
    assert not (tmp_path / "out" / "results.json").exists()
    assert run(*given, "--resume").exit_code == 0
    assert (tmp_path / "out" / "results.json").exists()


def test_help_names_every_option_with_the_default_of_each_objective():
    text = " ".join(run("--help").output.split())
    assert "mass: 2; lm, distill: 4; lora: 4" in text
    assert "--full-steps" in text
