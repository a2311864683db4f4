"""A flat start: weights rescaled, layer by layer, until the lattice of gradients is as high at the bottom as at the top.

With G_{l,t} the lattice (`lattice.py`) under a random loss, and a_l a factor on the matrices with which layer l reads its
input,

    g_l = mean over t of log G_{l,t}                          the height of a layer
    log a_l <- log a_l + (g_l - g_{l-1}) / 2,   l = 2..L      what comes down through layer l grows with a_l

again and again, until the heights differ by less than a factor `within`; the factors of the round that came nearest are kept.
The height is a mean of logarithms, and not the gradient of the layer as a whole, which its largest points make up: in a deep
LSTM these stand at the early steps, and hide that the late ones have vanished.

Recurrent matrices and biases stay as they are: what they start with is chosen for time, not for depth. STAR's authors
(Turkoglu et al. 2019) name such a start as future work.
"""

import math
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.diagnose.flatness import Flatness, flatness
from unfading.diagnose.lattice import lattice
from unfading.errors import check_count, check_positive
from unfading.model import Model
from unfading.tasks.base import Batch

# One round changes a factor by two at most: far from flat, a step is a guess.
MOST = math.log(2.0)


class FlatStart(NamedTuple):
    """What a flat start did."""

    before: Flatness
    after: Flatness
    spread: float  # the highest layer against the lowest, afterwards
    factors: tuple[float, ...]  # a_1..a_L; a_1 is 1
    rounds: int


def flat_start(model: Model, data: Tensor | Batch, *, within: float = 1.1, rounds: int = 40, seed: int = 0) -> FlatStart:
    """Rescale the input matrices of a model's layers, in place, until its lattice is flat from layer to layer.

    Args:
        model: as it starts; its stack runs forward in time.
        data: some rows of what it will read: x [T, B, I], or a batch. Sixteen rows tell enough; the steps need not be all.
        within: the factor by which the layers may differ at the end.
        rounds: at most so many, each as dear as a measured lattice.
        seed: of the loss, a random weight for every number of the prediction.
    """
    check_positive("within - 1", within - 1)
    check_count("rounds", rounds)
    batch = data if isinstance(data, Batch) else Batch(data, data)
    with torch.no_grad():
        shape = model(batch.x, lengths=batch.lengths)[0].shape
    v = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(batch.x.device)
    matrices = [_reading(cast(Cell, cell)) for cell in model.rnn.cells]

    def measure() -> Tensor:
        return lattice(model, batch, lambda prediction, _: (prediction * v.to(prediction.dtype)).sum())

    G = measure()
    first = last = G
    factors = [0.0] * len(matrices)  # their logarithms
    best, least, done = list(factors), _spread(G), 0
    while least > math.log(within) and done < rounds:
        heights = _heights(G)
        if not all(map(math.isfinite, heights)):
            break
        steps = [0.0, *(_clipped((above - below) / 2) for below, above in pairwise(heights))]
        _scale(matrices, steps)
        factors = [factor + step for factor, step in zip(factors, steps, strict=True)]
        G = measure()
        done += 1
        if _spread(G) < least:
            best, least, last = list(factors), _spread(G), G
    _scale(matrices, [there - here for there, here in zip(best, factors, strict=True)])
    return FlatStart(flatness(first), flatness(last), math.exp(least), tuple(map(math.exp, best)), done)


def _reading(cell: Cell) -> list[nn.Parameter]:
    """The matrices with which a cell reads its input: those that `project` depends on."""
    own = [p for p in cell.parameters() if p.requires_grad and p.dim() == 2 and min(p.shape) > 1]
    like = cell.initial_state(1)[0]
    with torch.enable_grad():
        inputs = cell.project(torch.ones(1, 1, cell.input_size, dtype=like.dtype, device=like.device))
        fields = [field.sum() for field in _pytree.tree_leaves(inputs) if field.requires_grad]
        found = torch.autograd.grad(torch.stack(fields).sum(), own, allow_unused=True) if fields and own else []
    return [p for p, gradient in zip(own, found, strict=True) if gradient is not None]


def _heights(G: Tensor) -> list[float]:
    """Points that no gradient reaches say nothing of the rest."""
    return [float(row[row > 0].log().mean()) for row in G]


def _spread(G: Tensor) -> float:
    heights = _heights(G)
    return max(heights) - min(heights) if all(map(math.isfinite, heights)) else math.inf


def _clipped(step: float) -> float:
    return max(-MOST, min(MOST, step))


@torch.no_grad()
def _scale(matrices: list[list[nn.Parameter]], logarithms: list[float]) -> None:
    for layer, logarithm in zip(matrices, logarithms, strict=True):
        for matrix in layer:
            matrix.mul_(math.exp(logarithm))
