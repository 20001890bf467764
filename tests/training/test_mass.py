"""Fitting by the mass objective: what it learns, that it goes on exactly, and that processes change nothing."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

from bifocals import FocalConfig, FocusConfig, attach, check, fullness, lens_of, reference
from bifocals.benchmarks.capture import run as measure_capture
from bifocals.network import NetworkRouter
from bifocals.routing import Router, top_groups
from bifocals.tape import Tape
from bifocals.testing import tiny_model, tiny_tokens
from bifocals.training import layer_fit, mass, stakes
from bifocals.training.capture import capture_layers
from bifocals.training.checkpoint import CheckpointError
from bifocals.training.distill import divergence
from bifocals.training.mass import MassOptions, calibrate, fit_mass
from bifocals.training.mass_kept import far_mass_kept
from bifocals.training.mass_loss import (
    balanced_scores,
    centroid_update,
    hard_groups,
    held_keys,
    network_update,
    query_update,
)
from bifocals.training.processes import end_process
from bifocals.training.worth import attention_received, worth_update

NETWORKS = FocusConfig.network(groups=4, top_k=1, window=5, sinks=2, dim=8, idle=0.3)
FOCUS = {"networks": NETWORKS, "centroids": FocusConfig(groups=4, top_k=1, window=5, sinks=2)}
OPTIONS = MassOptions(steps=40, query_steps=16, rows=24, save_every=8, report_every=4)
every_router = pytest.mark.parametrize("router", FOCUS)


SMALL = {"PIECE": 5, "SLACK": 3}  # so that groups are full now and then in short sequences


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for name, size in SMALL.items():
        monkeypatch.setattr(fullness, name, size)


def lens_with(router, family="llama", dtype=torch.float32):
    return attach(tiny_model(family, dtype=dtype), FOCUS[router])


def fit(lens, checkpoints=None, options=OPTIONS, stop_after=None, final=None):
    """The losses reported; stopped in the middle if asked. What is returned in the end goes into ``final``."""
    losses = []

    def report(progress):
        losses.append(progress.loss)
        if stop_after is not None and len(losses) == stop_after:
            raise KeyboardInterrupt

    domains = torch.arange(7) % 3
    last = fit_mass(lens, tiny_tokens(7, 100), options, domains=domains, checkpoints=checkpoints, report=report)
    if final is not None:
        final.update(last)
    return losses


def same(lens, other):
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in lens.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_the_rows_that_are_learned_from_are_the_bases_own_attention(family):
    """Causal, with a softcap and a sliding window, and both ways."""
    model, tokens = tiny_model(family), tiny_tokens(1, 60)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(tokens, output_attentions=True).attentions
    lens = attach(model, NETWORKS)
    rows = torch.tensor([[20, 33, 59]])
    for (_, layer), own in zip(capture_layers(lens, tokens, rows).items(), expected):
        far = layer.far_keys(rows[0], 60, window=5, sinks=2)
        got = layer.far_attention(0, slice(0, 3), rows[0], far)
        # The base's eager softmax is in float32, whatever its dtype.
        torch.testing.assert_close(got, own[0][:, rows[0]] * far, atol=2**-23, rtol=2**-20)
        assert far.any(dim=1).all()
        assert not far[:, :2].any()


def test_a_softcap_and_a_learned_temperature_are_in_the_rows_too():
    """The first layer sees the same hidden states: only the temperature differs, outside the softcap."""
    model, tokens = tiny_model("gemma2"), tiny_tokens(1, 60)
    lens = attach(model, FocalConfig(form="token", per="head", temperature=0.5), NETWORKS)
    rows = torch.arange(60)
    constant = capture_layers(lens, tokens, rows[None])["0"]
    torch.nn.init.normal_(lens.layers["0"].temperature.weight)
    learned = capture_layers(lens, tokens, rows[None])["0"]
    sharper = (learned.query[0] / constant.query[0]).mean(dim=-1)  # 0.5 / temperature
    assert sharper.std() > 0.1
    everything = torch.ones(60, 60, dtype=torch.bool)
    logs = [layer.far_attention(0, slice(None), rows, everything).log() for layer in (constant, learned)]
    apart = [log[:, 59, 50:59] - log[:, 59, 59:] for log in logs]
    torch.testing.assert_close(apart[1], apart[0] * sharper[:, 59, None], rtol=1e-6, atol=1e-6)


def test_the_far_mass_kept_is_that_of_the_bases_attention_over_the_pattern():
    model, tokens = tiny_model("llama"), tiny_tokens(1, 60)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True).attentions
    lens = attach(model, FocusConfig(groups=4, top_k=2, window=5, sinks=2))
    with lens.taped(Tape()) as tape, torch.no_grad():
        model(tokens)
    kept = total = 0.0
    for name, attention in zip(lens.routers, attentions):
        options = {"window": 5, "sinks": 2, "heads": 4}
        nothing = torch.zeros_like(tape.reads[name])
        always = reference.focus_pairs(nothing, tape.holds[name], **options)
        read = reference.focus_pairs(tape.reads[name], tape.holds[name], **options)
        kept += attention[read & ~always].sum().item()
        total += attention[~always.expand_as(attention)].sum().item()
    assert 0.1 < kept / total < 0.9
    assert far_mass_kept(lens, tokens[0], tape) == pytest.approx(kept / total, rel=1e-5)


def test_capturing_computes_the_base():
    model, tokens = tiny_model("llama"), tiny_tokens(1, 60)
    with torch.no_grad():
        expected = model.base_model(tokens).last_hidden_state
    lens = attach(model, NETWORKS)
    lens.mode = "off"
    seen = []
    model.model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
    capture_layers(lens, tokens, torch.tensor([[20, 33, 59]]))
    torch.testing.assert_close(seen[0], expected)
    assert lens.mode == "off"


def test_what_capturing_costs_is_measured_and_leaves_no_lens():
    model = tiny_model("llama", dtype=torch.float32)
    row = measure_capture(model, 600, 1)["rows"][0]
    assert row["ratio"] == row["captured_seconds"] / row["plain_seconds"] > 0
    assert lens_of(model) is None


def updates():
    """Each update on a small case in float64, as a function of its router's parameters."""
    torch.manual_seed(0)
    config = FocusConfig.network(groups=3, dim=4)
    network = NetworkRouter(4, 2, 5, config).double()
    centroids = Router(6, 2, FocusConfig(groups=3, dim=4, tau=1.0)).double()
    network.potential.normal_(std=0.1)
    attention = torch.rand(4, 7, 12, dtype=torch.double).softmax(dim=-1) * 0.6
    rows, keys = torch.randn(4, 7, 5, dtype=torch.double), torch.randn(2, 12, 5, dtype=torch.double)
    hidden_rows, hidden = torch.randn(7, 6, dtype=torch.double), torch.randn(12, 6, dtype=torch.double)
    spent = torch.rand(4, 7, 5, dtype=torch.double).softmax(dim=-1)
    received = attention_received(attention, torch.rand(7, 12) > 0.3, 2)
    both = torch.nn.ModuleList([network.queries, network.keys])
    assert 0 < held_keys(network, keys).sum() < held_keys(network, keys).numel()
    return {
        "worth": (network.worth, lambda: worth_update(network, keys, received)),
        "soft": (both, lambda: network_update(network, rows, keys, attention, is_hard=False, is_strict=False)),
        "strict": (both, lambda: network_update(network, rows, keys, attention, is_hard=False, is_strict=True)),
        "queries": (network.queries, lambda: query_update(network, rows, spent)),
        "centroids": (centroids, lambda: centroid_update(centroids, hidden_rows, hidden, attention)),
    }


