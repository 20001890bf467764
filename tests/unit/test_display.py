"""What one sees of a fit."""

import pytest

from bifocals import display
from bifocals.display import FitDisplay, describe
from bifocals.training.watch import Progress


def test_progress_is_one_line_of_what_is_known():
    seen = Progress("lens", 3, 10, 2.5, 1000.0, 75.0, soft_loss=0.0, hard_loss=0.0, far_kept=0.25, dominance=0.2)
    assert describe(seen) == (
        "lens, loss 2.500, perplexity soft 1.00, hard 1.00, far pairs 25%, dominance 20%, 1000 tokens/s, 1:15 left"
    )


def test_every_warning_is_shown(capsys):
    display = FitDisplay()
    for warning in ("Groups are collapsing.", None, "Groups are collapsing."):
        display.report(Progress("lens", 3, 10, 2.5, warning=warning))
    assert capsys.readouterr().err.count("Groups are collapsing.") == 2


def test_what_is_not_known_is_not_told():
    assert describe(Progress("capture", 3, 10)) == "capture"


def test_where_nothing_can_be_written_over_a_line_comes_now_and_then(capsys, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with FitDisplay() as shown:
        for step in range(1, 7):
            shown.report(Progress("fit, layer 2", step, 6, 1.5))
            now += display.PAUSE / 2
        shown.report(Progress("fitted", 1, 1, hard_loss=0.0))  # a stage tells where it begins
        for setting in ("dense", "top_k 1"):
            shown.on_run("books/emma.txt", setting)
    assert capsys.readouterr().err.splitlines() == [
        "1/6 fit, layer 2, loss 1.500",
        "3/6 fit, layer 2, loss 1.500",
        "5/6 fit, layer 2, loss 1.500",
        "1/1 fitted, hard 1.00",
        "1/? measuring emma.txt, dense",
    ]


def test_what_is_measured_after_a_fit_is_counted_anew():
    with FitDisplay() as shown:
        shown.report(Progress("fit", 2, 2))
        for count in (1, 2, 3):
            shown.on_run("books/emma.txt", "top_k 1")
            (task,) = shown.progress.tasks
            assert (task.completed, task.total) == (count, None)


def test_names_in_brackets_are_shown(capsys):
    with FitDisplay() as shown:
        shown.on_run("data[train].txt", "top_k 1")
    assert "data[train].txt" in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_one_tells(rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with FitDisplay() as shown:
        shown.report(Progress("fit", 1, 6, warning="Groups are collapsing."))
    told = capsys.readouterr().err
    assert ("1/6 fit" in told) == ("Groups are collapsing." in told) == (rank == "0")
