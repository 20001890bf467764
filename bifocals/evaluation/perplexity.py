"""Perplexity with a lens, between two ends: the base model, and its window and sinks alone.

    recovered = 1 - log(lens / dense) / log(window / dense)        in perplexities

is the share of the quality lost without far pairs that the lens brings back: 1 is the base model, 0 is no far pair.
Every block of text is run once in each setting, so that the settings differ by nothing but the lens; intervals (95%)
come from drawing the blocks anew (paired bootstrap). Models that read the tokens after the one they predict have no
perplexity: of those, what the lens keeps is all that is told.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bifocals.config import FocusConfig
from bifocals.families import is_decoder
from bifocals.lens import Lens, attach, evaluating, lens_of
from bifocals.tape import NearOnly, Tape
from bifocals.training.data import Blocks

DRAWS = 2000
ROWS_AT_ONCE = 256  # of logits: a vocabulary is wide
DENSE, WINDOW = "dense", "window + sinks"
Row = dict[str, Any]


def evaluate(
    model: PreTrainedModel,
    blocks: Blocks,
    top_ks: Sequence[int] = (),
    on_run: Callable[[str, str], None] = lambda text, setting: None,
) -> dict[str, Any]:
    """Run every block dense, with window and sinks alone, and with the model's lens at each ``top_k``.

    A model without a lens has the two ends alone. ``on_run(text, setting)`` is called after each run of a block.
    """
    with _lens_of(model, top_ks) as lens:
        run_text = _run_text if is_decoder(model) else _measure_text
        texts = [run_text(lens, text, blocks.of(domain), top_ks, on_run) for domain, text in enumerate(blocks.names)]
    rows = [row for domain, (text, runs) in enumerate(zip(blocks.names, texts)) for row in _rows(text, runs, domain)]
    return {"length": blocks.tokens.shape[1], "rows": rows, "mean": _mean_rows(rows, texts)}


def block_loss(model: PreTrainedModel, block: Tensor) -> float:
    """Nats per token of one block."""
    return token_losses(model, block).mean().item()


def token_losses(model: PreTrainedModel, block: Tensor) -> Tensor:
    """Nats of each token of one block but the first, in float64."""
    with evaluating(model), torch.no_grad():
        logits = model(input_ids=block[None].to(model.device), use_cache=False).logits[0, :-1]
    wanted = block[1:].to(logits.device)
    parts = [
        cross_entropy(some.float(), ids, reduction="none").double()
        for some, ids in zip(logits.split(ROWS_AT_ONCE), wanted.split(ROWS_AT_ONCE))
    ]
    return torch.cat(parts).cpu()


class Run:
    """One text in one setting: the loss of each block, and what the lens kept of it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.far_kept: list[float] = []
        self.pairs_kept: list[float] = []
        self.dominance: dict[str, float] = {}  # by layer: the largest group's share of a block's keys, at its worst

    def add(self, loss: float | None, lens: Lens, tape: Tape | None) -> None:
        if loss is not None:
            self.losses.append(loss)
        if tape is not None:
            found = lens.measure_tape(tape)
            self.far_kept.append(found.far_kept)
            self.pairs_kept.append(found.pairs_kept)
            for layer, shares in found.layers.items():
                self.dominance[layer] = max(shares.dominance, self.dominance.get(layer, 0.0))


Runs = dict[str, Run]


def _run_text(lens: Lens, text: str, tokens: Tensor, top_ks: Sequence[int], on_run: Callable[[str, str], None]) -> Runs:
    runs: Runs = defaultdict(Run)
    for block in tokens:
        with lens.disabled() as base:
            runs[DENSE].add(block_loss(base, block), lens, None)
        on_run(text, DENSE)
        for setting, top_k, tape in [(WINDOW, None, NearOnly()), *((f"top_k {k}", k, Tape()) for k in top_ks)]:
            lens.top_k = lens.top_k if top_k is None else top_k
            with lens.taped(tape):
                loss = block_loss(lens.model, block)
            runs[setting].add(loss, lens, tape)
            on_run(text, setting)
    return runs


