"""transformers' Trainer with checkpoints that hold what is trained and the optimizer, and nothing that is executed.

Trainer's own hold the whole model and are read with pickle. The loop, distribution, schedules, precision and logging
stay Trainer's; a run that was stopped goes on exactly as if it had not been.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from bifocals.lens import Lens
from bifocals.training.checkpoint import (
    CheckpointError,
    adamw_tensors,
    load_optimizer,
    optimizer_tensors,
    read_checkpoint,
    write_checkpoint,
)
from bifocals.training.options import PretrainOptions, TrainOptions
from bifocals.training.processes import wait_for_all, world_size
from bifocals.training.sharding import as_whole, is_sharded, like

COUNTERS = "last_epoch", "_step_count"  # of the schedule


class Order(Dataset[dict[str, Tensor]]):
    """The blocks in the order of training: shuffled anew each time round, by the seed alone."""

    def __init__(self, blocks: Tensor, total: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rounds = [torch.randperm(len(blocks), generator=generator) for _ in range(-(-total // len(blocks)))]
        self.blocks, self.order = blocks, torch.cat(rounds)[:total]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[self.order[index]]}


class ExactTrainer(Trainer):
    """Trains what requires gradients: a lens, the model that it sits on, or some of its weights."""

    def __init__(self, lens: Lens, blocks: Tensor, folder: Path, args: TrainingArguments, *, batch: int) -> None:
        self.lens, self.folder = lens, folder
        self.order = Order(blocks, args.max_steps * batch, args.seed)
        caches = getattr(lens.model.config, "use_cache", None)
        super().__init__(lens.model, args, train_dataset=self.order)
        if caches is not None:
            lens.model.config.use_cache = caches  # Trainer switches it off for good, and it would be saved so
        self.loss_is_scaled_for_ga = False  # a mean over the micro batch: Trainer divides it by their number
        self.remove_callback(PrinterCallback)
        if is_sharded(lens):
            # So that no wrapper is put around a model that gathers weights and averages gradients by itself.
            if not hasattr(self, "is_distributed_loading_by_transformers"):
                raise ValueError(
                    "shard: expected a Trainer that takes a model whose weights are shared out, got an older one. "
                    "Upgrade transformers to 5.22, or train without it."
                )
            self.is_distributed_loading_by_transformers = True

    def train_from(self, checkpoint: Path | None) -> None:
        """From the beginning, or from a checkpoint, whose step Trainer reads from a file of its own."""
        if checkpoint is not None:
            try:
                TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            except (OSError, TypeError, ValueError, RecursionError) as reason:
                raise CheckpointError(
                    f"{checkpoint}: its trainer_state.json is none ({reason}). Remove it."
                ) from reason
        self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def expect_finite(self, loss: Tensor) -> Tensor:
        if not bool(torch.isfinite(loss)):
            step = self.state.global_step + 1
            raise ValueError(f"The loss is {loss.item()} at step {step}: expected a finite one. Lower the rate.")
        return loss

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.order)

    def _trained(self) -> dict[str, Tensor]:
        """What the optimizer and the balance change: the lens, and of the base what is trained."""
        own = {id(parameter) for parameter in self.lens.parameters()}
        base = {name: tensor for name, tensor in self.lens.model.named_parameters() if tensor.requires_grad}
        return {
            **{f"lens.{name}": tensor for name, tensor in self.lens.state_dict().items()},
            **{f"base.{name}": tensor for name, tensor in base.items() if id(tensor) not in own},
        }

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        random = _gather_random_states(self.args.device)
        optimizer, schedule = self._optimizer_and_schedule()
        tensors = as_whole(self._trained() | optimizer_tensors(optimizer)) | random
        if self.args.should_save:
            state = {
                "rates": [group["lr"] for group in optimizer.param_groups],
                "schedule": {name: getattr(schedule, name) for name in COUNTERS},
            }
            step = self.state.global_step
            write_checkpoint(self.folder, step, tensors, state=state, trainer_state=asdict(self.state))
        wait_for_all()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """All at once below, when the optimizer is there."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer, schedule = self._optimizer_and_schedule()
        random, trained = _gather_random_states(self.args.device), self._trained()
        tensors, state = read_checkpoint(Path(checkpoint), trained | adamw_tensors(optimizer) | random)
        try:
            rates = [float(rate) for rate in state["rates"]]
            counters = {name: int(state["schedule"][name]) for name in COUNTERS}
        except (KeyError, TypeError, ValueError) as reason:
            raise CheckpointError(
                f"{checkpoint}: its state.json is not of this run ({reason!r}). Remove it."
            ) from reason
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.copy_(like(tensor, tensors[name]))
        load_optimizer(optimizer, tensors)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        schedule.load_state_dict({**schedule.state_dict(), **counters, "_last_lr": rates})
        self._random_state = tensors[f"random.{self.args.process_index}"]

    def _optimizer_and_schedule(self) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        assert self.optimizer is not None, "Trainer makes it before it saves or loads"
        assert self.lr_scheduler is not None, "Trainer makes it before it saves or loads"
        return self.optimizer, self.lr_scheduler

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            _set_random_state(self._random_state, self.args.device)


def arguments_of(options: TrainOptions | PretrainOptions, folder: Path, **own: Any) -> TrainingArguments:
    """Trainer's arguments; ``own`` are those that differ between fitting and pretraining."""
    processes = world_size()
    at_once = options.micro_batch * processes
    if options.batch % at_once:
        raise ValueError(
            f"batch: expected a multiple of {at_once} (micro_batch {options.micro_batch} on {processes} processes), "
            f"got {options.batch}."
        )
    on_cpu = not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.batch // at_once,
        warmup_steps=options.warm_up,
        optim="adamw_torch",
        bf16=options.precision == "bfloat16",
        gradient_checkpointing=options.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if options.gradient_checkpointing else None,
        seed=options.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=options.save_every,
        report_to=options.report_to,
        disable_tqdm=True,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
        ddp_backend="gloo" if on_cpu and processes > 1 else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # they would overwrite the statistics that each process collects
        **own,
    )


def _gather_random_states(device: torch.device) -> dict[str, Tensor]:
    """The random state of every process."""
    own = torch.get_rng_state()
    if device.type == "cuda":
        own = torch.cat([own, torch.cuda.get_rng_state(device)])
    if not distributed.is_initialized():
        return {"random.0": own}
    states = [torch.empty_like(own, device=device) for _ in range(distributed.get_world_size())]
    distributed.all_gather(states, own.to(device))
    return {f"random.{process}": state.cpu() for process, state in enumerate(states)}


def _set_random_state(state: Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)
