"""The settings and measurements behind the incremental RNN's figures.

The form of the theorem is eq. 5 with a full Gaussian U scaled to norm 0.6 alpha; the form of the experiments is eq. 9 with
P = U = I + V H, ReLU, and eta = 0.01 at the start.
"""

import math
from typing import Any

import torch
from torch import Generator, Tensor

from unfading.cells.base import Activation
from unfading.cells.elman import ElmanCell
from unfading.cells.fast import FastRNNCell
from unfading.cells.incremental import IncrementalRNNCell
from unfading.diagnostics.equilibrium.fixed_point import Convergence, convergence, equilibria, pulled, scipy_root
from unfading.diagnostics.equilibrium.inner_path import walk
from unfading.training.run import Run

Row = dict[str, Any]

HAR2 = {
    "RNN (tanh, orthogonal start)": {"cell": "Elman", "rate": 1e-3},
    "incremental RNN, K = 5, rank 16": {
        "cell": "IncrementalRNN", "cell_options": {"rank": 16, "steps": 128}, "rate": 1e-2,  # both rates as published
    },
    "stable incremental RNN (ours), K = 5, rank 8": {
        "cell": "StableIncrementalRNN", "cell_options": {"rank": 8, "steps": 128, "inner_steps": 5}, "rate": 3e-3,
        "rates": {"eta": 0.1},
    },
}  # fmt: skip


def har2(setting: str, steps: int) -> Run:
    """80 units, as in the paper; Adam, batch 128, clipped at norm 1, seed 0."""
    return Run(task="har2", hidden=80, batch=128, steps=steps, seed=0, **HAR2[setting])  # type: ignore[arg-type]


def theorem_cell(
    size: int, *, eta: float, activation: Activation = "tanh", inputs: int = 1, seed: int = 0
) -> IncrementalRNNCell:
    """Eq. 5 with K = 5, alpha = 1, U, W, b ~ N(0, 1), and U scaled to norm 0.6, in float64."""
    cell = IncrementalRNNCell(
        inputs, size, rank=size, projection_rank=0, inner_steps=5, eta=eta, activation=activation
    ).double()
    generator = Generator().manual_seed(seed)
    U, W, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((size, size), (size, inputs), (size,))
    )
    with torch.no_grad():
        cell.U.factors[0].copy_(0.6 / torch.linalg.matrix_norm(U, 2) * U - torch.eye(size))
        cell.from_input.weight.copy_(W)
        cell.from_input.bias.copy_(b)
    return cell


def grid(x: Tensor) -> Tensor:
    """Values from the least of x to the largest, dense where tanh bends."""
    low, high = float(x.min()), float(x.max())
    wide, near = (torch.linspace(max(low, -end), min(high, end), 201, dtype=torch.float64) for end in (math.inf, 5.0))
    return torch.cat([wide, near]).sort().values


def same_weights(cell: IncrementalRNNCell) -> tuple[ElmanCell, FastRNNCell]:
    """A plain RNN and a FastRNN with the matrices of an incremental RNN of eq. 5."""
    plain, residual = ElmanCell(1, 2).double(), FastRNNCell(1, 2).double()
    with torch.no_grad():
        U = cell.weights().M
        assert isinstance(U, Tensor)
        plain.W_h.copy_(U)
        residual.U.copy_(U)
        for other in (plain, residual):
            other.from_input.load_state_dict(cell.from_input.state_dict())
    return plain, residual


def approached(activation: Activation, eta: float, seed: int) -> tuple[Convergence, float]:
    """From g_0 = 0 with a random h and x, to the equilibrium; and how far scipy's root is from ours."""
    generator = Generator().manual_seed(1000 + seed)
    h, x = (torch.randn(1, size, generator=generator, dtype=torch.float64) for size in (32, 3))
    cell = theorem_cell(32, eta=eta, activation=activation, inputs=3, seed=seed)
    path = walk(cell, x[None])
    near = equilibria(path, h, path.u[0])
    gap = float((scipy_root(path, h[0], path.u[0, 0]) - near.s[0]).abs().max())
    return convergence(path, h[0], path.u[0, 0], near.s[0], eta), gap


@torch.no_grad()
def pulls(form: str, eta: float = 0.1, steps: int = 300) -> list[Row]:
    """||F|| along the inner steps, relative to the first, in the median over 16 inputs."""
    generator = Generator().manual_seed(0)
    if form.startswith("theorem"):
        cell = theorem_cell(128, eta=eta, activation="relu", inputs=3)
    else:
        cell = IncrementalRNNCell(3, 128, rank=16, eta=eta).double()
        cell.reset_parameters(generator)
    u = torch.randn(16, 128, generator=generator, dtype=torch.float64)
    sizes = pulled(cell, torch.zeros_like(u), u, eta, steps, cell.weights())
    return [{"form": form, "k": k, "pull": float((size / sizes[0]).median())} for k, size in enumerate(sizes)]
