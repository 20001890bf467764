"""What a lens says of itself: measure, check and summary."""

import pytest
import torch

import bifocals
from bifocals import FocalConfig, FocusConfig, attach
from bifocals.tape import NearOnly
from bifocals.testing import tiny_model, tiny_tokens

FOCUS = FocusConfig(groups=4, top_k=2, window=5, sinks=2)


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


@pytest.mark.parametrize(
    "focus", [FOCUS, FocusConfig.network(groups=4, window=5, sinks=2)], ids=["centroids", "networks"]
)
def test_window_and_sinks_alone_ask_no_router_and_decode_as_they_prefill(focus, monkeypatch):
    model, tokens = tiny_model("llama"), tiny_tokens()
    lens = attach(model, focus)
    for router in lens.routers.values():
        monkeypatch.setattr(router, "forward", None)
    with torch.no_grad(), lens.taped(NearOnly()) as tape:
        whole = model(tokens, use_cache=False).logits
    assert (lens.measure_tape(tape).far_kept, lens.measure_tape(tape).dominance) == (0.0, 0.0)
    with torch.no_grad(), lens.taped(NearOnly()):
        seen, found = None, []
        for start, stop in [(0, 20), *((at, at + 1) for at in range(20, 40))]:
            step = model(tokens[:, start:stop], past_key_values=seen, use_cache=True)
            seen = step.past_key_values
            found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), whole)


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


def test_measuring_nothing_but_padding_keeps_all_of_it():
    model, tokens = tiny_model("llama"), tiny_tokens()
    measured = attach(model, FOCUS).measure(tokens, torch.zeros_like(tokens))
    assert (measured.far_kept, measured.pairs_kept) == (1.0, 1.0)


def test_measure_works_on_an_encoder_decoder():
    model = tiny_model("bart")
    found = attach(model, FOCUS).measure(tiny_tokens())
    assert found.layers.keys() == {"0", "1"}
    assert 0 < found.far_kept < 1


def test_check_and_measure_leave_every_training_flag_and_statistic_alone():
    model, tokens = tiny_model("llama", dtype=torch.float32), tiny_tokens()
    lens = attach(model, FOCUS)
    lens.train()
    flags = [module.training for module in model.modules()]
    lens.measure(tokens)
    assert bifocals.check(model).is_kept
    assert [module.training for module in model.modules()] == flags
    assert all(router.dual_count == 0 for router in lens.routers.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_check_knows_how_coarse_half_precision_is(dtype):
    model = tiny_model("llama", dtype=dtype)
    attach(model, FocalConfig(temperature=0.5), FOCUS)
    report = bifocals.check(model)
    assert report.is_kept, str(report)


def test_the_summary_counts_what_was_added():
    model = tiny_model("llama")
    size = sum(parameter.numel() for parameter in model.parameters())
    lens = attach(model, FocalConfig(form="token"), FOCUS)
    summary = lens.summary()
    assert summary.added == sum(parameter.numel() for parameter in lens.parameters())
    assert summary.share == summary.added / size
    assert [(row.layer, row.groups, row.window) for row in summary.layers] == [("0", 4, 5), ("1", 4, 5)]
    assert f"{summary.added:,} parameters added" in str(summary)