def _measure_text(
    lens: Lens, text: str, tokens: Tensor, top_ks: Sequence[int], on_run: Callable[[str, str], None]
) -> Runs:
    """Without perplexities."""
    runs: Runs = defaultdict(Run)
    for block in tokens:
        for top_k in top_ks:
            lens.top_k = top_k
            with lens.taped(Tape()) as tape, evaluating(lens.model), torch.no_grad():
                lens.model(input_ids=block[None].to(lens.model.device))
            runs[f"top_k {top_k}"].add(None, lens, tape)
            on_run(text, f"top_k {top_k}")
    return runs


def _rows(text: str, runs: Runs, seed: int) -> list[Row]:
    rows = []
    for setting, run in runs.items():
        row: Row = {"text": text, "setting": setting}
        if run.losses:
            row["perplexity"] = math.exp(np.mean(run.losses))
        if run.far_kept:
            row |= {"far_kept": float(np.mean(run.far_kept)), "most_far_kept": max(run.far_kept)}
            row["pairs_kept"] = float(np.mean(run.pairs_kept))
        if setting not in (DENSE, WINDOW):
            if run.losses:
                row |= {"recovered": _recovered(runs, setting), "interval": _interval(_drawn(runs, setting, seed))}
            row |= {"dominance": max(run.dominance.values()), "dominance_by_layer": run.dominance}
        rows.append({**row, "losses": run.losses})
    return rows


def _mean_rows(rows: list[Row], texts: list[Runs]) -> list[Row]:
    """Over the texts, each counting the same; of any block, the most far pairs kept and the worst dominance."""
    means = []
    for setting in texts[0]:
        own = [row for row in rows if row["setting"] == setting]
        if setting in (DENSE, WINDOW):
            continue
        mean: Row = {"setting": setting}
        if "recovered" in own[0]:
            drawn = np.mean([_drawn(runs, setting, seed) for seed, runs in enumerate(texts)], axis=0)
            shares = [row["recovered"] for row in own]
            mean |= {"recovered": None if None in shares else float(np.mean(shares)), "interval": _interval(drawn)}
        mean |= {
            "far_kept": float(np.mean([row["far_kept"] for row in own])),
            "most_far_kept": max(row["most_far_kept"] for row in own),
            "pairs_kept": float(np.mean([row["pairs_kept"] for row in own])),
            "dominance": max(row["dominance"] for row in own),
        }
        means.append(mean)
    return means


def _recovered(runs: Runs, setting: str) -> float | None:
    """None where no far pair is missed."""
    share = float(recovered_share(*(np.mean(runs[name].losses) for name in (setting, DENSE, WINDOW))))
    return share if math.isfinite(share) else None


def recovered_share(own: Any, dense: Any, window: Any) -> Any:
    """From losses in nats per token, which are logarithms of perplexities; nan where no far pair is missed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 - np.divide(own - dense, window - dense)


def _drawn(runs: Runs, setting: str, seed: int) -> "np.ndarray[Any, Any]":
    """The share recovered on blocks drawn anew, many times; the same blocks for every setting."""
    blocks = len(runs[DENSE].losses)
    draws = np.random.default_rng(seed).integers(blocks, size=(DRAWS, blocks))
    return np.asarray(
        recovered_share(*(np.array(runs[name].losses)[draws].mean(axis=1) for name in (setting, DENSE, WINDOW)))
    )


def _interval(drawn: "np.ndarray[Any, Any]") -> list[float] | None:
    drawn = drawn[np.isfinite(drawn)]
    return [float(each) for each in np.quantile(drawn, [0.025, 0.975])] if len(drawn) else None


@contextmanager
def _lens_of(model: PreTrainedModel, top_ks: Sequence[int]) -> Iterator[Lens]:
    """The model's lens in hard mode, and as it was afterwards; for a model without one, a bare one for the block."""
    lens = lens_of(model)
    if lens is None:
        if top_ks:
            raise ValueError(
                f"top_k {list(top_ks)}: expected a model with a lens, got one without. Attach or load one."
            )
        bare = attach(model, FocusConfig(groups=1))
        try:
            yield bare
        finally:
            bare.detach()
        return
    mode, top_k = lens.mode, lens.top_k
    lens.mode = "hard"
    try:
        yield lens
    finally:
        lens.mode, lens.top_k = mode, top_k
