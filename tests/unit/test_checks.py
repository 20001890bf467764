"""Wrong input: what was expected, what came, what to do; before any work."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bifocals import focal_attention, focus_attention, soft_focus_attention

pytestmark = pytest.mark.usefixtures("as_in_production")

RIGHT = {
    "query": torch.zeros(2, 4, 9, 8),
    "key": torch.zeros(2, 2, 9, 8),
    "value": torch.zeros(2, 2, 9, 8),
}
TRUE = torch.ones(2, 2, 9, 3, dtype=torch.bool)
FOCUS = {**RIGHT, "membership": TRUE, "window": 2}
SOFT = {**RIGHT, "gates": TRUE.float(), "key_gates": TRUE.float(), "window": 2}


class NoAttention(TorchDispatchMode):
    """Refuses the work itself; comparing a few numbers is checking."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        assert not re.search(r"attention|focus|mm|softmax|div|masked_fill", str(operator))
        return operator(*arguments, **(options or {}))


def assert_refused(attend, right, wrong, *said):
    arguments = {**right, **wrong}
    vectors = [arguments.pop(name) for name in ("query", "key", "value")]
    with NoAttention(), pytest.raises(ValueError, match=r"xpected .*got") as raised:
        attend(*vectors, **arguments)
    message = str(raised.value)
    for part in said:
        assert part in message
    # The remedy: a sentence after what came, or a clause after a colon.
    assert message.endswith(".")
    assert re.search(r"got .*[.:] \S", message)


HEADS = {
    "three dimensions": ({"query": torch.zeros(4, 9, 8)}, "query", "(batch, head, length, dim)", "(4, 9, 8)"),
    "integers": ({"value": torch.zeros(2, 2, 9, 8).long()}, "value", "floating-point", "torch.int64"),
    "two dtypes": ({"key": torch.zeros(2, 2, 9, 8).half()}, "one dtype", "torch.float16"),
    "two devices": ({"key": torch.zeros(2, 2, 9, 8, device="meta")}, "one device", "meta"),
    "values of other tokens": ({"value": torch.zeros(2, 2, 8, 8)}, "key and value", "(2, 2, 8, 8)"),
    "another batch": ({"query": torch.zeros(1, 4, 9, 8)}, "batch and dim", "(1, 4, 9, 8)"),
    "another dim": ({"query": torch.zeros(2, 4, 9, 6)}, "batch and dim", "(2, 4, 9, 6)"),
    "vectors of no numbers": (
        {"query": torch.zeros(2, 4, 9, 0), "key": torch.zeros(2, 2, 9, 0)},
        *("dim >= 1", "(2, 4, 9, 0)"),
    ),
    "heads that do not divide": ({"query": torch.zeros(2, 3, 9, 8)}, "multiple", "3 and 2"),
    "no heads": ({"key": torch.zeros(2, 0, 9, 8), "value": torch.zeros(2, 0, 9, 8)}, "multiple", "4 and 0"),
    "more queries than keys": ({"query": torch.zeros(2, 4, 10, 8)}, "as many queries as keys", "10 and 9"),
    "segments of another length": ({"segments": torch.zeros(2, 8).long()}, "segments", "(2, 9)", "(2, 8)"),
    "segments of floats": ({"segments": torch.zeros(2, 9)}, "segments", "integers", "torch.float32"),
    "segments of bools": ({"segments": torch.zeros(2, 9).bool()}, "segments", "integers", "torch.bool"),
    "a segment that comes back": ({"segments": torch.tensor([[0, 1, 0, 0, 0, 0, 0, 0, 0]] * 2)}, "contiguous"),
    "a segment around padding": ({"segments": torch.tensor([[0, -1, 0, 0, 0, 0, 0, 0, 0]] * 2)}, "contiguous"),
    "a temperature of 0": ({"temperature": 0.0}, "temperature", "> 0", "0.0"),
    "a temperature below 0": ({"temperature": -1.5}, "temperature", "> 0", "-1.5"),
    "a temperature of NaN": ({"temperature": float("nan")}, "temperature", "> 0", "nan"),
    "one of many temperatures is 0": ({"temperature": torch.tensor([1.0, 1, 0, 1])}, "temperature", "least value is 0"),
    "temperatures of other heads": ({"temperature": torch.ones(3)}, "temperature", "(head,)", "(3,)"),
    "temperatures of five dimensions": ({"temperature": torch.ones(1, 1, 1, 1, 1)}, "temperature", "(1, 1, 1, 1, 1)"),
    "integer temperatures": ({"temperature": torch.ones(4).long()}, "temperature", "floats", "torch.int64"),
    "a scale of 0": ({"scale": 0.0}, "scale", "> 0", "sqrt(dim)"),
    "a reach of 0": ({"reach": 0}, "reach", "> 0", "sliding window"),
}
COUNTS = {
    "a window below 0": ({"window": -1}, "window", ">= 0", "-1"),
    "half a window": ({"window": 2.5}, "window", "an integer", "2.5"),
    "a window of True": ({"window": True}, "window", "an integer", "True"),
    "sinks below 0": ({"sinks": -3}, "sinks", ">= 0", "-3"),
    "a softcap below 0": ({"softcap": -1.0}, "softcap", "> 0", "-1.0"),
}


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("attend", [focal_attention, focus_attention, soft_focus_attention])
def test_every_operator_refuses(attend, case):
    right = {focal_attention: {**RIGHT, "temperature": 1.0}, focus_attention: FOCUS, soft_focus_attention: SOFT}[attend]
    assert_refused(attend, right, *HEADS[case])


