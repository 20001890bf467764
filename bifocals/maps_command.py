"""`bifocals maps`: pictures of attention."""

from pathlib import Path

import click

from bifocals.train_command import other_weights


@click.command()
@click.argument("model")
@click.option("--text", help="The text; or give --file.")
@click.option("--file", "text_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A text file.")
@click.option("--layer", type=click.IntRange(0), default=0, help="The layer to draw.")
@click.option("--head", type=click.IntRange(0), default=0, help="The query head to draw.")
@click.option("--temperature", type=float, help="Of focal attention; without it, that of the lens, or 0.4.")
@click.option("--lens", "lens_folder", help="A saved lens: its temperature and its groups.")
@other_weights
@click.option("--tokens", "limit", type=click.IntRange(2, 2048), default=128, help="Of the text, at most so many.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A .png or .svg file.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the entropies here.")
def maps(
    model: str,
    text: str | None,
    text_file: Path | None,
    layer: int,
    head: int,
    temperature: float | None,
    lens_folder: str | None,
    allow_other_weights: bool,
    limit: int,
    out: Path,
    json_path: Path | None,
) -> None:
    """Draw what a head of MODEL attends to: standard attention beside focal, and beside Focus with a lens that has it.

    Below the maps: entropy, and the effective number of tokens attended to, of every layer.
    """
    import torch

    from bifocals import FocalConfig, load
    from bifocals.benchmarks.measuring import surroundings, write_json
    from bifocals.maps import attention_maps
    from bifocals.models import load_model
    from bifocals.plots import check_picture, draw_maps, save_figure

    if (text is None) == (text_file is None):
        raise click.UsageError("expected --text or --file, and not both.")
    check_picture(out)
    try:
        text = text_file.read_text(encoding="utf-8") if text_file is not None else text
    except UnicodeDecodeError as reason:
        raise click.UsageError(
            f"{text_file}: expected text in UTF-8, got other bytes at {reason.start}. Convert it first."
        ) from reason
    loaded = load_model(model)
    if loaded.tokenizer is None:
        raise click.UsageError(f"{model} has no tokenizer: expected one that turns text into its tokens.")
    ids = loaded.tokenizer(text, verbose=False)["input_ids"][:limit]
    if len(ids) < 2:
        raise click.UsageError(f"expected a text of at least two tokens, got {len(ids)}.")
    focal = None
    if lens_folder is not None:
        focal = load(loaded.model, lens_folder, allow_other_weights=allow_other_weights).focal
    if temperature is None and focal is None:
        temperature = FocalConfig().temperature
    if temperature is not None:
        FocalConfig(temperature=temperature)  # says what it may be
    found = attention_maps(loaded.model, torch.tensor(ids), layer=layer, head=head, temperature=temperature)
    save_figure(draw_maps(found, [loaded.tokenizer.decode([each]) for each in ids]), out)
    if json_path is not None:
        about = {"model": model, "lens": lens_folder, "temperature": temperature, "tokens": len(ids)}
        measured = {"entropy": found.entropy, "effective": found.effective}
        write_json(json_path, {**about, **measured, "surroundings": surroundings()})
    means = {kind: sum(layers.values()) / len(layers) for kind, layers in found.effective.items()}
    listed = ", ".join(f"{kind} {mean:.1f}" for kind, mean in means.items())
    click.echo(f"Effective tokens attended to, mean over layers: {listed}. Written to {out}.")
