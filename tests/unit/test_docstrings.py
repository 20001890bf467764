"""The examples in docstrings run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "focal",
        "focus",
        "pretrain_command",
        "routing",
        "training.adapt",
        "training.temperatures",
        "training.temperature_study",
    ],
)
def test_the_examples_of_a_module_run(name):
    found = doctest.testmod(importlib.import_module(f"bifocals.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
