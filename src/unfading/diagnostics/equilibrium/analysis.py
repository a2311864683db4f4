"""How near an incremental cell comes to the equilibrium that its paper speaks of, and whether the conditions hold there.

    result = equilibrium(cell, x)             x [T, B, I]; any of IncrementalRNN, SiRNN, StableIncrementalRNN, DeepTransition

The measures are those of `fixed_point` (distance, rate, bound) and `inner_steps` (conditions, Jacobians, dh_eq/dx), taken at
every time step and inner step of the first rows of x. The result holds plain numbers and lists: `result._asdict()` is JSON.
"""

import math
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.cells.base import Cell
from unfading.diagnostics.equilibrium.fixed_point import convergence, equilibria, pulled, scipy_root
from unfading.diagnostics.equilibrium.inner_path import Path, left, matrix_norm, reached, walk
from unfading.diagnostics.equilibrium.inner_steps import conditions, input_response, step_jacobians
from unfading.errors import check_count

# An eigenvalue, or a real part, within this of a value is that value.
EXACTLY = 1e-7
# Inner steps along which the pull is followed.
PULLS = 200


class EquilibriumAnalysis(NamedTuple):
    """What was measured; shares are of the points visited."""

    alpha: float
    matrix_norm: float | None  # ||P U||; None for an inner network
    hypotheses: bool  # of Theorem 1: ||P U|| < alpha, and 0 < eta alpha <= 1 for every eta met
    eta: dict[str, Any]  # least, most, share negative, share above 1 / alpha, mean of each inner step
    found: float  # share of time steps that have an equilibrium near
    distance: list[float | None]  # per time step: mean ||h_m - h_eq|| / ||s*|| over the rows that have one
    scipy_gap: float | None  # largest difference from scipy's root at the last step; None where there is none, or no scipy
    convergence: dict[str, Any] | None  # of the last step's first row; see `fixed_point.Convergence`
    theorem_2: dict[str, Any]  # share of inner steps at which it holds, worst ||A F|| / ||F||, worst of each time step
    corollary_1: dict[str, Any]  # the same for ||A||
    eigenvalues: dict[str, Any]  # of phi' P U - alpha I where time steps end: largest and least real part, shares
    bins: list[dict[str, Any]]  # their real parts, counted; see `histogram`
    pulls: list[
        float
    ]  # ||F|| along inner steps of the last time step's first row, repeated with one eta, relative to the first
    # Of the last step's first row: K, ||dh_m/dh_{m-1}||, ||. + I|| (||. - I||), mean diagonal.
    jacobians: list[dict[str, float]]
    input_response: dict[str, float] | None  # dh_eq/dx: largest difference of formula and measurement, relative; singular value

    def __str__(self) -> str:
        norm = "" if self.matrix_norm is None else f"||P U|| is {self.matrix_norm:.3g} (alpha {self.alpha:.3g}), "
        said = [f"{norm}eta {self.eta['least']:.2g} to {self.eta['most']:.2g}"]
        said.append(f"Theorem 1's hypotheses {'hold' if self.hypotheses else 'do not hold'}")
        if self.theorem_2["holds"] is not None:
            said.append(f"Theorem 2's condition holds at {self.theorem_2['holds']:.0%} of the inner steps")
        said.append(f"an equilibrium is near at {self.found:.0%} of the time steps")
        way = self.convergence
        if way is not None and way["fitted_rate"] is not None:
            bound = "" if way["bound"] is None else f", bound {way['bound']:.4f}"
            said.append(
                f"repeated steps come nearer at a rate of {way['fitted_rate']:.4f} (spectral radius "
                f"{way['spectral_radius']:.4f}{bound})"
            )
        return "; ".join(said) + "."


def equilibrium(cell: Cell, x: Tensor, *, rows: int = 2, inner_steps: int = 30, start: int = 0) -> EquilibriumAnalysis:
    """Measure an incremental cell on an input.

    Args:
        cell: one that takes inner steps; it is not changed.
        x: [T, B, I].
        rows: so many rows of x are looked at.
        inner_steps: the step Jacobian is told for K = 1 up to this.
        start: absolute index of x's first step, for the table of eta.
    """
    check_count("rows", rows)
    check_count("inner_steps", inner_steps)
    if x.dim() != 3 or x.shape[2] != cell.input_size or 0 in x.shape:
        raise ValueError(f"x must be [T, B, {cell.input_size}] with T and B at least 1; got {list(x.shape)}.")
    path = walk(cell, x[:, :rows], start=start)
    if not torch.isfinite(path.s).all():
        m = int(torch.isfinite(path.s).all(-1).all(-1).all(-1).int().argmin())
        raise ValueError(f"the state overflows at step {m} of {len(x)}; shorten x, or shrink eta and the recurrent matrix.")
    return along(path, x[-1, :rows], inner_steps=inner_steps)


