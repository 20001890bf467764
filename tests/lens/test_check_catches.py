"""For each promise, a lens broken on purpose: check must say that this promise, by name, does not hold."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from bifocals import FocalConfig, FocusConfig, adapter, attach, check, interface, layer, lens_of
from bifocals.grouped import GroupedLayer
from bifocals.lens import Lens
from bifocals.testing import TINY, tiny_model

OFF, AHEAD, PADDING, BATCH, DECODING, SAVING, WEIGHTS = (
    "off is the base model, bit for bit",
    "no look-ahead",
    "padding changes nothing",
    "batching changes nothing",
    "decoding equals prefill",
    "a saved lens loads the same",
    "the base's weights are unchanged",
)


@pytest.fixture
def model():
    model = tiny_model("llama", dtype=torch.float32)
    attach(model, FocalConfig(temperature=0.5), FocusConfig(groups=4, window=5))
    return model


def broken(model):
    report = check(model)
    assert [result.promise for result in report.results] == [OFF, AHEAD, PADDING, BATCH, DECODING, SAVING, WEIGHTS]
    return {result.promise for result in report.results if not result.is_kept}


def test_a_sound_lens_breaks_nothing(model):
    assert broken(model) == set()


def test_a_lens_that_stays_on_when_off(model, monkeypatch):
    monkeypatch.setattr(Lens, "disabled", lambda self: torch.no_grad())
    assert broken(model) == {OFF}


def test_a_hook_left_on_the_base(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.0001)
    assert OFF in broken(model)


def test_groups_balanced_over_the_sequence_look_ahead():
    model = tiny_model("llama", dtype=torch.float32)
    attach(model, FocusConfig.paper(groups=4, window=5, allow_look_ahead=True))
    for mode in ("soft", "hard"):
        lens_of(model).mode = mode
        assert AHEAD in broken(model)


def test_a_router_that_sees_the_next_token(monkeypatch):
    see = layer.LayerLens.see

    def shifted(self, module, args, kwargs):
        see(self, module, args, kwargs)
        self.hidden = self.hidden.roll(-1, dims=1)

    monkeypatch.setattr(layer.LayerLens, "see", shifted)
    model = tiny_model("llama", dtype=torch.float32)
    attach(model, FocusConfig(groups=4, window=5))
    assert AHEAD in broken(model)


def test_a_mask_function_that_drops_the_padding(model, monkeypatch):
    monkeypatch.setattr(interface, "_padding_segments", lambda is_real: (None, "padding"))
    assert broken(model) == {PADDING}


def test_a_row_that_reads_its_neighbour_in_the_batch(model, monkeypatch):
    attend = layer.LayerLens.attend
    monkeypatch.setattr(layer.LayerLens, "attend", lambda self, *args, **kwargs: _mixed(attend(self, *args, **kwargs)))
    assert BATCH in broken(model)


def _mixed(attended):
    return attended + 0.01 * attended.roll(1, dims=0) * (attended.shape[0] > 1)


def test_a_cache_that_remembers_other_groups(model, monkeypatch):
    remember = GroupedLayer.remember
    monkeypatch.setattr(
        GroupedLayer, "remember", lambda memory, holds, *more: remember(memory, holds.roll(1, -1), *more)
    )
    assert broken(model) == {DECODING}


def test_a_save_that_loses_digits(model, monkeypatch):
    write = adapter.write_tensors
    monkeypatch.setattr(
        adapter, "write_tensors", lambda tensors: write({name: each.half().float() for name, each in tensors.items()})
    )
    assert broken(model) == {SAVING}


def test_a_forward_that_changes_a_weight(model, monkeypatch):
    attend = layer.LayerLens.attend

    def wearing(self, *args, **kwargs):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-6
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(layer.LayerLens, "attend", wearing)
    assert WEIGHTS in broken(model)


def test_without_a_lens_a_default_one_is_checked_and_taken_off():
    model = tiny_model("qwen3", dtype=torch.float32)
    assert check(model).is_kept
    assert lens_of(model) is None


def test_the_report_is_a_table_that_names_each_promise(model):
    text = str(check(model))
    assert text.count("kept  ") == 7
    assert DECODING in text


def test_a_model_without_a_head_is_checked_by_its_hidden_states():
    body = tiny_model("llama").base_model
    attach(body, FocusConfig(groups=4, window=4))
    assert check(body).is_kept


def test_a_model_that_says_nothing_of_each_token_is_an_error_and_not_a_broken_promise():
    model = LlamaForSequenceClassification(LlamaConfig(**TINY["llama"])).eval()
    attach(model, FocusConfig(groups=4, window=4))
    with pytest.raises(ValueError, match=r"each token: expected .*, got \(1, 2\)\. Attach the lens to its base_model"):
        check(model)
