"""Fitting a lens: data, objectives, and what keeps a run alive."""

from typing import Any


def __getattr__(name: str) -> Any:
    """On demand: evaluation reads the data of this package, and a fit is evaluated."""
    if name == "train":
        from bifocals.training.run import train

        return train
    raise AttributeError(f"bifocals.training has no {name!r}")
