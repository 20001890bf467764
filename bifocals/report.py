"""Tables of stored results, as they stand in the documents; `python -m bifocals.report` writes them there."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "bifocals" / "lenses" / "smollm2-135m" / "README.md",
    ROOT / "docs" / "ablation.md",
)


def attention_table(folder: Path) -> str:
    """The speed of the operator, one line for each stored length."""
    lines = [
        "| tokens | groups a query reads | direction | speed-up | allowed by the pattern | pairs read |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("attention-k1", "attention-k2", "attention-backward"):
        stored = json.loads((folder / f"{name}.json").read_text())
        setting = stored["setting"]
        direction = "forward + backward" if setting["backward"] else "forward"
        reads = f"{setting['top_k']} of {setting['groups']}"
        for row in stored["rows"]:
            if row["groups"] == "balanced":
                lines.append(
                    f"| {row['length']:,} | {reads} | {direction} | {row['speedup']:.1f}x | {row['bound']:.1f}x "
                    f"| {row['pairs_kept']:.0%} |"
                )
    return "\n".join(lines)


def waiting_table(folder: Path) -> str:
    """How long prompts and decoding steps take, one line for each stored length."""
    lines = [
        "| what | tokens | groups a query reads | base, ms | Focus, ms | speed-up |",
        "|---|---|---|---|---|---|",
    ]
    for name, what, counted, rival in (
        ("prefill-short-k1", "a prompt, whole model", "length", "base"),
        ("prefill-k1", "a prompt, whole model", "length", "base"),
        ("decode-model-k1", "a decoding step, whole model", "context", "dense"),
        ("decode-k1", "attention of a decoding step", "context", "dense"),
        ("decode-k2", "attention of a decoding step", "context", "dense"),
    ):
        stored = json.loads((folder / f"{name}.json").read_text())
        reads = f"{stored['setting']['top_k']} of {stored['setting']['groups']}"
        for row in stored["rows"]:
            base, focus = 1000 * row[f"{rival}_seconds"], 1000 * row["focus_seconds"]
            lines.append(
                f"| {what} | {row[counted]:,} | {reads} | {base:,.1f} | {focus:,.1f} | {row['speedup']:.2f}x |"
            )
    return "\n".join(lines)


def quality_table(folder: Path) -> str:
    """What the shipped lens keeps of the base's quality, one line for each text, length and top_k."""
    lines = [
        "| tokens | text | dense | window + sinks | top_k | Focus | far pairs kept (most) | gap recovered (95%) "
        "| dominance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("quality*.json")):
        stored = json.loads(path.read_text())
        groups = stored["options"]["focus"]["groups"]
        ends = {(row["text"], row["setting"]): row["perplexity"] for row in stored["rows"]}
        for row in [*stored["rows"], *({"text": "mean", **row} for row in stored["mean"])]:
            if "recovered" not in row:
                continue
            text, (low, high) = row["text"], row["interval"]
            perplexities = [ends.get((text, setting)) for setting in ("dense", "window + sinks")]
            dense, window, own = (f"{each:.2f}" if each else "" for each in (*perplexities, row.get("perplexity")))
            top_k = row["setting"].split()[-1]
            interval = f" ({low:.1%} to {high:.1%})" if low < high else ""  # one block has none
            far = f"{row['far_kept']:.1%} ({row['most_far_kept']:.1%})"
            lines.append(
                f"| {stored['length']:,} | {_text_name(text)} | {dense} | {window} | {top_k} | {own} "
                f"| {far} | {row['recovered']:.1%}{interval} | {row['dominance'] * groups:.2f} |"
            )
    return "\n".join(lines)


def temperature_table(folder: Path) -> str:
    """What each temperature is worth to a model trained from scratch, one line for each."""
    path = folder / "temperature.json"
    if not path.exists():
        return "Not measured yet."
    summary = json.loads(path.read_text())["summary"]
    lines = ["| what | seeds | result (95% over seeds) | more than standard, same seeds (95%) |", "|---|---|---|---|"]
    for setting, found in summary["temperatures"].items():
        apart = "" if setting == "1.0" else _with_interval(found["more_than_standard"], "+.4f")
        loss = _with_interval(found["loss"], ".4f")
        lines.append(f"| loss, temperature {setting} | {found['loss']['seeds']} | {loss} | {apart} |")
    for context, found in summary["contexts"].items():
        loss, apart = _with_interval(found["loss"], ".4f"), _with_interval(found["more_than_standard"], "+.4f")
        lines.append(f"| loss, 0.4 at context {context} | {found['loss']['seeds']} | {loss} | {apart} |")
    saved = summary["tokens_saved"]
    lines.append(f"| tokens that 0.4 saves | {saved['seeds']} | {_with_interval(saved, '.1%')} | |")
    for setting, by_length in summary["recall"].items():
        for length, found in by_length.items():
            shown = _with_interval(found, ".1%")
            lines.append(f"| recall in {length} tokens, temperature {setting} | {found['seeds']} | {shown} | |")
    return "\n".join(lines)


def adaptation_table(folder: Path) -> str:
    """What adapting a pretrained model to a temperature gives, one line for each stored schedule."""
    lines = [
        "| schedule | temperature | steps | minutes | base | base at the temperature | adapted, over the base (95%) "
        "| trained on at 1, over the base (95%) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("adapt-*.json")):
        stored = json.loads(path.read_text())
        found, options, run = stored["held_out"], stored["options"], stored["runs"]["adapted"]
        shown = [
            f"{found[name]['perplexity']:.2f}, {found[name]['ratio']:.3f} "
            f"({found[name]['interval'][0]:.3f} to {found[name]['interval'][1]:.3f})"
            for name in ("adapted", "continued")
        ]
        lines.append(
            f"| {options['schedule']} | {stored['focal']['temperature']} | {options['steps']} "
            f"| {run['seconds'] / 60:.0f} | {found['base']['perplexity']:.2f} "
            f"| {found['base at the temperature']['perplexity']:.2f} | {shown[0]} | {shown[1]} |"
        )
    return "\n".join(lines) if len(lines) > 2 else "Not measured yet."


def ablation_table(folder: Path) -> str:
    """What each part of the recipe buys, one line for each variant of a short fit: gap recovered at far pairs kept."""
    return _variants(folder / "ablation.json")


def baselines_table(folder: Path) -> str:
    """The same of what a fit has to beat, as far as it reads groups."""
    return _variants(folder / "baselines.json")


def lora_table(folder: Path) -> str:
    """Perplexities of the base as it is, and after low-rank updates: with full attention, and with window and sinks."""
    path = folder / "baselines.json"
    rows = [row for row in json.loads(path.read_text())["rows"] if not row["mean"]] if path.exists() else []
    if not rows:
        return "Not measured yet."
    texts = list(dict.fromkeys(text["text"] for text in rows[0]["texts"]))
    columns = [f"{_text_name(text)}, {setting}" for text in texts for setting in ("dense", "window + sinks")]
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in rows:
        name = "the base" if row["part"] == "pattern" else row["name"]
        lines.append(f"| {name} | {' | '.join(format(text['perplexity'], '.2f') for text in row['texts'])} |")
    return "\n".join(lines)


def _variants(path: Path) -> str:
    if not path.exists():
        return "Not measured yet."
    lines = ["| part | variant | top_k 1 | top_k 2 | top_k 4 | dominance | minutes |", "|---|---|---|---|---|---|---|"]
    rows = json.loads(path.read_text())["rows"]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    for row in sorted(rows, key=lambda row: parts.index(row["part"])):
        if row["mean"]:
            settings = {each["setting"]: each for each in row["mean"]}
            shown = [_at_far(settings.get(f"top_k {top_k}")) for top_k in (1, 2, 4)]
            worst = max(each.get("dominance", 0) for each in row["texts"]) * row["focus"]["groups"]
            lines.append(
                f"| {row['part']} | {row['name']} | {' | '.join(shown)} | {worst:.2f} | {row['seconds'] / 60:.0f} |"
            )
    return "\n".join(lines)


def _at_far(found: dict[str, Any] | None) -> str:
    return "" if found is None else f"{found['recovered']:.1%} at {found['far_kept']:.1%}"


def _with_interval(found: dict[str, Any], form: str) -> str:
    if found["interval"] is None:
        return "" if found["mean"] is None else format(found["mean"], form)
    low, high = (format(end, form) for end in found["interval"])
    return f"{format(found['mean'], form)} ({low} to {high})"


def _text_name(source: str) -> str:
    """Where it was read from says little: the last of it does."""
    return "/".join(Path(source).parts[-2:])


def demo_output(folder: Path) -> str:
    """What `bifocals demo` showed, without its drawing."""
    path = folder / "demo.txt"
    shown = path.read_text().split("\n\n", 1)[1] if path.exists() else ""
    lines = [line.rstrip() for line in shown.splitlines()]
    return "\n".join(["```", *lines, "```"])


TABLES = {
    "attention": attention_table,
    "waiting": waiting_table,
    "quality": quality_table,
    "temperature": temperature_table,
    "adaptation": adaptation_table,
    "ablation": ablation_table,
    "baselines": baselines_table,
    "lora": lora_table,
    "demo": demo_output,
}


def with_tables(readme: str, folder: Path) -> str:
    """A document with its tables made anew."""
    for name, table in TABLES.items():
        readme = _with_block(readme, name, table(folder))
    return readme


def _with_block(readme: str, name: str, table: str) -> str:
    block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
    return re.sub(rf"<!-- {name} -->.*<!-- /{name} -->", lambda _: block, readme, flags=re.DOTALL)


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(with_tables(path.read_text(), ROOT / "results"))
