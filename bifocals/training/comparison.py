"""What a fit has to beat, on the same text and by the same measure as the ablation.

    python -m bifocals.training.comparison smollm2-135m --json results/baselines.json

Low-rank updates (LoRA) adapt the model to the text with full attention: their perplexity is that of the setting
"dense", to be compared with the one of "window and sinks alone", which is of the base.
"""

from collections.abc import Iterator

from bifocals.config import FocusConfig
from bifocals.training.options import LoraOptions
from bifocals.training.study import WINDOW, Variant, command

STEPS, BATCH = 8, 2


def variants() -> Iterator[Variant]:
    """Measure every baseline on held-out text, after fitting it where there is something to fit."""
    focus = FocusConfig(window=WINDOW)
    yield Variant("pattern", "window and sinks alone", focus, LoraOptions(), "window")
    yield Variant("groups", "random groups", focus, LoraOptions(), "random")
    yield Variant("groups", "groups by k-means", focus, LoraOptions(), "kmeans")
    for rank in (4, 16):
        for rate in (5e-5, 5e-4):
            options = LoraOptions(rank=rank, rate=rate, steps=STEPS, batch=BATCH)
            yield Variant("lora", f"LoRA of rank {rank}, rate {rate:g}", focus, options, "lora")


main = command(variants)

if __name__ == "__main__":
    main()
