"""`python -m bifocals`, and so `torchrun -m bifocals`."""

from bifocals.cli import main

main(prog_name="bifocals")