@pytest.mark.parametrize("name", ["worth", "soft", "strict", "queries", "centroids"])
def test_gradients_are_those_of_finite_differences(name):
    router, update = updates()[name]
    gradients = torch.autograd.grad(update().loss, list(router.parameters()))
    for parameter, gradient in zip(router.parameters(), gradients):
        direction = torch.randn_like(parameter)
        losses = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter += step * direction
                losses.append(update().loss.item())
                parameter -= step * direction
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((gradient * direction).sum().item(), rel=1e-5, abs=1e-8)


def test_a_key_in_one_group_has_the_loss_of_that_group_and_the_gradient_of_its_gates():
    torch.manual_seed(1)
    router = NetworkRouter(4, 2, 5, FocusConfig.network(groups=3, dim=4)).double()
    attention = torch.rand(4, 7, 12, dtype=torch.double).softmax(dim=-1) * 0.6
    rows, keys = torch.randn(4, 7, 5, dtype=torch.double), torch.randn(2, 12, 5, dtype=torch.double)
    update = network_update(router, rows, keys, attention, is_hard=True, is_strict=False)
    is_held = router.worth(keys) >= router.bars[..., None]
    holds = (top_groups(balanced_scores(router, keys)[None], 1)[0] & is_held).double()
    expected = (attention.view(2, 2, 7, 12) @ holds[:, None]).view(4, 7, 3)
    torch.testing.assert_close(update.mass, expected)
    update.loss.backward()
    assert router.keys.linear.grad.abs().sum() > 0


