"""The shapes in the operators' signatures are checked whenever the tests run; in production they cost nothing."""

import os

import jaxtyping
import pytest
import torch

OPERATORS = [
    "bifocals.backends.call",
    "bifocals.backends.dense",
    "bifocals.backends.gated",
    "bifocals.backends.native",
    "bifocals.backends.operator",
    "bifocals.backends.pattern",
    "bifocals.backends.sparse",
    "bifocals.backends.strips",
    "bifocals.backends.tiles",
    "bifocals.checks",
    "bifocals.filed",
    "bifocals.focal",
    "bifocals.focus",
    "bifocals.fullness",
    "bifocals.gated",
    "bifocals.grouped",
    "bifocals.maps",
    "bifocals.memory",
    "bifocals.network",
    "bifocals.quick_router",
    "bifocals.reference",
    "bifocals.routing",
    "bifocals.segments",
    "bifocals.training.query_scale",
]

# No test waits for a hub that it does not mean to reach; read when transformers is first imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# One thread for each worker: threads that wait for one another on shared cores lose far more than they gain.
torch.set_num_threads(1)

# Here and not in a fixture: it has to be there before the first import of the package, in every worker.
# The tower: an int is a float, as type checkers have it.
jaxtyping.install_import_hook(OPERATORS, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


@pytest.fixture
def as_in_production():
    """Without the checks of signatures, which speak before our own errors and which a compiler cannot trace."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
