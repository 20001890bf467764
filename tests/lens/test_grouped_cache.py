"""Decoding with the grouped cache: whatever is asked of a cache, the outputs are those of one prefill."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from bifocals import FocalConfig, FocusConfig, attach, grouped, lens_of
from bifocals.grouped import GroupedLayer
from bifocals.network import NetworkRouter
from bifocals.testing import TINY, tiny_model, tiny_tokens

DECODERS = [family for family in TINY if family not in ("bert", "bart")]
WINDOW, LENGTH, PROMPT = 5, 44, 18
STARTS = (0, 4, 9)  # of three rows: the rest is padding
# Inside, these models round to float32 (norms, the softmax of gemma2, the experts' router), whatever their dtype.
ROUNDING = 2e-5


@pytest.fixture(autouse=True)
def file_early(monkeypatch):
    """Keys are filed from here on, so that every test sees both the time order and the groups."""
    monkeypatch.setattr(grouped, "LONG", PROMPT + 8)


def padded_batch():
    tokens, mask = tiny_tokens(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    for row, start in enumerate(STARTS):
        tokens[row, :start] = mask[row, :start] = 0
    return tokens, mask, (mask.cumsum(1) - 1).clamp(min=0)


def logits(model, tokens, **others):
    with torch.no_grad():
        return model(tokens, **others).logits


def in_pieces(model, tokens, cuts, past=None, mask=None, positions=None):
    """Piece by piece, with a cache."""
    past = DynamicCache(config=model.config) if past is None else past
    found = []
    for start, stop in itertools.pairwise(cuts):
        others = {"past_key_values": past, "use_cache": True}
        if mask is not None:
            others |= {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        found.append(logits(model, tokens[:, start:stop], **others))
    return torch.cat(found, dim=1)


def close(got, expected):
    assert (got - expected).abs().max() <= ROUNDING * expected.abs().max()


def is_filed(cache):
    return [isinstance(layer, GroupedLayer) and layer.is_filed for layer in cache.layers]


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("routers", ["layer", "kv_head"])
@pytest.mark.parametrize("sinks", [0, 4])
def test_decoding_token_by_token_equals_one_prefill(family, routers, sinks):
    model, (tokens, mask, positions) = tiny_model(family), padded_batch()
    lens = attach(model, FocusConfig(groups=4, window=WINDOW, sinks=sinks, routers=routers))
    real = mask.bool()
    for top_k in (1, 2, 3):
        lens.top_k = top_k
        whole = logits(model, tokens, attention_mask=mask, position_ids=positions, use_cache=False)
        decoded = in_pieces(model, tokens, [0, *range(PROMPT, LENGTH + 1)], None, mask, positions)
        close(decoded[real], whole[real])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "olmo2", "phi3", "qwen2", "qwen3", "mixtral"])
def test_full_attention_layers_are_filed_without_being_asked(family):
    model, tokens = tiny_model(family), tiny_tokens(2, 20)
    attach(model, FocusConfig(groups=4, window=WINDOW))
    found = model.generate(tokens, max_new_tokens=12, min_new_tokens=12, return_dict_in_generate=True)
    assert is_filed(found.past_key_values) == [True, True]


def test_layers_that_slide_or_cap_or_hold_latents_keep_their_own_kind():
    for family, expected in (("mistral", [False, False]), ("gemma2", [False, False]), ("deepseek_v3", [False, False])):
        model = tiny_model(family)
        attach(model, FocusConfig(groups=4, window=WINDOW))
        found = model.generate(tiny_tokens(1, 20), max_new_tokens=12, min_new_tokens=12, return_dict_in_generate=True)
        assert is_filed(found.past_key_values) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "deepseek_v3", "mistral"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_greedy_and_beam_search_find_what_the_dense_mask_finds(family, how):
    model, (tokens, mask, _) = tiny_model(family), padded_batch()
    attach(model, FocalConfig(temperature=0.5), FocusConfig(groups=4, top_k=2, window=WINDOW, sinks=2))
    options = dict(attention_mask=mask[:, :24], max_new_tokens=16, min_new_tokens=16, do_sample=False, **how)
    cached = model.generate(tokens[:, :24], **options)
    assert torch.equal(cached, model.generate(tokens[:, :24], use_cache=False, **options))


@pytest.mark.parametrize("configs", [
    [FocusConfig(groups=4, top_k=1, window=WINDOW, sides="same")],
    [FocusConfig(groups=4, top_k=2, window=WINDOW, sides="same")],
    [FocusConfig(groups=4, top_k=4, window=WINDOW)],
    [FocusConfig.network(groups=4, top_k=2, window=WINDOW)],
    [FocusConfig.network(groups=4, top_k=4, window=WINDOW)],
    [FocusConfig(groups=1, window=0, sinks=0)],
    [FocalConfig(temperature=0.5, form="token", per="head"), FocusConfig(groups=4, window=WINDOW)],
    [FocalConfig(temperature=0.5, form="prefix"), FocusConfig(groups=4, window=WINDOW)],
], ids=str)  # fmt: skip
def test_every_kind_of_lens_decodes_as_it_prefills(configs):
    model, (tokens, mask, positions) = tiny_model("llama"), padded_batch()
    lens = attach(model, *configs)
    for parameter in lens.parameters():
        nn.init.normal_(parameter, std=0.5)
    for router in lens.routers.values():
        if isinstance(router, NetworkRouter):
            router.steepness.fill_(3.0)
    whole = logits(model, tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    decoded = in_pieces(model, tokens, [0, *range(PROMPT, LENGTH + 1)], None, mask, positions)
    close(decoded[mask.bool()], whole[mask.bool()])


@pytest.mark.parametrize("cuts", [
    [0, 8, 16, 24, 32, 40, 41, 42, 43, 44],
    [0, 20, 21, 22, 30, 31, 35, 44],
    [0, 30, 31, 32, 33, 41, 44],
    [0, 29, 30, 40, 41, 42, 43, 44],
    [*range(45)],
], ids=str)  # fmt: skip
@pytest.mark.parametrize("few", [4, 16])
def test_chunked_prompts_and_continued_chats_equal_one_prefill(cuts, few, monkeypatch):
    """Pieces longer than FEW put the keys back into time order, shorter ones are attended from the groups."""
    monkeypatch.setattr(grouped, "FEW", few)
    model, (tokens, mask, positions) = tiny_model("llama"), padded_batch()
    attach(model, FocusConfig(groups=4, top_k=2, window=WINDOW, sinks=2))
    whole = logits(model, tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    close(in_pieces(model, tokens, cuts, None, mask, positions)[mask.bool()], whole[mask.bool()])


def test_nothing_is_read_ahead_while_decoding():
    model, tokens = tiny_model("llama"), tiny_tokens(1, LENGTH)
    attach(model, FocusConfig(groups=4, top_k=2, window=WINDOW))
    cuts = [0, PROMPT, *range(28, LENGTH + 1, 4)]
    before = in_pieces(model, tokens, cuts)
    for position in range(PROMPT, LENGTH, 5):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 64
        after = in_pieces(model, changed, cuts)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


def filled(model, tokens, length=34):
    """A cache of filed keys."""
    past = DynamicCache(config=model.config)
    in_pieces(model, tokens, [0, 20, *range(21, length + 1)], past)
    assert is_filed(past) == [True, True]
    return past


@pytest.fixture
def model():
    model = tiny_model("llama")
    attach(model, FocalConfig(temperature=0.5, form="prefix"), FocusConfig(groups=4, top_k=2, window=WINDOW, sinks=2))
    for parameter in lens_of(model).parameters():
        nn.init.normal_(parameter, std=0.5)
    for router in lens_of(model).routers.values():
        if isinstance(router, NetworkRouter):
            router.steepness.fill_(3.0)
    return model


@pytest.mark.parametrize("cropped", [1, 3, 5, 6, 12, 25, 33, 34])
def test_a_filed_cache_may_be_cropped_anywhere(model, cropped):
    tokens = tiny_tokens(2, LENGTH)
    whole, past = logits(model, tokens, use_cache=False), filled(model, tokens)
    past.crop(-cropped)
    kept = 34 - cropped
    assert past.get_seq_length() == kept
    close(in_pieces(model, tokens, range(kept, LENGTH + 1), past), whole[:, kept:])


def test_rows_of_a_filed_cache_may_be_reordered_repeated_and_selected(model):
    tokens = tiny_tokens(3, LENGTH)
    whole, past = logits(model, tokens, use_cache=False), filled(model, tokens)
    past.reorder_cache(torch.tensor([2, 2, 0]))
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([4, 0, 3]))
    close(in_pieces(model, tokens[[0, 2, 2]], range(34, LENGTH + 1), past), whole[[0, 2, 2], 34:])


def test_a_filed_cache_looks_like_any_other(model):
    tokens = tiny_tokens(2, LENGTH)
    past, plain = filled(model, tokens), DynamicCache(config=model.config)
    in_pieces(model, tokens, [0, 20], plain)
    assert past.get_seq_length() == 34
    assert past.get_mask_sizes(3, 0) == (37, 0)
    assert past.is_croppable
    assert past.is_initialized
    for (key, value, _), (short_key, short_value, _) in zip(past, plain):
        assert torch.allclose(key[:, :, :20], short_key)
        assert torch.allclose(value[:, :, :20], short_value)


def test_a_copy_goes_its_own_way(model):
    tokens = tiny_tokens(2, LENGTH)
    whole, past = logits(model, tokens, use_cache=False), filled(model, tokens)
    twin = copy.deepcopy(past)
    in_pieces(model, tokens.flip(0), range(34, LENGTH + 1), twin)
    close(in_pieces(model, tokens, range(34, LENGTH + 1), past), whole[:, 34:])


def test_a_cache_that_was_reset_starts_anew(model):
    tokens = tiny_tokens(2, LENGTH)
    whole, past = logits(model, tokens, use_cache=False), filled(model, tokens)
    past.reset()
    assert past.get_seq_length() == 0
    lens_of(model).mode = "soft"
    soft = logits(model, tokens[:1], use_cache=False)
    close(in_pieces(model, tokens[:1], [0, 20, *range(21, LENGTH + 1)], past), soft)
    past.reset()
    lens_of(model).mode = "hard"
    close(in_pieces(model, tokens, [0, 20, *range(21, LENGTH + 1)], past), whole)


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": True}], ids=str)
def test_assisted_decoding_gives_back_what_was_guessed_wrong(model, how):
    if "assistant_model" in how:
        how = {"assistant_model": tiny_model("llama", seed=3)}
    tokens = tiny_tokens(1, 24)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    plain = model.generate(tokens, use_cache=False, **options)
    assert torch.equal(model.generate(tokens, **options, **how), plain)


def test_a_step_reads_near_sinks_and_its_groups_alone(model, monkeypatch):
    """What lies on other shelves may be anything."""
    tokens = tiny_tokens(1, LENGTH)
    whole, past = logits(model, tokens, use_cache=False), filled(model, tokens)
    attend = grouped.Filed.attend

    def poisoned(filed, query, reads, scale):
        for shelves, readers in zip(filed.shelves[0], reads[0]):
            for shelf, is_read in zip(shelves[1:], readers):
                if not is_read:
                    shelf.key.fill_(torch.nan)
        return attend(filed, query, reads, scale)

    monkeypatch.setattr(grouped.Filed, "attend", poisoned)
    close(in_pieces(model, tokens, [34, 35], past), whole[:, 34:35])


def test_padding_between_tokens_brings_the_time_order_back(model):
    tokens = tiny_tokens(2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[:, 36:38] = 0
    positions = torch.arange(LENGTH).expand(2, -1)
    real = mask[0].bool()
    pieces = in_pieces(model, tokens, [0, 20, *range(21, LENGTH + 1)], None, mask, positions)
    close(pieces[:, real], logits(model, tokens, attention_mask=mask, position_ids=positions, use_cache=False)[:, real])


def test_a_filed_cache_goes_on_with_gradients_and_after_inference_mode(model):
    tokens = tiny_tokens(2, LENGTH)
    whole, past = logits(model, tokens, use_cache=False), DynamicCache(config=model.config)
    with torch.inference_mode():
        in_pieces(model, tokens, [0, 20, *range(21, 31)], past)
    close(in_pieces(model, tokens, [30, 31, 32], past), whole[:, 30:32])
    for position in range(32, 36):
        step = model(tokens[:, position : position + 1], past_key_values=past, use_cache=True).logits
        close(step, whole[:, position : position + 1])
    step.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "q_proj" in name)


def test_another_batch_in_mid_generation_is_refused_and_the_model_stays_usable(model):
    tokens = tiny_tokens(3, LENGTH)
    for length in (22, 34):
        past = DynamicCache(config=model.config)
        in_pieces(model, tokens, [0, 20, *range(21, length + 1)], past)
        with pytest.raises(ValueError, match=r"holds keys of 3 rows.*gave 2 rows.*batch_select_indices"):
            logits(model, tokens[:2, length : length + 1], past_key_values=past, use_cache=True)
    close(logits(model, tokens), logits(model, tokens, use_cache=False))


def test_the_cache_of_another_model_is_refused(model):
    tokens = tiny_tokens(1, LENGTH)
    other = tiny_model("llama", num_key_value_heads=4)
    attach(other, FocusConfig(groups=4, window=WINDOW))
    with pytest.raises(ValueError, match=r"2 heads.*4 heads"):
        logits(other, tokens[:, 34:35], past_key_values=filled(model, tokens), use_cache=True)
    alike = tiny_model("llama", seed=5)
    attach(alike, FocusConfig(groups=4, window=WINDOW))
    with pytest.raises(ValueError, match="another model"):
        logits(alike, tokens[:, 34:35], past_key_values=filled(model, tokens), use_cache=True)
    past = filled(model, tokens)
    lens_of(model).mode = "off"
    with pytest.raises(ValueError, match="without it"):
        logits(model, tokens[:, 34:35], past_key_values=past, use_cache=True)


@pytest.mark.parametrize("length", [22, 34])
@pytest.mark.parametrize("where", ["self_attn.o_proj", "mlp", "self_attn.q_proj"])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_step_is_noticed_and_the_model_stays_usable(model, length, where, layer):
    tokens, past = tiny_tokens(1, LENGTH), DynamicCache(config=model.config)
    whole = logits(model, tokens, use_cache=False)
    in_pieces(model, tokens, [0, 20, *range(21, length + 1)], past)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[layer].get_submodule(where).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        in_pieces(model, tokens, [length, length + 1], past)
    handle.remove()
    lengths = {part.get_seq_length() for part in past.layers}
    if len(lengths) > 1:
        with pytest.raises(ValueError, match="interrupted"):
            in_pieces(model, tokens, [length + 1, length + 2], past)
    else:
        done = lengths.pop()
        close(in_pieces(model, tokens, range(done, LENGTH + 1), past), whole[:, done:])
    close(in_pieces(model, tokens, [0, 20, *range(21, LENGTH + 1)]), whole)


WIDE = 12  # a window in which the groups of many keys are left for later


def postponing(score, family="llama"):
    """A model whose routers are centroids or networks."""
    model, options = tiny_model(family), {"groups": 4, "top_k": 2, "window": WIDE, "sinks": 2}
    attach(model, FocusConfig.network(dim=8, **options) if score == "network" else FocusConfig(**options))
    torch.manual_seed(0)
    for parameter in lens_of(model).parameters():
        nn.init.normal_(parameter, std=0.5)
    for router in lens_of(model).routers.values():
        if isinstance(router, NetworkRouter):
            router.steepness.fill_(3.0)
    return model


every_score = pytest.mark.parametrize("score", ["cosine", "network"])


def undecided(past):
    return [len(layer._later) for layer in past.layers]


class Played:
    """Rows of tokens and their cache, which is always that of one prefill."""

    def __init__(self, model, is_padded):
        self.model, self.past, self.length = model, DynamicCache(config=model.config), 0
        self.tokens, self.mask = tiny_tokens(3, 100), torch.ones(3, 100, dtype=torch.long)
        for row, start in enumerate(STARTS if is_padded else ()):
            self.mask[row, :start] = 0

    def read(self, count):
        cuts = [self.length, self.length + count]
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        got = in_pieces(self.model, self.tokens, cuts, self.past, self.mask, positions)
        whole = {"attention_mask": self.mask[:, : cuts[1]], "position_ids": positions[:, : cuts[1]]}
        expected = logits(self.model, self.tokens[:, : cuts[1]], use_cache=False, **whole)[:, cuts[0] :]
        real = self.mask[:, cuts[0] : cuts[1]].bool()
        close(got[real], expected[real])
        self.length = cuts[1]

    def crop(self, count):
        self.past.crop(-count)
        self.length -= count
        self.tokens[:, self.length :] = self.tokens[:, self.length :].roll(1, 1)  # and goes on with others

    def select(self, rows, change):
        self.tokens, self.mask = self.tokens[rows], self.mask[rows]
        change(self.past)

    def play(self, what, chance):
        rows = len(self.tokens)
        if what == "steps":
            for _ in range(chance.choice([1, 5, 14])):
                self.read(1)
        elif what in ("piece", "long piece"):
            self.read(chance.randint(2, 7) if what == "piece" else 18)
        elif what == "inference":
            with torch.inference_mode():
                self.read(1)
                self.read(1)
        elif what == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 alone
                self.read(1)
        elif what == "crop":
            self.crop(chance.choice([1, 4, 13]))
        elif what == "copy":
            left, self.past = self.past, copy.deepcopy(self.past)
            left.crop(-3)
            left.reorder_cache(torch.zeros(rows, dtype=torch.long))
        elif what == "reorder":
            order = [chance.randrange(rows) for _ in range(rows)]
            self.select(order, lambda past: past.reorder_cache(torch.tensor(order)))
        elif what == "repeat":
            self.select([row for row in range(rows) for _ in range(2)], lambda past: past.batch_repeat_interleave(2))
            self.select([0, rows], lambda past: past.batch_select_indices(torch.tensor([0, rows])))
        elif what == "reset":
            self.past.reset()
            self.length = 0
            self.read(20)


@every_score
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole rows", "padded rows"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_done_to_a_cache_it_stays_that_of_one_prefill(score, is_padded, seed):
    chance, left = random.Random(seed), []
    played = Played(postponing(score), is_padded)
    played.read(20)
    kinds = ["piece", "long piece", "inference", "autocast", "crop", "copy", "reorder", "repeat", "reset"]
    for what in chance.sample(kinds, len(kinds)) + chance.choices(kinds, k=5):
        if played.length > 60:
            played.crop(played.length - 40)
        played.play("steps", chance)
        left.append(all(undecided(played.past)))
        played.play(what, chance)
    played.play("steps", chance)
    assert any(left) or is_padded


def change_weights(model):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in lens_of(model).parameters():
            parameter.normal_(std=0.5)


def change_potentials(model):
    torch.manual_seed(5)
    for router in lens_of(model).routers.values():
        router.potential.normal_()


def replace_weights(model):
    torch.manual_seed(5)
    for router in lens_of(model).routers.values():
        for module in router.modules():
            for name, parameter in module.named_parameters(recurse=False):
                for _ in range(2):  # the second may lie where the one before the first did
                    setattr(module, name, nn.Parameter(torch.randn_like(parameter.detach())))


def change_top_k(model):
    lens_of(model).top_k = 1


def measure(model):
    lens_of(model).measure(tiny_tokens(1, 30))


@every_score
@pytest.mark.parametrize("change", [change_weights, change_potentials, replace_weights, change_top_k, measure])
def test_groups_left_for_later_are_those_of_the_time_when_the_key_came(score, change, monkeypatch):
    tokens, found = tiny_tokens(2, 70), []
    for postponed in (32, 0):
        monkeypatch.setattr(grouped, "POSTPONED", postponed)
        model = postponing(score)
        past = DynamicCache(config=model.config)
        in_pieces(model, tokens, [0, 20, *range(21, 41)], past)
        assert all(undecided(past)) == (postponed > 0)
        change(model)
        found.append(in_pieces(model, tokens, range(40, 71), past))
    close(*found)


def test_a_caller_may_write_the_next_token_over_the_last():
    """Where nothing is between embeddings and attention, routers look at the caller's own tensor."""
    model, tokens = postponing("cosine", "olmo2"), tiny_tokens(2, 70)
    whole, past = logits(model, tokens, use_cache=False), DynamicCache(config=model.config)
    in_pieces(model, tokens, [0, 20], past)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        written = embedded[:, :1].clone()
        for position in range(20, 70):
            written.copy_(embedded[:, position : position + 1])
            step = model(inputs_embeds=written, past_key_values=past, use_cache=True).logits
            close(step, whole[:, position : position + 1])


