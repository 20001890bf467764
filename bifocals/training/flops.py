"""Floating-point operations of a decoder, counting only the pairs of tokens that attention reads.

    forward of a token    2 x (weights that multiply it)  +  4 x (width of its queries) x (keys that it reads)
    training              three times the forward: the gradients of both factors of every product

A causal query reads half of the length on average, and with Focus the share of those pairs that its pattern keeps. Soft
gates weigh every pair: training by them reads all, training in mode sparse reads those kept.
"""

import time

import torch
from transformers import PreTrainedModel

from bifocals.families import attention_sites

SIZE, SECONDS = 1024, 0.2  # of the square product that stands for what a device can do


def forward_flops(model: PreTrainedModel, length: int, pairs_kept: float = 1.0) -> float:
    """Of one token in a sequence of ``length``; ``pairs_kept`` is the share of the causal pairs that is read."""
    embeddings = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    matrices = {id(weight): weight.numel() for weight in model.parameters() if weight.ndim >= 2}
    matrices.pop(id(embeddings), None)  # looked up, not multiplied
    matrices[id(head)] = head.numel()  # unless it is the head as well
    widths = sum(site.heads * site.head_dim for site in attention_sites(model))
    return 2.0 * sum(matrices.values()) + 4.0 * widths * pairs_kept * (length + 1) / 2


def training_flops(model: PreTrainedModel, length: int, pairs_kept: float = 1.0) -> float:
    """Of one token."""
    return 3 * forward_flops(model, length, pairs_kept)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Per second, of a large square product on this device: what utilisation is a share of."""
    square = torch.ones(SIZE, SIZE, device=device, dtype=dtype)
    (square @ square).sum().item()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        (square @ square)[0, 0].item()
        done += 1
    return done * 2 * SIZE**3 / (time.perf_counter() - start)
