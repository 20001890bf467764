"""Several short fits into one file: stopped, halved, and with constants changed for one of them."""

import json

import pytest
from click.testing import CliRunner

from bifocals.config import FocusConfig
from bifocals.training import ablation, comparison, layer_fit, mass_loss, study
from bifocals.training.options import LoraOptions, MassOptions
from bifocals.training.study import Variant, command, constants

FOCUS = FocusConfig.network(groups=4, window=8, sinks=1, dim=8)
MASS = MassOptions(steps=2, query_steps=1, rows=8)


@pytest.fixture
def run(saved_model, tmp_path, monkeypatch):
    """Runs a study of a tiny model; returns its rows."""
    monkeypatch.setattr(study, "LENGTH", 64)

    def start(variants, *arguments):
        path = tmp_path / "rows.json"
        data = ["--data", "pydoc", "--sequences", "4", "--held-out", "1", "--json", str(path)]
        result = CliRunner().invoke(command(variants), [str(saved_model), *data, *arguments])
        assert result.exit_code == 0, result.output
        return json.loads(path.read_text())["rows"]

    return start


def test_a_study_runs_what_its_file_does_not_hold(run):
    started = []

    def variants():
        """Say which were asked for."""
        for name, baseline, options in (("mass", None, MASS), ("window", "window", LoraOptions())):
            started.append(name)
            yield Variant("part", name, FOCUS, options, baseline)

    assert [row["name"] for row in run(variants, "--half", "1")] == ["window"]
    first = run(variants)
    assert [row["name"] for row in first] == ["window", "mass"]
    assert run(variants) == first
    window, mass = first
    assert [text["setting"] for text in window["texts"]] == ["dense", "window + sinks"]
    assert {row["setting"] for row in mass["mean"]} == {"top_k 1", "top_k 2"}
    assert mass["options"]["steps"] == 2


def test_constants_are_changed_for_one_fit_alone(run):
    seen = []

    def variants():
        """Look at the constants in between."""
        seen.append(mass_loss.UNEVEN)
        yield Variant("balance", "even", FOCUS, MASS, constants={"mass_loss.UNEVEN": 0.0})
        seen.append(mass_loss.UNEVEN)

    before = mass_loss.UNEVEN
    (row,) = run(variants)
    assert row["constants"] == {"mass_loss.UNEVEN": 0.0}
    assert seen == [before, before]
    with constants({"mass_loss.UNEVEN": 0.0}):
        assert mass_loss.UNEVEN == 0


@pytest.mark.parametrize("module", [ablation, comparison])
def test_every_variant_has_a_name_of_its_own_and_constants_that_exist(module):
    found = list(module.variants())
    assert len({variant.name for variant in found}) == len(found)
    modules = {"mass_loss": mass_loss, "layer_fit": layer_fit}
    for variant in found:
        for name in variant.constants:
            owner, attribute = name.split(".")
            assert hasattr(modules[owner], attribute)


def test_the_ablation_covers_every_part_of_the_recipe():
    parts = {variant.part for variant in ablation.variants()}
    assert {"sinks", "routers", "sides", "balance", "initialisation", "objective", "groups", "dim"} <= parts
