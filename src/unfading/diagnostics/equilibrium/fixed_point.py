"""The equilibrium of an incremental cell and the rate of convergence to it.

    F(s*) = 0,    F(s) = phi(P U s + u) - alpha s,    h_eq = s* - h_{m-1}

`equilibria` finds s* by Newton's method, for many points at once. `scipy_root` is the paper's method, one point at a time, and
serves as an independent check. `convergence` repeats the inner step with one eta and records the distance d_k = ||s_k - s*||:

    fitted rate       of d_k ~ rate^k near s*, by least squares on log d_k
    spectral radius   of A = I + eta (phi' P U - alpha I) at s*, the limit of the rate
    bound             1 - alpha eta + eta ||P U||, Kag et al. 2020, Proposition 2: d_k <= bound^(k-1) d_1 (printed without the
                      exponent), if ||P U|| < alpha, 0 < eta alpha <= 1 and phi is 1-Lipschitz

For the fit, s_k - s* is rescaled to a millionth of s* after every step. A plain sequence of distances reaches rounding error
too early: if two eigenvalues of A are close to each other, or complex, its slope is up to 10 % off.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.cells.incremental import InnerStepsCell
from unfading.diagnostics.equilibrium.inner_path import CHUNK, InnerPath, matrix_norm, pull_jacobians

NEWTON_STEPS = 40
HALVINGS = 30
# A point counts as an equilibrium if ||F|| is at most this many rounding errors of the terms of F.
ROUNDINGS = 1e3
# The rate is fitted over the last three quarters of this many steps, each from this distance relative to the equilibrium.
FIT_STEPS, FIT_DISTANCE = 400, 1e-6


class Equilibria(NamedTuple):
    """The points that Newton's method reached."""

    s: Tensor  # [N, D]
    converged: Tensor  # [N] bool, whether s is an equilibrium


