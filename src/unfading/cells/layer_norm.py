"""Layer norm inside a step: each pre-activation of H units is brought to mean 0 and variance 1, then scaled and shifted.

    norm(a) = gain * (a - mean(a)) / sqrt(var(a) + 1e-5) + shift

var is the mean of the squared deviations. After Ba et al. 2016, who norm the input's and the state's products apart and an
LSTM's c_t as well; here it is the whole pre-activation of one gate, bias included, as in NRU's code. NRU's authors report
that their RNNs with orthogonal or identity start were unstable without it; for the other cells it is an option that their
papers do not use.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class LayerNorm(NamedTuple):
    """What a step does with its pre-activation, [B, G H], for G gates."""

    gain: Tensor  # [G, H]
    shift: Tensor  # [G, H]

    def __call__(self, a: Tensor) -> Tensor:
        gates = a.unflatten(-1, self.gain.shape)
        normal = nn.functional.layer_norm(gates, self.gain.shape[-1:])
        return (normal * self.gain + self.shift).flatten(-2)


class Plain(NamedTuple):
    """No layer norm: the pre-activation as it is."""

    def __call__(self, a: Tensor) -> Tensor:
        return a


class Normalise(nn.Module):
    """The parameters of a layer norm over each of `gates` pre-activations, or, with `on=False`, none."""

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
