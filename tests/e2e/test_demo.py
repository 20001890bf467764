"""The demonstration on the real model, cut short: what it shows is measured and fits together."""

import pytest
from rich.console import Console

from bifocals import demo

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]


def test_it_shows_every_setting_both_answers_and_that_folding_changes_nothing(monkeypatch):
    for name, smaller in {"LENGTH": 384, "DECODED": 2, "DOCUMENTS": ("with",)}.items():
        monkeypatch.setattr(demo, name, smaller)
    console = Console(record=True, width=100)
    demo.run(console, with_fit=False)
    shown = console.export_text()
    settings = ["dense", "window + sinks", "Focus, top_k 1", "Focus, top_k 2", "Focus, top_k 4"]
    forms = ["beside the model", "folded into the weights"]
    lines = [line.strip() for line in shown.splitlines()]
    rows = {name: line.split() for name in settings + forms for line in lines if line.startswith(f"{name}  ")}
    perplexity, far = ([float(rows[name][at].rstrip("%")) for name in settings] for at in (-4, -3))
    assert far[0] == 100
    assert far[1] == 0 < far[2] < far[3] < far[4] < 100
    assert perplexity[0] < perplexity[4] < perplexity[1]
    beside, folded = (rows[name] for name in forms)
    assert beside[-3] == folded[-3]
    for said in ("The shipped lens is on", "   base    ", "   Focus   "):
        assert said in shown
