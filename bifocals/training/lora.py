"""Low-rank updates of the base model (LoRA, by peft), trained by the language-model loss with full attention.

Not a lens: it adapts the model to the text, where Focus selects what the model reads. A baseline for both.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback

from bifocals.training.exact import Order
from bifocals.training.options import LoraOptions, TrainOptions
from bifocals.training.trainer import training_arguments
from bifocals.training.watch import Progress, Report


def fit_lora(model: PreTrainedModel, blocks: Tensor, out: Path, options: LoraOptions, report: Report) -> list[float]:
    """Put the updates into ``model``, train them and write them into ``out``; returns the losses."""
    if find_spec("peft") is None:
        raise ValueError("The lora baseline needs peft. Install it: pip install 'bifocals[training]'")
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        model, LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    )
    how = TrainOptions(steps=options.steps, batch=options.batch, rate=options.rate, seed=options.seed)
    args = training_arguments(how, out / "checkpoints", is_full=False)
    args.save_strategy = "no"
    trainer = Trainer(wrapped, args, train_dataset=Labelled(blocks, options.steps * options.batch, options.seed))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Reporting(report))
    trainer.train()
    wrapped.save_pretrained(str(out))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Labelled(Order):
    """Each block is its own target."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = super().__getitem__(index)
        return {**block, "labels": block["input_ids"]}


class Reporting(TrainerCallback):
    def __init__(self, report: Report) -> None:
        self.report = report

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.report(Progress("lora", state.global_step, state.max_steps, logs["loss"]))
