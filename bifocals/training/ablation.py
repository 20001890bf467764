"""Which part of the recipe buys what: the same short fit, one thing changed at a time.

    python -m bifocals.training.ablation smollm2-135m --json results/ablation.json

The recipe is that of the lens that ships, with every key in a group, no group ever full and layers not weighed:
networks on the base's queries and keys, fitted by mass. Parts that networks do not have (routers for each layer, the
same groups on both sides) are changed in the recipe with centroids.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bifocals.config import FocusConfig
from bifocals.training.options import LoraOptions, MassOptions, TrainOptions
from bifocals.training.study import WINDOW, Variant, command

MASS = MassOptions(steps=50, query_steps=20, batch=2, rows=96, budget=0.95, steepness=0.0, weigh=0)
THROUGH_MODEL = TrainOptions(steps=8, batch=2, warm_up=2, watch_every=8)


def variants() -> Iterator[Variant]:
    """Fit every variant of the recipe shortly, and measure it on held-out text."""

    def networks(**changes: Any) -> FocusConfig:
        return FocusConfig.network(**{"window": WINDOW, "idle": 0.0, **changes})

    def centroids(**changes: Any) -> FocusConfig:
        return FocusConfig(**{"window": WINDOW, **changes})

    yield Variant("recipe", "networks, 8 groups, mass", networks(), MASS)
    yield Variant("recipe", "another seed", networks(), replace(MASS, seed=1))
    for idle in (0.2, 0.5):
        yield Variant("idle", f"{idle:.0%} of the keys idle", networks(idle=idle), MASS)
        yield Variant("idle", f"{idle:.0%} of the keys idle, another seed", networks(idle=idle), replace(MASS, seed=1))
    filling = replace(MASS, steepness=MassOptions().steepness)
    yield Variant("fullness", "full groups lose score", networks(), filling)
    yield Variant("fullness", "full groups lose score, another seed", networks(), replace(filling, seed=1))
    weighing = replace(MASS, weigh=MassOptions().weigh)
    yield Variant("thresholds", "layers weighed by what is at stake", networks(), weighing)
    yield Variant(
        "thresholds", "layers weighed by what is at stake, another seed", networks(), replace(weighing, seed=1)
    )
    yield Variant("score", "centroids", centroids(), MASS)
    yield Variant("score", "centroids, another seed", centroids(), replace(MASS, seed=1))
    yield Variant("routers", "centroids, one router for each layer", centroids(routers="layer"), MASS)
    yield Variant("sides", "centroids, same groups for queries and keys", centroids(sides="same"), MASS)
    yield Variant("sinks", "no sinks", networks(sinks=0), MASS)
    yield Variant(
        "balance", "nothing in the loss for even groups", networks(), MASS,
        constants={"mass_loss.UNEVEN": 0.0, "mass_loss.CROWDED": 0.0},
    )  # fmt: skip
    yield Variant(
        "balance", "potentials do not follow the groups", networks(), MASS, constants={"layer_fit.POTENTIAL_RATE": 0.0}
    )
    yield Variant(
        "balance", "no groups of hard keys: soft all along", networks(), MASS, constants={"layer_fit.SOFT": 1.0}
    )
    yield Variant(
        "initialisation",
        "no time for groups to form: hard from the start",
        networks(),
        MASS,
        constants={"layer_fit.SOFT": 0.0},
    )
    yield Variant(
        "initialisation", "groups not even at the start", networks(), MASS, constants={"layer_fit.START_ROUNDS": 1}
    )
    yield Variant("queries", "no updates of the queries alone", networks(), replace(MASS, query_steps=0))
    yield Variant("objective", "lm", networks(), THROUGH_MODEL)
    yield Variant("objective", "lm, sparse", networks(), replace(THROUGH_MODEL, sparse=True))
    yield Variant("objective", "lm, the paper's sigmoid gate and centroids", centroids(gate="sigmoid"), THROUGH_MODEL)
    yield Variant("objective", "distill", networks(), replace(THROUGH_MODEL, objective="distill"))
    for groups in (4, 16):
        yield Variant("groups", f"{groups} groups", networks(groups=groups), MASS)
    for dim in (8, 128):
        yield Variant("dim", f"networks of {dim} hidden units", networks(dim=dim), MASS)
    yield Variant("dim", "centroids in 64 dimensions", centroids(dim=64), MASS)
    yield Variant("nothing fitted", "random groups", centroids(), LoraOptions(), "random")
    yield Variant("nothing fitted", "groups by k-means", centroids(), LoraOptions(), "kmeans")


main = command(variants)

if __name__ == "__main__":
    main()
