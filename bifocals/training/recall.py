"""Associative recall: pairs of a key and a value, then keys of them again and again, whose values are asked for.

    k3 v9 k1 v4 k7 v2 ... | k1 (v4) k3 (v9) ...

A model can answer by finding the key in its context and in no other way: keys and values are drawn anew for each
sequence. More pairs are more keys to tell apart, which is what a temperature is for. Models are trained on few and on
many pairs alike: with many alone they are slow to begin.
"""

from collections.abc import Sequence
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

KEYS, VALUES = 256, 64


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and where it is asked."""

    preset: Preset
    pairs: tuple[int, ...]  # of the training sequences, which are as long as the preset's context
    asked: tuple[int, ...]  # pairs of the sequences that are measured on
    sequences: int = 256  # of each that are measured on


TASK = Task(
    Preset(
        hidden=64,
        intermediate=128,
        layers=2,
        heads=2,
        vocabulary=KEYS + VALUES,
        context=128,
        options=PretrainOptions(
            steps=1500, batch=32, micro_batch=32, rate=3e-3, warm_up=50, save_every=250, evaluate_every=100
        ),
    ),
    pairs=(2, 4, 8, 16, 32),
    asked=(4, 8, 16, 32, 48, 64),
)


def draw_recall(sequences: int, pairs: Sequence[int], length: int, seed: int) -> Tensor:
    """(sequence, length): so many pairs as one of ``pairs`` says, then keys of them drawn again and again."""
    generator = torch.Generator().manual_seed(seed)

    def draw(stop: int, *shape: int) -> Tensor:
        return torch.randint(stop, shape, generator=generator)

    number = torch.tensor(pairs)[draw(len(pairs), sequences, 1)]  # of each sequence
    keys = torch.rand(sequences, KEYS, generator=generator).argsort(dim=1)
    values = KEYS + draw(VALUES, sequences, KEYS)
    place = torch.arange(length // 2).expand(sequences, -1)
    asked = (torch.rand(place.shape, generator=generator) * number).long()
    which = torch.where(place < number, place, asked)
    return torch.stack([keys.gather(1, which), values.gather(1, which)], dim=2).flatten(1)


@torch.no_grad()
def recall_accuracy(model: PreTrainedModel, tokens: Tensor) -> float:
    """The share of the values in the second half of each sequence that the model gets right."""
    half = tokens.shape[1] // 2
    asked = torch.arange(half, 2 * half, 2)  # where the keys stand
    right = []
    with evaluating(model):
        for some in tokens.split(32):
            answers = model(input_ids=some.to(model.device), use_cache=False).logits[:, asked].argmax(dim=-1).cpu()
            right.append(answers == some[:, asked + 1])
    return torch.cat(right).float().mean().item()


def train_recall(
    focal: FocalConfig, seed: int, folder: Path, task: Task = TASK, report: Report = lambda progress: None
) -> dict[str, Any]:
    """A model from scratch; returns its accuracy for each number of pairs. It resumes what ``folder`` holds."""
    options = task.preset.options
    context = task.preset.context
    blocks = draw_recall(options.steps * options.batch, task.pairs, context, seed=1_000 + seed)
    held_out = draw_recall(16, task.pairs, context, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lens = attach(Qwen3ForCausalLM(task.preset.config()), focal)
    with training(lens, is_full=True):
        trainer = WholeTrainer(lens, blocks, held_out, folder, options, report=report)
        trainer.train_from(last_checkpoint(folder))
    asked = {pairs: draw_recall(task.sequences, (pairs,), 4 * pairs, seed=pairs) for pairs in task.asked}
    accuracy = {str(pairs): recall_accuracy(lens.model, tokens) for pairs, tokens in asked.items()}
    return {**asdict(trainer.trained()), "accuracy": accuracy, "pairs": task.pairs, "options": asdict(options)}
