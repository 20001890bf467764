"""Train a model from scratch with a temperature, and with Focus if wanted: what `bifocals pretrain` does.

out/run.json          what is trained, on what and how; a run resumes only as what it was
out/checkpoints/      where it stands
out/model/            a stock transformers checkpoint and its tokenizer, once it is trained
out/lens/             the temperature, and the routers of Focus; `bifocals fold` puts a constant into the weights
out/results.json      losses, bits per byte, operations and time
"""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM, TrainerCallback, TrainerState, TrainingArguments

from bifocals.benchmarks.measuring import surroundings, write_json
from bifocals.config import FocalConfig, FocusConfig
from bifocals.evaluation.perplexity import block_loss
from bifocals.files import new_folder
from bifocals.lens import Lens, attach
from bifocals.training.checkpoint import last_checkpoint
from bifocals.training.data import Blocks, DataError, load_blocks, load_documents, load_tokens
from bifocals.training.exact import ExactTrainer, arguments_of
from bifocals.training.flops import peak_flops, training_flops
from bifocals.training.lm import lm_loss
from bifocals.training.options import PretrainOptions
from bifocals.training.presets import Preset
from bifocals.training.processes import is_first_process, join_processes
from bifocals.training.run import CHECKPOINTS, RESULTS, open_run, training
from bifocals.training.tokenizer import train_tokenizer
from bifocals.training.watch import Progress, Report


def pretrain(
    preset: Preset,
    sources: Sequence[str],
    out: Path,
    *,
    focal: FocalConfig,
    focus: FocusConfig | None = None,
    options: PretrainOptions | None = None,
    held_out: int = 16,
    resume: bool = False,
    report: Report = lambda progress: None,
) -> dict[str, Any]:
    """Write the model, its lens and its results into ``out``; returns the results."""
    options = preset.options if options is None else options
    join_processes()
    tokenizer = train_tokenizer(sources, preset.vocabulary)
    blocks = load_blocks(sources, tokenizer, preset.context, part="fitting")
    kept_out = load_blocks(sources, tokenizer, preset.context, part="held-out", limit=held_out)
    if len(blocks.tokens) < options.batch:
        raise DataError(
            f"Expected text for one batch, {options.batch} sequences of {preset.context} tokens, got "
            f"{len(blocks.tokens)}. Give more text, or a smaller batch."
        )
    lens = new_lens(preset, tokenizer, focal, focus, options.seed)
    described = describe(lens, blocks, options)
    open_run(out, described, resume)
    start = time.perf_counter()
    losses = train_everything(lens, blocks.tokens, kept_out.tokens, out / CHECKPOINTS, options, report)
    results = {**losses, "seconds": time.perf_counter() - start, **described}
    if is_first_process():
        loss = losses["validation"][-1]["loss"]
        results |= {"bits_per_byte": loss / math.log(2) * tokens_per_byte(sources, tokenizer)}
        results |= {"surroundings": surroundings()}
        if not (out / "model").exists():
            with new_folder(out / "model") as aside:
                lens.model.save_pretrained(aside)
                tokenizer.save_pretrained(aside)
        lens.save(out / "lens")
        write_json(out / RESULTS, results)
    return results