@every_router
def test_fitted_routers_keep_more_mass_than_they_cover(router):
    lens = lens_with(router)
    before = {name: tensor.clone() for name, tensor in lens.model.state_dict().items()}
    losses = fit(lens)
    progress = fit_mass(lens, tiny_tokens(7, 100), OPTIONS)
    assert losses
    assert all(each.mass_kept > each.far_kept + 0.05 for each in progress.values())
    assert all(0.25 <= each.dominance < 0.5 for each in progress.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in lens.model.state_dict().items())


def test_the_keys_that_get_least_are_idle_as_many_as_were_asked_for():
    lens = lens_with("networks")
    fit(lens, options=MassOptions(steps=150, query_steps=1, rows=24))
    tokens, rows = tiny_tokens(7, 100), torch.arange(30, 100).expand(7, -1)
    for name, layer in capture_layers(lens, tokens, rows).items():
        held, got = [], []
        for sequence, keys in enumerate(layer.routed_keys):
            far = layer.far_keys(rows[0], 100, window=5, sinks=2)
            attention = layer.far_attention(sequence, slice(None), rows[0], far)
            received, counted = attention_received(attention, far, 2)
            held.append(held_keys(lens.routers[name], keys)[:, 2:94])
            got.append((received / counted)[:, 2:94])
        held, got = torch.stack(held), torch.stack(got)
        assert (~held).float().mean(dim=(0, 2)) == pytest.approx([0.3, 0.3], abs=0.05)
        assert got[held].mean() > 1.5 * got[~held].mean()


def test_full_groups_lose_score_so_that_text_about_one_thing_crowds_none():
    """Of sequences about one thing each: a seventh of the vocabulary."""
    tokens = tiny_tokens(7, 200) // 7 + 9 * torch.arange(7)[:, None]
    largest = []
    for steepness in (0.0, 10.0):
        lens = lens_with("networks")
        fit_mass(lens, tokens, MassOptions(steps=20, query_steps=1, rows=24, steepness=steepness))
        assert all(bool(router.steepness.any()) == (steepness > 0) for router in lens.routers.values())
        largest.append(max(lens.measure(row[None]).dominance for row in tokens))
    assert largest[0] > 0.45
    assert largest[1] < 0.33


def test_a_token_that_comes_again_and_again_crowds_no_group():
    """Half of the text: in the first layer all its keys are alike."""
    tokens = torch.where(torch.arange(200) % 2 == 0, 5, tiny_tokens(6, 200))
    largest = []
    for steepness in (0.0, 10.0):
        lens = attach(tiny_model("llama", dtype=torch.float32), replace(NETWORKS, idle=0.0))
        fit_mass(lens, tokens, MassOptions(steps=20, query_steps=1, rows=24, steepness=steepness))
        largest.append(max(lens.measure(row[None]).layers["0"].dominance for row in tokens))
    assert largest[0] > 0.5
    assert largest[1] < 0.33


def test_what_is_learned_from_and_calibrated_on_are_the_groups_that_run():
    """Full groups included: the groups of each layer, as its model sorts the same sequence."""
    lens, tokens = lens_with("networks", dtype=torch.float64), tiny_tokens(7, 100)
    fit(lens)
    with lens.taped(Tape()) as tape, torch.no_grad():
        lens.top_k = 4
        lens.model(input_ids=tokens, use_cache=False)  # the base: all groups are read
    for name, layer in capture_layers(lens, tokens, torch.arange(30, 100).expand(7, -1)).items():
        router, moved = lens.routers[name], 0
        for sequence, keys in enumerate(layer.routed_keys):
            course = layer.course(sequence)
            holds = hard_groups(router, keys, course)
            query = torch.zeros(1, 4, 100, keys.shape[-1], dtype=keys.dtype)
            assert torch.equal(holds[None], router.membership(query, keys[None], course, top_k=1)[1])
            moved += int((holds != tape.holds[name][sequence] & held_keys(router, keys)[..., None]).sum())
        assert moved > 0


