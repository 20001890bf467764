"""What a model with a lens attends to: padding, dropout and other sequences; and what a cache may go on with."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

from bifocals import FocalConfig, FocusConfig, attach, lens_of
from bifocals.testing import tiny_model, tiny_tokens

FOCUS = FocusConfig(groups=4, top_k=2, window=5, sinks=2)


def logits(model, tokens, **others):
    with torch.no_grad():
        return model(tokens, **others).logits


def test_threads_that_share_a_model_do_not_see_each_other():
    model = tiny_model("llama")
    attach(model, FocalConfig(form="prefix"), FOCUS)
    rows = [tiny_tokens(length=length, seed=length) for length in (30, 40, 50)]
    expected = [logits(model, row) for row in rows]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(5):
            for got, alone in zip(threads.map(lambda row: logits(model, row), rows), expected):
                assert torch.equal(got, alone)


def test_padding_between_tokens_is_never_read():
    """As when the prompt holds the pad token: generate masks it wherever it stands."""
    model, tokens = tiny_model("llama"), tiny_tokens()
    mask = torch.ones_like(tokens)
    mask[:, 20:23] = 0
    for mode in ("soft", "hard"):
        for configs in ([FocalConfig(temperature=0.5)], [FocalConfig(temperature=0.5, form="prefix"), FOCUS]):
            lens = attach(model, *configs)
            lens.mode = mode
            before = logits(model, tokens, attention_mask=mask)
            changed = tokens.clone()
            changed[:, 20:23] = 5
            after = logits(model, changed, attention_mask=mask)
            real = mask[0].bool()
            assert torch.allclose(before[:, real], after[:, real], atol=1e-9)
            past, pieces = DynamicCache(), []
            for start, stop in ((0, 12), (12, 22), (22, 40)):
                step = {"attention_mask": mask[:, :stop], "past_key_values": past, "use_cache": True}
                pieces.append(logits(model, tokens[:, start:stop], **step))
            assert torch.allclose(torch.cat(pieces, 1)[:, real], before[:, real], atol=1e-5)
            lens.detach()


def test_neutral_settings_with_padding_between_tokens_are_the_base():
    model, tokens = tiny_model("gemma2"), tiny_tokens()
    mask = torch.ones_like(tokens)
    mask[0, 9:11] = 0
    base = logits(model, tokens, attention_mask=mask)[:, 11:]
    lens = attach(model, FocalConfig(temperature=1.0), FocusConfig(groups=1, window=3))
    for mode in ("soft", "hard"):
        lens.mode = mode
        assert torch.allclose(logits(model, tokens, attention_mask=mask)[:, 11:], base, atol=1e-4)


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_attention_dropout_of_training_is_applied_and_is_right_in_the_mean(mode):
    model, tokens = tiny_model("gpt2", attn_pdrop=0.3), tiny_tokens(1, 16)
    lens = attach(model, FOCUS, layers=[0])
    lens.mode = mode
    inside = model.transformer.h[0].attn
    found = []
    inside.c_proj.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    expected = logits(model, tokens) is not None and found.pop()
    model.train()
    with torch.no_grad():
        model(tokens.expand(1500, -1))
    drawn = found.pop()
    assert not torch.allclose(drawn[0], drawn[1])
    error = (drawn.mean(0) - expected[0]).abs()
    assert (error < 6 * drawn.std(0) / 1500**0.5 + 1e-9).all()


def test_attention_weights_are_refused_rather_than_made_up():
    model, tokens = tiny_model("llama"), tiny_tokens()
    attach(model, FOCUS)
    with pytest.raises(ValueError, match="no attention weights"):
        model(tokens, output_attentions=True)


@pytest.mark.parametrize("layers", [None, [0], [3]])
@pytest.mark.parametrize("lengths", [(5, 12), (12, 5), (12, 1)])
def test_cross_attention_without_a_lens_is_the_base_whatever_the_lengths_and_padding(layers, lengths):
    model = tiny_model("bart")
    read, decoded = (tiny_tokens(length=length) for length in lengths)
    padding = torch.ones_like(read)
    padding[0, -2:] = 0
    known = {"attention_mask": padding, "decoder_input_ids": decoded}
    base = logits(model, read, **known)
    attach(model, FocalConfig(temperature=1.0) if layers else FocusConfig(groups=1, window=2), layers=layers)
    torch.testing.assert_close(logits(model, read, **known), base)


def test_an_encoder_may_use_the_paper_as_printed():
    model, tokens = tiny_model("bert"), tiny_tokens()
    lens = attach(model, FocalConfig(form="sequence"), FocusConfig.paper(groups=4, window=3))
    for mode in ("soft", "hard"):
        lens.mode = mode
        assert logits(model, tokens).isfinite().all()


def test_a_cache_goes_on_only_with_the_mode_and_lens_that_filled_it():
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, FOCUS)

    def filled():
        past = DynamicCache(config=model.config)
        logits(model, tokens[:, :10], past_key_values=past, use_cache=True)
        return past

    past = filled()
    lens.mode = "soft"
    with pytest.raises(ValueError, match=r"filled with a lens in mode 'hard', and goes on without it or in another"):
        logits(model, tokens[:, 10:], past_key_values=past, use_cache=True)
    past = filled()
    with lens.disabled(), pytest.raises(ValueError, match="goes on without it"):
        logits(model, tokens[:, 10:], past_key_values=past, use_cache=True)
    with lens.disabled():
        past = filled()
    with pytest.raises(ValueError, match="10 tokens that were computed without this lens"):
        logits(model, tokens[:, 10:], past_key_values=past, use_cache=True)
    past = filled()
    lens.detach()
    attach(model, FOCUS)
    with pytest.raises(ValueError, match="another model"):
        logits(model, tokens[:, 10:], past_key_values=past, use_cache=True)


@pytest.mark.parametrize("configs", [[FOCUS], [FocalConfig(form="prefix")], [FocalConfig(temperature=0.5)]])
def test_a_refused_step_leaves_the_cache_as_it_was(configs):
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, *configs)
    whole, past = logits(model, tokens), DynamicCache(config=model.config)
    logits(model, tokens[:, :10], past_key_values=past, use_cache=True)
    for mode in ("soft", "off") if lens.focus is not None else ("off",):
        lens.mode = mode
        with pytest.raises(ValueError, match="Start from an empty cache"):
            logits(model, tokens[:, 10:], past_key_values=past, use_cache=True)
    lens.mode = "hard"
    torch.testing.assert_close(logits(model, tokens[:, 10:], past_key_values=past, use_cache=True), whole[:, 10:])


def test_the_dial_may_turn_while_decoding_unless_keys_follow_it():
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, FOCUS)
    past = DynamicCache()
    logits(model, tokens[:, :20], past_key_values=past, use_cache=True)
    lens.top_k = 1
    logits(model, tokens[:, 20:], past_key_values=past, use_cache=True)
    lens.detach()
    lens = attach(model, FocusConfig(groups=4, window=5, sides="same"))
    past = DynamicCache()
    logits(model, tokens[:, :20], past_key_values=past, use_cache=True)
    lens.top_k = 1
    with pytest.raises(ValueError, match="top_k"):
        logits(model, tokens[:, 20:], past_key_values=past, use_cache=True)


def test_idle_keys_let_the_dial_turn_while_decoding_but_not_to_all_groups():
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, FocusConfig.network(groups=4, window=5, top_k=2))
    past = DynamicCache()
    logits(model, tokens[:, :20], past_key_values=past, use_cache=True)
    lens.top_k = 3
    logits(model, tokens[:, 20:30], past_key_values=past, use_cache=True)
    lens.top_k = 4
    with pytest.raises(ValueError, match="to or from all groups"):
        logits(model, tokens[:, 30:], past_key_values=past, use_cache=True)
    lens.top_k = 2
    logits(model, tokens[:, 30:], past_key_values=past, use_cache=True)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_may_be_cropped_reordered_repeated_selected_and_reset(family):
    model, tokens = tiny_model(family, **({"sliding_window": 30} if family == "mistral" else {})), tiny_tokens()
    attach(model, FocalConfig(temperature=0.5, form="prefix"), FOCUS)
    for parameter in lens_of(model).parameters():
        nn.init.normal_(parameter, std=0.5)
    whole = logits(model, tokens)
    past = DynamicCache(config=model.config)
    logits(model, tokens[:, :25], past_key_values=past, use_cache=True)
    past.crop(-8)
    assert torch.allclose(logits(model, tokens[:, 17:], past_key_values=past, use_cache=True), whole[:, 17:], atol=1e-5)
    past.reset()
    assert torch.allclose(logits(model, tokens[:, :20], past_key_values=past, use_cache=True), whole[:, :20], atol=1e-5)
    past.reorder_cache(torch.tensor([1, 0]))
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([3, 0]))
    assert torch.allclose(logits(model, tokens[:, 20:], past_key_values=past, use_cache=True), whole[:, 20:], atol=1e-5)
    twin = copy.deepcopy(past)
    assert twin.get_seq_length() == past.get_seq_length() == 40


def test_sinkhorn_is_not_defined_while_decoding():
    model, tokens = tiny_model("llama"), tiny_tokens()
    attach(model, FocusConfig.paper(groups=4, allow_look_ahead=True))
    past = DynamicCache()
    logits(model, tokens[:, :20], past_key_values=past, use_cache=True)
    with pytest.raises(ValueError, match="not defined while decoding"):
        logits(model, tokens[:, 20:], past_key_values=past, use_cache=True)


def test_masks_and_caches_that_a_lens_cannot_follow_are_refused():
    model, tokens = tiny_model("llama"), tiny_tokens()
    attach(model, FOCUS)
    with pytest.raises(ValueError, match=r"expected \(batch, length\), got shape \(2, 1, 40, 40\)"):
        logits(model, tokens, attention_mask=torch.ones(2, 1, 40, 40, dtype=torch.bool))
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="Drop cache_implementation"):
        logits(model, tokens, past_key_values=static, use_cache=True)
    with pytest.raises(ValueError, match="Drop cache_implementation"):
        model.generate(tokens, max_new_tokens=3, cache_implementation="static")