def new_lens(preset: Preset, tokenizer: Any, focal: FocalConfig, focus: FocusConfig | None, seed: int) -> Lens:
    """On a model of the preset's shape, random by the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(preset.config(eos_token_id=tokenizer.eos_token_id))
        return attach(model, focal, *([] if focus is None else [focus]))


def describe(lens: Lens, blocks: Blocks, options: PretrainOptions) -> dict[str, Any]:
    """All that the trained model depends on."""
    config = lens.model.config
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model": {name: getattr(config, name) for name in shape},
        "focal": None if lens.focal is None else asdict(lens.focal),
        "focus": None if lens.focus is None else asdict(lens.focus),
        "options": asdict(options),
        "data": list(blocks.names),
        "length": blocks.tokens.shape[1],
        "blocks": len(blocks.tokens),
        "tokens": hashlib.sha256(blocks.tokens.numpy().tobytes()).hexdigest(),
    }


def tokens_per_byte(sources: Sequence[str], tokenizer: Any) -> float:
    """Of the text held out: what turns nats per token into nats per byte."""
    tokens = sum(len(load_tokens(source, tokenizer, "held-out")) for source in sources)
    documents = [text for source in sources for text in load_documents(source, "held-out")]
    return tokens / sum(len(text.encode("utf-8", "surrogatepass")) for text in documents)


def train_everything(
    lens: Lens, blocks: Tensor, held_out: Tensor, folder: Path, options: PretrainOptions, report: Report
) -> dict[str, Any]:
    """Model and lens; returns the losses of every step, those on ``held_out``, operations and utilisation."""
    if lens.focus is not None:
        lens.mode = "soft"
    with training(lens, is_full=True):
        trainer = Pretrainer(lens, blocks, held_out, folder, options, report)
        trainer.train_from(last_checkpoint(folder))
    lens.model.eval()
    lens.mode = "hard"
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "validation": [
            {"step": entry["step"], "loss": entry["validation"]} for entry in history if "validation" in entry
        ],
        "training_flops": trainer.flops_per_step * options.steps,
        "utilisation": trainer.utilisation,
    }


class Pretrainer(ExactTrainer):
    """Trains model and lens by the language-model loss, AdamW, warm-up and a cosine to a tenth."""

    def __init__(
        self, lens: Lens, blocks: Tensor, held_out: Tensor, folder: Path, options: PretrainOptions, report: Report
    ) -> None:
        self.options, self.held_out = options, held_out
        self.validation: float | None = None
        self.utilisation: float | None = None
        self.flops_per_step = training_flops(lens.model, blocks.shape[1]) * options.batch * blocks.shape[1]
        args = arguments_of(
            options,
            folder,
            max_steps=options.steps,
            learning_rate=options.rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            weight_decay=options.weight_decay,
            adam_beta2=0.95,
        )
        super().__init__(lens, blocks, args, batch=options.batch, is_full=True)
        self.add_callback(Validating(self, report))

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *others: Any, **more: Any) -> Any:
        return self.expect_finite(lm_loss(model, self.lens, inputs["input_ids"]))

    def log(self, logs: dict[str, float], *others: Any) -> None:
        if self.validation is not None:
            logs, self.validation = {**logs, "validation": self.validation}, None
        super().log(logs, *others)

    def validate(self) -> float:
        """Nats per token of the text held out, by the pattern that will run."""
        before = self.lens.mode
        self.lens.mode = "hard"
        try:
            losses = [block_loss(self.lens.model, block) for block in self.held_out]
        finally:
            self.lens.mode = before
        return sum(losses) / len(losses)


class Validating(TrainerCallback):
    """After each step: one step of the balance, now and then the loss on held-out text, and a report."""

    def __init__(self, trainer: Pretrainer, report: Report) -> None:
        self.trainer, self.report = trainer, report
        self.start, self.first_step, self.seconds_validating = 0.0, 0, 0.0
        self.hard_loss: float | None = None
        self.peak = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        dtype = torch.bfloat16 if self.trainer.options.precision == "bfloat16" else torch.float32
        self.peak = peak_flops(args.device, dtype)
        self.start, self.first_step = time.perf_counter(), state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self.trainer.lens.step_balance()
        step = state.global_step
        is_due = step % self.trainer.options.evaluate_every == 0 or step == state.max_steps
        if is_due and state.is_world_process_zero:
            before = time.perf_counter()
            self.trainer.validation = self.hard_loss = self.trainer.validate()
            self.seconds_validating += time.perf_counter() - before

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or "loss" not in logs:
            return
        done = state.global_step - self.first_step
        seconds = time.perf_counter() - self.start - self.seconds_validating
        self.trainer.utilisation = self.trainer.flops_per_step * done / seconds / self.peak
        tokens = done * self.trainer.options.batch * self.trainer.held_out.shape[1]
        left = seconds / done * (state.max_steps - state.global_step)
        self.report(
            Progress(
                "everything",
                state.global_step,
                state.max_steps,
                logs["loss"],
                tokens_per_second=tokens / seconds,
                seconds_left=left,
                hard_loss=self.hard_loss,
            )
        )
