"""Long prompts in hard mode: memory grows with the length, never with its square."""

import pytest
import torch

from bifocals import FocalConfig, FocusConfig, attach, segments
from bifocals.testing import tiny_model, tiny_tokens
from tests.sizes import Sizes

LENGTH = 16384
FOCUS = FocusConfig(groups=8, top_k=1, window=64, sinks=4)


@pytest.mark.parametrize("configs", [[FOCUS], [FocalConfig(temperature=0.5)]], ids=["focus", "focal"])
@pytest.mark.parametrize("how", ["plain", "padded", "chunked"])
def test_no_prompt_makes_a_mask_of_length_squared(configs, how):
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1, max_position_embeddings=LENGTH)
    attach(model, *configs)
    tokens, mask = tiny_tokens(1, LENGTH), torch.ones(1, LENGTH, dtype=torch.long)
    mask[:, :100] = 0

    @torch.no_grad()
    def run():
        if how == "padded":
            return model(tokens, attention_mask=mask, logits_to_keep=1)
        past = None
        for piece in tokens.split(LENGTH if how == "plain" else LENGTH // 4, dim=1):
            past = model(piece, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values
        return past

    with Sizes() as sizes:
        run()
    assert sizes.largest < LENGTH * LENGTH / 4  # a quarter of a mask of one byte for each pair


def test_a_prompt_of_131072_tokens_makes_nothing_but_vectors_for_each_token():
    length = 131072
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1, max_position_embeddings=length)
    attach(model, FocusConfig(groups=64, top_k=1, window=64, sinks=4))
    with torch.no_grad(), Sizes() as sizes:
        past = model(tiny_tokens(1, length), use_cache=True, logits_to_keep=1).past_key_values
    assert past.get_seq_length() == length
    assert sizes.largest < 4096 * length  # bytes: some vectors for each token


@pytest.mark.parametrize("configs", [[FocalConfig(temperature=0.5)], [FocalConfig(form="prefix"), FOCUS]], ids=str)
@pytest.mark.parametrize("padding", [slice(0, 9), slice(20, 23), slice(33, 40)], ids=["left", "between", "right"])
def test_pairs_that_are_written_out_some_rows_at_a_time_are_the_same(configs, padding, monkeypatch):
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, *configs)
    mask = torch.ones_like(tokens)
    mask[0, padding] = 0
    real = mask.bool()
    for mode in ("hard", "soft"):
        lens.mode = mode
        with torch.no_grad():
            whole = model(tokens, attention_mask=mask).logits
            monkeypatch.setattr(segments, "PAIRS", 500)
            in_blocks = model(tokens, attention_mask=mask).logits
            monkeypatch.undo()
        assert (in_blocks - whole)[real].abs().max() < 1e-9
