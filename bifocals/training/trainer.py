"""Fitting a lens by transformers' Trainer: the loss, one step of the balance for each of the optimizer, and a watch."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from bifocals.lens import Lens
from bifocals.training.distill import distill_loss
from bifocals.training.exact import ExactTrainer, arguments_of
from bifocals.training.lm import lm_loss
from bifocals.training.options import TrainOptions
from bifocals.training.watch import CollapseWatch, Look, Progress, Report, look

Loss = Callable[[nn.Module, Lens, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"lm": lm_loss, "distill": distill_loss}


class LensTrainer(ExactTrainer):
    """Fits one lens; with ``is_full``, the base model too."""

    def __init__(
        self,
        lens: Lens,
        blocks: Tensor,
        held_out: Tensor,
        folder: Path,
        options: TrainOptions,
        *,
        is_full: bool,
        report: Report,
    ) -> None:
        self.options, self.held_out, self.is_full = options, held_out, is_full
        self.loss_of = LOSSES["lm" if is_full else options.objective]
        self.looked: Look | None = None
        args = training_arguments(options, folder, is_full)
        super().__init__(lens, blocks, folder, args, batch=options.batch)
        self.add_callback(Watching(self, report))

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *others: Any, **more: Any) -> Any:
        if not self.is_full:
            # A frozen base is what it will be when the lens is used: without dropout.
            self.lens.model.eval()
            self.lens.train()
        return self.expect_finite(self.loss_of(model, self.lens, inputs["input_ids"]))

    def log(self, logs: dict[str, float], *others: Any) -> None:
        if self.looked is not None:
            logs = {**logs, **asdict(self.looked)}
        super().log(logs, *others)


class Watching(TrainerCallback):
    """After each step: one step of the balance, now and then a look at held-out text, and a report."""

    def __init__(self, trainer: LensTrainer, report: Report) -> None:
        self.trainer, self.report = trainer, report
        self.collapse = CollapseWatch(trainer.lens.focus.groups) if trainer.lens.focus is not None else None
        self.warning: str | None = None
        self.start, self.first_step = 0.0, 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self.start, self.first_step = time.perf_counter(), state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self.trainer.lens.step_balance()
        step, options = state.global_step, self.trainer.options
        is_due = step % options.watch_every == 0 or step == state.max_steps
        if is_due and (state.is_world_process_zero or options.shard):  # what is shared out is run together
            self.trainer.looked = look(self.trainer.lens, self.trainer.held_out)
            assert self.collapse is not None
            self.warning = self.collapse.see(step, self.trainer.looked.dominance)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or "loss" not in logs:
            return
        seconds, done = time.perf_counter() - self.start, state.global_step - self.first_step
        tokens = done * self.trainer.options.batch * len(self.trainer.held_out)
        looked = {} if self.trainer.looked is None else asdict(self.trainer.looked)
        phase = "everything" if self.trainer.is_full else "lens"
        left = seconds / done * (state.max_steps - state.global_step)
        speed = {"tokens_per_second": tokens / seconds, "seconds_left": left}
        warning, self.warning = self.warning, None
        self.report(
            Progress(phase, state.global_step, state.max_steps, logs["loss"], **speed, **looked, warning=warning)
        )


def training_arguments(options: TrainOptions, folder: Path, is_full: bool) -> TrainingArguments:
    return arguments_of(
        options,
        folder,
        max_steps=options.full_steps if is_full else options.steps,
        learning_rate=options.full_rate if is_full else options.rate,
        lr_scheduler_type="linear",
        weight_decay=0.0,
    )
