"""The equilibrium that an incremental cell moves towards, and how fast it gets there.

    F(s*) = 0,    F(s) = phi(P U s + u) - alpha s,    h_eq = s* - h_{m-1}

`equilibria` finds s* by Newton's method, for many points at once; `scipy_root` is the paper's way, one point at a time, and an
independent witness. `convergence` repeats the inner step with one eta and follows the distance d_k = ||s_k - s*||:

    fitted rate       of d_k ~ rate^k near s*, by least squares on log d_k
    spectral radius   of A = I + eta (phi' P U - alpha I) at s*: what the rate tends to
    bound             1 - alpha eta + eta ||P U||, Kag et al. 2020, Proposition 2: d_k <= bound^(k-1) d_1 (printed without the
                      exponent), where ||P U|| < alpha, 0 < eta alpha <= 1 and phi is 1-Lipschitz

The fit looks through a magnifying glass: each time s_k - s* is scaled back to a millionth of s*. A plain sequence of distances
ends in rounding too early: where two eigenvalues of A are near each other, or turn, its slope is up to 10 % off.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.cells.incremental import InnerStepsCell
from unfading.diagnostics.equilibrium.inner_path import CHUNK, Path, matrix_norm, slopes

NEWTON_STEPS = 40
HALVINGS = 30
# A point is an equilibrium when its pull is so many roundings of what it is the difference of.
ROUNDINGS = 1e3
# The rate is fitted over the last three quarters of so many steps, each from so near, relative to the equilibrium.
FIT_STEPS, NEAR = 400, 1e-6


class Equilibria(NamedTuple):
    """Where the pull vanishes."""

    s: Tensor  # [N, D]
    found: Tensor  # [N] bool


@torch.no_grad()
def equilibria(path: Path, s: Tensor, u: Tensor) -> Equilibria:
    """The equilibrium near each s [N, D] for its input's part u [N, D], by Newton's method with shortened steps.

    Where a step along Newton's direction cannot make the pull smaller (a kink of ReLU, a singular matrix), s <- s + F / alpha
    is taken, which comes nearer wherever ||P U|| < alpha.
    """
    pieces = [_equilibria(path, *piece) for piece in zip(s.split(CHUNK), u.split(CHUNK), strict=True)]
    return Equilibria(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _equilibria(path: Path, s: Tensor, u: Tensor) -> Equilibria:
    s = s.clone()
    for _ in range(NEWTON_STEPS):
        moving = ~_settled(path, s, u)
        if not moving.any():
            break
        s[moving] = _newton(path, s[moving], u[moving])
    found = _settled(path, s, u)
    # Two more steps, which bring what is near down to its rounding.
    for _ in range(2):
        polished = s + _direction(path, s, u)
        nearer = _size(path, polished, u) < _size(path, s, u)
        s = torch.where((found & nearer).unsqueeze(-1), polished, s)
    return Equilibria(s, found)


def scipy_root(path: Path, s: Tensor, u: Tensor) -> Tensor:
    """The root of F from s [D] by scipy's hybrid method (MINPACK's hybrd, which fsolve calls too)."""
    from importlib import import_module

    try:
        root = import_module("scipy.optimize").root
    except ModuleNotFoundError:
        raise ValueError(
            "scipy's root needs scipy, which is not installed. Get it with: pip install 'unfading[diagnose]'"
        ) from None
    with torch.no_grad():
        found = root(
            lambda a: path.cell.pull(torch.from_numpy(a), u, path.weights).numpy(), s.numpy(), method="hybr", tol=1e-14
        )
    return torch.from_numpy(found.x)


class Convergence(NamedTuple):
    """How the inner step, repeated with one eta, comes to the equilibrium."""

    eta: float
    distances: list[float]  # ||s_k - s*|| for k = 0, 1, ...
    fitted_rate: float | None  # None where the cell is at the equilibrium, or one step away
    spectral_radius: float
    bound: float | None  # None for an inner network, which has no ||P U||
    bound_holds: bool | None  # at every step of the distances; None where Proposition 2 says nothing


@torch.no_grad()
def convergence(path: Path, s: Tensor, u: Tensor, root: Tensor, eta: float, *, steps: int = 200) -> Convergence:
    """Follow the inner step from s [D] to the equilibrium `root` [D], for at most so many steps.

    The distance is followed until the rounding of s would rule it.
    """
    floor = ROUNDINGS * torch.finfo(s.dtype).eps * float(root.norm())
    first, distances = s - root, [float((s - root).norm())]
    while len(distances) <= steps and floor < distances[-1] < math.inf:
        s = s + eta * path.cell.pull(s, u, path.weights)
        distances.append(float((s - root).norm()))
    A = torch.eye(len(s), dtype=s.dtype) + eta * slopes(path, root[None], u[None])[0]
    norm, alpha = matrix_norm(path), path.cell.alpha
    bound = None if norm is None else 1 - alpha * eta + eta * norm
    speaks = norm is not None and norm < alpha and 0 < eta * alpha <= 1
    return Convergence(
        eta,
        distances,
        _fitted(path, first, u, root, eta),
        float(torch.linalg.eigvals(A).abs().max()),
        bound,
        _under(distances, bound, floor) if speaks and bound is not None else None,
    )


@torch.no_grad()
def pulled(cell: InnerStepsCell, s: Tensor, u: Tensor, eta: float, steps: int, weights: Any) -> Tensor:
    """||F|| at s [N, D] and along so many inner steps from there, [steps + 1, N]."""
    sizes = []
    for _ in range(steps + 1):
        F = cell.pull(s, u, weights)
        sizes.append(F.norm(dim=-1))
        s = s + eta * F
    return torch.stack(sizes)


def _size(path: Path, s: Tensor, u: Tensor) -> Tensor:
    """||F||."""
    return path.cell.pull(s, u, path.weights).norm(dim=-1)


def _settled(path: Path, s: Tensor, u: Tensor) -> Tensor:
    scale = path.cell.alpha * s.norm(dim=-1) + u.norm(dim=-1) + 1e-300
    return _size(path, s, u) <= ROUNDINGS * torch.finfo(s.dtype).eps * scale


def _direction(path: Path, s: Tensor, u: Tensor) -> Tensor:
    """Newton's step; not finite, or of any size, where the matrix is singular."""
    F = path.cell.pull(s, u, path.weights)
    return torch.linalg.solve_ex(slopes(path, s, u), -F.unsqueeze(-1)).result.squeeze(-1)


