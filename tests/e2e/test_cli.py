"""The command line, as a user meets it."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, PreTrainedModel

from bifocals import FocalConfig, FocusConfig, attach
from bifocals.cli import main
from bifocals.testing import tiny_model


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_help_says_what_each_command_is_for() -> None:
    for command in ("bench", "check", "demo", "fold"):
        assert command in run("--help").output
    assert "oracle" in run("bench", "attention", "--help").output


def test_bench_attention_writes_every_number_of_its_table(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "numbers.json"
    result = run(
        *("bench", "attention", "--lengths", "200,1100", "--groups", "4", "--top-k", "2", "--window", "16"),
        *("--sinks", "2", "--dim", "8", "--repeats", "1", "--backward", "--json", str(path)),
    )
    assert result.exit_code == 0, result.output
    stored = json.loads(path.read_text())
    assert [(row["length"], row["groups"]) for row in stored["rows"]] == [
        (200, "balanced"),
        (200, "unbalanced"),
        (1100, "balanced"),
        (1100, "unbalanced"),
    ]
    for row in stored["rows"]:
        assert row["bound"] == pytest.approx(1 / row["pairs_kept"])
        assert row["fraction_of_bound"] == pytest.approx(row["speedup"] / row["bound"])
        assert row["dense_seconds"] > 0
        assert row["max_error"] < 1e-5
    assert stored["surroundings"]["torch"] == torch.__version__


def test_bench_temperature_times_every_form_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "temperature.json"
    options = ("--preset", "nano", "--length", "16", "--batch", "1", "--repeats", "2", "--json", str(path))
    result = run("bench", "temperature", *options)
    assert result.exit_code == 0, result.output
    stored = json.loads(path.read_text())
    assert len(stored["rows"]) == 6
    assert stored["rows"][0]["ratio"] == 1
    assert all(len(seconds) == 2 for seconds in stored["seconds"].values())
    assert all(row["form"] in result.output for row in stored["rows"])


def test_bench_attention_prints_no_timing_when_the_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from bifocals.benchmarks import attention

    def wrong(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        return torch.zeros_like(arguments[0])

    monkeypatch.setattr(attention, "focus_attention", wrong)
    result = run("bench", "attention", "--lengths", "100", "--repeats", "1")
    assert result.exit_code != 0
    assert "speedup" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "attention", "--lengths", "10,x"), "separated by commas"),
        (("bench", "attention", "--groups", "2", "--top-k", "3"), "expected at most the 2 groups, got 3"),
        (("check", "no-such-model"), "no-such-model"),
        (("check", "smollm2-135m", "--no-focus"), "nothing to check"),
    ],
)
def test_wrong_arguments_get_one_message_and_no_traceback(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code not in (0, None)
    assert message in result.output
    assert "Traceback" not in result.output


def test_check_prints_every_promise_and_succeeds(saved_model: Path) -> None:
    result = run("check", str(saved_model), "--focal", "0.5")
    assert result.exit_code == 0, result.output
    assert result.output.count("kept") >= 7
    assert "no look-ahead" in result.output


def test_check_takes_a_saved_lens(saved_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved_model)
    attach(model, FocusConfig(groups=3, window=4)).save(tmp_path / "lens")
    result = run("check", str(saved_model), "--lens", str(tmp_path / "lens"))
    assert result.exit_code == 0, result.output


def test_fold_writes_a_stock_checkpoint_with_the_same_logits(saved_model: Path, tmp_path: Path) -> None:
    result = run("fold", str(saved_model), "--temperature", "0.5", "--out", str(tmp_path / "folded"))
    assert result.exit_code == 0, result.output
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    model = AutoModelForCausalLM.from_pretrained(saved_model)
    attach(model, FocalConfig(temperature=0.5))
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(folded(tokens).logits, model(tokens).logits)


def test_a_lens_of_other_weights_is_folded_only_where_that_is_said(saved_model: Path, tmp_path: Path) -> None:
    attach(tiny_model("llama", seed=1), FocalConfig(temperature=0.5)).save(tmp_path / "lens")
    given = ["fold", str(saved_model), "--lens", str(tmp_path / "lens"), "--out", str(tmp_path / "folded")]
    refused = run(*given)
    assert refused.exit_code != 0
    assert "--allow-other-weights" in refused.output
    assert run(*given, "--allow-other-weights").exit_code == 0


def test_fold_does_not_overwrite(saved_model: Path) -> None:
    before = sorted(saved_model.iterdir())
    result = run("fold", str(saved_model), "--out", str(saved_model))
    assert result.exit_code != 0
    assert "does not exist yet" in result.output
    assert sorted(saved_model.iterdir()) == before


def test_a_fold_that_stops_half_way_leaves_nothing(saved_model: Path, tmp_path: Path, monkeypatch) -> None:
    def stopping(model, folder):
        (folder / "config.json").write_text("{}")
        raise OSError("the disk is full")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", stopping)
    result = run("fold", str(saved_model), "--out", str(tmp_path / "folded"))
    assert result.exit_code == 1
    assert "the disk is full" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


PARTS = {"routing", "near", "far", "attention", "append", "rest"}


def test_bench_decode_measures_one_layer_and_says_where_time_and_memory_go(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    result = run(
        *("bench", "decode", "--context", "300,5000", "--groups", "4", "--top-k", "2", "--window", "16", "--dim", "8"),
        *("--heads", "4", "--kv-heads", "2", "--repeats", "2", "--json", str(path)),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["context"] for row in rows] == [300, 5000]
    for row in rows:
        assert row["parts"].keys() == {"near", "far", "append"}
        assert row["speedup"] == pytest.approx(row["dense_seconds"] / row["focus_seconds"])
        assert row["max_error"] < 1e-5
    assert 1 <= rows[1]["memory"] < 1.2


def test_bench_decode_prints_no_timing_when_the_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from bifocals.benchmarks.decode import Layer

    monkeypatch.setattr(Layer, "focus", lambda layer, query, reads: torch.zeros_like(query))
    result = run("bench", "decode", "--context", "300", "--window", "16", "--dim", "8", "--repeats", "1")
    assert "differs from the float64 oracle" in str(result.exception)
    assert "speedup" not in result.output


def test_bench_decode_and_prefill_measure_a_whole_model(saved_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    pattern = ("--groups", "4", "--window", "16", "--repeats", "1", "--json", str(path))
    result = run("bench", "decode", str(saved_model), "--context", "60,2500", *pattern)
    assert result.exit_code == 0, result.output
    for row in json.loads(path.read_text())["rows"]:
        assert row["parts"].keys() == PARTS
        assert row["parts"]["routing"] > 0
        assert row["parts"]["near"] > 0
    result = run("bench", "prefill", str(saved_model), "--lengths", "40,2100", *pattern)
    assert result.exit_code == 0, result.output
    for row in json.loads(path.read_text())["rows"]:
        assert row["parts"].keys() == PARTS
        assert row["parts"]["near"] > 0
        assert row["parts"]["far"] > 0


@pytest.mark.parametrize("wrong", [["--top-k", "9"], ["--heads", "4", "--kv-heads", "3"], ["--context", "100"]])
def test_bench_decode_refuses_what_cannot_be(wrong: list[str]) -> None:
    result = run("bench", "decode", *wrong)
    assert result.exit_code == 2
    assert "expected" in result.output
