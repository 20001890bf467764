"""Train a model from scratch with a temperature, and with Focus if wanted: what `bifocals pretrain` does.

out/run.json          what is trained, on what and how; a run resumes only as what it was
out/checkpoints/      where it stands, until it is done
out/model/            a stock transformers checkpoint and its tokenizer, once it is trained
out/lens/             the temperature, and the routers of Focus; `bifocals fold` puts a constant into the weights
out/results.json      losses, bits per byte, temperatures, operations and time
out/temperatures.png  what temperatures were learned, if any and if matplotlib is there
"""

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from bifocals.benchmarks.measuring import surroundings
from bifocals.config import FocalConfig, FocusConfig
from bifocals.evaluation.perplexity import block_loss
from bifocals.files import new_folder
from bifocals.lens import Lens, attach
from bifocals.training.checkpoint import last_checkpoint
from bifocals.training.context import ContextOptions, measure_beyond, stretch
from bifocals.training.data import Blocks, DataError, load_blocks
from bifocals.training.flops import forward_flops
from bifocals.training.mass import calibrate
from bifocals.training.options import PretrainOptions
from bifocals.training.presets import Preset
from bifocals.training.processes import is_first_process, join_processes
from bifocals.training.run import (
    CHECKPOINTS,
    calibration,
    close_run,
    expect_trainable,
    finished,
    open_run,
    training,
)
from bifocals.training.sharding import sharded
from bifocals.training.tokenizer import token_bytes, train_tokenizer
from bifocals.training.watch import Report
from bifocals.training.whole import WholeTrainer


def pretrain(
    preset: Preset,
    sources: Sequence[str],
    out: Path,
    *,
    focal: FocalConfig,
    focus: FocusConfig | None = None,
    options: PretrainOptions | None = None,
    longer: ContextOptions | None = None,
    is_sparse: bool = False,
    held_out: int = 16,
    resume: bool = False,
    report: Report = lambda progress: None,
) -> dict[str, Any]:
    """Write the model, its lens and its results into ``out``; returns the results.

    With ``is_sparse``, Focus is trained at the cost of its pattern: gates on the far pairs kept alone.
    """
    options = preset.options if options is None else options
    longer = ContextOptions() if longer is None else longer
    length = longer.context or preset.context
    join_processes()
    expect_trainable(options, out)
    tokenizer = train_tokenizer(sources, preset.vocabulary)
    blocks = load_blocks(sources, tokenizer, length, part="fitting")
    kept_out = load_blocks(sources, tokenizer, length, part="held-out", limit=held_out)
    expect_one_batch(blocks, options.batch)
    lens = new_lens(preset, tokenizer, focal, focus, longer, options.seed)
    if focus is not None:
        lens.mode = "sparse" if is_sparse else "soft"
    has_networks = focus is not None and focus.score == "network"
    how = calibration(lens, blocks) if has_networks else None  # before anything is trained: it may refuse
    described = {"mode": lens.mode, **describe(lens, blocks, options)}
    open_run(out, {**described, "held_out": len(kept_out.tokens)}, resume)
    done = finished(out, len(kept_out.tokens))
    if done is not None:
        return done
    with sharded(lens) if options.shard else nullcontext(), training(lens, is_full=True):
        trainer = WholeTrainer(lens, blocks.tokens, kept_out.tokens, out / CHECKPOINTS, options, report=report)
        trainer.train_from(last_checkpoint(out / CHECKPOINTS))
    lens.model.eval()
    lens.mode = "hard"
    if how is not None:
        calibrate(lens, blocks.tokens, how, domains=blocks.domains)
    results = {**asdict(trainer.trained()), **described}
    if is_first_process():
        results["held_out"] = measure(lens, blocks.tokens, kept_out.tokens, tokenizer)
        results["measured_on"] = len(kept_out.tokens)
        results["beyond"] = measure_beyond(lens.model, sources, tokenizer, length, limit=held_out)
        results["surroundings"] = surroundings()
        save_model(lens, tokenizer, out)
        draw_learned(out, results)
        close_run(out, results)
    return results


def new_lens(
    preset: Preset,
    tokenizer: Any,
    focal: FocalConfig,
    focus: FocusConfig | None,
    longer: ContextOptions,
    seed: int,
) -> Lens:
    """On a model of the preset's shape, random by the seed alone."""
    config = stretch(preset.config(eos_token_id=tokenizer.eos_token_id), longer)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        return attach(model, focal, *([] if focus is None else [focus]))


def expect_one_batch(blocks: Blocks, batch: int) -> None:
    if len(blocks.tokens) < batch:
        raise DataError(
            f"Expected text for one batch, {batch} sequences of {blocks.tokens.shape[1]} tokens, got "
            f"{len(blocks.tokens)}. Give more text, or a smaller batch."
        )


def describe(lens: Lens, blocks: Blocks, options: PretrainOptions) -> dict[str, Any]:
    """All that the trained model depends on."""
    config = lens.model.config
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model": {name: getattr(config, name, None) for name in (*shape, "rope_parameters")},
        "parameters": lens.model.num_parameters(),
        "focal": None if lens.focal is None else asdict(lens.focal),
        "focus": None if lens.focus is None else asdict(lens.focus),
        "options": asdict(options),
        "data": list(blocks.names),
        "length": blocks.tokens.shape[1],
        "blocks": len(blocks.tokens),
        "tokens": hashlib.sha256(blocks.tokens.numpy().tobytes()).hexdigest(),
    }


def measure(lens: Lens, blocks: Tensor, held_out: Tensor, tokenizer: Any) -> dict[str, float]:
    """On text held out: nats per token, also of the best guess without context; bits per byte; operations."""
    losses = [block_loss(lens.model, block) for block in held_out]
    loss = sum(losses) / len(losses)
    predicted = held_out[:, 1:]
    bytes_of = torch.tensor(token_bytes(tokenizer))
    kept = 1.0 if lens.focus is None else lens.measure(held_out[:4]).pairs_kept
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "unigram_loss": unigram_loss(blocks, predicted, len(bytes_of)),
        "bits_per_byte": loss * predicted.numel() / math.log(2) / bytes_of[predicted].sum().item(),
        "pairs_kept": kept,
        "flops_per_token": forward_flops(lens.model, held_out.shape[1], kept),
    }


def unigram_loss(blocks: Tensor, predicted: Tensor, vocabulary: int) -> float:
    """Nats per token of guessing by frequency alone, each token counted once more than it was seen."""
    counts = torch.bincount(blocks.flatten(), minlength=vocabulary).double() + 1
    return -(counts / counts.sum()).log()[predicted].mean().item()


def save_model(lens: Lens, tokenizer: Any, out: Path) -> None:
    """A stock checkpoint, and the lens beside it."""
    if not (out / "model").exists():
        with new_folder(out / "model") as aside:
            lens.model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
    lens.save(out / "lens")


def draw_learned(out: Path, results: dict[str, Any]) -> None:
    if "temperatures" in results["validation"][-1] and find_spec("matplotlib") is not None:
        from bifocals.plots import draw_temperatures, save_figure

        save_figure(draw_temperatures(results["validation"]), out / "temperatures.png")
