"""What a fitted lens has to beat, with the same text, command and measurement.

window    near tokens and sinks alone                    nothing is fitted
random    routers as they start, balanced                groups that mean nothing
kmeans    centroids by k-means on the text's tokens      groups by likeness, not by what attention needs
lora      low-rank updates of the base, dense (peft)     another use of a few parameters: adapting to the text
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from bifocals.lens import Lens
from bifocals.network import AnyRouter
from bifocals.routing import Router

Baseline = Literal["window", "random", "kmeans", "lora"]
ROUNDS = 20  # of k-means; it settles sooner
BALANCE_STEPS = 3  # times round the text: potentials keep a tenth of their start after two dozen blocks


def fit_kmeans(lens: Lens, blocks: Tensor, seed: int) -> None:
    """Centroids by spherical k-means on the projected tokens of ``blocks``."""
    generator = torch.Generator().manual_seed(seed)
    for name, tokens in projected_tokens(lens, blocks).items():
        router = lens.routers[name]
        assert isinstance(router, Router)
        with torch.no_grad():
            for head, points in enumerate(tokens):
                router.centroids[head] = kmeans(points, router.config.groups, generator)


def kmeans(points: Tensor, groups: int, generator: torch.Generator) -> Tensor:
    """Unit centroids, (group, dim), of unit points, (point, dim); a group that empties keeps its centroid."""
    centroids = points[torch.randperm(len(points), generator=generator)[:groups]].clone()
    for _ in range(ROUNDS):
        nearest = (points @ centroids.mT).argmax(dim=-1)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        is_used = torch.bincount(nearest, minlength=groups) > 0
        centroids = torch.where(is_used[:, None], normalize(sums, dim=-1), centroids)
    return centroids


@torch.no_grad()
def projected_tokens(lens: Lens, blocks: Tensor) -> dict[str, Tensor]:
    """What each layer's router sees of the text in the base model: unit vectors, (router, token, dim)."""
    seen: dict[str, list[Tensor]] = {name: [] for name in lens.routers}

    def watch(name: str, router: AnyRouter) -> Callable[..., None]:
        def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            assert isinstance(router, Router)
            seen[name].append(normalize(hidden[:, None] @ router.projection[-1], dim=-1).transpose(0, 1).flatten(1, 2))

        return see

    hooks = [
        module.register_forward_pre_hook(watch(name, lens.routers[name]), with_kwargs=True)
        for name, module in zip(lens.layers, lens.modules())
        if name in lens.routers
    ]
    try:
        with lens.disabled() as base:
            for block in blocks:
                base.base_model(input_ids=block[None].to(base.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(each, dim=1) for name, each in seen.items()}


@torch.no_grad()
def balance(lens: Lens, blocks: Tensor) -> None:
    """Move the potentials until the groups are equally full on ``blocks``, with nothing else changed."""
    model = lens.model
    lens.train()
    for _ in range(BALANCE_STEPS):
        for block in blocks:
            model.base_model(input_ids=block[None].to(model.device), use_cache=False)
            lens.step_balance()
    lens.train(False)
