"""The shapes in signatures are checked by the test run: these tests fail where the hook is not installed."""

import importlib
import inspect
from pathlib import Path

import jaxtyping
import pytest
import torch

import bifocals
from bifocals import focal_attention, focus_attention
from bifocals.backends import call
from bifocals.routing import dominance

MODULES = ["backends.call", "backends.dense", "backends.gated", "backends.native", "backends.operator"]
MODULES += ["backends.pattern", "backends.sparse", "backends.strips", "backends.tiles", "checks", "filed", "focal"]
MODULES += [
    "focus",
    "fullness",
    "gated",
    "grouped",
    "maps",
    "memory",
    "network",
    "quick_router",
    "reference",
    "routing",
    "segments",
]
MODULES += ["training.query_scale"]


@pytest.mark.parametrize("name", MODULES)
def test_every_function_of_an_operator_module_is_checked(name):
    module = importlib.import_module(f"bifocals.{name}")
    classes = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    functions = [each for place in (module, *classes) for each in vars(place).values() if inspect.isfunction(each)]
    functions = [each for each in functions if inspect.unwrap(each).__code__.co_filename == module.__file__]
    assert functions
    assert all(hasattr(function, "__wrapped__") for function in functions)


def test_no_module_with_shapes_in_its_signatures_is_left_out():
    package = Path(bifocals.__file__).parent
    found = [path.relative_to(package) for path in package.rglob("*.py") if "from jaxtyping import" in path.read_text()]
    assert {".".join(path.with_suffix("").parts) for path in found} <= set(MODULES)


def test_a_shape_that_contradicts_a_signature_is_found():
    right, wrong = torch.ones(1, 2, 5, 4), torch.ones(2, 2, 5, 4)
    assert focal_attention(right, right, right, temperature=1.0).shape == right.shape
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'key'"):
        focal_attention(right, wrong, wrong, temperature=1.0)
    with pytest.raises(jaxtyping.TypeCheckError, match="'membership'"):
        focus_attention(right, right, right, membership=torch.ones(1, 1, 5, 3), window=1)
    with pytest.raises(jaxtyping.TypeCheckError):
        dominance(torch.ones(1, 5, 3, dtype=torch.bool))


def test_a_result_that_contradicts_a_signature_is_found(monkeypatch):
    monkeypatch.setattr(call, "_plain_logits", lambda query, key, *_: (torch.zeros(1, 2, 3, 3), 1.0))
    rows = torch.ones(1, 2, 5, 4)
    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        call.attend(rows, rows[:, :, :3], rows[:, :, :3], None, 1.0, softcap=2.0)


def test_without_the_checks_nothing_but_our_own_errors_are_raised(as_in_production):
    with pytest.raises(ValueError, match="expected the same batch and dim"):
        focal_attention(torch.ones(1, 2, 5, 4), torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4), temperature=1.0)