@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize(("attend", "right"), [(focus_attention, FOCUS), (soft_focus_attention, SOFT)])
def test_both_forms_of_focus_refuse(attend, right, case):
    assert_refused(attend, right, *COUNTS[case])


@pytest.mark.parametrize("backend", ["auto", "dense", "sdpa"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"membership": TRUE.float()}, ("membership", "bool", "torch.float32", "one_hot")),
        ({"membership": TRUE[:1]}, ("membership", "(2, 1 | 2 | 4, 9, groups)", "(1, 2, 9, 3)")),
        ({"membership": TRUE[:, :, :8]}, ("membership", "(2, 2, 8, 3)")),
        ({"membership": TRUE[0]}, ("membership", "(2, 9, 3)")),
        ({"membership": TRUE.repeat(1, 3, 1, 1)}, ("membership", "(2, 6, 9, 3)")),
        ({"membership": TRUE[..., :0]}, ("membership", "(2, 2, 9, 0)")),
        ({"membership": TRUE.to("meta")}, ("membership", "device cpu", "meta")),
        ({"key_membership": TRUE.int()}, ("key_membership", "bool", "torch.int32")),
        ({"key_membership": TRUE[:, :, :7]}, ("key_membership", "(2, 2, 7, 3)")),
        ({"key_membership": TRUE[..., :2]}, ("same number of groups", "3 and 2")),
    ],
)
def test_focus_attention_refuses_memberships_that_do_not_fit(wrong, said, backend):
    assert_refused(focus_attention, FOCUS, {**wrong, "backend": backend}, *said)


def test_fewer_queries_than_keys_need_the_membership_of_all_keys():
    fewer = {"query": RIGHT["query"][:, :, :5], "membership": TRUE[:, :, :5]}
    assert_refused(focus_attention, FOCUS, fewer, "(2, 2, 5, 3)", "key_membership of all keys")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gates": TRUE}, ("gates", "floats", "torch.bool")),
        ({"gates": TRUE.float()[:, :, :8]}, ("gates", "(2, 2, 8, 3)")),
        ({"key_gates": TRUE.float().repeat(1, 3, 1, 1)}, ("key_gates", "(2, 6, 9, 3)")),
        ({"key_gates": TRUE.float()[..., :2]}, ("same number of groups", "3 and 2")),
        ({"gate": "hard"}, ("gate", "'log' or 'sigmoid'", "'hard'")),
        ({"slope": 0.0}, ("slope", "> 0", "0.0")),
    ],
)
def test_soft_focus_attention_refuses_gates_that_do_not_fit(wrong, said):
    assert_refused(soft_focus_attention, SOFT, wrong, *said)


def test_a_backend_that_cannot_run_is_an_error_and_not_another_backend():
    assert_refused(focus_attention, FOCUS, {"backend": "triton"}, "'auto', 'dense', 'sdpa' or 'native'", "'triton'")
    both = {"backend": "sdpa", "softcap": 2.0, "temperature": torch.ones(4)}
    with pytest.raises(ValueError, match=r"'sdpa' cannot run .*expected a number for one of them.*'dense' or 'auto'"):
        focus_attention(*RIGHT.values(), membership=TRUE, window=2, **both)