@pytest.mark.parametrize("then", ["more tokens", "crop", "select"])
def test_a_cache_filed_or_grown_in_inference_mode_goes_on_outside(model, then):
    tokens = tiny_tokens(2, 130)
    whole, past = logits(model, tokens, use_cache=False), DynamicCache(config=model.config)
    cuts = [0, 20, *range(21, 91)]
    if then == "more tokens":
        in_pieces(model, tokens, cuts[:20], past)
        cuts = cuts[19:]
    with torch.inference_mode():
        in_pieces(model, tokens, cuts, past)
    assert is_filed(past) == [True, True]
    if then == "crop":
        past.crop(-4)
    elif then == "select":
        past.batch_select_indices(torch.tensor([0, 1]))
    start = past.get_seq_length()
    close(in_pieces(model, tokens, range(start, 131), past), whole[:, start:])


@every_score
def test_weights_that_change_unseen_are_seen_by_the_next_prompt_even_of_one_token(score):
    model, tokens = postponing(score), tiny_tokens(2, LENGTH)
    in_pieces(model, tokens, [0, 20, *range(21, LENGTH + 1)])
    for name, parameter in lens_of(model).named_parameters():
        parameter.data.mul_(-1.7 if "projection" not in name else 1.0)
    decoded = in_pieces(model, tokens, range(LENGTH + 1))
    close(decoded, logits(model, tokens, use_cache=False))
