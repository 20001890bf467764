"""The demonstration: on this machine, with a real model, what the lenses keep, cost and answer.

Everything printed is measured while it runs; nothing is looked up. The model comes from its wheel, the texts from
Python's own documentation.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from bifocals import FocalConfig, FocusConfig, attach, fold, load, reference
from bifocals.adapter import AdapterError
from bifocals.lens import Lens
from bifocals.models import DEFAULT, Loaded, load_model
from bifocals.tape import NearOnly
from bifocals.training.data import load_blocks
from bifocals.training.watch import Report

TEXT = "pydoc@held-out"  # what no lens of ours was fitted on
LENGTH, DECODED = 2048, 16  # tokens of the text that is measured, and tokens decoded after it
TEMPERATURE = 0.9
DOCUMENTS = ("with", "exceptions", "naming")  # topics, about 1,700 tokens
QUESTION = "What is the purpose of the with statement? Answer in one sentence."


def run(console: Console, *, with_fit: bool, report: Report = lambda progress: None) -> None:
    torch.manual_seed(0)
    show_patterns(console)
    console.print(f"\nLoading {DEFAULT} (the first time it is unpacked, which takes about a minute) ...")
    loaded = load_model(DEFAULT)
    lens = _fitted_lens(loaded, console, report) if with_fit else _shipped_lens(loaded, console)
    tokens = load_blocks([TEXT], loaded.tokenizer, LENGTH, limit=1).tokens[:1]
    show_focus(console, lens, tokens)
    show_answers(console, lens, loaded.tokenizer)
    lens.detach()
    show_focal(console, loaded.model, tokens)


def show_patterns(console: Console) -> None:
    console.print("Three patterns, eight tokens in groups a b a a b a b b: causal; window 1; Focus, one sink")
    groups = one_hot(torch.tensor([0, 1, 0, 0, 1, 0, 1, 1]), 2).bool()[None, None]
    nothing = torch.zeros_like(groups)
    drawn = [
        reference.focus_pairs(member, member, window=window, sinks=sinks, heads=1)[0, 0]
        for member, window, sinks in ((groups, 8, 0), (nothing, 1, 0), (groups, 1, 1))
    ]
    for row in range(8):
        lines = ["".join("x " if pattern[row, column] else ". " for column in range(row + 1)) for pattern in drawn]
        console.print("   ".join(f"{line:<18}" for line in lines), highlight=False)


def _shipped_lens(loaded: Loaded, console: Console) -> Lens:
    try:
        lens = load(loaded.model, DEFAULT)
    except AdapterError as reason:
        console.print(f"No lens is shipped for it ({reason}); an untrained one shows the mechanics, not the quality.")
        return attach(loaded.model, FocusConfig())
    added = sum(parameter.numel() for parameter in lens.parameters())
    console.print(f"The shipped lens is on: {added:,} parameters beside the {loaded.model.num_parameters() - added:,}.")
    return lens


def _fitted_lens(loaded: Loaded, console: Console, report: Report) -> Lens:
    """A small fit, by the mass objective: a few sequences, a few updates, and without what pays in long fits alone."""
    from bifocals.lens import lens_of
    from bifocals.training.mass import MassOptions
    from bifocals.training.run import train

    console.print("Fitting a small lens: 8 sequences of 1,024 tokens of Python's documentation ...")
    options = MassOptions(steps=60, query_steps=30, rows=128, weigh=0)
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        train(
            loaded.model, loaded.tokenizer, ["pydoc"], Path(folder) / "lens", options,
            focus=FocusConfig.network(idle=0.0), length=1024, sequences=8, held_out=1, report=report,
        )  # fmt: skip
    console.print(f"Fitted in {time.perf_counter() - start:.0f} s.")
    lens = lens_of(loaded.model)
    assert lens is not None
    return lens


@dataclass(frozen=True, slots=True)
class Reading:
    """One text read by the model in one setting."""

    perplexity: float
    prefill: float  # tokens per second
    decode: float


@torch.no_grad()
def read(model: Any, tokens: Tensor) -> Reading:
    """Read the text at once, then decode a few tokens after it, greedily."""
    start = time.perf_counter()
    output = model(input_ids=tokens, use_cache=True)
    prefill = time.perf_counter() - start
    loss = cross_entropy(output.logits[0, :-1], tokens[0, 1:]).item()
    past, new = output.past_key_values, output.logits[:, -1:].argmax(dim=-1)
    del output
    start = time.perf_counter()
    for _ in range(DECODED):
        output = model(input_ids=new, past_key_values=past, use_cache=True)
        new = output.logits[:, -1:].argmax(dim=-1)
    return Reading(math.exp(loss), tokens.numel() / prefill, DECODED / (time.perf_counter() - start))


def show_focus(console: Console, lens: Lens, tokens: Tensor) -> None:
    """Dense, window and sinks alone, and the dial, on the same text."""
    assert lens.focus is not None
    rows: list[tuple[str, int | None, Callable[[], AbstractContextManager[Any]]]] = [
        ("dense", None, lens.disabled),
        ("window + sinks", None, lambda: lens.taped(NearOnly())),
        *((f"Focus, top_k {top_k}", top_k, nullcontext) for top_k in (1, 2, 4) if top_k <= lens.focus.groups),
    ]
    title = (
        f"Focus on {tokens.numel():,} tokens it was not fitted on: window {lens.focus.window}, sinks {lens.focus.sinks}"
    )
    table = _table(title, "setting", "perplexity", "far pairs", "prefill tokens/s", "decode tokens/s")
    own = lens.top_k
    for name, top_k, setting in rows:
        lens.top_k = own if top_k is None else top_k
        kept = {"dense": 1.0, "window + sinks": 0.0}.get(name)
        if kept is None:
            kept = lens.measure(tokens).far_kept
        with setting():
            found = read(lens.model, tokens)
        table.add_row(name, f"{found.perplexity:.2f}", f"{kept:.1%}", f"{found.prefill:.0f}", f"{found.decode:.1f}")
    lens.top_k = own
    console.print(table)


def show_answers(console: Console, lens: Lens, tokenizer: Any) -> None:
    """One question about a long document, both ways."""
    document = "\n\n".join(topics[name] for name in DOCUMENTS)
    chat = [{"role": "user", "content": f"{document}\n\n{QUESTION}"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    length = prompt["input_ids"].shape[1]
    console.print(f"{QUESTION} (after a document of {length:,} tokens)", highlight=False)

    def answer() -> str:
        model: Any = lens.model
        said = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        return str(tokenizer.decode(said[0, length:], skip_special_tokens=True)).strip()

    with lens.disabled():
        console.print(f"   base    {answer()}", highlight=False, markup=False)
    console.print(f"   Focus   {answer()}", highlight=False, markup=False)


def show_focal(console: Console, model: Any, tokens: Tensor) -> None:
    """A constant temperature beside the model and inside its weights: the same model. Leaves it folded."""
    table = _table(f"Focal, temperature {TEMPERATURE}", "setting", "perplexity", "prefill tokens/s", "decode tokens/s")
    attach(model, FocalConfig(temperature=TEMPERATURE))
    for name in ("beside the model", "folded into the weights"):
        found = read(model, tokens)
        table.add_row(name, f"{found.perplexity:.4f}", f"{found.prefill:.0f}", f"{found.decode:.1f}")
        if name == "beside the model":
            fold(model)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for name in columns:
        table.add_column(name, justify="left" if name == "setting" else "right")
    return table
