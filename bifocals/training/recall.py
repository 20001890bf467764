"""Associative recall in a haystack: needles, each a key and a value in one token, that questions then ask for by key.

    .  .  k3=v7  .  k1=v2  .  .  .  k2=v7  .  |  k1? v2  k3? v7  k2? v7

Values are drawn anew for each sequence, so a model answers by finding the needle among all tokens and in no other way.
More hay is more to be kept out of the answer, which is what a temperature is for. With key and value in two tokens a
model must also learn to look one token back; models of this size did not begin to in the time of such a run.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM

from bifocals.config import FocalConfig
from bifocals.lens import attach, evaluating
from bifocals.training.checkpoint import last_checkpoint
from bifocals.training.options import PretrainOptions
from bifocals.training.presets import Preset
from bifocals.training.run import training
from bifocals.training.watch import Report
from bifocals.training.whole import WholeTrainer

KEYS, VALUES, HAY = 8, 8, 64
# Tokens in this order: needles, values, questions, hay.
FIRST_VALUE = KEYS * VALUES
FIRST_QUESTION = FIRST_VALUE + VALUES
FIRST_HAY = FIRST_QUESTION + KEYS
ASKED = 2 * KEYS  # tokens at the end of a sequence, questions and answers in turn


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and where it is asked."""

    preset: Preset
    lengths: tuple[int, ...]  # of the sequences that are measured on
    sequences: int = 256  # of each


TASK = Task(
    Preset(
        hidden=64,
        intermediate=128,
        layers=2,
        heads=2,
        vocabulary=FIRST_HAY + HAY,
        context=64,
        options=PretrainOptions(
            steps=1500, batch=32, micro_batch=32, rate=3e-3, warm_up=50, save_every=500, evaluate_every=100
        ),
    ),
    lengths=(64, 128, 256, 512, 1024),
)


def draw_recall(sequences: int, length: int, seed: int) -> Tensor:
    """(sequence, length): hay with every key's needle in it, then all keys asked for in some order."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randint(VALUES, (sequences, KEYS), generator=generator)
    hay = FIRST_HAY + torch.randint(HAY, (sequences, length - ASKED), generator=generator)
    place = torch.rand(hay.shape, generator=generator).argsort(dim=1)[:, :KEYS]
    stack = hay.scatter(1, place, torch.arange(KEYS) * VALUES + value)
    order = torch.rand(value.shape, generator=generator).argsort(dim=1)
    asked = torch.stack([FIRST_QUESTION + order, FIRST_VALUE + value.gather(1, order)], dim=2)
    return torch.cat([stack, asked.flatten(1)], dim=1)


@torch.no_grad()
def recall_accuracy(model: PreTrainedModel, tokens: Tensor) -> float:
    """The share of the answers that the model gets right."""
    right = []
    with evaluating(model):
        for some in tokens.split(32):
            logits = model(input_ids=some.to(model.device), use_cache=False).logits[:, -ASKED::2]
            right.append(logits.argmax(dim=-1).cpu() == some[:, 1 - ASKED :: 2])
    return torch.cat(right).float().mean().item()


def train_recall(
    focal: FocalConfig, seed: int, folder: Path, task: Task = TASK, report: Report = lambda progress: None
) -> dict[str, Any]:
    """A model from scratch; returns its accuracy at each length. It resumes what ``folder`` holds."""
    options = task.preset.options
    context = task.preset.context
    blocks = draw_recall(options.steps * options.batch, context, seed=1_000_000 + seed)
    held_out = draw_recall(16, context, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lens = attach(Qwen3ForCausalLM(task.preset.config()), focal)
    with training(lens, is_full=True):
        trainer = WholeTrainer(lens, blocks, held_out, folder, options, report=report)
        trainer.train_from(last_checkpoint(folder))
    asked = {length: draw_recall(task.sequences, length, seed=length) for length in task.lengths}
    accuracy = {str(length): recall_accuracy(lens.model, tokens) for length, tokens in asked.items()}
    return {**asdict(trainer.trained()), "accuracy": accuracy, "options": asdict(options)}