@torch.no_grad()
def equilibria(path: InnerPath, s: Tensor, u: Tensor) -> Equilibria:
    """The equilibrium near each s [N, D] for its input part u [N, D], by Newton's method with step halving.

    If no step along Newton's direction reduces ||F|| (a kink of ReLU, a singular matrix), s <- s + F / alpha is used instead,
    which comes closer whenever ||P U|| < alpha.
    """
    chunks = [_equilibria(path, *chunk) for chunk in zip(s.split(CHUNK), u.split(CHUNK), strict=True)]
    return Equilibria(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _equilibria(path: InnerPath, s: Tensor, u: Tensor) -> Equilibria:
    s = s.clone()
    for _ in range(NEWTON_STEPS):
        moving = ~_is_equilibrium(path, s, u)
        if not moving.any():
            break
        s[moving] = _newton_step(path, s[moving], u[moving])
    converged = _is_equilibrium(path, s, u)
    # Two more steps reduce the error of converged points to rounding.
    for _ in range(2):
        polished = s + _newton_direction(path, s, u)
        closer = _pull_norm(path, polished, u) < _pull_norm(path, s, u)
        s = torch.where((converged & closer).unsqueeze(-1), polished, s)
    return Equilibria(s, converged)


def scipy_root(path: InnerPath, s: Tensor, u: Tensor) -> Tensor:
    """The root of F from s [D] by scipy's hybrid method (MINPACK's hybrd, which fsolve uses too)."""
    from importlib import import_module

    try:
        root = import_module("scipy.optimize").root
    except ModuleNotFoundError:
        raise ValueError(
            "scipy_root needs scipy, which is not installed. Get it with: pip install 'unfading[diagnose]'"
        ) from None
    with torch.no_grad():
        solution = root(
            lambda a: path.cell.pull(torch.from_numpy(a), u, path.weights).numpy(), s.numpy(), method="hybr", tol=1e-14
        )
    return torch.from_numpy(solution.x)


class Convergence(NamedTuple):
    """How the inner step, repeated with one eta, converges to the equilibrium."""

    eta: float
    distances: list[float]  # ||s_k - s*|| for k = 0, 1, ...
    fitted_rate: float | None  # None if the cell is at the equilibrium, or one step away from it
    spectral_radius: float
    bound: float | None  # None for an inner network, which has no ||P U||
    bound_holds: bool | None  # at every step of the distances; None if the assumptions of Proposition 2 do not hold


@torch.no_grad()
def convergence(path: InnerPath, s: Tensor, u: Tensor, root: Tensor, eta: float, *, steps: int = 200) -> Convergence:
    """Repeat the inner step from s [D] towards the equilibrium `root` [D], for at most `steps` steps.

    It stops when the distance comes down to the rounding error of s.
    """
    floor = ROUNDINGS * torch.finfo(s.dtype).eps * float(root.norm())
    first, distances = s - root, [float((s - root).norm())]
    while len(distances) <= steps and floor < distances[-1] < math.inf:
        s = s + eta * path.cell.pull(s, u, path.weights)
        distances.append(float((s - root).norm()))
    A = torch.eye(len(s), dtype=s.dtype) + eta * pull_jacobians(path, root[None], u[None])[0]
    norm, alpha = matrix_norm(path), path.cell.alpha
    bound = None if norm is None else 1 - alpha * eta + eta * norm
    bound_applies = norm is not None and norm < alpha and 0 < eta * alpha <= 1
    return Convergence(
        eta,
        distances,
        _fitted_rate(path, first, u, root, eta),
        float(torch.linalg.eigvals(A).abs().max()),
        bound,
        _bound_holds(distances, bound, floor) if bound_applies and bound is not None else None,
    )


@torch.no_grad()
def pull_norms(cell: InnerStepsCell, s: Tensor, u: Tensor, eta: float, steps: int, weights: Any) -> Tensor:
    """||F|| at s [N, D] and after each of `steps` inner steps from there, [steps + 1, N]."""
    norms = []
    for _ in range(steps + 1):
        F = cell.pull(s, u, weights)
        norms.append(F.norm(dim=-1))
        s = s + eta * F
    return torch.stack(norms)


def _pull_norm(path: InnerPath, s: Tensor, u: Tensor) -> Tensor:
    """||F||."""
    return path.cell.pull(s, u, path.weights).norm(dim=-1)


def _is_equilibrium(path: InnerPath, s: Tensor, u: Tensor) -> Tensor:
    scale = path.cell.alpha * s.norm(dim=-1) + u.norm(dim=-1) + 1e-300
    return _pull_norm(path, s, u) <= ROUNDINGS * torch.finfo(s.dtype).eps * scale


def _newton_direction(path: InnerPath, s: Tensor, u: Tensor) -> Tensor:
    """The full Newton step; it is arbitrary, or not finite, where the matrix is singular."""
    F = path.cell.pull(s, u, path.weights)
    return torch.linalg.solve_ex(pull_jacobians(path, s, u), -F.unsqueeze(-1)).result.squeeze(-1)


def _newton_step(path: InnerPath, s: Tensor, u: Tensor) -> Tensor:
    """One step for every point, halved until it reduces ||F||."""
    norm, direction = _pull_norm(path, s, u), _newton_direction(path, s, u)
    best = s + path.cell.pull(s, u, path.weights) / path.cell.alpha
    accepted = torch.zeros(len(s), dtype=torch.bool)
    for halving in range(HALVINGS):
        candidate = s + direction * 0.5**halving
        # A small decrease is required, because steps that gain nothing could repeat forever.
        better = _pull_norm(path, candidate, u) < (1 - 1e-4 * 0.5**halving) * norm
        best = torch.where((better & ~accepted).unsqueeze(-1), candidate, best)
        accepted |= better
        if accepted.all():
            break
    return best


def _fitted_rate(path: InnerPath, error: Tensor, u: Tensor, root: Tensor, eta: float) -> float | None:
    """exp of the slope of log d_k."""
    distance = FIT_DISTANCE * (max(float(root.norm()), float(u.norm())) or 1.0)
    logs = [0.0]
    for _ in range(FIT_STEPS):
        size = float(error.norm())
        if not 0 < size < math.inf:
            return None
        rescaled = root + error * (distance / size)
        error = rescaled + eta * path.cell.pull(rescaled, u, path.weights) - root
        logs.append(logs[-1] + math.log(max(float(error.norm()), 1e-300) / distance))
    log = torch.tensor(logs[FIT_STEPS // 4 :], dtype=torch.float64)
    k = torch.arange(len(log), dtype=torch.float64)
    k = k - k.mean()
    return float(torch.exp((k * log).sum() / k.square().sum()))


def _bound_holds(distances: list[float], bound: float, floor: float) -> bool:
    return all(after <= bound * before + floor for before, after in pairwise(distances))
