"""The base's weights shared out over two processes (FSDP): the same losses, also after a kill."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bifocals import FocusConfig, attach
from bifocals.testing import tiny_model, tiny_tokenizer
from bifocals.training.options import TrainOptions
from bifocals.training.processes import end_process
from bifocals.training.run import train
from bifocals.training.sharding import sharded

HOW = {"focus": FocusConfig(groups=4, window=8, sinks=1), "length": 48, "sequences": 8, "held_out": 1}


def fit(out: Path, **how):
    options = TrainOptions(
        steps=3, full_steps=5, batch=4, save_every=2, watch_every=2, warm_up=1, shard=how.pop("shard")
    )
    train(tiny_model("llama", dtype=torch.float32), tiny_tokenizer(), ["pydoc"], out, options, **HOW, **how)


def losses_of(out: Path):
    return json.loads((out / "results.json").read_text())["losses"]


def launch(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True, text=True)


def test_weights_shared_out_give_the_losses_of_one_process_also_after_a_kill(tmp_path):
    fit(tmp_path / "one", shard=False)
    assert launch(tmp_path / "two", "kill").returncode != 0
    assert (tmp_path / "two" / "checkpoints" / "everything" / "checkpoint-2").is_dir()
    done = launch(tmp_path / "two", "resume")
    assert done.returncode == 0, done.stderr
    found, expected = losses_of(tmp_path / "two"), losses_of(tmp_path / "one")
    assert found.keys() == expected.keys()
    for phase, losses in expected.items():
        assert found[phase] == pytest.approx(losses, rel=1e-6)
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(two, one)


def test_one_process_alone_is_told_to_start_several():
    with (
        pytest.raises(ValueError, match="expected several processes, got one"),
        sharded(attach(tiny_model("llama"), FocusConfig(groups=4))),
    ):
        pass


def main():
    """One of two processes."""
    torch.set_num_threads(1)
    out, what = Path(sys.argv[1]), sys.argv[2]

    def report(progress):
        if what == "kill" and progress.phase == "everything" and progress.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    fit(out, shard=True, report=report, resume=what == "resume")
    end_process(0)


if __name__ == "__main__":
    main()
