"""`bifocals pretrain`, as a user meets it."""

import json

import pytest
from click.testing import CliRunner

from bifocals.cli import main


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} bottles of beer on the wall. " for number in range(400)))
    return path


def run(text, out, *arguments):
    given = ("--data", text, "--out", out, "--steps", 1, "--batch", 2, "--micro-batch", 2, "--context", 32, *arguments)
    return CliRunner().invoke(main, ["pretrain", *map(str, given)])


def test_pretrain_trains_a_model_and_folds_it(text, tmp_path):
    out = tmp_path / "out"
    result = run(text, out, "--preset", "nano", "--warm-up", 0)
    assert result.exit_code == 0, result.output
    assert "bits per byte" in result.output
    stored = json.loads((out / "results.json").read_text())
    assert stored["focal"]["temperature"] == 0.4
    assert stored["length"] == 32
    assert stored["utilisation"] > 0
    given = ["fold", str(out / "model"), "--lens", str(out / "lens"), "--out", str(tmp_path / "folded")]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "giga"), "Unknown preset 'giga': expected one of nano, micro"),
        (("--preset", "nano", "--temperature", "0"), "Expected temperature in (0, 4], got 0.0"),
        (("--preset", "nano", "--temperature", "4.1"), "Expected temperature in (0, 4], got 4.1"),
        (("--preset", "nano", "--temperature", "warm"), "expected a number in (0, 4] or 'learned', got 'warm'"),
        (("--preset", "nano", "--form", "sequence"), "expected form 'token' or 'prefix' for a causal model"),
        (("--preset", "nano", "--temperature", "learned", "--form", "constant"), "expected a form that is learned"),
        (("--preset", "nano", "--per", "head", "--maximum", "1"), "--per, --maximum: of learned temperatures"),
        (("--preset", "nano", "--batch", "3"), "a multiple of micro_batch 2, got 3: change one of the two."),
        (("--preset", "nano", "--seed", "-1"), "Expected a seed in [0, 2^32), got -1"),
        (("--preset", "nano", "--report-to", "nowhere"), "report_to: expected one of none, all"),
        (("--preset", "nano", "--shard"), "shard: expected several processes, got one"),
        (("--preset", "nano", "--focus", "--score", "network", "--window", "27"), "at least 33 tokens"),
        (("--preset", "nano", "--batch", "4000"), "Expected text for one batch, 4000 sequences of 32 tokens"),
        (("--preset", "nano", "--groups", "4"), "--groups: options of Focus, expected together with --focus"),
        (("--preset", "nano", "--sparse"), "--sparse: options of Focus, expected together with --focus"),
        (("--preset", "nano", "--resume"), "Start it without --resume."),
        (("--preset", "nano", "--factor", "2"), "Expected factor 1 without rope"),
        (("--preset", "nano", "--data", "pydoc@all"), "'pydoc@all': expected a source without '@'"),
        (("--preset", "nano", "--data", "nowhere.txt"), "No text at 'nowhere.txt'"),
    ],
)
def test_wrong_arguments_get_one_message_and_write_nothing(text, tmp_path, arguments, message):
    result = run(text, tmp_path / "out", *arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_help_names_the_options_of_temperature_context_recipe_and_focus():
    result = CliRunner().invoke(main, ["pretrain", "--help"])
    for option in ("--form", "--per", "--rope", "--rate", "--sparse", "--groups"):
        assert option in result.output
