"""The examples in docstrings run."""

import doctest
import importlib
from pathlib import Path

import pytest

import bifocals

PACKAGE = Path(bifocals.__file__).parent


def examples():
    """How many there are in each module that has any."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(["bifocals", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        found[name] = len(doctest.DocTestParser().get_examples(path.read_text()))
    return {name: count for name, count in found.items() if count}


def test_the_modules_with_examples_are_found():
    assert {"bifocals.focus", "bifocals.network", "bifocals.training.watch"} <= examples().keys()


@pytest.mark.parametrize(("name", "count"), examples().items())
def test_the_examples_of_a_module_run(name, count):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted == count
    assert found.failed == 0
