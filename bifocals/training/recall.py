"""Associative recall: pairs of a key and a value, then every key again, whose value is asked for.

    k3 v9 k1 v4 k7 v2 ... | k1 (v4) k3 (v9) ...

A model can answer by finding the key in its context and in no other way: keys and values are drawn anew for each
sequence. More pairs are more keys to tell apart, which is what a temperature is for.
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

KEYS, VALUES = 256, 64


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and where it is asked."""

    preset: Preset
    pairs: int  # of a training sequence
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
            steps=1000, batch=32, micro_batch=32, rate=3e-3, warm_up=100, save_every=250, evaluate_every=100
        ),
    ),
    pairs=32,
    asked=(4, 8, 16, 32, 48, 64),
)


def draw_recall(sequences: int, pairs: int, seed: int) -> Tensor:
    """(sequence, 4 x pairs): every pair, then all of them again in another order."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(sequences, KEYS, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(KEYS, KEYS + VALUES, (sequences, pairs), generator=generator)
    shown = torch.stack([keys, values], dim=2)
    order = torch.rand(sequences, pairs, generator=generator).argsort(dim=1)
    asked = shown.gather(1, order[..., None].expand(-1, -1, 2))
    return torch.cat([shown, asked], dim=1).flatten(1)


@torch.no_grad()
def recall_accuracy(model: PreTrainedModel, tokens: Tensor) -> float:
    """The share of the values asked for that the model gets right."""
    pairs = tokens.shape[1] // 4
    asked = torch.arange(pairs) * 2 + 2 * pairs  # where the keys stand that are asked for
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
    blocks = draw_recall(options.steps * options.batch, task.pairs, seed=1_000 + seed)
    held_out = draw_recall(8, task.pairs, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lens = attach(Qwen3ForCausalLM(task.preset.config()), focal)
    with training(lens, is_full=True):
        trainer = WholeTrainer(lens, blocks, held_out, folder, options, report=report)
        trainer.train_from(last_checkpoint(folder))
    asked = {pairs: draw_recall(task.sequences, pairs, seed=pairs) for pairs in task.asked}
    accuracy = {str(pairs): recall_accuracy(lens.model, tokens) for pairs, tokens in asked.items()}
    return {**asdict(trainer.trained()), "accuracy": accuracy, "pairs": task.pairs, "options": asdict(options)}
