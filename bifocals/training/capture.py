"""What the mass objective needs of one forward of the base, kept for many updates of the routers.

    routed          what the router looks at: of every key, and of some queries, the rows
    query, key      as attention compares them, so that the rows of the base's attention can be had again

Both grow with the length alone: rows of attention, length long, are computed for one layer at a time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bifocals.fullness import Course
from bifocals.layer import Taken
from bifocals.lens import Lens, evaluating


@dataclass(slots=True)
class LayerCapture:
    """One layer: a list entry for each sequence."""

    routed_rows: list[Tensor] = field(default_factory=list)  # (head, row, dim), or hidden states (row, hidden)
    routed_keys: list[Tensor] = field(default_factory=list)  # (kv_head, key, dim), or hidden states (key, hidden)
    query: list[Tensor] = field(default_factory=list)  # (head, row, dim), scaled
    key: list[Tensor] = field(default_factory=list)  # (kv_head, key, dim)
    softcap: list[float | Tensor | None] = field(
        default_factory=list
    )  # over the temperature, if any: (1 | head, row, 1)
    reach: int | None = None
    is_causal: bool = True

    def course(self, sequence: int) -> Course | None:
        """Of a sequence; None where groups are never full, under a sliding window."""
        keys = self.key[sequence]
        return None if self.reach is not None else Course.of_sequence(keys.shape[1], keys.device)

    def far_keys(self, rows: Tensor, length: int, window: int, sinks: int) -> Tensor:
        """True where a key is far from the query of a row, and the base reads it: (row, key)."""
        apart = rows[:, None] - torch.arange(length, device=rows.device)
        far = (apart if self.is_causal else apart.abs()) > window
        if self.reach is not None:
            far &= apart.abs() < self.reach
        far[:, :sinks] = False
        return far

    def far_attention(self, sequence: int, chosen: slice, rows: Tensor, far: Tensor) -> Tensor:
        """The base's attention from the chosen rows to their far keys, 0 elsewhere: (head, row, key)."""
        query, key = self.query[sequence][:, chosen], self.key[sequence]
        query, key = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (query, key))
        heads, count, dim = query.shape
        logits = (query.reshape(key.shape[0], -1, dim) @ key.mT).view(heads, count, -1)
        softcap = self.softcap[sequence]
        if softcap is not None:
            softcap = softcap[:, chosen] if isinstance(softcap, Tensor) else softcap
            logits = softcap * torch.tanh(logits / softcap)
        apart = rows[:, None] - torch.arange(key.shape[1], device=rows.device)
        hidden = apart < 0 if self.is_causal else torch.zeros_like(far)
        if self.reach is not None:
            hidden = hidden | (apart.abs() >= self.reach)
        return logits.masked_fill_(hidden, -torch.inf).softmax(dim=-1).mul_(far)


class Capture:
    """Takes what passes through some layers of a lens while the base runs, at the rows of the sequence at hand."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.layers: dict[str, LayerCapture] = {}
        self.rows = torch.empty(0, dtype=torch.long)

    def take(self, layer: str, taken: Taken) -> None:
        if layer not in self.names:
            return
        kept = self.layers.setdefault(layer, LayerCapture())
        kept.reach, kept.is_causal = taken.pattern.reach, taken.pattern.is_causal
        rows = self.rows.to(taken.query.device)
        softcap = None if taken.softcap is None else taken.softcap / taken.temperature
        kept.softcap.append(softcap[0, :, rows] if isinstance(softcap, Tensor) else softcap)
        kept.query.append(_compact((taken.query * (taken.scale / taken.temperature))[0, :, rows]))
        kept.key.append(_compact(taken.key[0]))
        kept.routed_rows.append(_compact(taken.routed[0][0].index_select(-2, rows)))
        kept.routed_keys.append(_compact(taken.routed[-1][0]))


def _compact(tensor: Tensor) -> Tensor:
    """Half the memory; other precisions than float32 stay, as their range or exactness may be wanted."""
    return tensor.to(torch.float16 if tensor.dtype == torch.float32 else tensor.dtype, copy=True).contiguous()


@torch.no_grad()
def capture_layers(
    lens: Lens, blocks: Tensor, rows: Tensor, seen: Callable[[int], None] = lambda count: None
) -> dict[str, LayerCapture]:
    """One forward of the base for each block, (block, length), at its rows, (block, row)."""
    capture = Capture(lens.routers)
    body = lens.model.base_model
    device = next(body.parameters()).device
    with evaluating(lens.model), lens.capturing(capture):
        for number, (block, chosen) in enumerate(zip(blocks, rows)):
            capture.rows = chosen
            body(input_ids=block[None].to(device), use_cache=False)
            seen(number + 1)
    return capture.layers
