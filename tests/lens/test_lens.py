"""How a lens behaves: attaching, switching, copying, misuse."""

import copy
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention

import bifocals
from bifocals import FocalConfig, FocusConfig, attach, fold, lens_of
from bifocals.testing import TINY, tiny_model, tiny_tokens

FOCUS = FocusConfig(groups=4, top_k=2, window=5, sinks=2)


def logits(model, tokens, **others):
    with torch.no_grad():
        return model(tokens, **others).logits


def test_importing_bifocals_registers_nothing_and_does_not_need_transformers():
    code = """
import sys, bifocals
assert "transformers" not in sys.modules
from transformers import AttentionInterface, AttentionMaskInterface
import bifocals.lens
assert "bifocals" not in AttentionInterface._global_mapping
assert "bifocals" not in AttentionMaskInterface._global_mapping
assert callable(bifocals.check) and callable(bifocals.fold) and callable(bifocals.attach)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.calls[operator.name()] += 1
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_a_constant_temperature_adds_no_operation_to_a_model(family):
    model, tokens = tiny_model(family), tiny_tokens()
    with Record() as base:
        logits(model, tokens, use_cache=False)
    attach(model, FocalConfig(temperature=0.4))
    with Record() as focal:
        logits(model, tokens, use_cache=False)
    assert focal.calls == base.calls


def test_every_public_name_is_there():
    for name in bifocals.__all__:
        assert getattr(bifocals, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bifocals.nothing  # noqa: B018


def test_models_made_from_one_config_keep_their_own_settings():
    config, tokens = LlamaConfig(**TINY["llama"]), tiny_tokens()
    models = [LlamaForCausalLM(config).double().eval() for _ in range(3)]
    base = [logits(model, tokens) for model in models]
    attach(models[0], FocalConfig(temperature=0.5))
    attach(models[1], FOCUS).mode = "off"
    assert not torch.equal(logits(models[0], tokens), base[0])
    assert torch.equal(logits(models[1], tokens), base[1])
    assert torch.equal(logits(models[2], tokens), base[2])


def test_layers_left_alone_are_left_alone():
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, FOCUS, layers=[1])
    assert list(lens.layers) == ["1"]
    with torch.no_grad():
        fitted = model(tokens, output_hidden_states=True).hidden_states
        with lens.disabled():
            base = model(tokens, output_hidden_states=True).hidden_states
    assert (fitted[1] - base[1]).abs().max() < 1e-12
    assert (fitted[2] - base[2]).abs().max() > 1e-3


@pytest.mark.parametrize("layers", [[], [2], [-1], [True], ["0"]])
def test_layers_that_are_not_there_are_refused(layers):
    with pytest.raises(ValueError, match=r"layers: expected some of 0\.\.1"):
        attach(tiny_model("llama"), FOCUS, layers=layers)


def test_a_copy_has_its_own_lens():
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, FocalConfig(temperature=0.5, form="token"), FOCUS)
    fitted = logits(model, tokens)
    twin = copy.deepcopy(model)
    own = lens_of(twin)
    assert own is not None
    assert own is not lens
    assert own.model is twin
    assert torch.equal(logits(twin, tokens), fitted)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_()
    own.top_k = 1
    assert not torch.equal(logits(twin, tokens), fitted)
    own.detach()
    assert torch.equal(logits(model, tokens), fitted)
    with lens.disabled():
        assert torch.equal(logits(twin, tokens), logits(model, tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_lens_moves_with_its_model(dtype):
    model, tokens = tiny_model("llama", dtype=torch.float32), tiny_tokens()
    lens = attach(model, FocalConfig(temperature=0.5, form="prefix"), FOCUS)
    model.to(dtype)
    assert all(parameter.dtype == dtype for parameter in lens.parameters())
    for mode in ("soft", "hard"):
        lens.mode = mode
        assert logits(model, tokens).dtype == dtype
        assert logits(model, tokens).isfinite().all()


def test_a_lens_on_a_half_model_routes_in_float32():
    model = tiny_model("llama", dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.float32 for parameter in attach(model, FOCUS).parameters())
    assert logits(model, tiny_tokens()).dtype == torch.bfloat16


def test_saving_the_model_writes_a_stock_checkpoint(tmp_path):
    model, tokens = tiny_model("llama"), tiny_tokens()
    base = logits(model, tokens)
    plain, fitted = tmp_path / "plain", tmp_path / "fitted"
    model.save_pretrained(plain)
    attach(model, FocalConfig(temperature=0.5), FOCUS)
    model.save_pretrained(fitted)
    for file in plain.iterdir():
        assert (fitted / file.name).read_bytes() == file.read_bytes()
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(fitted), tokens), base)


def test_another_attention_under_a_lens_is_refused_and_chosen_while_off_is_kept():
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, FOCUS)
    fitted = logits(model, tokens)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"switched under its lens: expected 'bifocals', got 'eager'.*'off'"):
        logits(model, tokens)
    lens.mode = "off"
    assert model.config._attn_implementation == "eager"
    lens.mode = "hard"
    assert torch.equal(logits(model, tokens), fitted)
    assert lens.detach().config._attn_implementation == "eager"


def test_a_stock_state_loads_into_a_model_with_a_lens():
    model, other, tokens = tiny_model("llama"), tiny_model("llama", seed=7), tiny_tokens()
    lens = attach(model, FocalConfig(form="token"), FOCUS)
    before = {name: tensor.clone() for name, tensor in lens.state_dict().items()}
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in lens.state_dict().items())
    with lens.disabled():
        assert torch.equal(logits(model, tokens), logits(other, tokens))


def test_threads_that_share_a_model_do_not_see_each_other():
    model = tiny_model("llama")
    attach(model, FocalConfig(form="prefix"), FOCUS)
    rows = [tiny_tokens(length=length, seed=length) for length in (30, 40, 50)]
    expected = [logits(model, row) for row in rows]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(5):
            for got, alone in zip(threads.map(lambda row: logits(model, row), rows), expected):
                assert torch.equal(got, alone)


def test_the_dial_changes_what_is_read_and_measure_says_how_much():
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, FOCUS)
    kept = []
    for top_k in (1, 2, 3, 4):
        lens.top_k = top_k
        found = lens.measure(tokens)
        assert found.layers.keys() == {"0", "1"}
        assert 0.25 <= found.dominance <= 1
        assert found.far_kept < found.pairs_kept or found.far_kept == 1
        kept.append(found.far_kept)
    assert kept == sorted(kept)
    assert kept[-1] == 1.0
    assert lens.mode == "hard"


def test_measure_counts_pairs_as_the_definitions_say():
    model, tokens = tiny_model("mistral", sliding_window=20), tiny_tokens(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    lens = attach(model, FOCUS)
    found = lens.measure(tokens, mask)
    tape = bifocals.lens.Tape()
    with torch.no_grad(), lens.taped(tape):
        model(tokens, attention_mask=mask)
    far_kept = far = kept = pairs = 0
    for row in range(2):
        first = 6 if row == 0 else 0
        for head in range(2):
            for i in range(first, 40):
                for j in range(max(first, i - 19), i + 1):
                    near_or_sink = i - j <= 5 or j - first < 2
                    share = bool((tape.reads["1"][row, head, i] & tape.holds["1"][row, head, j]).any())
                    far, far_kept = far + (not near_or_sink), far_kept + (not near_or_sink and share)
                    pairs, kept = pairs + 1, kept + (near_or_sink or share)
    assert found.layers["1"].far_kept == pytest.approx(far_kept / far)
    assert found.layers["1"].pairs_kept == pytest.approx(kept / pairs)


def test_the_summary_counts_what_was_added():
    model = tiny_model("llama")
    size = sum(parameter.numel() for parameter in model.parameters())
    lens = attach(model, FocalConfig(form="token"), FOCUS)
    summary = lens.summary()
    assert summary.added == sum(parameter.numel() for parameter in lens.parameters())
    assert summary.share == summary.added / size
    assert [(row.layer, row.groups, row.window) for row in summary.layers] == [("0", 4, 5), ("1", 4, 5)]
    assert f"{summary.added:,} parameters added" in str(summary)


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


class CustomAttention(LlamaAttention):
    """Somebody's own attention: it may compute anything."""


