"""The real model, from its wheel: attach, check, measure, generate, save, load, detach."""

import pytest
import torch

from bifocals import FocalConfig, FocusConfig, attach, check, fold, load
from bifocals.models import load_model

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]
FOCAL, FOCUS = FocalConfig(temperature=0.4), FocusConfig(window=16)
PROMPT = "The lens of the eye bends light so that"


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2-135m")


@pytest.fixture
def model(loaded):
    torch.manual_seed(0)
    yield loaded.model
    lens = loaded.model.__dict__.get("_bifocals_lens")
    if lens is not None:
        lens.detach()


@pytest.mark.parametrize(
    ("configs", "mode"),
    [([FOCAL], "hard"), ([FOCUS], "soft"), ([FOCUS], "hard"), ([FOCAL, FOCUS], "hard")],
    ids=["focal", "focus-soft", "focus-hard", "both"],
)
def test_the_real_model_keeps_every_promise(model, loaded, configs, mode):
    attach(model, *configs).mode = mode
    report = check(model, loaded.tokenizer)
    assert report.is_kept, str(report)


def test_the_real_model_generates_with_a_lens_and_comes_back_bit_for_bit(model, loaded, tmp_path):
    inputs = loaded.tokenizer(PROMPT, return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        base = model(**inputs).logits
        said = model.generate(**inputs, **options)
        lens = attach(model, FocusConfig(window=4, sinks=1, groups=4, top_k=1))
        found = lens.measure(loaded.tokenizer("far and near " * 40, return_tensors="pt")["input_ids"])
        assert 0.05 < found.far_kept < 0.9
        assert len(found.layers) == 30
        fitted = model(**inputs).logits
        assert not torch.equal(fitted, base)
        lens.save(tmp_path)
        lens.detach()
        assert torch.equal(model(**inputs).logits, base)
        lens = load(model, tmp_path)
        assert torch.equal(model(**inputs).logits, fitted)
        assert model.generate(**inputs, **options).shape == said.shape
        lens.top_k = 4
        assert torch.equal(model.generate(**inputs, **options), said)
        lens.detach()
        assert torch.equal(model.generate(**inputs, **options), said)


def test_a_temperature_folds_into_the_real_model(model, loaded):
    inputs = loaded.tokenizer(PROMPT, return_tensors="pt")
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if "q_proj" in name}
    with torch.no_grad():
        attach(model, FOCAL)
        focal = model(**inputs).logits
        try:
            folded = fold(model)(**inputs).logits
        finally:
            model.load_state_dict(kept, strict=False)
    assert (folded - focal).abs().max() < 2e-3 * focal.abs().max()
