"""What keys are worth: how much far attention each is foretold to get. The least of them are idle, in no group.

n_j     rows that key j is far from, counted for every head that shares it
m_j     what they spend on it, together
loss    sum_j (n_j exp(w_j) - m_j w_j) / sum_j m_j          Poisson's: exp(w) foretells the mean of m / n
bar     that share of the keys (config.idle) is below it; domains count the same
"""

import torch
from torch import Tensor

from bifocals.network import NetworkRouter
from bifocals.training.capture import LayerCapture
from bifocals.training.mass_loss import Update
from bifocals.training.processes import sum_over_processes
from bifocals.training.sequences import Sequences

MOST = 2.0  # of w: attention is at most 1, and a wild start must not overflow
LOWEST, HALVINGS = -40.0, 40  # in which the bars are found


def attention_received(attention: Tensor, far: Tensor, kv_heads: int) -> Tensor:
    """Of far attention (head, row, key): m and n, (2, kv_head, key)."""
    wide = torch.promote_types(attention.dtype, torch.float32)
    by_head = attention.sum(dim=1, dtype=wide).unflatten(0, (kv_heads, -1))
    received = by_head.sum(dim=1)
    return torch.stack([received, (by_head.shape[1] * far.sum(dim=0)).to(wide).expand_as(received)])


@torch.no_grad()
def foretell_mean_worth(router: NetworkRouter, targets: list[Tensor]) -> None:
    """Every key starts with the mean: what is left to learn is to tell them apart."""
    assert router.worth is not None
    received, rows = torch.stack(targets).sum(dim=(0, 3), dtype=torch.double)
    sum_over_processes(received)
    sum_over_processes(rows)
    router.worth.bias.copy_((received / rows.clamp(min=1)).clamp(min=1e-9).log()[:, None, None])


def worth_update(router: NetworkRouter, keys: Tensor, target: Tensor) -> Update:
    """What one sequence teaches of the worth of its keys."""
    assert router.worth is not None
    worth = router.worth(keys)[..., 0].clamp(max=MOST)
    received, rows = target.to(worth.dtype)
    loss = (rows * worth.exp() - received * worth).sum() / received.sum().clamp(min=torch.finfo(worth.dtype).tiny)
    nothing = worth.new_zeros(0)
    return Update(loss, nothing, nothing, received.sum(), None, None)


@torch.no_grad()
def set_bars(router: NetworkRouter, layer: LayerCapture, text: Sequences) -> None:
    """By halving: counts add up over processes, quantiles do not."""
    if router.worth is None:
        return
    found = [(domain, router.worth(keys)[..., 0]) for domain, keys in zip(text.domain_of, layer.routed_keys)]
    low, high = torch.full_like(router.bars, LOWEST), torch.full_like(router.bars, MOST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        counts = torch.zeros(text.domains, 1 + len(middle), dtype=torch.double)  # all keys, and those below each bar
        for domain, worth in found:
            counts[domain, 0] += worth.shape[1]
            counts[domain, 1:] += (worth < middle).sum(dim=1).cpu()
        sum_over_processes(counts)
        every, below = counts[counts[:, 0] > 0].split([1, len(middle)], dim=1)
        is_low = ((below / every).mean(dim=0) < router.config.idle).to(middle.device)[:, None]
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    router.bars.copy_(low)
