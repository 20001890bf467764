"""Every promise on every family: one test for each promise, tiny random models in float64."""

import copy

import pytest
import torch
from transformers import DynamicCache

from bifocals import FocalConfig, FocusConfig, attach, check, fold, lens_of, load, reference
from bifocals.families import FAMILIES
from bifocals.fullness import Course
from bifocals.interface import NAME
from bifocals.layer import LayerLens
from bifocals.network import NetworkRouter
from bifocals.tape import Tape
from bifocals.testing import TINY, inputs_of, tiny_model, tiny_tokens

DECODERS = [family for family in TINY if family not in ("bert", "bart")]
# Inside, these models round to float32 (norms, the softmax of gemma2, the experts' router), whatever their dtype.
ROUNDING = 2e-5
LATENT = "deepseek_v3", "networks"
FOCUS = {
    "centroids": FocusConfig(groups=4, top_k=2, window=5, sinks=2),
    "networks": FocusConfig.network(groups=4, top_k=2, window=5, sinks=2, dim=8),
}
FOCAL = FocalConfig(temperature=0.5)

every_family = pytest.mark.parametrize("family", TINY)


def with_every_router(families):
    """Latent attention shows no keys to networks."""
    pairs = [(family, router) for family in families for router in FOCUS if (family, router) != LATENT]
    return pytest.mark.parametrize(("family", "router"), pairs)


every_router = with_every_router(TINY)
every_decoder = with_every_router(DECODERS)


def put_on(model, *configs):
    """A lens whose groups may be full where they can be, as after a fit."""
    lens = attach(model, *configs)
    for router in lens.routers.values():
        if isinstance(router, NetworkRouter):
            router.steepness.fill_(3.0)
    return lens


def logits(model, tokens, **others):
    with torch.no_grad():
        return model(**inputs_of(model, tokens, **others)).logits


def close(got, expected):
    assert (got - expected).abs().max() <= ROUNDING * expected.abs().max()


def test_every_family_of_the_table_is_tested():
    assert TINY.keys() == FAMILIES.keys()


@every_family
def test_neutral_settings_are_the_base(family):
    model, tokens = tiny_model(family), tiny_tokens()
    mask = torch.ones_like(tokens)
    mask[0, -9:] = 0
    base, padded = logits(model, tokens), logits(model, tokens, attention_mask=mask)
    lens = attach(model, FocalConfig(temperature=1.0), FocusConfig(groups=1, window=3, sinks=0))
    for mode in ("soft", "hard"):
        lens.mode = mode
        close(logits(model, tokens), base)
        kept = slice(None) if family == "bart" else slice(0, -9)
        close(logits(model, tokens, attention_mask=mask)[:, kept], padded[:, kept])


@every_router
def test_off_disabled_and_detach_give_the_base_bit_for_bit(family, router):
    model, tokens = tiny_model(family), tiny_tokens()
    base, keys = logits(model, tokens), list(model.state_dict())
    implementation, trained = model.config._attn_implementation, [p.requires_grad for p in model.parameters()]
    lens = put_on(model, FOCAL, FOCUS[router])
    fitted = logits(model, tokens)
    assert (fitted - base).abs().max() > 0.1
    assert list(model.state_dict()) == keys
    lens.mode = "off"
    assert torch.equal(logits(model, tokens), base)
    lens.mode = "hard"
    with lens.disabled():
        assert torch.equal(logits(model, tokens), base)
    assert torch.equal(logits(model, tokens), fitted)
    lens.detach()
    assert torch.equal(logits(model, tokens), base)
    assert list(model.state_dict()) == keys
    assert model.config._attn_implementation == implementation
    assert [p.requires_grad for p in model.parameters()] == trained
    assert lens_of(model) is None
    assert NAME not in str(dict(model.named_modules()).keys())


