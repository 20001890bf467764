"""What the README shows, run as it stands there."""

import re
from pathlib import Path

import pytest

from bifocals.report import DOCUMENTS, ROOT, with_tables

README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(snippet: str) -> None:
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.real
@pytest.mark.xdist_group("real")
def test_the_ten_lines_run_on_the_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = (snippet for snippet in SNIPPETS if "attach" in snippet)
    run(snippet)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.xdist_group("real")
def test_the_fitting_snippet_runs_on_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = (snippet for snippet in SNIPPETS if "training" in snippet)
    run(snippet)
    assert (tmp_path / "lens" / "results.json").is_file()


def test_the_operators_snippet_runs() -> None:
    (snippet,) = (snippet for snippet in SNIPPETS if "focus_attention" in snippet)
    run(snippet)


def test_the_tables_are_made_from_the_stored_results() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        assert with_tables(text, ROOT / "results") == text
        assert "|---" in text
        assert "Not measured yet." not in text
    assert "| 16,384 |" in README
    assert "| 2,048 | mean |" in README
