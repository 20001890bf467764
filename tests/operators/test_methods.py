"""Temperatures, routers and soft gates, each against its definition."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bifocals import FocusConfig, LearnedTemperature, Router, focal_attention, reference, soft_focus_attention
from bifocals.focus import focus_attention
from bifocals.routing import dominance, entropy


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.names.append(str(operator))
        return operator(*arguments, **(options or {}))


def vectors(length=40, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, heads, length, 8, dtype=dtype) for heads in (4, 2, 2)]


def test_a_constant_temperature_is_one_fused_call_and_nothing_more():
    query, key, value = vectors(dtype=torch.float32)
    with Counted() as counted:
        focal_attention(query, key, value, temperature=0.4)
    assert len(counted.names) == 1
    assert "scaled_dot_product" in counted.names[0]


@pytest.mark.parametrize("shape", [(), (4,), (2, 40), (2, 4, 40), (1, 4, 1, 1)])
def test_a_temperature_tensor_of_every_shape_equals_the_oracle_and_gets_gradients(shape):
    query, key, value = vectors()
    temperature = (torch.rand(shape, dtype=torch.float64) + 0.2).requires_grad_()
    full = {0: (1, 1, 1, 1), 1: (1, 4, 1, 1), 2: (2, 1, 40, 1), 3: (2, 4, 40, 1), 4: shape}[len(shape)]
    exact = reference.focal_attention(query, key, value, temperature=temperature.reshape(full))
    got = focal_attention(query, key, value, temperature=temperature)
    torch.testing.assert_close(got, exact)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), temperature)[0] for out in (got, exact)))


@pytest.mark.parametrize("form", ["token", "prefix"])
def test_a_learned_temperature_starts_where_it_should_and_reads_no_later_token(form):
    module = LearnedTemperature(8, start=0.4, minimum=0.1, maximum=2.0, outputs=3, form=form).double()
    hidden = torch.randn(2, 10, 8, dtype=torch.float64)
    torch.testing.assert_close(module(hidden), torch.full((2, 3, 10, 1), 0.4, dtype=torch.float64))
    torch.nn.init.normal_(module.weight)
    changed = hidden.clone()
    changed[:, 6] += 1
    assert torch.equal(module(hidden)[:, :, :6], module(changed)[:, :, :6])
    assert not torch.equal(module(hidden)[:, :, 6], module(changed)[:, :, 6])
    exact = reference.learned_temperature(hidden, module.weight, module.bias, form=form, minimum=0.1, maximum=2.0)
    torch.testing.assert_close(module(hidden), exact)


@pytest.mark.parametrize("raw", [-1e6, 1e6])
def test_the_gradient_of_a_learned_temperature_is_alive_at_both_ends(raw):
    module = LearnedTemperature(4, start=0.4, minimum=0.1, maximum=2.0)
    torch.nn.init.constant_(module.bias, raw)
    temperature = module(torch.ones(1, 3, 4))
    assert temperature.min() >= 0.1
    assert temperature.max() <= 2.0
    temperature.sum().backward()
    assert module.bias.grad.abs().min() > 0
    assert module.weight.grad.abs().min() > 0


def test_a_causal_router_puts_a_token_in_groups_by_that_token_alone():
    router = Router(16, 2, FocusConfig(groups=4)).eval()
    hidden = torch.randn(1, 12, 16)
    changed = hidden.clone()
    changed[:, 7:] = torch.randn(1, 5, 16)
    for side, other in zip(router.membership(hidden), router.membership(changed)):
        assert torch.equal(side[:, :, :7], other[:, :, :7])


def test_sinkhorn_equals_its_definition_and_reads_the_future():
    router = Router(16, 1, FocusConfig.paper(groups=4, allow_look_ahead=True)).double().eval()
    hidden = torch.randn(1, 12, 16, dtype=torch.float64)
    gates, _ = router(hidden).gates()
    torch.testing.assert_close(gates, reference.sinkhorn(router.scores(hidden, -1), 10))
    changed = hidden.clone()
    changed[:, 11] += 5
    assert not torch.allclose(gates[:, :, :11], router(changed).gates()[0][:, :, :11])


def test_forward_is_pure_and_only_a_step_moves_the_potentials():
    router = Router(16, 2, FocusConfig(groups=4)).train()
    hidden = torch.randn(2, 64, 16)
    router(hidden)
    assert router.potential.abs().max() == 0
    twice = Router(16, 2, FocusConfig(groups=4)).train()
    twice.load_state_dict(router.state_dict())
    twice(hidden), twice(hidden)
    router.step_balance(), twice.step_balance()
    assert router.potential.abs().max() > 0
    torch.testing.assert_close(router.potential, twice.potential)


def test_potentials_of_past_steps_balance_the_groups():
    torch.manual_seed(3)
    router = Router(16, 1, FocusConfig(groups=8)).train()
    shift = torch.randn(16)
    before = dominance(router.membership(torch.randn(1, 4000, 16) + shift)[1])
    for _ in range(60):
        router(torch.randn(1, 500, 16) + shift)
        router.step_balance()
    of_keys = router.eval().membership(torch.randn(1, 4000, 16) + shift)[1]
    assert dominance(of_keys) < before
    assert dominance(of_keys) < 2 / 8
    assert entropy(of_keys) > 0.9


@pytest.mark.parametrize("gate", ["log", "sigmoid"])
def test_soft_gates_equal_the_oracle_with_gradients(gate):
    query, key, value = vectors()
    gates = torch.randn(2, 2, 40, 5, dtype=torch.float64).softmax(-1).requires_grad_()
    key_gates = torch.randn(2, 1, 40, 5, dtype=torch.float64).softmax(-1).requires_grad_()
    options = {"gates": gates, "key_gates": key_gates, "window": 3, "sinks": 2, "gate": gate}
    got, exact = (run(query, key, value, **options) for run in (soft_focus_attention, reference.soft_focus_attention))
    torch.testing.assert_close(got, exact)
    for side in (gates, key_gates):
        torch.testing.assert_close(
            *(torch.autograd.grad(o.square().sum(), side, retain_graph=True)[0] for o in (got, exact))
        )


def test_the_log_gate_becomes_the_hard_pattern_and_the_sigmoid_gate_never_closes():
    query, key, value = vectors()
    membership = torch.nn.functional.one_hot(torch.randint(4, (2, 1, 40)), 4).bool()
    gates = membership.double()
    hard = focus_attention(query, key, value, membership=membership, window=3)
    soft = {
        gate: soft_focus_attention(query, key, value, gates=gates, key_gates=gates, window=3, gate=gate)
        for gate in ("log", "sigmoid")
    }
    torch.testing.assert_close(soft["log"], hard)
    assert not torch.allclose(soft["sigmoid"], hard, atol=1e-3)