@every_router
def test_a_lens_computes_the_reference(family, router, monkeypatch):
    """What each layer was given and gave, against the oracle: the family's heads, scale, softcap and sliding window."""
    model, tokens = tiny_model(family), tiny_tokens()
    calls = []
    routed = {}
    attend, route = LayerLens.attend, LayerLens._route

    def recording(self, query, key, value, pattern, *, scale, softcap, dropout):
        attended = attend(self, query, key, value, pattern, scale=scale, softcap=softcap, dropout=dropout)
        calls.append((self, query, key, value, pattern, scale, softcap, attended))
        return attended

    def recording_inputs(self, inputs, *others):
        routed[self] = inputs
        return route(self, inputs, *others)

    monkeypatch.setattr(LayerLens, "attend", recording)
    monkeypatch.setattr(LayerLens, "_route", recording_inputs)
    put_on(model, FOCAL, FOCUS[router])
    logits(model, tokens)
    assert calls
    for lens, query, key, value, pattern, scale, softcap, attended in calls:
        common = {"scale": scale, "softcap": softcap, "temperature": 0.5}
        if lens.is_cross:
            everything = torch.ones(2, 1, query.shape[2], key.shape[2], dtype=torch.bool)
            expected = reference.attention(query, key, value, everything, **common)
        elif lens.router is None:
            expected = reference.focal_attention(query, key, value, is_causal=pattern.is_causal, **common)
        else:
            course = [] if router == "centroids" or pattern.reach is not None else [Course.of_sequence(query.shape[2])]
            reads, holds = lens.router.membership(*routed[lens], *course)
            expected = reference.focus_attention(
                query, key, value, membership=reads, key_membership=holds, window=5, sinks=2,
                reach=pattern.reach, is_causal=pattern.is_causal, **common,
            )  # fmt: skip
        assert (attended - expected).abs().max() < 1e-12


@every_router
@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_check_keeps_every_promise(family, router, mode):
    model = tiny_model(family)
    put_on(model, FOCAL, FOCUS[router]).mode = mode
    report = check(model)
    assert report.is_kept, str(report)


@every_decoder
@pytest.mark.parametrize("form", ["token", "prefix", "length"])
def test_decoding_in_chunks_equals_prefill_with_left_padding(family, router, form):
    model, tokens = tiny_model(family), tiny_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    put_on(model, FocalConfig(temperature=0.5, form=form, per="head"), FOCUS[router])
    for parameter in lens_of(model).parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    whole = logits(model, tokens, attention_mask=mask, position_ids=positions)
    past, pieces = DynamicCache(config=model.config), []
    for start, stop in ((0, 14), (14, 21), *((i, i + 1) for i in range(21, 40))):
        cut = slice(start, stop)
        others = {"attention_mask": mask[:, :stop], "position_ids": positions[:, cut], "past_key_values": past}
        pieces.append(logits(model, tokens[:, cut], use_cache=True, **others))
    close(torch.cat(pieces, 1)[:, 7:], whole[:, 7:])


@every_decoder
@pytest.mark.parametrize("form", ["prefix", "length"])
def test_a_packed_row_is_its_sequences_one_by_one(family, router, form):
    model = tiny_model(family)
    first, second = tiny_tokens(1, 22, seed=1), tiny_tokens(1, 18, seed=2)
    lens = put_on(model, FocalConfig(temperature=0.5, form=form), FOCUS[router])
    for parameter in lens.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    positions = torch.cat([torch.arange(22), torch.arange(18)])[None]
    packed = logits(model, torch.cat([first, second], 1), position_ids=positions, use_cache=False)
    close(packed[:, :22], logits(model, first))
    close(packed[:, 22:], logits(model, second))


@every_decoder
def test_generation_with_the_cache_equals_generation_without(family, router):
    model, tokens = tiny_model(family), tiny_tokens(2, 20)
    mask = torch.ones_like(tokens)
    tokens[0, :5], mask[0, :5] = 0, 0
    put_on(model, FOCAL, FOCUS[router])
    for how in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        options = dict(attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False, **how)
        cached = model.generate(tokens, use_cache=True, **options)
        assert torch.equal(cached, model.generate(tokens, use_cache=False, **options))


