"""What is written in a figure can be read."""

import json
from itertools import pairwise
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg

from bifocals.plots import draw_study, draw_temperatures

STUDY = Path(__file__).parents[2] / "results" / "temperature.json"


def drawn(figure):
    FigureCanvasAgg(figure).draw()
    return figure


def test_titles_end_inside_the_figure():
    spread = {"mean": 0.4, "min": 0.3, "max": 0.5}
    looks = [{"step": step, "temperatures": {"0": [spread], "1": [spread]}} for step in (1, 2)]
    figure = drawn(draw_temperatures(looks))
    for axes in figure.axes:
        assert axes.title.get_window_extent().x1 <= figure.bbox.x1


def test_names_of_temperatures_do_not_overlap():
    stored = json.loads(STUDY.read_text())
    axes = drawn(draw_study(stored["rows"], stored["summary"])).axes[0]
    names = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(names))
