"""A flat start: adjust weights and biases until the lattice of gradients is as flat as possible, in depth and in time.

With G_{l,t} the lattice (`lattice.py`) under a random loss, q the adjustments of the cell (`adjustments.py`), the same in all
layers, and a_l a further factor, for each layer l = 2..L, on its input matrices:

    r_{l,t} = log G_{l,t} - mean of log G                              zero if the lattice is flat
    J(q, a) = mean of r^2 + sum rho q^2 + sum rho (log a)^2            the penalties keep the start close to the cell's own

Damped Gauss-Newton steps (Levenberg, Marquardt) reduce J. With D the derivatives of r by (q, log a):

    (q, log a) <- (q, log a) - (D D^T / n + diag(rho) + lambda I)^-1 (D r / n + rho (q, log a))

D by q is measured by finite differences, for all adjustments at once (`torch.func.vmap`). D by log a_l is assumed: the gradient
that layer l passes down is proportional to a_l, so it is 1 in the layers below l and 0 elsewhere. A step that does not reduce J
is rejected, and lambda grows. The input matrices of the bottom layer do not change, because no point of the lattice lies below
them.

Why the lattice must be flat in time and not only in depth: a layer of an LSTM with forget gate f passes its input on with an
average delay of f / (1 - f) steps. Twenty-four layers with forget bias 1 have a delay of 65 steps, and a sequence of 28 steps
ends before. The gradient of every layer can then be large, and yet all of it belongs to the wrong steps. The lattice shows this
as a slope in time.

STAR's authors (Turkoglu et al. 2019) name an initialisation that follows the measured gradients as future work.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.func import vmap

from unfading.cells.base import Cell
from unfading.diagnostics.flat_start.adjustments import adjusted, cell_adjustments, input_matrices
from unfading.diagnostics.measure.lattice import Flatness, flatness, lattice_function
from unfading.diagnostics.measure.lattice_step import Parameters
from unfading.errors import check_count, check_number, check_positive, check_seed, check_type
from unfading.layers.model import Model
from unfading.layers.recurrent import check_reads_vectors
from unfading.tasks.base import Batch

# Matrices have a larger penalty than biases: large matrices saturate gates and states, and few rows may not show it.
RHO_MATRIX, RHO_BIAS = 1.0, 0.01
PERTURBATION = 0.1  # change of q in the finite differences
LARGEST_CHANGE = 1.0  # of any q or log a in one round
SMALLEST_DAMPING = 0.01  # lambda; below it, a round leaves the region in which r is linear
DAMPING_TRIES = 4  # per round, each with lambda four times as large
SMALLEST_GAIN = 0.01  # a round that reduces J by less than this share is the last


class FlatStart(NamedTuple):
    """The result of `flat_start`."""

    before: Flatness
    after: Flatness
    spread: tuple[float, float]  # before and after: typical factor between a point and the mean, exp(sqrt(mean of r^2))
    turns: dict[str, float]  # q of every adjustment: a matrix is multiplied by exp(q), a bias is shifted by q
    factors: tuple[float, ...]  # a_1..a_L; a_1 is 1
    rounds: int


def flat_start(model: Model, data: Tensor | Batch, *, within: float = 1.5, rounds: int = 12, seed: int = 0) -> FlatStart:
    """Adjust the weights and biases of a model's layers, in place, until its lattice of gradients is flat.

    If the adjustments cannot make it flat, the flattest lattice that was reached is used.

    Args:
        model: a newly initialised model whose stack runs forward in time.
        data: some rows of its future input: x [T, B, I], or a batch. Eight rows are enough. Use as many steps as in training,
            because a lattice that is flat over few steps need not be flat over many.
        within: stop when the typical factor between a point of the lattice and the mean is below this.
        rounds: the largest number of rounds; each costs as much as measuring a few lattices.
        seed: seed of the loss, a random linear function of the prediction.
    """
    check_type("model", model, Model)
    check_reads_vectors(model, "flat_start")
    check_number("within", within)
    check_positive("within - 1", within - 1)
    check_count("rounds", rounds)
    check_seed("seed", seed)
    if not isinstance(data, Tensor | Batch):
        raise TypeError(f"data must be a Tensor [T, B, I] or a Batch; got {type(data).__name__}.")
    batch = data if isinstance(data, Batch) else Batch(data, data)
    search = _Search(model, batch, seed)
    z, G = search.start, search.lattice(search.start)
    initial_G, mask = G, (G > 0) & torch.isfinite(G)
    damping, done = 0.1, 0
    while done < rounds and mask.any() and _spread(G, mask) > math.log(within):
        done += 1
        z_new, G_new, damping = search.step(z, G, mask, damping)
        before, after = search.cost(z, G, mask), search.cost(z_new, G_new, mask)
        z, G = z_new, G_new
        if after > (1 - SMALLEST_GAIN) * before:
            break
    search.write(z)
    q, log_a = search.split(z)
    turns = {str(adjustment): float(value) for adjustment, value in zip(search.adjustments, q, strict=True)}
    spread = (math.exp(_spread(initial_G, mask)), math.exp(_spread(G, mask)))
    return FlatStart(flatness(initial_G), flatness(G), spread, turns, (1.0, *log_a.exp().tolist()), done)


class _Search:
    """J of one model as a function of z, which holds q and then log a.

    The argument `mask` [L, T] marks the points of the lattice that count: those with a gradient at the start.
    """

    def __init__(self, model: Model, batch: Batch, seed: int):
        with torch.no_grad():
            prediction = model(batch.x, lengths=batch.lengths)[0]
        v = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(seed)).to(prediction)
        self.measure, thetas = lattice_function(model, batch, lambda prediction, _: (prediction * v).sum())
        self.cells = [cast(Cell, cell) for cell in model.rnn.cells]
        self.adjustments = cell_adjustments(self.cells[-1])
        self.input_matrices = input_matrices(self.cells[-1])
        # The lattice prefixes parameter names with "cell."; adjustments use the cell's own names.
        self.thetas = [{name.removeprefix("cell."): value for name, value in theta.items()} for theta in thetas]
        L = len(self.cells)
        self.start = torch.zeros(len(self.adjustments) + L - 1, dtype=torch.float64, device=prediction.device)
        rho = [RHO_MATRIX if adjustment.rows is None else RHO_BIAS for adjustment in self.adjustments]
        self.rho = self.start.new_tensor(rho + [RHO_MATRIX] * (L - 1))

    def split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """q and log a."""
        return z[: len(self.adjustments)], z[len(self.adjustments) :]

    def parameters(self, z: Tensor) -> list[Parameters]:
        """The parameters of every layer at z."""
        q, log_a = self.split(z)
        of_input = [adjustment for adjustment in self.adjustments if adjustment.name in self.input_matrices]
        thetas: list[Parameters] = []
        for l, theta in enumerate(self.thetas):
            changes = [
                (adjustment, value)
                for adjustment, value in zip(self.adjustments, q.unbind(), strict=True)
                if l or adjustment not in of_input
            ]
            changes += [(adjustment, log_a[l - 1]) for adjustment in of_input if l]
            thetas.append(adjusted(theta, changes))
        return thetas

    def lattice(self, z: Tensor) -> Tensor:
        """G at z."""
        return self.measure([{f"cell.{name}": value for name, value in theta.items()} for theta in self.parameters(z)])

    def cost(self, z: Tensor, G: Tensor, mask: Tensor) -> float:
        """J; infinite if a point of the lattice has become zero or not finite."""
        J = float(_residuals(G, mask).square().mean() + (self.rho * z.square()).sum())
        return J if math.isfinite(J) else math.inf

    def step(self, z: Tensor, G: Tensor, mask: Tensor, damping: float) -> tuple[Tensor, Tensor, float]:
        """One round: the new z and G, unchanged if no step reduces J, and the next lambda."""
        K, r = len(self.adjustments), _residuals(G, mask)
        perturbed = z + PERTURBATION * torch.eye(K, len(z), dtype=z.dtype, device=z.device)
        D = (_residuals(vmap(self.lattice)(perturbed), mask) - r) / PERTURBATION
        D = torch.cat([D, self._derivatives_by_log_a(G, mask)]).nan_to_num(0.0, 0.0, 0.0)
        gradient = D @ r / len(r) + self.rho * z
        for _ in range(DAMPING_TRIES):
            change = -torch.linalg.solve(D @ D.T / len(r) + torch.diag(self.rho + damping), gradient)
            z_new = z + change * min(1.0, LARGEST_CHANGE / float(change.abs().max()))
            G_new = self.lattice(z_new)
            if self.cost(z_new, G_new, mask) < self.cost(z, G, mask):
                return z_new, G_new, max(SMALLEST_DAMPING, damping / 4)
            damping *= 4
        return z, G, damping

    def _derivatives_by_log_a(self, G: Tensor, mask: Tensor) -> Tensor:
        """The assumed derivatives of r by log a_2..log a_L, [L - 1, points]."""
        L, T = G.shape
        below = torch.ones(L, L, dtype=G.dtype, device=G.device).tril(-1)[1:].unsqueeze(2).expand(L - 1, L, T)[:, mask]
        return below - below.mean(dim=1, keepdim=True)

    @torch.no_grad()
    def write(self, z: Tensor) -> None:
        """Copy the parameters at z into the model."""
        for cell, theta in zip(self.cells, self.parameters(z), strict=True):
            for name, value in cell.named_parameters():
                value.copy_(theta[name])


def _residuals(G: Tensor, mask: Tensor) -> Tensor:
    """r at the points of the mask; the other points, such as steps after the end of all rows, have no gradient."""
    logarithms = G[..., mask].log()
    return logarithms - logarithms.mean(dim=-1, keepdim=True)


def _spread(G: Tensor, mask: Tensor) -> float:
    """The root mean square of r; nan if no point has a gradient."""
    return float(_residuals(G, mask).square().mean().sqrt()) if mask.any() else math.nan
