"""Training a whole model with its lens by the language-model loss: AdamW, warm-up, then a cosine to a tenth.

What is done each step beside it: one step of the routers' balance, the temperature that a schedule asks for, now and
then the loss on text held out with what temperatures were learned, and a report.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from bifocals.evaluation.perplexity import block_loss
from bifocals.lens import Lens
from bifocals.training.exact import ExactTrainer, arguments_of
from bifocals.training.flops import peak_flops, training_flops
from bifocals.training.lm import lm_loss
from bifocals.training.options import PretrainOptions
from bifocals.training.processes import world_size
from bifocals.training.temperatures import as_logs, from_logs, watch_temperatures
from bifocals.training.watch import Progress, Report

BeforeStep = Callable[[int], None]  # gets the number of steps done


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run leaves beside its weights."""

    losses: list[float]  # of each step
    validation: list[dict[str, Any]]  # step, loss and, where temperatures are learned, what they are
    seconds: float  # of the steps, without looks at text held out
    flops: float  # with Focus in mode sparse, of the pairs read
    utilisation: float  # of what a large product reaches on the same device


class WholeTrainer(ExactTrainer):
    """Trains the lens, and of its model what requires gradients."""

    def __init__(
        self,
        lens: Lens,
        blocks: Tensor,
        held_out: Tensor,
        folder: Path,
        options: PretrainOptions,
        *,
        report: Report = lambda progress: None,
        before_step: BeforeStep = lambda done: None,
    ) -> None:
        self.options, self.held_out = options, held_out
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
        super().__init__(lens, blocks, folder, args, batch=options.batch)
        self.watching = Watching(self, report, before_step)
        self.add_callback(self.watching)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *others: Any, **more: Any) -> Any:
        return self.expect_finite(lm_loss(model, self.lens, inputs["input_ids"]))

    def log(self, logs: dict[str, float], *others: Any) -> None:
        super().log({**logs, **self.watching.to_log()} if "loss" in logs else logs, *others)

    def validate(self) -> dict[str, float]:
        """Nats per token of the text held out, by the pattern that will run; what temperatures it has; pairs read."""
        before = self.lens.mode
        self.lens.mode = "hard"
        try:
            with watch_temperatures(self.lens) as seen:
                losses = [block_loss(self.lens.model, block) for block in self.held_out]
        finally:
            self.lens.mode = before
        found = {"validation": sum(losses) / len(losses), **as_logs(seen.ranges())}
        if before == "sparse":
            found["pairs_kept"] = self.lens.measure(self.held_out[:1]).pairs_kept
        return found

    def trained(self) -> Trained:
        """Of all steps, also those before a resume."""
        history = self.state.log_history
        steps = [entry for entry in history if "loss" in entry]
        validation = [
            {"step": entry["step"], "loss": entry["validation"], **from_logs(entry)}
            for entry in steps
            if "validation" in entry
        ]
        kept = [entry["pairs_kept"] for entry in steps if "pairs_kept" in entry] or [1.0]
        length = self.held_out.shape[1]
        per_token = training_flops(self.lens.model, length, sum(kept) / len(kept))
        seconds, flops = steps[-1]["seconds"], per_token * length * self.options.batch * len(steps)
        utilisation = flops / seconds / self.watching.peak
        return Trained([entry["loss"] for entry in steps], validation, seconds, flops, utilisation)


class Watching(TrainerCallback):
    """What happens around each step."""

    def __init__(self, trainer: WholeTrainer, report: Report, before_step: BeforeStep) -> None:
        self.trainer, self.report, self.before_step = trainer, report, before_step
        self.start, self.peak = 0.0, 0.0
        self.new: dict[str, float] = {}
        self.hard_loss: float | None = None

    def to_log(self) -> dict[str, float]:
        new, self.new = self.new, {}
        return {**new, "seconds": time.perf_counter() - self.start}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        dtype = torch.bfloat16 if self.trainer.options.precision == "bfloat16" else torch.float32
        self.peak = peak_flops(args.device, dtype) * world_size()
        before = next((entry["seconds"] for entry in reversed(state.log_history) if "seconds" in entry), 0.0)
        self.start = time.perf_counter() - before

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self.before_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self.trainer.lens.step_balance()
        step = state.global_step
        is_due = step % self.trainer.options.evaluate_every == 0 or step == state.max_steps
        # What is shared out is run together.
        if is_due and (state.is_world_process_zero or self.trainer.options.shard):
            paused = time.perf_counter()
            self.new = self.trainer.validate()
            self.hard_loss = self.new["validation"]
            self.start += time.perf_counter() - paused

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or "loss" not in logs:
            return
        done, seconds = state.global_step, logs["seconds"]
        self.report(
            Progress(
                "everything",
                done,
                state.max_steps,
                logs["loss"],
                tokens_per_second=done * self.trainer.options.batch * self.trainer.held_out.shape[1] / seconds,
                seconds_left=seconds / done * (state.max_steps - done),
                hard_loss=self.hard_loss,
            )
        )
