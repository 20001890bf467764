"""A lens on a model: attaching, switching, copying, saving and folding; and how misuse is refused."""

import copy
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM
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
