"""The shapes in the operators' signatures are checked whenever the tests run; in production they cost nothing."""

import importlib

import jaxtyping
import torch

OPERATORS = [
    "bifocals.backends.call",
    "bifocals.backends.dense",
    "bifocals.backends.operator",
    "bifocals.backends.pattern",
    "bifocals.backends.sparse",
    "bifocals.backends.tiles",
    "bifocals.checks",
    "bifocals.focal",
    "bifocals.focus",
    "bifocals.reference",
    "bifocals.routing",
    "bifocals.segments",
]

# One thread for each worker: threads that wait for one another on shared cores lose far more than they gain.
torch.set_num_threads(1)

# Here and not in a fixture: it has to be there before the first import of the package, in every worker.
# The tower: an int is a float, as type checkers have it.
jaxtyping.install_import_hook(OPERATORS, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

# A compiler cannot trace the checks, so what it traces goes without; what it calls is checked as ever. Even so it
# cannot trace what is checked in a class of which it makes an object itself.
type(jaxtyping.config).jaxtyping_disable = property(lambda _: torch.compiler.is_compiling())
Routing = importlib.import_module("bifocals.routing").Routing
Routing.__init__, Routing.gates = Routing.__init__.__wrapped__, Routing.gates.__wrapped__
