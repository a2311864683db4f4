"""Phase portraits: trajectories of a two-dimensional state under a slowly changing input.

    x_m = x_{m-1} + sigma z_m,  z ~ N(0, 1)                     the input, a random walk
    h_m                                                        the state, two numbers
    alpha s*(x) = phi(P U s*(x) + P (W x + b))                  for an incremental cell: the equilibrium curve over x

Kag et al. 2020, Fig. 2. The curve holds for sums of states: an incremental cell in equilibrium has h_m + h_{m-1} = s*(x_m)
(h_m - h_{m-1} in the -h form). `sums` computes them.
"""

from typing import Any

import torch
from torch import Generator, Tensor

from unfading.cells.base import Cell
from unfading.diagnostics.equilibrium.fixed_point import equilibria
from unfading.diagnostics.equilibrium.inner_path import check_incremental, inner_path
from unfading.errors import check_count, check_positive
from unfading.reference import scan


def random_walk(steps: int, deviation: float, *, seed: int) -> Tensor:
    """x [T, 1, 1], float64: the cumulative sum of `steps` increments N(0, deviation^2)."""
    check_count("steps", steps)
    check_positive("deviation", deviation)
    increments = torch.randn(steps, 1, 1, generator=Generator().manual_seed(seed), dtype=torch.float64)
    return deviation * increments.cumsum(0)


@torch.no_grad()
def states(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    """The states h_0 .. h_T of a cell of two units, in float64, from h [2] on x [T, 1, I], [T + 1, 2]."""
    if cell.output_size != 2:
        raise ValueError(
            f"a phase portrait needs a state of two numbers; got {cell.output_size}. Build the cell with two units."
        )
    initial = cell.initial_state(1)
    if len(initial) > 1:
        raise ValueError(
            f"a phase portrait needs a state of one part; {type(cell).__name__} has {', '.join(initial._fields)}. "
            f"Use a cell whose state is h alone."
        )
    trajectory, _ = scan(cell, cell.project(x), type(initial)(h[None]), cell.weights())
    return torch.cat([h[None], trajectory[0][:, 0]])


def sums(cell: Cell, h: Tensor) -> Tensor:
    """The sums that converge to the equilibrium: h_m + h_{m-1}, or h_m - h_{m-1} in the -h form, [T, 2]."""
    return h[1:] - h[:-1] if check_incremental(cell).minus else h[1:] + h[:-1]


@torch.no_grad()
def equilibrium_curve(cell: Cell, x: Tensor) -> Tensor:
    """s*(x) for each x [N] of one feature, [N, 2]; nan where there is no equilibrium."""
    path = inner_path(cell, x.reshape(1, len(x), 1))
    result = equilibria(path, path.s[0, -1], path.u[0])
    return torch.where(result.converged.unsqueeze(-1), result.s, torch.nan)


def portrait(h: Tensor) -> dict[str, Any]:
    """Summary of a trajectory [N, 2]: its length, the diagonal of its bounding box, its median turn per step in degrees."""
    moves = h[1:] - h[:-1]
    lengths = moves.norm(dim=1)
    turns = torch.atan2(_cross(moves[:-1], moves[1:]), (moves[:-1] * moves[1:]).sum(1)).abs().rad2deg()
    return {
        "length": float(lengths.sum()),
        "extent": float((h.amax(0) - h.amin(0)).norm()),
        "median_turn": float(turns[lengths[:-1] * lengths[1:] > 0].median()),
    }


def distance_to(curve: Tensor, points: Tensor) -> Tensor:
    """The distance of each point [N, 2] from the polygon through `curve` [M, 2], [N]."""
    a, b = curve[:-1], curve[1:]
    along = b - a
    share = ((points[:, None] - a) * along).sum(-1) / along.square().sum(-1).clamp_min(1e-300)
    nearest = a + share.clamp(0, 1).unsqueeze(-1) * along
    return (points[:, None] - nearest).norm(dim=-1).nan_to_num(torch.inf).amin(1)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    return a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]