def test_models_that_a_lens_does_not_know_are_refused_by_name():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match=r"MambaForCausalLM: no entry for model_type 'mamba'.*llama.*families\.py"):
        attach(mamba, FOCUS)
    with pytest.raises(ValueError, match="got Linear"):
        attach(nn.Linear(2, 2), FOCUS)
    custom = tiny_model("llama")
    for number, block in enumerate(custom.model.layers):
        block.self_attn = CustomAttention(custom.config, number)
    with pytest.raises(ValueError, match="bypasses the attention interface"):
        attach(custom, FOCUS)


@pytest.mark.parametrize("configs", [[], [FOCUS, FOCUS], [FocalConfig(), FocalConfig()], ["focus"], [FOCUS, None]])
def test_attach_wants_one_config_of_each_kind(configs):
    with pytest.raises(ValueError, match="Expected a FocalConfig, a FocusConfig, or one of each"):
        attach(tiny_model("llama"), *configs)


def test_a_second_lens_is_refused_and_the_first_stays():
    model = tiny_model("llama")
    lens = attach(model, FOCUS)
    with pytest.raises(ValueError, match="has a lens already"):
        attach(model, FocalConfig())
    assert lens_of(model) is lens


@pytest.mark.parametrize("first", ["whole", "body"])
def test_a_second_lens_is_refused_through_another_door_too(first):
    model, tokens = tiny_model("llama"), tiny_tokens()
    doors = {"whole": model, "body": model.model}
    lens = attach(doors.pop(first), FOCUS)
    fitted = logits(model, tokens)
    with pytest.raises(ValueError, match="has a lens already"):
        attach(*doors.values(), FocalConfig())
    assert torch.equal(logits(model, tokens), fitted)
    lens.detach()


