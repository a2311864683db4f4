"""The path of an incremental cell: every point that its inner steps visit on an input, and the linear map at each point.

With h_{m-1} the state before time step m (-h_{m-1} in the -h form) and F the cell's `pull`:

    s_k = g_k + h_{m-1},      g_k = g_{k-1} + eta_{m,k} F(s_{k-1}),      h_m = g_K
    A_k = I + eta_{m,k} dF/ds(s_{k-1}),        dF/ds = phi' P U - alpha I

Everything is computed in float64 on a copy of the cell, whatever the cell's own precision. Letters: T time, B batch, D state
size, K inner steps, N points.
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
from unfading.diagnostics.measure.observe import Chain, select_rows
from unfading.diagnostics.measure.single_steps import check_single_steps

# Points whose Jacobians are in memory at a time.
CHUNK = 256


class InnerPath(NamedTuple):
    """The points that the inner steps visit."""

    cell: InnerStepsCell  # the copy, in float64
    weights: Any
    s: Tensor  # [T, K + 1, B, D] points, from s_0 to s_K
    h: Tensor  # [T + 1, B, D] the state before each time step, and after the last
    u: Tensor  # [T, B, D] the input's part of the argument of phi
    eta: Tensor  # [T, K]


class InnerPoints(NamedTuple):
    """Points selected from a path."""

    s: Tensor  # [N, D]
    u: Tensor  # [N, D]
    eta: Tensor  # [N] the size of the inner step that starts at the point


def check_incremental(cell: Cell) -> InnerStepsCell:
    """The cell itself; a TypeError if it does not take inner steps."""
    if not isinstance(cell, InnerStepsCell):
        raise TypeError(
            f"an equilibrium exists only for cells that take inner steps towards one (IncrementalRNN, SiRNN, "
            f"StableIncrementalRNN, DeepTransition); got {type(cell).__name__}."
        )
    return cell


@torch.no_grad()
def inner_path(cell: Cell, x: Tensor, state: Any = None, *, start: int = 0) -> InnerPath:
    """Run a cell over x [T, B, I] and record every inner step; `start` is the absolute index of x's first step."""
    cell = deepcopy(check_incremental(cell)).double().eval()
    inputs, weights = cell.project(x.double(), start), cell.weights()
    h = (cell.initial_state(x.shape[1]) if state is None else state).h.double()
    states, points = [h], []
    for u, etas in zip(inputs.u, inputs.eta[:, 0], strict=True):
        points.append(_inner_steps(cell, h, u, etas, weights))
        h = points[-1][-1] - (-h if cell.minus else h)
        states.append(h)
    return InnerPath(cell, weights, torch.stack(points), torch.stack(states), inputs.u, inputs.eta[:, 0])


@torch.no_grad()
def observed_path(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> InnerPath:
    """The path at some observed time steps, counted from 0; h has the state before each, and the state after the last."""
    cell = check_incremental(innermost(chain.cell))
    check_single_steps(cell, chain.T, reverse=chain.position.backward)
    cell = deepcopy(cell).double().eval()
    weights = cell.weights()
    inputs = [cell.project(select_rows(chain.x[t], rows).double().unsqueeze(0), chain.index[t]) for t in times]
    u, eta = (torch.cat([getattr(of_step, name) for of_step in inputs]) for name in ("u", "eta"))
    h = torch.stack([select_rows(chain.states[t].h, rows).double() for t in times])
    s = torch.stack([_inner_steps(cell, *of_step, weights) for of_step in zip(h, u, eta[:, 0], strict=True)])
    last = s[-1, -1] - (-h[-1] if cell.minus else h[-1])
    return InnerPath(cell, weights, s, torch.cat([h, last.unsqueeze(0)]), u, eta[:, 0])


def _inner_steps(cell: InnerStepsCell, h: Tensor, u: Tensor, etas: Tensor, weights: Any) -> Tensor:
    """s_0 .. s_K of one time step from h [B, D], [K + 1, B, D]."""
    before = -h if cell.minus else h
    points = [before if cell.from_zero else h + before]
    for eta in etas:
        points.append(points[-1] + eta * cell.pull(points[-1], u, weights))
    return torch.stack(points)


def start_points(path: InnerPath) -> InnerPoints:
    """Every point at which an inner step starts, in the order of time, inner step, batch row: N = T K B."""
    T, K, B, D = path.s[:, :-1].shape
    u = path.u.unsqueeze(1).expand(T, K, B, D)
    eta = path.eta.unsqueeze(2).expand(T, K, B)
    return InnerPoints(path.s[:, :-1].reshape(-1, D), u.reshape(-1, D), eta.reshape(-1))


def end_points(path: InnerPath) -> InnerPoints:
    """Every point at which a time step ends, in the order of time and batch row: N = T B."""
    T, B, D = path.u.shape
    return InnerPoints(path.s[:, -1].reshape(-1, D), path.u.reshape(-1, D), path.eta[:, -1:].expand(T, B).reshape(-1))


def pull_jacobians(path: InnerPath, s: Tensor, u: Tensor) -> Tensor:
    """dF/ds at s [N, D], [N, D, D]: by autograd, so that it holds for any inner network."""
    jacobian: Tensor = vmap(jacrev(path.cell.pull), in_dims=(0, 0, None))(s, u, path.weights)
    return jacobian.detach()


def in_chunks(points: InnerPoints) -> Iterator[InnerPoints]:
    """The points in chunks whose Jacobians fit into memory."""
    yield from (InnerPoints(*chunk) for chunk in zip(*(part.split(CHUNK) for part in points), strict=True))


@torch.no_grad()
def matrix_norm(path: InnerPath) -> float | None:
    """||P U||, the largest singular value of the recurrent matrix; None for an inner network, which has no such matrix."""
    M = getattr(path.weights, "M", None)
    if M is None:
        return None
    return float(torch.linalg.matrix_norm(M if isinstance(M, Tensor) else M.dense(), 2))