def test_a_layer_of_which_predictions_depend_more_reads_more():
    """The second layer's values are nearly nothing, so what it reads does not matter."""
    lens, kept = lens_with("networks"), {}
    with torch.no_grad():
        lens.model.model.layers[1].self_attn.v_proj.weight.mul_(1e-3)
    for weigh in (0, 2):
        fit(lens, options=MassOptions(steps=40, query_steps=16, rows=24, weigh=weigh))
        lens.top_k = 1
        found = lens.measure(tiny_tokens(7, 100))
        kept[weigh] = found.layers["0"].far_kept, found.layers["1"].far_kept, found.far_kept
        assert lens.mode == "hard"
    assert kept[2][0] > kept[0][0] + 0.03
    assert kept[2][1] < kept[0][1] - 0.03
    assert kept[2][2] == pytest.approx(kept[0][2], abs=0.03)


def test_thresholds_are_set_anew_for_another_budget_without_weighing_again(monkeypatch):
    """With no updates but those: ``steps`` 1 has none that go on from a lens."""
    lens = lens_with("networks")
    fit(lens)
    before = {name: tensor.clone() for name, tensor in lens.state_dict().items()}
    monkeypatch.setattr(mass, "weigh_layers", None)
    fit(lens, options=replace(OPTIONS, steps=1, query_steps=0, weigh=0, is_new=False, budget=0.5))
    for name, tensor in lens.state_dict().items():
        assert torch.equal(tensor, before[name]) == (not name.endswith("thresholds"))
    first, second = (lens.state_dict()[f"layers.{layer}.router.thresholds"] for layer in "01")
    ratio = before["layers.0.router.thresholds"][0] / before["layers.1.router.thresholds"][0]
    assert ratio != 1
    torch.testing.assert_close(first[:3] / second[:3], ratio.expand(3))
    for top_k in (1, 2, 3):
        lens.top_k = top_k
        assert lens.measure(tiny_tokens(7, 100)).far_kept == pytest.approx(0.5 * top_k / 4, abs=0.04)


def test_a_calibration_measures_steepness_in_the_deviations_of_scores_that_have_changed():
    lens = lens_with("networks")
    fit(lens)
    before = {name: router.steepness.clone() for name, router in lens.routers.items()}
    with torch.no_grad():
        for network in (router.keys for router in lens.routers.values()):
            for tensor in (network.linear, network.bias, network.outward):
                tensor.mul_(2)
    calibrate(lens, tiny_tokens(7, 100), MassOptions(batch=1, rows=24))
    for name, router in lens.routers.items():
        torch.testing.assert_close(router.steepness, 2 * before[name])
        router.steepness.zero_()
    calibrate(lens, tiny_tokens(7, 100), MassOptions(batch=1, rows=24))
    assert not any(router.steepness.any() for router in lens.routers.values())


def test_a_calibration_that_is_stopped_while_it_weighs_leaves_the_lens_as_it_was(monkeypatch):
    lens, runs = lens_with("networks"), []
    fit(lens)
    before = {name: tensor.clone() for name, tensor in lens.state_dict().items()}

    def stopped(*given):
        runs.append(given)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return divergence(*given)

    monkeypatch.setattr(stakes, "divergence", stopped)
    with pytest.raises(KeyboardInterrupt):
        calibrate(lens, tiny_tokens(7, 100, seed=5), OPTIONS)
    torch.testing.assert_close(lens.state_dict(), before, rtol=0, atol=0)
    assert lens.top_k == 1


def test_a_fit_that_diverges_says_so():
    with pytest.raises(ValueError, match=r"The fit diverged.*Lower the rate"):
        fit(lens_with("networks"), options=replace(OPTIONS, rate=1e30))


@pytest.mark.parametrize("wrong", [{"steps": 2.5}, {"is_new": "no"}, {"rate": float("inf")}, {"seed": 2**70}])
def test_options_are_checked_when_they_are_made(wrong):
    with pytest.raises((TypeError, ValueError), match=rf"{next(iter(wrong))}\b.* got "):
        MassOptions(**wrong)


def test_thresholds_read_top_k_groups_on_average():
    lens = lens_with("networks")
    fit(lens)
    thresholds = next(iter(lens.routers.values())).thresholds.tolist()
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[-1] == 0
    kept = []
    for top_k in (1, 2, 3, 4):
        lens.top_k = top_k
        kept.append(lens.measure(tiny_tokens(7, 100)).far_kept)
    # Without the idle ones, seven keys in ten are left to be read.
    assert kept[:3] == pytest.approx([min(OPTIONS.budget * top_k / 4, 0.7) for top_k in (1, 2, 3)], abs=0.06)
    assert kept[3] == 1


