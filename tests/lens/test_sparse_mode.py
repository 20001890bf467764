"""Gates on the kept pairs alone: what fits a lens at the cost of its pattern."""

import pytest
import torch

from bifocals import FocusConfig, attach, check, gated
from bifocals.fullness import Course
from bifocals.network import NetworkRouter
from bifocals.testing import tiny_model, tiny_tokens

FOCUS = {
    "centroids": FocusConfig(groups=4, top_k=2, window=5, sinks=2),
    "networks": FocusConfig.network(groups=4, top_k=2, window=5, sinks=2, dim=8),
    "same groups": FocusConfig(groups=4, top_k=1, window=5, sinks=2, sides="same", routers="layer"),
}
every_router = pytest.mark.parametrize("router", FOCUS)


def sparse_lens(router, family):
    torch.manual_seed(0)
    lens = attach(tiny_model(family), FOCUS[router])
    lens.mode = "sparse"
    for layer in lens.routers.values():
        if isinstance(layer, NetworkRouter):
            layer.steepness.fill_(3.0)
    return lens


def test_keys_that_gave_way_to_full_groups_have_the_gates_of_those_they_are_in():
    """As if the scores of full groups were lower to begin with: each key's gate is its largest."""
    lens = sparse_lens("networks", "llama")
    router = lens.routers["0"]
    query, key = torch.randn(1, 4, 40, 8).double(), torch.randn(1, 2, 40, 8).double()
    routing = router(query, key, Course.of_sequence(40))
    holds, gates = routing.groups(2)[1], routing.sorted_gates(2)[1]
    is_held = holds.any(dim=-1)
    assert not torch.equal(holds, router(query, key).groups(2)[1])
    assert torch.equal(gates.amax(dim=-1)[is_held], gates[holds])


@every_router
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_promises_are_kept_in_sparse_mode(router, family):
    report = check(sparse_lens(router, family).model)
    assert report.is_kept, str(report)


@every_router
def test_long_text_has_the_same_gradients_as_all_pairs_written_out(router, monkeypatch):
    """Of the base's weights and of the routers; gpt2 computes in float64 throughout."""
    found = {}
    for short in (0, 1000):
        monkeypatch.setattr(gated, "SHORT_DENSE", short)
        lens = sparse_lens(router, "gpt2")
        loss = lens.model(tiny_tokens(2, 120), labels=tiny_tokens(2, 120)).loss
        loss.backward()
        found[short] = {name: parameter.grad for name, parameter in lens.model.named_parameters()}
    assert found[0].keys() == found[1000].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1000][name], msg=name)
    own = {name: gradient for name, gradient in found[0].items() if ".bifocals." in name}
    assert own
    assert all(gradient is not None and gradient.any() for gradient in own.values())


def test_the_pattern_is_that_of_hard_mode():
    """A token that no query after it reads in hard mode changes nothing after it in sparse mode either."""
    lens = attach(tiny_model("llama", num_hidden_layers=1), FocusConfig(groups=4, top_k=1, window=2, sinks=0))
    tokens = tiny_tokens(1, 80)
    kept = lens.measure(tokens).far_kept
    assert kept < 0.5
    for mode in ("hard", "sparse"):
        lens.mode = mode
        embedded = lens.model.model.embed_tokens(tokens).detach().requires_grad_()
        lens.model(inputs_embeds=embedded).logits[0, -1].sum().backward()
        reached = embedded.grad[0].abs().sum(dim=-1) > 0
        if mode == "hard":
            of_hard = reached
    assert torch.equal(reached, of_hard)
    assert not reached.all()


def test_a_gate_that_never_closes_is_refused():
    lens = attach(tiny_model("llama"), FocusConfig(groups=4, gate="sigmoid"))
    with pytest.raises(ValueError, match=r"expected gate='log', got 'sigmoid'.*Use mode 'soft'"):
        lens.mode = "sparse"
    assert lens.mode == "hard"
