"""One definition, one default, one sentence per option; validated on construction."""

import dataclasses
import json

import pytest

from bifocals import FocalConfig, FocusConfig
from bifocals.config import as_dict, from_dict


def test_focus_defaults_are_those_of_the_design():
    config = FocusConfig()
    assert (config.groups, config.top_k, config.window, config.sinks, config.dim, config.tau) == (8, 2, 128, 4, 16, 0.1)
    assert (config.routers, config.sides, config.score, config.balance) == ("kv_head", "separate", "cosine", "causal")


@pytest.mark.parametrize(("groups", "top_k"), [(1, 1), (2, 2), (3, 2), (64, 2)])
def test_a_query_reads_two_groups_or_the_only_one(groups, top_k):
    assert FocusConfig(groups=groups).top_k == top_k


def test_the_paper_is_one_constructor_away_and_keeps_other_options():
    config = FocusConfig.paper(groups=4, window=7, gate="log")
    assert (config.routers, config.sides, config.score, config.balance) == ("layer", "same", "dot", "sinkhorn")
    assert (config.groups, config.window, config.gate, config.top_k, config.sinks) == (4, 7, "log", 1, 0)
    assert FocusConfig.paper().gate == "sigmoid"


@pytest.mark.parametrize("kind", [FocalConfig, FocusConfig])
def test_configs_are_frozen_take_names_only_and_have_a_sentence_for_each_option(kind):
    config = kind()
    for option in dataclasses.fields(kind):
        assert option.metadata["help"].endswith(".")
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, option.name, getattr(config, option.name))
    with pytest.raises(TypeError, match="positional"):
        kind(0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": 0},
        {"top_k": 9},
        {"top_k": -1},
        {"groups": 2, "top_k": 3},
        {"window": -1},
        {"sinks": -1},
        {"dim": 0},
        {"tau": 0.0},
        {"tau": float("nan")},
        {"slope": 0.0},
        {"rounds": 0},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"routers": "head"},
        {"sides": "both"},
        {"score": "euclid"},
        {"balance": "none"},
        {"gate": "tanh"},
    ],
)
def test_focus_refuses(wrong):
    with pytest.raises(ValueError, match=r"Expected .*, got .*: .*\."):
        FocusConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": 4.5},
        {"form": "batch"},
        {"per": "token"},
        {"form": "token", "temperature": 0.05},
        {"form": "token", "temperature": 2.0},
        {"form": "prefix", "minimum": 0.0},
        {"form": "prefix", "minimum": 3.0},
    ],
)
def test_focal_refuses(wrong):
    with pytest.raises(ValueError, match=r"Expected .*, got .*: .*\."):
        FocalConfig(**wrong)


@pytest.mark.parametrize("config", [FocalConfig(form="prefix"), FocusConfig.paper(groups=3), FocusConfig()])
def test_a_config_survives_a_file(config):
    assert from_dict(type(config), json.loads(json.dumps(as_dict(config)))) == config


def test_unknown_names_in_a_file_are_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"no option \['topk'\].*'top_k'"):
        from_dict(FocusConfig, {"topk": 1})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (FocusConfig, "groups", "8"),
        (FocusConfig, "groups", 8.0),
        (FocusConfig, "groups", True),
        (FocusConfig, "window", 1.5),
        (FocusConfig, "tau", None),
        (FocusConfig, "allow_look_ahead", 1),
        (FocusConfig, "gate", 1),
        (FocalConfig, "temperature", [0.4]),
        (FocalConfig, "temperature", True),
    ],
)
def test_wrong_types_are_refused_from_a_file_and_from_python(kind, name, value):
    for make in (from_dict, lambda kind, values: kind(**values)):
        with pytest.raises(ValueError, match=rf"{kind.__name__}.{name}: expected .*, got .*\. Convert it"):
            make(kind, {name: value})


def test_whole_numbers_in_a_file_are_floats_and_values_are_checked():
    assert from_dict(FocalConfig, {"temperature": 1}).temperature == 1
    with pytest.raises(ValueError, match="Expected tau > 0"):
        from_dict(FocusConfig, {"tau": -1.0})