@every_router
def test_after_fitting_every_promise_is_kept(router):
    lens = lens_with(router, dtype=torch.float64)
    fit(lens)
    report = check(lens.model)
    assert report.is_kept, str(report)


@every_router
def test_the_same_seed_gives_the_same_routers_and_another_gives_others(router):
    first, second, third = (lens_with(router) for _ in range(3))
    for lens, seed in ((first, 0), (second, 0), (third, 1)):
        fit(lens, options=MassOptions(steps=6, query_steps=2, rows=24, seed=seed))
    assert same(first, second)
    assert not same(first, third)


@every_router
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(router, tmp_path):
    whole, final = lens_with(router), {}
    losses = fit(whole, final=final)
    for stop_after in (9, len(losses) // 2, len(losses) - 2):
        folder = tmp_path / str(stop_after)
        with pytest.raises(KeyboardInterrupt):
            fit(lens_with(router), folder, stop_after=stop_after)
        resumed, resumed_final = lens_with(router), {}
        later = fit(resumed, folder, final=resumed_final)
        fitted, expected = ([loss for loss in some if loss != 0] for some in (later, losses))
        assert fitted == expected[len(expected) - len(fitted) :]
        assert same(resumed, whole)
        assert resumed_final == final  # also of layers that were finished before it stopped


def test_layers_are_not_weighed_again_on_the_sequences_before_a_stop(tmp_path):
    """Of three sequences and two layers, stopped in the last one."""
    reports = len(fit(lens_with("networks")))
    with pytest.raises(KeyboardInterrupt):
        fit(lens_with("networks"), tmp_path, stop_after=reports - 1)
    assert len(fit(lens_with("networks"), tmp_path)) == 7 + 2  # sequences captured, layers weighed


@every_router
def test_a_second_fit_goes_on_from_the_first(router, tmp_path):
    """Its first loss is about the last one of the first fit, and it can be stopped as well."""
    short = MassOptions(steps=20, query_steps=8, rows=24, report_every=1, save_every=4, rate=1e-4, is_new=False)
    lens, other = lens_with(router), lens_with(router)
    fit(lens)
    other.load_state_dict(lens.state_dict())
    started = [loss for loss in fit(lens_with(router), options=MassOptions(steps=20, rows=24, report_every=1)) if loss]
    with pytest.raises(KeyboardInterrupt):
        fit(other, tmp_path, options=short, stop_after=20)
    losses = [loss for loss in fit(lens, options=short) if loss]
    assert losses[0] < started[0]
    fit(other, tmp_path, options=short)
    assert same(lens, other)


def test_a_finished_run_is_not_run_again(tmp_path):
    first, second, final, again = lens_with("networks"), lens_with("networks"), {}, {}
    fit(first, tmp_path, final=final)
    assert fit(second, tmp_path, final=again) == []
    assert same(first, second)
    assert again == final


def test_a_run_killed_outright_goes_on_bit_for_bit(tmp_path):
    whole = lens_with("networks")
    fit(whole)
    for kill_after in (5, 12):
        killed = subprocess.run(
            [sys.executable, __file__, str(tmp_path), str(kill_after)], check=False, env=environment()
        )
        assert killed.returncode == -signal.SIGKILL
    resumed = lens_with("networks")
    fit(resumed, tmp_path)
    assert same(resumed, whole)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(lens_with("networks"), tmp_path, stop_after=20)
    with pytest.raises(ValueError, match=r"is of another run.*Remove it"):
        fit(lens_with("networks"), tmp_path, options=MassOptions(steps=41, rows=24))


@pytest.mark.parametrize(
    "about", ["", "[]", '{"key": 1}', '{"key": 1, "layer": 0, "step": 0, "done": {"0": {"x": 1}}}']
)
def test_a_damaged_checkpoint_is_refused_with_a_remedy(about, tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "mass.safetensors", {"state": about})
    with pytest.raises(CheckpointError, match=r"cannot be read.*Remove it"):
        fit(lens_with("networks"), tmp_path)


@every_router
def test_two_processes_give_the_losses_of_one(router, tmp_path):
    whole = lens_with(router)
    losses = fit(whole)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__]
    subprocess.run([*command, str(tmp_path / "losses.pt"), router], check=True, env=environment())
    got = [float(each) for each in (tmp_path / "losses.pt").read_text().split()]
    fitted = [loss for loss in losses if loss != 0]
    assert got == pytest.approx(fitted, rel=1e-4)


