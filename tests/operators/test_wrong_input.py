"""Wrong input is told what was expected, what came and what to do, before any work."""

import pytest
import torch

from bifocals import FocalConfig, FocusConfig, LearnedTemperature, Router, focal_attention, focus_attention
from bifocals.config import from_dict

RIGHT = {
    "query": torch.zeros(2, 4, 9, 8),
    "key": torch.zeros(2, 2, 9, 8),
    "value": torch.zeros(2, 2, 9, 8),
    "membership": torch.ones(2, 2, 9, 3, dtype=torch.bool),
    "window": 2,
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query": torch.zeros(2, 3, 9, 8)}, "multiple of key-value heads, got 3 and 2"),
        ({"value": torch.zeros(2, 2, 7, 8)}, "key and value: expected the same"),
        ({"query": torch.zeros(2, 4, 12, 8)}, "at most as many queries as keys"),
        ({"key": torch.zeros(2, 2, 9, 8).double()}, "expected one dtype"),
        ({"membership": torch.ones(2, 2, 9, 3)}, "expected bool"),
        ({"membership": torch.ones(2, 3, 9, 3, dtype=torch.bool)}, "membership: expected shape"),
        ({"window": -1}, "window: expected an integer >= 0, got -1"),
        ({"sinks": -2}, "sinks: expected an integer >= 0, got -2"),
        ({"temperature": 0.0}, "temperature: expected > 0, got 0.0"),
        ({"temperature": torch.zeros(4)}, "least value is 0"),
        ({"temperature": torch.ones(5)}, "Reshape it"),
        ({"segments": torch.zeros(2, 8, dtype=torch.long)}, "segments: expected integers of shape"),
        ({"segments": torch.tensor([[0, 1, 0, 0, 0, 0, 0, 0, 0]] * 2)}, "one contiguous run"),
        ({"backend": "triton"}, "expected 'auto', 'dense' or 'sdpa', got 'triton'"),
        ({"backend": "sdpa", "softcap": 3.0, "temperature": torch.ones(4)}, "backend 'sdpa' cannot run"),
    ],
)
def test_focus_attention_says_what_is_wrong(wrong, message):
    arguments = {**RIGHT, **wrong}
    vectors = [arguments.pop(name) for name in ("query", "key", "value")]
    # The tests check shapes in signatures before the function's own message is reached.
    focus = getattr(focus_attention, "__wrapped__", focus_attention)
    with pytest.raises(ValueError, match=message):
        focus(*vectors, **arguments)


def test_the_sequence_mean_is_refused_for_causal_use_with_the_reason():
    with pytest.raises(ValueError, match="reads tokens after the query"):
        LearnedTemperature(8, start=0.4, minimum=0.1, maximum=2.0, form="sequence")


def test_sinkhorn_is_refused_for_causal_use_unless_allowed():
    with pytest.raises(ValueError, match="depend on later tokens"):
        Router(8, 1, FocusConfig.paper())
    Router(8, 1, FocusConfig.paper(allow_look_ahead=True))
    Router(8, 1, FocusConfig.paper(), is_causal=False)


@pytest.mark.parametrize(
    "options",
    [{"groups": 0}, {"top_k": 9}, {"window": -1}, {"sinks": -1}, {"dim": 0}, {"tau": 0.0}, {"score": "euclid"}],
)
def test_a_focus_config_refuses_what_makes_no_sense(options):
    with pytest.raises(ValueError, match="Expected"):
        FocusConfig(**options)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 4.1])
def test_a_focal_config_refuses_temperatures_outside_its_range(temperature):
    with pytest.raises(ValueError, match="temperature in"):
        FocalConfig(temperature=temperature)


def test_a_config_from_a_file_is_checked_by_name_and_type():
    assert from_dict(FocusConfig, {"groups": 4}) == FocusConfig(groups=4)
    for values in ({"group": 4}, {"groups": "4"}, {"groups": True}, {"tau": None}):
        with pytest.raises(ValueError, match="FocusConfig"):
            from_dict(FocusConfig, values)


def test_top_k_is_two_where_there_are_two_groups():
    assert (FocusConfig().top_k, FocusConfig(groups=1).top_k) == (2, 1)


def test_focal_attention_refuses_a_temperature_of_zero():
    with pytest.raises(ValueError, match="below 1 sharpens"):
        focal_attention(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), temperature=0.0)
