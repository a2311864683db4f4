"""Layer norm inside a step: each pre-activation of H units is normalised to mean 0 and variance 1, then scaled and shifted.

    norm(a) = gain * (a - mean(a)) / sqrt(var(a) + 1e-5) + shift

var is the mean of the squared deviations. After Ba et al. 2016, who normalise the products with the input and with the state
separately, and the LSTM's c_t as well. Here the norm acts on the whole pre-activation of one gate, bias included, as in NRU's
code. NRU's authors report that their RNNs with an orthogonal or identity start were unstable without it. For the other cells it
is an option that their papers do not use.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class LayerNorm(NamedTuple):
    """The layer norm of a pre-activation [B, G H] of G gates."""

    gain: Tensor  # [G, H]
    shift: Tensor  # [G, H]

    def __call__(self, a: Tensor) -> Tensor:
        gates = a.unflatten(-1, self.gain.shape)
        normal = nn.functional.layer_norm(gates, self.gain.shape[-1:])
        return (normal * self.gain + self.shift).flatten(-2)


class Plain(NamedTuple):
    """No layer norm: returns the pre-activation unchanged."""

    def __call__(self, a: Tensor) -> Tensor:
        return a


class Normalise(nn.Module):
    """The parameters of a layer norm over each of `gates` pre-activations; none with `on=False`."""

    def __init__(self, gates: int, size: int, *, on: bool):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(gates, size)) if on else None
        self.shift = nn.Parameter(torch.empty(gates, size)) if on else None

    def reset_parameters(self) -> None:
        if self.gain is not None and self.shift is not None:
            nn.init.ones_(self.gain)
            nn.init.zeros_(self.shift)

    def forward(self) -> LayerNorm | Plain:
        return Plain() if self.gain is None or self.shift is None else LayerNorm(self.gain, self.shift)
