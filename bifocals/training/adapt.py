"""Turn a pretrained model into a focal one: what `bifocals adapt` does.

    abrupt   the temperature from the first step on
    anneal   from 1 to the temperature over the first half of the steps, by equal factors
    scale    the temperature from the first step on, with a scale of the queries that starts by undoing it, and is
             learned (query_scale.py)

Beside it the model is trained on at temperature 1, on the same text in the same order: what a temperature is worth, it
is worth against that.

out/run.json          what is adapted, on what and how; a run resumes only as what it was
out/checkpoints/      where both runs stand, until they are done
out/model/            a stock transformers checkpoint and its tokenizer, once it is adapted
out/lens/             the temperature; `bifocals fold` puts it into the weights
out/results.json      losses of both runs, and perplexities on text held out
out/losses.png        the losses of both runs on text held out, if matplotlib is there
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bifocals.adapter import fingerprint
from bifocals.benchmarks.measuring import surroundings
from bifocals.config import FocalConfig
from bifocals.evaluation.perplexity import DRAWS, block_loss
from bifocals.families import attention_sites, is_decoder
from bifocals.focal import ConstantTemperature
from bifocals.lens import Lens, attach
from bifocals.training.checkpoint import last_checkpoint
from bifocals.training.context import ContextOptions, measure_beyond, put_positions, stretch
from bifocals.training.data import load_blocks
from bifocals.training.options import AdaptOptions
from bifocals.training.pretrain import describe, expect_one_batch, save_model
from bifocals.training.processes import is_first_process, join_processes
from bifocals.training.query_scale import expect_scalable, put_scales_into_weights, relearn_scales
from bifocals.training.run import CHECKPOINTS, close_run, expect_trainable, finished, open_run, training
from bifocals.training.sharding import sharded
from bifocals.training.watch import Report
from bifocals.training.whole import Trained, WholeTrainer

LENGTH = 512
ANNEALED = 0.5  # the share of the steps in which the temperature falls
VALUES = ("v_proj", "o_proj", "out_proj", "c_proj", "dense", "value")  # of attention: what no temperature concerns


def adapt(
    model: PreTrainedModel,
    tokenizer: Any,
    sources: Sequence[str],
    out: Path,
    *,
    temperature: float = 0.4,
    options: AdaptOptions | None = None,
    longer: ContextOptions | None = None,
    held_out: int = 8,
    resume: bool = False,
    report: Report = lambda progress: None,
) -> dict[str, Any]:
    """Write the adapted model, its lens and the results into ``out``; returns the results. ``model`` is trained."""
    options = AdaptOptions() if options is None else options
    longer = ContextOptions() if longer is None else longer
    _expect_decoder(model)
    focal, stretched = FocalConfig(temperature=temperature), _stretched(model, longer)
    length = longer.context or min(LENGTH, stretched.max_position_embeddings)
    join_processes()
    expect_trainable(options, out)
    blocks = load_blocks(sources, tokenizer, length, part="fitting")
    kept_out = load_blocks(sources, tokenizer, length, part="held-out", limit=held_out)
    expect_one_batch(blocks, options.batch)
    lens = attach(model, focal)
    if options.schedule == "scale":
        expect_scalable(lens)
    described = {"weights": fingerprint(model), "context": asdict(longer), **describe(lens, blocks, options)}
    open_run(out, {**described, "held_out": len(kept_out.tokens)}, resume)
    done = finished(out, len(kept_out.tokens))
    if done is not None:
        lens.detach()
        return done
    with lens.disabled():
        measured = {"base": measure(model, kept_out.tokens)}
    put_positions(model, stretched)
    measured["base at the temperature"] = measure(model, kept_out.tokens)
    if options.schedule == "scale":
        relearn_scales(lens)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    runs = {"adapted": _train(lens, blocks.tokens, kept_out.tokens, out / CHECKPOINTS / "adapted", options, report)}
    put_scales_into_weights(lens)
    measured["adapted"] = measure(model, kept_out.tokens)
    beyond = measure_beyond(model, sources, tokenizer, length, limit=held_out)
    if is_first_process():
        save_model(lens, tokenizer, out)
    lens.detach()
    model.load_state_dict(before)
    lens = attach(model, FocalConfig(temperature=1.0))
    folder = out / CHECKPOINTS / "continued"
    runs["continued"] = _train(lens, blocks.tokens, kept_out.tokens, folder, options, report)
    measured["continued"] = measure(model, kept_out.tokens)
    lens.detach()
    results = {
        **described,
        "runs": {name: asdict(run) for name, run in runs.items()},
        "held_out": {name: against(losses, measured["base"]) for name, losses in measured.items()},
        "measured_on": len(kept_out.tokens),
        "beyond": beyond,
        "surroundings": surroundings(),
    }
    if is_first_process():
        if find_spec("matplotlib") is not None:
            from bifocals.plots import draw_adaptation, save_figure

            save_figure(draw_adaptation(results["runs"]), out / "losses.png")
        close_run(out, results)
    return results


def _expect_decoder(model: PreTrainedModel) -> None:
    if not is_decoder(model):
        raise ValueError(
            f"{type(model).__name__} reads the tokens that it would be asked to predict: expected a decoder, which "
            "reads only those before. Name one."
        )


def _stretched(model: PreTrainedModel, longer: ContextOptions) -> PreTrainedConfig:
    known = model.config.max_position_embeddings
    if longer.rope == "plain" and longer.context > known:
        raise ValueError(
            f"context: expected at most the model's {known} tokens, got {longer.context}. Stretch its positions with "
            "--rope and --factor."
        )
    return stretch(model.config, longer)


def _train(
    lens: Lens, blocks: Tensor, held_out: Tensor, folder: Path, options: AdaptOptions, report: Report
) -> Trained:
    assert lens.focal is not None
    constants = [layer.temperature for layer in lens.layers.values()]
    target = lens.focal.temperature

    def before_step(done: int) -> None:
        if options.schedule == "anneal":
            for constant in constants:
                assert isinstance(constant, ConstantTemperature)
                constant.temperature = annealed(target, done, options.steps)

    with (
        sharded(lens) if options.shard else nullcontext(),
        training(lens, is_full=options.part == "everything"),
        _trainable(lens, options),
    ):
        how: dict[str, Any] = {"report": report, "before_step": before_step}
        trainer = WholeTrainer(lens, blocks, held_out, folder, options, **how)
        trainer.train_from(last_checkpoint(folder))
    lens.model.eval()
    for constant in constants:
        assert isinstance(constant, ConstantTemperature)
        constant.temperature = target
    return trainer.trained()


def annealed(target: float, done: int, steps: int) -> float:
    """The temperature of the next step.

    >>> [round(annealed(0.25, done, 8), 3) for done in range(6)]
    [1.0, 0.707, 0.5, 0.354, 0.25, 0.25]
    """
    return target ** min(1.0, done / (ANNEALED * steps))


@contextmanager
def _trainable(lens: Lens, options: AdaptOptions) -> Iterator[None]:
    """Gradients for queries and keys, if these alone are trained; ``training`` takes them back."""
    if options.part == "queries":
        for site in attention_sites(lens.model):
            for name, part in site.module.named_children():
                if name not in VALUES:
                    part.requires_grad_(True)
    yield


def measure(model: PreTrainedModel, held_out: Tensor) -> list[float]:
    """Nats per token of each block."""
    return [block_loss(model, block) for block in held_out]


def against(losses: list[float], base: list[float]) -> dict[str, Any]:
    """The perplexity, and its ratio to the base's with its 95% interval over the blocks, drawn anew in pairs."""
    apart = np.array(losses) - np.array(base)
    draws = np.random.default_rng(0).integers(len(apart), size=(DRAWS, len(apart)))
    low, high = np.quantile(apart[draws].mean(axis=1), [0.025, 0.975])
    return {
        "perplexity": math.exp(np.mean(losses)),
        "ratio": math.exp(apart.mean()),
        "interval": [math.exp(low), math.exp(high)],
        "losses": losses,
    }
