"""Every option of a fit: one definition, one default, one sentence each."""

import math
from dataclasses import dataclass
from typing import Literal

from bifocals.config import check_types, expect, option


def _expect_whole_forwards(batch: int, micro_batch: int) -> None:
    expect(batch % micro_batch == 0, f"batch a multiple of micro_batch {micro_batch}", batch, "change one of the two")


@dataclass(frozen=True, kw_only=True, slots=True)
class MassOptions:
    """How routers are fitted by the mass objective."""

    steps: int = option(550, "Updates of each layer's router, queries and keys together.")
    query_steps: int = option(200, "Updates of the queries alone afterwards, on the final groups (networks only).")
    batch: int = option(2, "Sequences in one update, over all processes.")
    rows: int = option(256, "Queries of a sequence that groups are formed from; as many more make them even.")
    rate: float = option(0.0, "Learning rate; 0 means 0.015 for networks and 0.005 for centroids.")
    query_rate: float = option(5e-3, "Learning rate of the updates of the queries alone.")
    budget: float = option(0.86, "Share of top_k / groups at which thresholds aim: unseen text should stay below 1.")
    steepness: float = option(
        10.0, "What a group loses for each fair share of keys too many, in deviations of its scores; 0: nothing."
    )
    weigh: int = option(
        1, "Sequences of each source on which layers are weighed against each other; 0: as they are, or all the same."
    )
    is_new: bool = option(True, "Draw the routers anew; or go on from those of the lens, without the soft phase.")
    seed: int = option(0, "Of everything that is drawn.")
    save_every: int = option(100, "Steps between checkpoints.")
    report_every: int = option(10, "Steps between reports.")
    report_to: str = option("none", "Where reports are logged beside: none, tensorboard, wandb, ...")

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in (("steps", 1), ("query_steps", 0), ("batch", 1), ("rows", 1), ("save_every", 1)):
            expect(getattr(self, name) >= least, f"{name} >= {least}", getattr(self, name), "it counts")
        expect(self.report_every >= 1, "report_every >= 1", self.report_every, "it counts steps")
        expect(0 <= self.rate < math.inf, "a finite rate >= 0", self.rate, "0 means the default")
        expect(0 < self.query_rate < math.inf, "a finite query_rate > 0", self.query_rate, "0.005 is the default")
        expect(0 <= self.seed < 2**32, "a seed in [0, 2^32)", self.seed, "any number in it will do")
        expect(self.weigh >= 0, "weigh >= 0", self.weigh, "it counts sequences")
        expect(0 <= self.steepness < math.inf, "a finite steepness >= 0", self.steepness, "0: no group is ever full")
        expect(0 < self.budget <= 1, "budget in (0, 1]", self.budget, "0.86 leaves room for unseen text")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """How a lens is fitted through its model (objectives lm and distill)."""

    objective: Literal["lm", "distill"] = option("lm", "The language-model loss, or the base's own predictions.")
    steps: int = option(400, "Optimizer steps of the lens alone, the base frozen.")
    full_steps: int = option(0, "Optimizer steps of everything afterwards: base and lens (full fine-tuning).")
    sparse: bool = option(False, "Gates on the far pairs kept alone, not on all: steps at the cost of the pattern.")
    batch: int = option(4, "Sequences in one step, over all processes.")
    micro_batch: int = option(1, "Sequences in one forward; gradients are added up to the batch.")
    rate: float = option(5e-3, "Learning rate of the lens.")
    full_rate: float = option(5e-5, "Learning rate of everything.")
    warm_up: int = option(10, "Steps in which the rate rises; it falls linearly afterwards.")
    shard: bool = option(False, "Share the base's weights out over the processes (FSDP); each keeps a part of them.")
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "Of the model's arithmetic; routing stays in float32."
    )
    gradient_checkpointing: bool = option(False, "Compute the forward twice instead of keeping it: less memory.")
    seed: int = option(0, "Of the order of the text, and of dropout where the model has any.")
    save_every: int = option(50, "Steps between checkpoints.")
    watch_every: int = option(10, "Steps between looks at the hard perplexity and the groups.")
    report_to: str = option("none", "Where transformers' Trainer logs: none, tensorboard, wandb, ...")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "batch", "micro_batch", "save_every", "watch_every"):
            expect(getattr(self, name) >= 1, f"{name} >= 1", getattr(self, name), "it counts")
        expect(self.full_steps >= 0, "full_steps >= 0", self.full_steps, "0 leaves the base frozen")
        expect(self.warm_up >= 0, "warm_up >= 0", self.warm_up, "0 starts at the full rate")
        for name in ("rate", "full_rate"):
            rate = getattr(self, name)
            expect(0 < rate < math.inf, f"a finite {name} > 0", rate, "5e-3 suits a lens, 5e-5 everything")
        _expect_whole_forwards(self.batch, self.micro_batch)
        expect(0 <= self.seed < 2**32, "a seed in [0, 2^32)", self.seed, "any number in it will do")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """How low-rank updates are trained."""

    rank: int = option(4, "Rank of the updates of every linear layer.")
    steps: int = option(100, "Optimizer steps.")
    batch: int = option(4, "Sequences in one step.")
    rate: float = option(1e-4, "Learning rate.")
    seed: int = option(0, "Of the order of the text and of the updates' start.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("rank", "steps", "batch"):
            expect(getattr(self, name) >= 1, f"{name} >= 1", getattr(self, name), "it counts")
        expect(0 < self.rate < math.inf, "a finite rate > 0", self.rate, "1e-4 is usual")
        expect(0 <= self.seed < 2**32, "a seed in [0, 2^32)", self.seed, "any number in it will do")


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainOptions:
    """How a model is trained from scratch: AdamW, warm-up, then a cosine to a tenth."""

    steps: int = option(600, "Optimizer steps.")
    batch: int = option(8, "Sequences in one step, over all processes.")
    micro_batch: int = option(8, "Sequences in one forward; gradients are added up to the batch.")
    rate: float = option(2e-3, "Highest learning rate.")
    warm_up: int = option(60, "Steps in which the rate rises.")
    weight_decay: float = option(0.1, "Of matrices; norms and biases have none.")
    precision: Literal["float32", "bfloat16"] = option("float32", "Of the arithmetic; weights stay in float32.")
    gradient_checkpointing: bool = option(False, "Compute the forward twice instead of keeping it: less memory.")
    shard: bool = option(False, "Share the model's weights out over the processes (FSDP); each keeps a part of them.")
    seed: int = option(0, "Of the weights at the start, and of the order of the text.")
    save_every: int = option(200, "Steps between checkpoints.")
    evaluate_every: int = option(50, "Steps between looks at the validation loss.")
    report_to: str = option("none", "Where transformers' Trainer logs: none, tensorboard, wandb, ...")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "batch", "micro_batch", "save_every", "evaluate_every"):
            expect(getattr(self, name) >= 1, f"{name} >= 1", getattr(self, name), "it counts")
        expect(self.warm_up >= 0, "warm_up >= 0", self.warm_up, "0 starts at the full rate")
        expect(0 < self.rate < math.inf, "a finite rate > 0", self.rate, "small models bear 2e-3, large ones 1e-4")
        expect(self.weight_decay >= 0, "weight_decay >= 0", self.weight_decay, "0.1 is usual")
        _expect_whole_forwards(self.batch, self.micro_batch)
        expect(0 <= self.seed < 2**32, "a seed in [0, 2^32)", self.seed, "any number in it will do")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptOptions(PretrainOptions):
    """How a pretrained model is adapted to a temperature."""

    schedule: Literal["abrupt", "anneal", "scale"] = option(
        "anneal", "The temperature at once, falling from 1, or with the query's scale re-learned from undoing it."
    )
    part: Literal["everything", "queries"] = option("everything", "What is trained: all weights, or queries and keys.")
    steps: int = option(60, "Optimizer steps.")
    batch: int = option(4, "Sequences in one step, over all processes.")
    micro_batch: int = option(1, "Sequences in one forward; gradients are added up to the batch.")
    rate: float = option(5e-5, "Highest learning rate.")
    warm_up: int = option(5, "Steps in which the rate rises.")
    weight_decay: float = option(0.0, "Of matrices; norms and biases have none.")
    save_every: int = option(20, "Steps between checkpoints.")
    evaluate_every: int = option(15, "Steps between looks at the validation loss.")
