"""Does a fit that is killed again and again end as one that never was?

    python -m bifocals.benchmarks.resume --kills 10 --json results/resume.json

Each objective fits a tiny random model (with dropout, so that random states count) once in one go, and once killed by
SIGKILL at random moments and resumed. Nothing is timed: the answer is whether losses and lens agree bit for bit.
"""

import json
import os
import random
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from bifocals.benchmarks.measuring import surroundings, write_json
from bifocals.config import FocusConfig
from bifocals.testing import tiny_model, tiny_tokenizer
from bifocals.training.mass import MassOptions
from bifocals.training.options import TrainOptions
from bifocals.training.run import Options, train

LENGTH = 256  # enough for groups to be full now and then
FITS: dict[str, Options] = {
    "lm": TrainOptions(steps=60, batch=2, save_every=3, watch_every=10),
    "distill": TrainOptions(objective="distill", steps=60, batch=2, save_every=3, watch_every=10),
    "lm, then everything": TrainOptions(steps=30, full_steps=30, batch=2, save_every=3, watch_every=10),
    "mass": MassOptions(steps=60, query_steps=20, rows=8, save_every=5),
}


def fit(out: Path, options: Options, *, resume: bool) -> dict[str, Any]:
    model = tiny_model("gpt2", dtype=torch.float32, attn_pdrop=0.1, resid_pdrop=0.1)
    focus = FocusConfig.network(groups=4, window=8, sinks=1, dim=8)
    how: dict[str, Any] = {"focus": focus, "length": LENGTH, "sequences": 8, "held_out": 1}
    return train(model, tiny_tokenizer(), ["pydoc"], out, options, resume=resume, **how)


def fit_and_kill(out: Path, options: Options, after: float) -> bool:
    """In another process; True if it was killed before it was done."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fit(out, options, resume=(out / "run.json").exists())
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


@click.command()
@click.option("--kills", default=10, help="At least so many times each fit is killed.")
@click.option("--seed", default=0, help="Of the moments.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the answer here.")
def main(kills: int, seed: int, path: Path | None) -> None:
    """Kill fits and resume them."""
    torch.set_num_threads(1)
    moments, rows = random.Random(seed), []
    for name, options in FITS.items():
        with TemporaryDirectory() as folder:
            whole, killed = Path(folder) / "whole", Path(folder) / "killed"
            start = time.monotonic()
            losses = fit(whole, options, resume=False)["losses"]
            seconds, count, runs = time.monotonic() - start, 0, 1
            while count < kills or not (killed / "results.json").exists():
                if (killed / "results.json").exists():  # done before it was killed often enough: once more
                    shutil.rmtree(killed)
                    runs += 1
                wait = moments.uniform(0.05, 0.6) * seconds if count < kills else 100 * seconds
                count += fit_and_kill(killed, options, wait)
            again = json.loads((killed / "results.json").read_text())["losses"]
            files = [(each / "adapter_model.safetensors").read_bytes() for each in (whole, killed)]
        row: dict[str, Any] = {"fit": name, "kills": count, "runs": runs, "same_lens": files[0] == files[1]}
        # Of each step, or by mass the last one of each layer.
        row |= {"losses": sum(len(each) for each in losses.values()), "same_losses": again == losses}
        rows.append(row)
        click.echo(row)
    if path is not None:
        asked = {"kills": kills, "seed": seed}
        write_json(
            path,
            {
                "command": shlex.join(["python", "-m", "bifocals.benchmarks.resume", *sys.argv[1:]]),
                "options": asked,
                "surroundings": surroundings(),
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
