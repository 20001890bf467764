"""The demonstration: what the operators compute, how fast, and what a lens does to a real model."""

from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import one_hot

from bifocals import FocalConfig, FocusConfig, focus_attention, reference
from bifocals.benchmarks import attention

QUESTION = "What does a compiler do? Answer in one sentence."


def run(console: Console) -> None:
    torch.manual_seed(0)
    show_patterns(console)
    show_exactness(console)
    show_speed(console)
    show_model(console)


def show_patterns(console: Console) -> None:
    console.print(
        "[bold]Three patterns[/bold], eight tokens in groups a b a a b a b b: causal; window 1; Focus, one sink"
    )
    groups = one_hot(torch.tensor([0, 1, 0, 0, 1, 0, 1, 1]), 2).bool()[None, None]
    nothing = torch.zeros_like(groups)
    drawn = [
        reference.focus_pairs(member, member, window=window, sinks=sinks, heads=1)[0, 0]
        for member, window, sinks in ((groups, 8, 0), (nothing, 1, 0), (groups, 1, 1))
    ]
    for row in range(8):
        lines = ["".join("x " if pattern[row, column] else ". " for column in range(row + 1)) for pattern in drawn]
        console.print("   ".join(f"{line:<18}" for line in lines), highlight=False)


def show_exactness(console: Console) -> None:
    query, key, value = (torch.randn(1, 2, 1500, 64, dtype=torch.float64) for _ in range(3))
    groups = one_hot(torch.randint(8, (1, 2, 1500)), 8).bool()
    fast = focus_attention(query, key, value, membership=groups, window=64, sinks=4, backend="sdpa")
    exact = reference.focus_attention(query, key, value, membership=groups, window=64, sinks=4)
    console.print(
        f"\n[bold]Exact[/bold]: sparse and dense differ by {(fast - exact).abs().max().item():.1e} in float64."
    )


def show_speed(console: Console) -> None:
    console.print("\n[bold]Fast[/bold]: one call of Focus (8 groups, window 128) against dense causal attention, here:")
    setting = attention.Setting(
        lengths=(4096, 16384),
        groups=8,
        top_k=1,
        window=128,
        sinks=4,
        heads=2,
        dim=64,
        repeats=3,
        backward=False,
        sides="same",
    )

    def on_row(row: dict[str, float]) -> None:
        console.print(
            f"   {row['length']:>6} tokens, {row['groups']:<10} groups: {row['speedup']:.1f}x as fast, "
            f"{row['pairs_kept']:.0%} of the pairs",
            highlight=False,
        )

    attention.run(setting, on_row)


def show_model(console: Console) -> None:
    from bifocals import attach, fold
    from bifocals.models import DEFAULT, load_model

    console.print(f"\n[bold]On a real model[/bold]: loading {DEFAULT} (unpacked once, which takes about a minute) ...")
    loaded = load_model(DEFAULT)
    model: Any = loaded.model
    tokenizer = loaded.tokenizer
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    def answer() -> str:
        tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()

    console.print(f"   {QUESTION}")
    base = answer()
    console.print(f"   base          {base}", highlight=False)
    lens = attach(model, FocusConfig(groups=1))
    console.print(f"   Focus, 1 group, which is every pair: same answer: {answer() == base}", highlight=False)
    lens.detach()
    console.print(f"   detached      same answer: {answer() == base}", highlight=False)
    ids = prompt["input_ids"]
    with torch.no_grad():
        attach(model, FocalConfig(temperature=0.8))
        focal = model(ids).logits
        fold(model)
        folded = model(ids).logits
    difference = (focal - folded).abs().max().item()
    console.print(f"   Focal 0.8     unfolded and folded into the weights differ by {difference:.1e}", highlight=False)
