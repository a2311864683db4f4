"""How close an incremental cell comes to its equilibrium, and whether the conditions of the paper's theorems hold there.

    result = equilibrium(cell, x)             x [T, B, I]; any of IncrementalRNN, SiRNN, StableIncrementalRNN, DeepTransition

It measures the quantities of `fixed_point` (distance, rate, bound) and `inner_steps` (conditions, Jacobians, dh_eq/dx) at every
time step and inner step of the first rows of x. The result holds plain numbers and lists: `result._asdict()` is JSON.
"""

import math
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.cells.base import Cell
from unfading.diagnostics.equilibrium.fixed_point import convergence, equilibria, pull_norms, scipy_root
from unfading.diagnostics.equilibrium.inner_path import InnerPath, end_points, inner_path, matrix_norm, start_points
from unfading.diagnostics.equilibrium.inner_steps import conditions, input_response, step_jacobians
from unfading.errors import check_count

# An eigenvalue, or a real part, within this distance of a value counts as equal to it.
TOLERANCE = 1e-7
# Inner steps after which ||F|| is recorded.
PULL_STEPS = 200


class EquilibriumAnalysis(NamedTuple):
    """The measurements of an incremental cell. "Last step" means the last time step; shares are of the visited points."""

    alpha: float
    matrix_norm: float | None  # ||P U||; None for an inner network
    hypotheses: bool  # of Theorem 1: ||P U|| < alpha, and 0 < eta alpha <= 1 for every eta of the path
    eta: dict[str, Any]  # minimum, maximum, share negative, share above 1 / alpha, mean of each inner step
    found: float  # share of time steps that have an equilibrium nearby
    distance: list[float | None]  # per time step: mean ||h_m - h_eq|| / ||s*|| over the rows that have an equilibrium
    scipy_gap: float | None  # largest difference from scipy's root at the last step; None without an equilibrium or scipy
    convergence: dict[str, Any] | None  # of a row of the last step that has an equilibrium; see `fixed_point.Convergence`
    theorem_2: dict[str, Any]  # share of inner steps at which it holds, worst ||A F|| / ||F||, worst of each time step
    corollary_1: dict[str, Any]  # the same for ||A||
    eigenvalues: dict[str, Any]  # of phi' P U - alpha I at the ends of time steps: largest and least real part, shares
    bins: list[dict[str, Any]]  # a histogram of their real parts; see `histogram`
    pulls: list[float]  # ||F|| for the first row of the last step, repeating its last inner step, relative to the first
    jacobians: list[dict[str, float]]  # of the first row of the last step: K, norm, distance from the limit, mean diagonal
    input_response: dict[str, float] | None  # dh_eq/dx: relative difference of formula and measurement, singular value

    def __str__(self) -> str:
        norm = "" if self.matrix_norm is None else f"||P U|| is {self.matrix_norm:.3g} (alpha {self.alpha:.3g}), "
        clauses = [f"{norm}eta {self.eta['least']:.2g} to {self.eta['most']:.2g}"]
        clauses.append(f"the hypotheses of Theorem 1 {'hold' if self.hypotheses else 'do not hold'}")
        if self.theorem_2["holds"] is not None:
            clauses.append(f"the condition of Theorem 2 holds at {self.theorem_2['holds']:.0%} of the inner steps")
        clauses.append(f"{self.found:.0%} of the time steps have an equilibrium nearby")
        fit = self.convergence
        if fit is not None and fit["fitted_rate"] is not None:
            bound = "" if fit["bound"] is None else f", bound {fit['bound']:.4f}"
            clauses.append(
                f"repeated inner steps converge at a rate of {fit['fitted_rate']:.4f} (spectral radius "
                f"{fit['spectral_radius']:.4f}{bound})"
            )
        return "; ".join(clauses) + "."


def equilibrium(cell: Cell, x: Tensor, *, rows: int = 2, inner_steps: int = 30, start: int = 0) -> EquilibriumAnalysis:
    """Measure an incremental cell on an input.

    Args:
        cell: a cell that takes inner steps; it is not changed.
        x: [T, B, I].
        rows: number of rows of x to measure, from the first.
        inner_steps: the step Jacobian is measured for K = 1 up to this.
        start: absolute index of x's first step, for the table of eta.
    """
    check_count("rows", rows)
    check_count("inner_steps", inner_steps)
    if x.dim() != 3 or x.shape[2] != cell.input_size or 0 in x.shape:
        raise ValueError(f"x must be [T, B, {cell.input_size}] with T and B at least 1; got {list(x.shape)}.")
    path = inner_path(cell, x[:, :rows], start=start)
    if not torch.isfinite(path.s).all():
        m = int(torch.isfinite(path.s).all(-1).all(-1).all(-1).int().argmin())
        raise ValueError(f"the state overflows at step {m} of {len(x)}; use a shorter x, a smaller eta or a smaller matrix.")
    return analyse_path(path, x[-1, :rows], inner_steps=inner_steps)


