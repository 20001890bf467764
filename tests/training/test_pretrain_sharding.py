"""A model from scratch with its weights shared out over two processes (FSDP): the same losses as in one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bifocals import FocalConfig
from bifocals.training.options import PretrainOptions
from bifocals.training.presets import Preset
from bifocals.training.pretrain import pretrain
from bifocals.training.processes import end_process

OPTIONS = PretrainOptions(steps=4, batch=4, micro_batch=2, warm_up=1, save_every=2, evaluate_every=2)
SMALL = Preset(hidden=32, intermediate=48, layers=2, heads=2, vocabulary=300, context=32, options=OPTIONS)


def fit(text: Path, out: Path, *, shard: bool):
    options = replace(OPTIONS, shard=shard)
    pretrain(SMALL, [str(text)], out, focal=FocalConfig(form="token"), options=options, held_out=2)


def test_a_model_shared_out_is_the_model_of_one_process(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall. " for number in range(400)))
    fit(text, tmp_path / "one", shard=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, text, tmp_path / "two"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert two["held_out"]["loss"] == pytest.approx(one["held_out"]["loss"], rel=1e-6)
    weights = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(*weights)


def main():
    """One of two processes."""
    torch.set_num_threads(1)
    fit(Path(sys.argv[1]), Path(sys.argv[2]), shard=True)
    end_process(0)


if __name__ == "__main__":
    main()