def along(path: Path, x: Tensor, *, inner_steps: int) -> EquilibriumAnalysis:
    """The same along a path whose last time step read x [B, I]."""
    T, B, D = path.u.shape
    ends = reached(path)
    near = equilibria(path, ends.s, ends.u)
    at_steps = conditions(path, left(path))
    found, values = near.found.reshape(T, B), conditions(path, ends).eigenvalues
    last = found[-1].nonzero().flatten()
    gaps = (ends.s - near.s).norm(dim=-1) / near.s.norm(dim=-1).clamp_min(1e-300)
    norm, alpha = matrix_norm(path), path.cell.alpha
    last_row = (T - 1) * B + int(last[0]) if len(last) else None
    return EquilibriumAnalysis(
        alpha=alpha,
        matrix_norm=norm,
        hypotheses=norm is not None and norm < alpha and bool(((path.eta > 0) & (path.eta * alpha <= 1)).all()),
        eta=_eta(path),
        found=float(found.double().mean()),
        distance=[_mean(gap[have]) for gap, have in zip(gaps.reshape(T, B), found, strict=True)],
        scipy_gap=_scipy_gap(path, near.s.reshape(T, B, D)[-1], last),
        convergence=None if last_row is None else _convergence(path, near.s[last_row], row=int(last[0])),
        theorem_2=_holds(at_steps.theorem_2.reshape(T, -1)),
        corollary_1=_holds(at_steps.corollary_1.reshape(T, -1)),
        eigenvalues=spectrum(values, alpha),
        bins=histogram(values.real.flatten(), 0.1),
        pulls=[size for size in _pulls(path) if math.isfinite(size)],
        jacobians=_jacobians(path, inner_steps),
        input_response=None if last_row is None else _response(path, x[int(last[0])], near.s[last_row]),
    )


def spectrum(eigenvalues: Tensor, alpha: float) -> dict[str, Any]:
    """Largest and least real part, and how many lie where the paper's condition (all negative) needs them."""
    real, size = eigenvalues.real, eigenvalues.abs()
    return {
        "largest": float(real.max()),
        "least": float(real.min()),
        "negative": _share(real < -EXACTLY),
        "zero": _share(size <= EXACTLY),  # there dh_eq/dh and dh_eq/dx have no meaning
        "positive": _share(real > EXACTLY),  # these push away from the equilibrium
        "minus_alpha": _share((eigenvalues + alpha).abs() <= EXACTLY),  # units that are off
        "points_all_negative": _share((real < -EXACTLY).all(-1)),
    }


def histogram(values: Tensor, width: float) -> list[dict[str, Any]]:
    """Counts of values in bins of one width that never hold both sides of zero, and a bin of their own for zeros."""
    zero = values.abs() <= EXACTLY
    places, counts = (values[~zero] / width).floor().unique(return_counts=True)
    rows: list[dict[str, Any]] = [
        {"low": place * width, "high": (place + 1) * width, "count": count, "sign": "negative" if place < 0 else "positive"}
        for place, count in zip(places.tolist(), counts.tolist(), strict=True)
    ]
    # The last is drawn over the others.
    return [*rows, {"low": -width / 6, "high": width / 6, "count": int(zero.sum()), "sign": "zero"}] if zero.any() else rows


def _pulls(path: Path) -> list[float]:
    sizes = pulled(path.cell, path.s[-1, 0, :1], path.u[-1, :1], float(path.eta[-1, -1]), PULLS, path.weights)
    return (sizes / sizes[0].clamp_min(1e-300)).flatten().tolist()


def _eta(path: Path) -> dict[str, Any]:
    eta = path.eta
    return {
        "least": float(eta.min()),
        "most": float(eta.max()),
        "negative": _share(eta < 0),
        "above_1_over_alpha": _share(eta * path.cell.alpha > 1),
        "mean_of_inner_step": eta.mean(0).tolist(),
    }


def _scipy_gap(path: Path, s: Tensor, rows: Tensor) -> float | None:
    if not len(rows) or find_spec("scipy") is None:
        return None
    return max(float((scipy_root(path, path.s[-1, -1, b], path.u[-1, b]) - s[b]).abs().max()) for b in rows.tolist())


def _convergence(path: Path, root: Tensor, *, row: int) -> dict[str, Any]:
    return convergence(path, path.s[-1, 0, row], path.u[-1, row], root, float(path.eta[-1, -1]))._asdict()


def _holds(values: Tensor) -> dict[str, Any]:
    """Of a condition that holds below 1, per time step; where nothing pulls it says nothing."""
    known = values[~values.isnan()]
    worst = values.nan_to_num(-math.inf).amax(1).tolist()
    return {
        "holds": _share(known < 1) if len(known) else None,
        "worst": float(known.max()) if len(known) else None,
        "worst_of_step": [None if value == -math.inf else value for value in worst],
    }


def _jacobians(path: Path, most: int) -> list[dict[str, float]]:
    found = step_jacobians(path, len(path.u) - 1, 0, most)
    limit = (1.0 if path.cell.minus else -1.0) * torch.eye(found.shape[1], dtype=found.dtype)
    return [
        {
            "K": float(k),
            "norm": float(torch.linalg.matrix_norm(J, 2)),
            "from_limit": float(torch.linalg.matrix_norm(J - limit, 2)),
            "mean_diagonal": float(J.diagonal().mean()),
        }
        for k, J in enumerate(found, 1)
    ]


def _response(path: Path, x: Tensor, s: Tensor) -> dict[str, float]:
    found = input_response(path, x, s)
    gap = (found.formula - found.measured).abs().max() / found.measured.abs().max().clamp_min(1e-300)
    return {"gap": float(gap), "smallest_singular_value": found.smallest}


def _share(true: Tensor) -> float:
    return float(true.double().mean())


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None
