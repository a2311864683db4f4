"""A flat start: weights and biases turned until the lattice of gradients is as flat, in depth and in time, as they can make it.

With G_{l,t} the lattice (`lattice.py`) under a random loss, q the adjustments of the cell (`adjustments.py`), each the same
in all layers, and a_l a further factor, for layer l = 2..L alone, on the matrices with which it reads the layer below:

    r_{l,t} = log G_{l,t} - mean of log G                              zero where the lattice is flat
    J(q, a) = mean of r^2 + sum rho q^2 + sum rho (log a)^2            the second part keeps the start near the cell's own

J is brought down by damped Gauss-Newton steps (Levenberg, Marquardt): with D the derivatives of r by (q, log a),

    (q, log a) <- (q, log a) - (D D^T / n + diag(rho) + lambda I)^-1 (D r / n + rho (q, log a))

D by q is measured, all adjustments at a time (`torch.func.vmap`). D by log a_l is not: what layer l sends down grows with a_l,
so it is taken to be 1 in the layers below l and 0 elsewhere. A step that does not bring J down is not taken: lambda grows.
The bottom layer's reading matrices stay, since no point of the lattice lies behind them.

Why time is in it, and not depth alone: a layer of an LSTM whose forget gate stands at f passes on what it reads f / (1 - f)
steps late on average. Twenty-four layers with forget bias 1 are 65 steps late, and a sequence of 28 has ended by then. The
gradient of every layer may be as large as one likes; all of it is at the wrong steps. The lattice shows it as a slope in time.

STAR's authors (Turkoglu et al. 2019) name a start that follows the measured gradients as future work.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.func import vmap

from unfading.cells.base import Cell
from unfading.diagnostics.flat_start.adjustments import adjustments, input_matrices, turned
from unfading.diagnostics.measure.flatness import Flatness, flatness
from unfading.diagnostics.measure.lattice import measured
from unfading.diagnostics.measure.lattice_step import Parameters
from unfading.errors import check_count, check_positive
from unfading.layers.model import Model
from unfading.tasks.base import Batch

# A matrix is held to its start more than a bias: a large one makes gates switch and states saturate, which a lattice of few
# rows does not show.
RHO_MATRIX, RHO_BIAS = 1.0, 0.01
TURN = 0.1  # by which an adjustment is turned to see what it does
MOST = 1.0  # by which one round turns an adjustment
LEAST = 0.01  # lambda: with less, a round goes where r is no longer linear
TRIES = 4  # with lambda four times as large each
ENOUGH = 0.01  # a round that brings J down by less than this share is the last


class FlatStart(NamedTuple):
    """What a flat start did."""

    before: Flatness
    after: Flatness
    spread: tuple[float, float]  # exp of the root of the mean of r^2, before and after: the typical point against the mean
    turns: dict[str, float]  # q of every adjustment: a matrix's factor is exp(q), a bias is shifted by q
    factors: tuple[float, ...]  # a_1..a_L; a_1 is 1
    rounds: int


def flat_start(model: Model, data: Tensor | Batch, *, within: float = 1.5, rounds: int = 12, seed: int = 0) -> FlatStart:
    """Turn the weights and biases of a model's layers, in place, until its lattice is flat, or as flat as they make it.

    Args:
        model: as it starts; its stack runs forward in time.
        data: some rows of what it will read: x [T, B, I], or a batch. Eight rows tell enough; the steps should be as many as in
            training, since what is flat over few steps is not over many.
        within: the typical factor between a point of the lattice and the mean that is flat enough.
        rounds: at most so many, each as dear as a few measured lattices.
        seed: of the loss, a random weight for every number of the prediction.
    """
    check_positive("within - 1", within - 1)
    check_count("rounds", rounds)
    batch = data if isinstance(data, Batch) else Batch(data, data)
    search = _Search(model, batch, seed)
    z, G = search.start, search.lattice(search.start)
    first, seen = G, (G > 0) & torch.isfinite(G)
    damping, done = 0.1, 0
    while done < rounds and seen.any() and _spread(G, seen) > math.log(within):
        done += 1
        z_new, G_new, damping = search.step(z, G, seen, damping)
        before, after = search.cost(z, G, seen), search.cost(z_new, G_new, seen)
        z, G = z_new, G_new
        if after > (1 - ENOUGH) * before:
            break
    search.write(z)
    q, a = search.parts(z)
    turns = {str(adjustment): float(value) for adjustment, value in zip(search.adjustments, q, strict=True)}
    spread = (math.exp(_spread(first, seen)), math.exp(_spread(G, seen)))
    return FlatStart(flatness(first), flatness(G), spread, turns, (1.0, *a.exp().tolist()), done)


class _Search:
    """J of one model: z holds q, then log a."""

    def __init__(self, model: Model, batch: Batch, seed: int):
        with torch.no_grad():
            prediction = model(batch.x, lengths=batch.lengths)[0]
        v = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(seed)).to(prediction)
        self.measure, thetas = measured(model, batch, lambda prediction, _: (prediction * v).sum())
        self.cells = [cast(Cell, cell) for cell in model.rnn.cells]
        self.adjustments = adjustments(self.cells[-1])
        self.input_matrices = input_matrices(self.cells[-1])
        # A point calls its cell "cell"; the adjustments go by the cell's own names.
        self.thetas = [{name.removeprefix("cell."): value for name, value in theta.items()} for theta in thetas]
        L = len(self.cells)
        self.start = torch.zeros(len(self.adjustments) + L - 1, dtype=torch.float64, device=prediction.device)
        rho = [RHO_MATRIX if adjustment.rows is None else RHO_BIAS for adjustment in self.adjustments] + [RHO_MATRIX] * (L - 1)
        self.rho = self.start.new_tensor(rho)

    def parts(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return z[: len(self.adjustments)], z[len(self.adjustments) :]

    def turned(self, z: Tensor) -> list[Parameters]:
        """The parameters of every layer at z."""
        q, a = self.parts(z)
        own = [adjustment for adjustment in self.adjustments if adjustment.name in self.input_matrices]
        new: list[Parameters] = []
        for l, theta in enumerate(self.thetas):
            turns = [
                (adjustment, value)
                for adjustment, value in zip(self.adjustments, q.unbind(), strict=True)
                if l or adjustment not in own
            ]
            turns += [(adjustment, a[l - 1]) for adjustment in own if l]
            new.append(turned(theta, turns))
        return new

    def lattice(self, z: Tensor) -> Tensor:
        """G at z."""
        return self.measure([{f"cell.{name}": value for name, value in theta.items()} for theta in self.turned(z)])

    def cost(self, z: Tensor, G: Tensor, seen: Tensor) -> float:
        """J; a lattice that has lost a point, or let it explode, is no better than any other."""
        J = float(_levels(G, seen).square().mean() + (self.rho * z.square()).sum())
        return J if math.isfinite(J) else math.inf

    def step(self, z: Tensor, G: Tensor, seen: Tensor, damping: float) -> tuple[Tensor, Tensor, float]:
        """A round: z and G after it, as they were where no step brings J down; and the next lambda."""
        K, r = len(self.adjustments), _levels(G, seen)
        tried = z + TURN * torch.eye(K, len(z), dtype=z.dtype, device=z.device)
        D = (_levels(vmap(self.lattice)(tried), seen) - r) / TURN
        D = torch.cat([D, self._below(G, seen)]).nan_to_num(0.0, 0.0, 0.0)
        slope = D @ r / len(r) + self.rho * z
        for _ in range(TRIES):
            turn = -torch.linalg.solve(D @ D.T / len(r) + torch.diag(self.rho + damping), slope)
            new = z + turn * min(1.0, MOST / float(turn.abs().max()))
            G_new = self.lattice(new)
            if self.cost(new, G_new, seen) < self.cost(z, G, seen):
                return new, G_new, max(LEAST, damping / 4)
            damping *= 4
        return z, G, damping

    def _below(self, G: Tensor, seen: Tensor) -> Tensor:
        """What a_2..a_L are taken to do to r: [L - 1, points]."""
        L, T = G.shape
        below = torch.ones(L, L, dtype=G.dtype, device=G.device).tril(-1)[1:].unsqueeze(2).expand(L - 1, L, T)[:, seen]
        return below - below.mean(dim=1, keepdim=True)

    @torch.no_grad()
    def write(self, z: Tensor) -> None:
        """Into the model's own parameters."""
        for cell, theta in zip(self.cells, self.turned(z), strict=True):
            for name, value in cell.named_parameters():
                value.copy_(theta[name])


def _levels(G: Tensor, seen: Tensor) -> Tensor:
    """r at the points that a gradient reached at first; those that none reaches, of rows that had ended, say nothing."""
    logarithms = G[..., seen].log()
    return logarithms - logarithms.mean(dim=-1, keepdim=True)


def _spread(G: Tensor, seen: Tensor) -> float:
    return float(_levels(G, seen).square().mean().sqrt()) if seen.any() else math.nan
