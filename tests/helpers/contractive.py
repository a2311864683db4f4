"""Layers whose errors do not grow over time, so that a loop can be held against float64 at any length and size."""

import torch

from tests.helpers.compiled import built

# Relative to the norm of each tensor: rounding in float32; 10 bits of a tf32 mantissa, and gates like that.
LIMITS = {"ieee": 2e-6, "tf32": 2e-3}


def contractive(cell, H, **keywords):
    """A float32 layer with halved weights; above 128 units smaller ones, as the norm of a random matrix grows with its size."""
    layer = built(cell, H, torch.float32, **keywords)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.5 * min(1, (128 / H) ** 0.5))
    return layer


def errors(got, want):
    """By name, the distance of each result from what is wanted, relative to its norm; of zeros, the distance itself."""
    return {what: ((got[what] - value).norm() / (value.norm() or 1.0)).item() for what, value in want.items()}
