"""Models with a lens under torch.compile, in a process of its own: a compiler cannot trace the checks of signatures."""

import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from bifocals import FocalConfig, FocusConfig, attach, fullness
from bifocals.testing import tiny_model, tiny_tokens

LENSES = {
    "focal": [FocalConfig(temperature=0.5)],
    "learned focal": [FocalConfig(temperature=0.5, form="token", per="head")],
    "soft": [FocalConfig(temperature=0.5, form="prefix"), FocusConfig(groups=4, window=4, sinks=1)],
    "hard": [FocusConfig(groups=4, window=4, sinks=1)],
    "networks": [FocusConfig.network(groups=4, window=4, sinks=1)],
}


@pytest.fixture(scope="module")
def without_checks():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=prepare) as process:
        yield process


def prepare():
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    fullness.PIECE, fullness.SLACK = 5, 3  # so that groups are full now and then


def compile_and_compare(name, compiler, is_whole):
    torch.compiler.reset()  # past so many versions of one function, nothing is compiled any more
    model, tokens = tiny_model("llama", dtype=torch.float32), tiny_tokens()
    lens = attach(model, *LENSES[name])
    if name == "soft":
        lens.mode = "soft"
    if name == "networks":
        for router in lens.routers.values():
            router.steepness.fill_(3.0)
    padding = torch.ones_like(tokens)
    padding[0, :6] = 0
    compiled = torch.compile(model, fullgraph=is_whole, backend=compiler)
    for options in ({"use_cache": False}, {"use_cache": True}, {"attention_mask": padding}):
        with torch.no_grad():
            expected, got = (run(tokens, **options).logits[:, 6:] for run in (model, compiled))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["focal", "learned focal", "soft"])
def test_focal_and_soft_compile_into_one_graph(without_checks, name):
    without_checks.submit(compile_and_compare, name, "eager", True).result()


@pytest.mark.parametrize("name", ["hard", "networks"])
def test_hard_mode_compiles_with_breaks(without_checks, name):
    without_checks.submit(compile_and_compare, name, "eager", False).result()