def _newton(path: Path, s: Tensor, u: Tensor) -> Tensor:
    """One step for all, each as long as it helps."""
    size, direction = _size(path, s, u), _direction(path, s, u)
    best = s + path.cell.pull(s, u, path.weights) / path.cell.alpha
    done = torch.zeros(len(s), dtype=torch.bool)
    for halving in range(HALVINGS):
        tried = s + direction * 0.5**halving
        # Less by a little at least: a step that gains nothing is not taken for ever.
        better = _size(path, tried, u) < (1 - 1e-4 * 0.5**halving) * size
        best = torch.where((better & ~done).unsqueeze(-1), tried, best)
        done |= better
        if done.all():
            break
    return best


def _fitted(path: Path, error: Tensor, u: Tensor, root: Tensor, eta: float) -> float | None:
    """exp of the slope of log d_k."""
    near = NEAR * (max(float(root.norm()), float(u.norm())) or 1.0)
    logs = [0.0]
    for _ in range(FIT_STEPS):
        size = float(error.norm())
        if not 0 < size < math.inf:
            return None
        before = root + error * (near / size)
        error = before + eta * path.cell.pull(before, u, path.weights) - root
        logs.append(logs[-1] + math.log(max(float(error.norm()), 1e-300) / near))
    log = torch.tensor(logs[FIT_STEPS // 4 :], dtype=torch.float64)
    k = torch.arange(len(log), dtype=torch.float64)
    k = k - k.mean()
    return float(torch.exp((k * log).sum() / k.square().sum()))


def _under(distances: list[float], bound: float, floor: float) -> bool:
    return all(after <= bound * before + floor for before, after in pairwise(distances))