def test_collapse_is_reported_once_with_a_remedy_or_logged_where_nobody_watches(monkeypatch, caplog):
    monkeypatch.setattr(layer_fit, "COLLAPSED", 0.5)
    monkeypatch.setattr(layer_fit, "PATIENCE", 5)
    warnings = []
    fit_mass(
        lens_with("networks"), tiny_tokens(7, 100), OPTIONS, report=lambda progress: warnings.append(progress.warning)
    )
    found = [warning for warning in warnings if warning]
    assert len(found) == 2  # one for each layer
    assert not caplog.records
    fit_mass(lens_with("networks"), tiny_tokens(7, 100), OPTIONS)
    assert [record.getMessage() for record in caplog.records] == found
    assert "collapsing" in found[0]
    assert "more varied text" in found[0]


def test_groups_that_are_crowded_while_they_form_are_no_collapse_if_they_are_not_afterwards(monkeypatch):
    """Of 40 steps, after 16 for the worth of keys, groups form in the first 22."""
    monkeypatch.setattr(layer_fit, "PATIENCE", 5)
    told = {}
    for limit in (0.5, 4.0):
        seen = []
        monkeypatch.setattr(layer_fit, "COLLAPSED", limit)
        fit_mass(lens_with("networks"), tiny_tokens(7, 100), OPTIONS, report=seen.append)
        told[limit] = [each.step for each in seen if each.warning]
    assert told == {0.5: [39, 39], 4.0: []}


def test_memory_grows_with_the_length_alone(monkeypatch):
    """The largest tensor of a fit, layers weighed, on sequences twice as long."""
    from tests.sizes import Sizes  # not where this file is run by itself

    for name in ("START_ROUNDS", "FINAL_ROUNDS"):
        monkeypatch.setattr(layer_fit, name, 2)
    largest = []
    for length in (300, 600):
        lens = lens_with("networks")
        with Sizes() as sizes:
            fit_mass(lens, tiny_tokens(2, length), MassOptions(steps=2, query_steps=1, rows=8))
        largest.append(sizes.largest)
    assert largest[1] <= 2.1 * largest[0]


def test_progress_counts_up_to_the_end():
    seen = []
    fit_mass(lens_with("networks"), tiny_tokens(7, 100), OPTIONS, report=seen.append)
    assert [each.step for each in seen if each.stage == "capture"] == list(range(1, 8))
    fitted = [(each.layers_done, each.step) for each in seen if each.stage == "fit"]
    assert all(earlier < later for earlier, later in pairwise(fitted))
    assert fitted[-1] == (1, 16 + 40 + 16)
    for each in seen:  # while worths are found, there are no groups to tell of
        has_groups = each.stage == "fit" and each.step > 16
        assert [value is not None for value in (each.mass_kept, each.far_kept, each.dominance)] == 3 * [has_groups]


def test_wrong_input_is_told_what_was_expected():
    lens = lens_with("networks")
    with pytest.raises(ValueError, match="more than 31 tokens in a row"):
        fit_mass(lens, tiny_tokens(7, 31), OPTIONS)
    with pytest.raises(ValueError, match="at least 2 rows of tokens"):
        fit_mass(lens, tiny_tokens(1, 100), OPTIONS)
    with pytest.raises(ValueError, match="one number for each of 7 blocks"):
        fit_mass(lens, tiny_tokens(7, 100), OPTIONS, domains=torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="Expected rows >= 1"):
        MassOptions(rows=0)


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def main():
    """Run by the tests in processes of their own: one that is killed, or one of two."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vars(fullness).update(SMALL)
    if "RANK" not in os.environ:
        folder, kill_after = sys.argv[1], int(sys.argv[2])
        count = 0

        def report(progress):
            nonlocal count
            count += progress.stage == "fit"
            if count == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

        domains = torch.arange(7) % 3
        fit_mass(
            lens_with("networks"), tiny_tokens(7, 100), OPTIONS, domains=domains, checkpoints=folder, report=report
        )
        return
    torch.distributed.init_process_group("gloo")
    losses = [loss for loss in fit(lens_with(sys.argv[2])) if loss != 0]
    if torch.distributed.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(" ".join(map(str, losses)))
    end_process(0)


if __name__ == "__main__":
    main()
