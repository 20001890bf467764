"""What temperatures were learned: mean, least and greatest over the tokens of a text, for each layer and head."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bifocals.focal import LearnedTemperature
from bifocals.lens import Lens

Ranges = dict[str, list[dict[str, float]]]  # by layer, then for each head (one if heads share it): mean, min, max


class Seen:
    """Collects temperatures, forward by forward."""

    def __init__(self) -> None:
        self.forwards: dict[str, list[Tensor]] = {}  # (statistic, head)

    def take(self, layer: str, temperature: Tensor) -> None:
        by_head = temperature.detach().double().transpose(0, 1).flatten(1)  # (head, token)
        statistics = torch.stack([by_head.mean(dim=1), by_head.amin(dim=1), by_head.amax(dim=1)])
        self.forwards.setdefault(layer, []).append(statistics.cpu())

    def ranges(self) -> Ranges:
        """Over all forwards, which have to be of one length for the mean to be over tokens."""
        found: Ranges = {}
        for layer, forwards in self.forwards.items():
            each = torch.stack(forwards)
            columns = each[:, 0].mean(dim=0), each[:, 1].amin(dim=0), each[:, 2].amax(dim=0)
            found[layer] = [dict(zip(("mean", "min", "max"), head)) for head in torch.stack(columns).T.tolist()]
        return found


@contextmanager
def watch_temperatures(lens: Lens) -> Iterator[Seen]:
    """See the temperatures of every forward inside the block; constants are not seen."""
    seen = Seen()
    learned = {name: layer.temperature for name, layer in lens.layers.items()}
    hooks = [
        form.clamp.register_forward_hook(lambda _, __, temperature, layer=name: seen.take(layer, temperature))
        for name, form in learned.items()
        if isinstance(form, LearnedTemperature)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def as_logs(ranges: Ranges) -> dict[str, float]:
    """One name and number each, as loggers want them.

    >>> as_logs({"0": [{"mean": 0.4}]})
    {'temperature/0/0/mean': 0.4}
    """
    return {
        f"temperature/{layer}/{head}/{name}": number
        for layer, heads in ranges.items()
        for head, statistics in enumerate(heads)
        for name, number in statistics.items()
    }


def from_logs(logs: dict[str, Any]) -> dict[str, Ranges]:
    """The inverse; nothing where no temperature was logged.

    >>> from_logs({"temperature/0/0/mean": 0.4, "loss": 3.0})
    {'temperatures': {'0': [{'mean': 0.4}]}}
    """
    ranges: Ranges = {}
    for key, number in logs.items():
        if key.startswith("temperature/"):
            _, layer, head, name = key.split("/")
            heads = ranges.setdefault(layer, [])
            if int(head) == len(heads):
                heads.append({})
            heads[int(head)][name] = number
    return {"temperatures": ranges} if ranges else {}
