"""How a process of several ends."""

import atexit
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as distributed

from bifocals.training.processes import end_process


class Witness:
    """Dies when Python is taken down, and says so."""

    def __del__(self, write=os.write):
        write(1, b"taken down\n")


def test_a_process_that_has_met_others_ends_with_its_code_and_without_taking_python_down(tmp_path):
    """A thread of gloo that lets go of a tensor meanwhile would abort it: "terminate called without an active ..."."""
    done = run("meet", tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "last words\nat exit\n"


def test_a_process_alone_ends_as_any_other(tmp_path):
    done = run("alone", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "last words\nstill here\nat exit\ntaken down\n"


def run(*arguments):
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def main():
    """One process; in a group, if asked to meet."""
    os.witness = Witness()
    atexit.register(print, "at exit")
    if sys.argv[1] == "meet":
        meeting = (Path(sys.argv[2]) / "meeting").as_uri()
        distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    print("last words")
    end_process(3)
    print("still here")


if __name__ == "__main__":
    main()