def test_the_lens_of_a_wrapped_model_is_found():
    model = tiny_model("llama")
    wrapped = nn.Sequential(nn.Sequential(model))
    assert lens_of(wrapped) is None
    lens = attach(model, FOCUS)
    assert lens_of(wrapped) is lens


def test_a_model_whose_weights_are_elsewhere_is_refused():
    model = tiny_model("llama").to("meta")
    with pytest.raises(ValueError, match=r"no weights in memory: expected .*, got 'meta'.* Load the model"):
        attach(model, FOCUS)
    assert lens_of(model) is None


def test_measuring_nothing_but_padding_keeps_all_of_it():
    model, tokens = tiny_model("llama"), tiny_tokens()
    measured = attach(model, FOCUS).measure(tokens, torch.zeros_like(tokens))
    assert (measured.far_kept, measured.pairs_kept) == (1.0, 1.0)


def test_wrong_settings_are_told_what_is_right():
    model = tiny_model("llama")
    lens = attach(model, FOCUS)
    for wrong in ("HARD", None, 1):
        with pytest.raises(ValueError, match="mode: expected one of"):
            lens.mode = wrong
    for wrong in (0, 5, True, 1.5, "2"):
        with pytest.raises(ValueError, match="top_k: expected an integer"):
            lens.top_k = wrong
    lens.detach()
    with pytest.raises(ValueError, match="was detached"):
        lens.mode = "soft"
    focal = attach(model, FocalConfig())
    with pytest.raises(ValueError, match="has no Focus"):
        focal.top_k = 1


def test_a_failed_attach_leaves_nothing_behind():
    model, tokens = tiny_model("llama"), tiny_tokens()
    base, modules = logits(model, tokens), len(list(model.modules()))
    with pytest.raises(ValueError, match="depend on later tokens"):
        attach(model, FocusConfig(balance="sinkhorn"))
    with pytest.raises(ValueError, match="reads tokens after the query"):
        attach(model, FocalConfig(form="sequence"))
    assert len(list(model.modules())) == modules
    assert torch.equal(logits(model, tokens), base)
    assert model.config._attn_implementation == "sdpa"


def test_an_encoder_may_use_the_paper_as_printed():
    model, tokens = tiny_model("bert"), tiny_tokens()
    lens = attach(model, FocalConfig(form="sequence"), FocusConfig.paper(groups=4, window=3))
    for mode in ("soft", "hard"):
        lens.mode = mode
        assert logits(model, tokens).isfinite().all()


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


def test_folding_is_refused_where_it_is_not_exact():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="no lens"):
        fold(model)
    for configs, reason in (([FocalConfig(), FOCUS], "Only Focal folds"), ([FocalConfig(form="token")], "learned")):
        lens = attach(model, *configs)
        with pytest.raises(ValueError, match=reason):
            fold(model)
        assert lens_of(model) is lens
        lens.detach()
    capped = tiny_model("gemma2")
    attach(capped, FocalConfig(), layers=[0])
    with pytest.raises(ValueError, match="one number for all layers"):
        fold(capped)


def test_some_layers_of_a_model_fold_alone():
    model, tokens = tiny_model("gpt_neox"), tiny_tokens()
    attach(model, FocalConfig(temperature=0.5), layers=[1])
    focal = logits(model, tokens)
    assert torch.allclose(logits(fold(model), tokens), focal, atol=1e-10)


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


def test_check_and_measure_leave_every_training_flag_and_statistic_alone():
    model, tokens = tiny_model("llama", dtype=torch.float32), tiny_tokens()
    lens = attach(model, FOCUS)
    lens.train()
    flags = [module.training for module in model.modules()]
    lens.measure(tokens)
    assert bifocals.check(model).is_kept
    assert [module.training for module in model.modules()] == flags
    assert all(router.dual_count == 0 for router in lens.routers.values())


def test_attention_weights_are_refused_rather_than_made_up():
    model, tokens = tiny_model("llama"), tiny_tokens()
    attach(model, FOCUS)
    with pytest.raises(ValueError, match="no attention weights"):
        model(tokens, output_attentions=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_check_knows_how_coarse_half_precision_is(dtype):
    model = tiny_model("llama", dtype=dtype)
    attach(model, FocalConfig(temperature=0.5), FOCUS)
    report = bifocals.check(model)
    assert report.is_kept, str(report)


def test_measure_works_on_an_encoder_decoder():
    model = tiny_model("bart")
    found = attach(model, FOCUS).measure(tiny_tokens())
    assert found.layers.keys() == {"0", "1"}
    assert 0 < found.far_kept < 1


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