@every_decoder
def test_assisted_and_sampled_generation_use_the_cache_rightly(family, router):
    model, tokens = tiny_model(family), tiny_tokens(1, 20)
    put_on(model, FOCAL, FOCUS[router])
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    plain = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, prompt_lookup_num_tokens=3, **options), plain)
    assert torch.equal(model.generate(tokens, assistant_model=tiny_model(family, seed=3), **options), plain)
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        sampled.append(model.generate(tokens, max_new_tokens=8, do_sample=True, use_cache=use_cache))
    assert torch.equal(*sampled)


@every_router
def test_a_saved_lens_loads_the_same(family, router, tmp_path):
    model, tokens = tiny_model(family), tiny_tokens()
    lens = attach(model, FocalConfig(temperature=0.5, form="token", per="head"), FOCUS[router], layers=[1])
    for tensor in lens.state_dict().values():
        tensor.normal_(std=0.3)
    fitted = logits(model, tokens)
    lens.save(tmp_path)
    other = tiny_model(family)
    loaded = load(other, tmp_path)
    assert torch.equal(logits(other, tokens), fitted)
    assert loaded.layers.keys() == lens.layers.keys()
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    loaded.detach()
    assert all(p.requires_grad for p in load(other, tmp_path, trainable=True).parameters())


@every_family
def test_a_folded_model_is_stock_and_computes_the_same(family, tmp_path):
    model, tokens = tiny_model(family), tiny_tokens()
    implementation = model.config._attn_implementation
    attach(model, FocalConfig(temperature=0.4))
    focal = logits(model, tokens)
    assert fold(model) is model
    assert lens_of(model) is None
    close(logits(model, tokens), focal)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path, experts_implementation="eager")
    assert stock.config._attn_implementation == implementation
    close(logits(stock, tokens), focal)


@every_router
def test_soft_mode_trains_the_lens_and_leaves_the_base_alone(family, router):
    model, tokens = tiny_model(family).train(), tiny_tokens()
    before = copy.deepcopy(model.state_dict())
    model.requires_grad_(False)
    lens = attach(model, FocalConfig(temperature=0.5, form="token"), FOCUS[router])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        name for name, _ in model.named_parameters() if f".{NAME}." in name
    ]
    lens.mode = "soft"
    optimizer = torch.optim.SGD(lens.parameters(), lr=0.1)
    model(**inputs_of(model, tokens)).logits.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in lens.parameters())
    optimizer.step()
    lens.step_balance()
    assert all(router.potential.abs().sum() > 0 for router in lens.routers.values())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@every_router
def test_gradient_checkpointing_changes_no_gradient(family, router):
    tokens, gradients = tiny_tokens(), []
    for checkpointing in (False, True):
        model = tiny_model(family).train()
        torch.manual_seed(0)
        lens = attach(model, FocalConfig(temperature=0.5, form="token"), FOCUS[router])
        lens.mode = "soft"
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**inputs_of(model, tokens), use_cache=False).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in lens.parameters()])
    for plain, checkpointed in zip(*gradients):
        assert torch.allclose(plain, checkpointed, rtol=1e-6, atol=1e-12)


@every_router
@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_autocast_is_borne_and_routes_in_float32(family, router, mode):
    model, tokens = tiny_model(family, dtype=torch.float32), tiny_tokens()
    lens = attach(model, FocalConfig(form="token"), FOCUS[router])
    lens.mode = mode
    inputs = inputs_of(model, tokens)
    with torch.autocast("cpu", torch.bfloat16), lens.taped(Tape()) as tape:
        model(**inputs).logits.float().square().mean().backward()
    learned = [name for name, _ in lens.named_parameters() if mode == "soft" or "temperature" in name]
    assert learned == [name for name, parameter in lens.named_parameters() if parameter.grad is not None]
    margins = [*tape.read_margins.values(), *tape.hold_margins.values()]
    assert all(margin.dtype == torch.float32 for margin in margins)
    assert bool(margins) == (mode == "hard")


def test_networks_are_refused_by_name_where_no_submodule_shows_the_keys():
    model = tiny_model("deepseek_v3")
    with pytest.raises(ValueError, match="score='network' is not offered for DeepseekV3Attention"):
        attach(model, FOCUS["networks"])
    assert lens_of(model) is None
