"""The path of an incremental cell: every point that its inner steps visit on an input, and the linear map at each.

With h_{m-1} the state before time step m (-h_{m-1} in the -h form) and F the cell's `pull`:

    s_k = g_k + h_{m-1},      g_k = g_{k-1} + eta_{m,k} F(s_{k-1}),      h_m = g_K
    A_k = I + eta_{m,k} dF/ds(s_{k-1}),        dF/ds = phi' P U - alpha I

Everything is computed in float64 on a copy of the cell, whatever the cell is kept in. Letters: T time, B batch, D state size,
K inner steps, N points.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from unfading.cells.base import Cell
from unfading.cells.incremental import InnerStepsCell
from unfading.cells.wrap import innermost
from unfading.diagnostics.measure.observe import Chain, taken

# Points whose Jacobians are held at a time.
CHUNK = 256


class Path(NamedTuple):
    """What the inner steps visit."""

    cell: InnerStepsCell  # the copy, in float64
    weights: Any
    s: Tensor  # [T, K + 1, B, D] points, from s_0 to s_K
    h: Tensor  # [T + 1, B, D] the state before each time step, and after the last
    u: Tensor  # [T, B, D] the input's part of the argument of phi
    eta: Tensor  # [T, K]


class Points(NamedTuple):
    """Points taken out of a path."""

    s: Tensor  # [N, D]
    u: Tensor  # [N, D]
    eta: Tensor  # [N] the step size with which the cell leaves the point


def incremental(cell: Cell) -> InnerStepsCell:
    """The cell, if it takes inner steps; else a TypeError."""
    if not isinstance(cell, InnerStepsCell):
        raise TypeError(
            f"an equilibrium is looked for in cells that take inner steps towards one (IncrementalRNN, SiRNN, "
            f"StableIncrementalRNN, DeepTransition); got {type(cell).__name__}."
        )
    return cell


@torch.no_grad()
def walk(cell: Cell, x: Tensor, state: Any = None, *, start: int = 0) -> Path:
    """Run a cell over x [T, B, I] and keep every inner step; `start` is the absolute index of x's first step."""
    cell = deepcopy(incremental(cell)).double().eval()
    inputs, weights = cell.project(x.double(), start), cell.weights()
    h = (cell.initial_state(x.shape[1]) if state is None else state).h.double()
    states, visited = [h], []
    for u, etas in zip(inputs.u, inputs.eta[:, 0], strict=True):
        visited.append(_visited(cell, h, u, etas, weights))
        h = visited[-1][-1] - (-h if cell.minus else h)
        states.append(h)
    return Path(cell, weights, torch.stack(visited), torch.stack(states), inputs.u, inputs.eta[:, 0])


@torch.no_grad()
def revisit(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Path:
    """The inner steps of some time steps that were observed, counted from 0; h has the state before each, and the last."""
    cell = deepcopy(incremental(innermost(chain.cell))).double().eval()
    weights = cell.weights()
    inputs = [cell.project(taken(chain.x[t], rows).double().unsqueeze(0), chain.index[t]) for t in times]
    u, eta = (torch.cat([getattr(each, name) for each in inputs]) for name in ("u", "eta"))
    h = torch.stack([taken(chain.states[t].h, rows).double() for t in times])
    s = torch.stack([_visited(cell, *each, weights) for each in zip(h, u, eta[:, 0], strict=True)])
    last = s[-1, -1] - (-h[-1] if cell.minus else h[-1])
    return Path(cell, weights, s, torch.cat([h, last.unsqueeze(0)]), u, eta[:, 0])


def _visited(cell: InnerStepsCell, h: Tensor, u: Tensor, etas: Tensor, weights: Any) -> Tensor:
    """s_0 .. s_K of one time step from h [B, D], [K + 1, B, D]."""
    before = -h if cell.minus else h
    points = [before if cell.from_zero else h + before]
    for eta in etas:
        points.append(points[-1] + eta * cell.pull(points[-1], u, weights))
    return torch.stack(points)


def left(path: Path) -> Points:
    """Every point that an inner step leaves, in the order of time, inner step, batch row: N = T K B."""
    T, K, B, D = path.s[:, :-1].shape
    u = path.u.unsqueeze(1).expand(T, K, B, D)
    eta = path.eta.unsqueeze(2).expand(T, K, B)
    return Points(path.s[:, :-1].reshape(-1, D), u.reshape(-1, D), eta.reshape(-1))


def reached(path: Path) -> Points:
    """Every point at which a time step ends, in the order of time and batch row: N = T B."""
    T, B, D = path.u.shape
    return Points(path.s[:, -1].reshape(-1, D), path.u.reshape(-1, D), path.eta[:, -1:].expand(T, B).reshape(-1))


def slopes(path: Path, s: Tensor, u: Tensor) -> Tensor:
    """dF/ds at s [N, D], [N, D, D]: by autograd, so that it holds for any inner network."""
    jacobian: Tensor = vmap(jacrev(path.cell.pull), in_dims=(0, 0, None))(s, u, path.weights)
    return jacobian.detach()


def in_chunks(points: Points) -> Iterator[Points]:
    """The points in pieces whose Jacobians fit into memory."""
    yield from (Points(*piece) for piece in zip(*(part.split(CHUNK) for part in points), strict=True))


@torch.no_grad()
def matrix_norm(path: Path) -> float | None:
    """||P U||, the largest singular value of the recurrent matrix; None for an inner network, which is no matrix."""
    M = getattr(path.weights, "M", None)
    if M is None:
        return None
    return float(torch.linalg.matrix_norm(M if isinstance(M, Tensor) else M.dense(), 2))