def analyse_path(path: InnerPath, x: Tensor, *, inner_steps: int) -> EquilibriumAnalysis:
    """The measurements along a path whose last time step read x [B, I]."""
    T, B, D = path.u.shape
    ends = end_points(path)
    nearby = equilibria(path, ends.s, ends.u)
    of_inner_steps = conditions(path, start_points(path))
    converged, eigenvalues = nearby.converged.reshape(T, B), conditions(path, ends).eigenvalues
    last_rows = converged[-1].nonzero().flatten()  # of the last time step, those with an equilibrium
    distances = (ends.s - nearby.s).norm(dim=-1) / nearby.s.norm(dim=-1).clamp_min(1e-300)
    norm, alpha = matrix_norm(path), path.cell.alpha
    row = int(last_rows[0]) if len(last_rows) else None
    root = None if row is None else nearby.s[(T - 1) * B + row]
    return EquilibriumAnalysis(
        alpha=alpha,
        matrix_norm=norm,
        hypotheses=norm is not None and norm < alpha and bool(((path.eta > 0) & (path.eta * alpha <= 1)).all()),
        eta=_eta(path),
        found=float(converged.double().mean()),
        distance=[_mean(of_step[rows]) for of_step, rows in zip(distances.reshape(T, B), converged, strict=True)],
        scipy_gap=_scipy_gap(path, nearby.s.reshape(T, B, D)[-1], last_rows),
        convergence=None if row is None or root is None else _convergence(path, root, row=row),
        theorem_2=_condition(of_inner_steps.theorem_2.reshape(T, -1)),
        corollary_1=_condition(of_inner_steps.corollary_1.reshape(T, -1)),
        eigenvalues=eigenvalue_shares(eigenvalues, alpha),
        bins=histogram(eigenvalues.real.flatten(), 0.1),
        pulls=[size for size in _pulls(path) if math.isfinite(size)],
        jacobians=_jacobians(path, inner_steps),
        input_response=None if row is None or root is None else _response(path, x[row], root),
    )


def eigenvalue_shares(eigenvalues: Tensor, alpha: float) -> dict[str, Any]:
    """Largest and least real part, and the shares by sign; the paper's condition is that all are negative."""
    real, size = eigenvalues.real, eigenvalues.abs()
    return {
        "largest": float(real.max()),
        "least": float(real.min()),
        "negative": _share(real < -TOLERANCE),
        "zero": _share(size <= TOLERANCE),  # dh_eq/dh and dh_eq/dx are not defined there
        "positive": _share(real > TOLERANCE),  # directions that move away from the equilibrium
        "minus_alpha": _share((eigenvalues + alpha).abs() <= TOLERANCE),  # units that are off
        "points_all_negative": _share((real < -TOLERANCE).all(-1)),
    }


def histogram(values: Tensor, width: float) -> list[dict[str, Any]]:
    """Counts of the values in bins of equal width, none of which spans zero, and a separate bin for zeros."""
    zero = values.abs() <= TOLERANCE
    bins, counts = (values[~zero] / width).floor().unique(return_counts=True)
    rows: list[dict[str, Any]] = [
        {"low": i * width, "high": (i + 1) * width, "count": count, "sign": "negative" if i < 0 else "positive"}
        for i, count in zip(bins.tolist(), counts.tolist(), strict=True)
    ]
    # Figures draw the last row on top of the others.
    return [*rows, {"low": -width / 6, "high": width / 6, "count": int(zero.sum()), "sign": "zero"}] if zero.any() else rows


def _pulls(path: InnerPath) -> list[float]:
    norms = pull_norms(path.cell, path.s[-1, 0, :1], path.u[-1, :1], float(path.eta[-1, -1]), PULL_STEPS, path.weights)
    return (norms / norms[0].clamp_min(1e-300)).flatten().tolist()


def _eta(path: InnerPath) -> dict[str, Any]:
    eta = path.eta
    return {
        "least": float(eta.min()),
        "most": float(eta.max()),
        "negative": _share(eta < 0),
        "above_1_over_alpha": _share(eta * path.cell.alpha > 1),
        "mean_of_inner_step": eta.mean(0).tolist(),
    }


def _scipy_gap(path: InnerPath, s: Tensor, rows: Tensor) -> float | None:
    if not len(rows) or find_spec("scipy") is None:
        return None
    return max(float((scipy_root(path, path.s[-1, -1, b], path.u[-1, b]) - s[b]).abs().max()) for b in rows.tolist())


def _convergence(path: InnerPath, root: Tensor, *, row: int) -> dict[str, Any]:
    return convergence(path, path.s[-1, 0, row], path.u[-1, row], root, float(path.eta[-1, -1]))._asdict()


def _condition(values: Tensor) -> dict[str, Any]:
    """Share and worst value of a condition that holds below 1, from values [T, inner steps x rows]; nan is left out."""
    known = values[~values.isnan()]
    worst = values.nan_to_num(-math.inf).amax(1).tolist()
    return {
        "holds": _share(known < 1) if len(known) else None,
        "worst": float(known.max()) if len(known) else None,
        "worst_of_step": [None if value == -math.inf else value for value in worst],
    }


def _jacobians(path: InnerPath, most: int) -> list[dict[str, float]]:
    jacobians = step_jacobians(path, len(path.u) - 1, 0, most)
    limit = (1.0 if path.cell.minus else -1.0) * torch.eye(jacobians.shape[1], dtype=jacobians.dtype)
    return [
        {
            "K": float(k),
            "norm": float(torch.linalg.matrix_norm(J, 2)),
            "from_limit": float(torch.linalg.matrix_norm(J - limit, 2)),
            "mean_diagonal": float(J.diagonal().mean()),
        }
        for k, J in enumerate(jacobians, 1)
    ]


def _response(path: InnerPath, x: Tensor, s: Tensor) -> dict[str, float]:
    response = input_response(path, x, s)
    gap = (response.formula - response.measured).abs().max() / response.measured.abs().max().clamp_min(1e-300)
    return {"gap": float(gap), "smallest_singular_value": response.smallest}


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None
