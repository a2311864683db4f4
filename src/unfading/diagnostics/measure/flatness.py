"""What a lattice G [L, T] comes to, in a few numbers.

    bottom_to_top         sum_t G_{1,t} / sum_t G_{L,t}                      layers: 1 the bottom, L the top
    first_to_last         G_{1,1} / G_{L,T}                                  the far corner against the one at the loss
    share_within_ten      share of points with G_{L,T} / 10 <= G <= 10 G_{L,T}
    gain_per_layer, gain_per_step
                          by what G is multiplied one layer further down, one step further back: exp of the slopes of

                              log G_{l,t} ~ a + b (L - l) + c (T - t)        least squares over the points where G > 0

A gain of 1 in both directions is a flat lattice; 1.26 is a factor of ten in ten layers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Flatness(NamedTuple):
    """The numbers of a lattice."""

    bottom_to_top: float
    first_to_last: float
    share_within_ten: float
    gain_per_layer: float
    gain_per_step: float


def flatness(G: Tensor, steps: Sequence[int] | None = None) -> Flatness:
    """The numbers of a lattice G [L, T], the bottom layer and the first step first; `steps`: of which steps, None all."""
    G = G.double()
    corner = G[-1, -1]
    gain_per_layer, gain_per_step = _gains(G, range(G.shape[1]) if steps is None else steps)
    return Flatness(
        bottom_to_top=float(G[0].sum() / G[-1].sum()),
        first_to_last=float(G[0, 0] / corner),
        share_within_ten=float(((corner / 10 <= G) & (corner * 10 >= G)).double().mean()),
        gain_per_layer=gain_per_layer,
        gain_per_step=gain_per_step,
    )


def _gains(G: Tensor, steps: Sequence[int]) -> tuple[float, float]:
    L, T = G.shape
    down = torch.arange(L - 1, -1, -1, dtype=G.dtype).unsqueeze(1).expand(L, T)
    back = (steps[-1] - torch.tensor(list(steps), dtype=G.dtype)).expand(L, T)
    seen = (G > 0) & torch.isfinite(G)
    if not seen.any():
        return math.nan, math.nan
    terms = torch.stack([torch.ones_like(G)[seen], down[seen], back[seen]], dim=1)
    # gelsd gives the smallest slopes where the points do not tell them: one layer, one step.
    _, b, c = torch.linalg.lstsq(terms, G[seen].log().unsqueeze(1), driver="gelsd").solution.squeeze(1).tolist()
    return math.exp(b), math.exp(c)
