"""The lens that ships for the default model: it loads by its name, keeps its promises, and keeps the quality."""

import pytest
import torch

from bifocals import check, load
from bifocals.adapter import AdapterError
from bifocals.evaluation.perplexity import evaluate
from bifocals.models import load_model
from bifocals.training.data import load_blocks

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]
NAME = "smollm2-135m"
MOST_FAR_KEPT = {1: 0.14, 2: 0.28, 4: 0.55}


@pytest.fixture(scope="module")
def loaded():
    return load_model(NAME)


@pytest.fixture
def lens(loaded):
    lens = load(loaded.model, NAME)
    yield lens
    lens.detach()


def test_it_keeps_every_promise(lens, loaded):
    report = check(lens.model, loaded.tokenizer)
    assert report.is_kept, str(report)


def test_it_recovers_most_of_the_gap_within_its_budgets_on_source_it_was_not_fitted_on(lens, loaded):
    blocks = load_blocks(["stdlib@held-out"], loaded.tokenizer, 1024, limit=1)
    rows = {row["setting"]: row for row in evaluate(lens.model, blocks, (1, 2, 4))["rows"]}
    for top_k, most in MOST_FAR_KEPT.items():
        row = rows[f"top_k {top_k}"]
        assert row["far_kept"] <= most
        assert row["recovered"] > 0.8
    assert rows["dense"]["perplexity"] < rows["top_k 4"]["perplexity"] < rows["top_k 1"]["perplexity"]


def test_its_groups_are_even_in_every_layer_on_source_it_was_not_fitted_on(lens, loaded):
    tokens = load_blocks(["stdlib@held-out"], loaded.tokenizer, 2048, limit=1).tokens
    for layer in lens.measure(tokens).layers.values():
        assert layer.dominance <= 1.6 / 8


def test_it_loads_on_the_same_model_in_another_precision_if_allowed():
    model = load_model(NAME, dtype=torch.bfloat16).model
    with pytest.raises(AdapterError, match="allow_other_weights=True"):
        load(model, NAME)
    lens = load(model, NAME, allow_other_weights=True)
    tokens = torch.randint(100, 40_000, (1, 150), generator=torch.Generator().manual_seed(0))
    assert 0 < lens.measure(tokens).far_kept < 1
