"""The inner steps of an incremental cell as linear maps, and the conditions of the incremental RNN's theorems at each of them.

At the point s where an inner step of size eta starts, with F the pull and A = I + eta (phi' P U - alpha I):

    Theorem 2's condition     eta^2 ||dF F||^2 + 2 eta F^T dF F < 0, which is ||A F|| < ||F||
    Corollary 1               ||A|| < 1
    step Jacobian             dh_m/dh_{m-1} = c A_K ... A_1 - I, with c = 2 for g_0 = h and c = 1 for g_0 = 0;
                              in the -h form I - c' A_K ... A_1, with c' = 0 for g_0 = h and c' = 1 for g_0 = 0
    dh_eq/dx                  -(dF/ds)^{-1} dF/du du/dx = (alpha I - phi' P U)^{-1} phi' P W, section 3.2

Kag et al. 2020. Theorem 1 is the limit -I (or I) of the step Jacobian.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from unfading.diagnostics.equilibrium.fixed_point import equilibria
from unfading.diagnostics.equilibrium.inner_path import InnerPath, InnerPoints, in_chunks, pull_jacobians

# Step of the central differences that are compared with the formula of dh_eq/dx, relative to the size of x.
DIFFERENCE = 1e-5


class Conditions(NamedTuple):
    """The quantities in the conditions of the theorems, at each of N points."""

    theorem_2: Tensor  # [N] ||A F|| / ||F||; nan where F = 0
    corollary_1: Tensor  # [N] ||A||
    eigenvalues: Tensor  # [N, D] of phi' P U - alpha I, complex


@torch.no_grad()
def conditions(path: InnerPath, points: InnerPoints) -> Conditions:
    """The quantities of Theorem 2 and Corollary 1, whose conditions hold below 1, and the eigenvalues at points of a path."""
    results: list[tuple[Tensor, ...]] = []
    for s, u, eta in in_chunks(points):
        F, dF = path.cell.pull(s, u, path.weights), pull_jacobians(path, s, u)
        A = torch.eye(s.shape[1], dtype=s.dtype) + eta[:, None, None] * dF
        ratio = (A @ F.unsqueeze(-1)).squeeze(-1).norm(dim=-1) / F.norm(dim=-1)
        results.append((ratio, torch.linalg.matrix_norm(A, 2), torch.linalg.eigvals(dF)))
    return Conditions(*(torch.cat(parts) for parts in zip(*results, strict=True)))


@torch.no_grad()
def step_jacobians(path: InnerPath, m: int, row: int, most: int) -> Tensor:
    """dh_m/dh_{m-1} for K = 1 .. most inner steps from the path's state before time step m, [most, D, D].

    Inner steps beyond the cell's own K use its last step size.
    """
    cell, u = path.cell, path.u[m, row]
    eye = torch.eye(len(u), dtype=u.dtype)
    h = path.h[m, row]
    before = -h if cell.minus else h
    s = before if cell.from_zero else h + before
    # ds_0/dh is this multiple of the identity, and ds_k/dh = A_k ds_{k-1}/dh.
    product = ((-1.0 if cell.minus else 1.0) + (0.0 if cell.from_zero else 1.0)) * eye
    jacobians = []
    for k in range(most):
        eta = path.eta[m, min(k, path.eta.shape[1] - 1)]
        product = product + eta * pull_jacobians(path, s[None], u[None])[0] @ product
        s = s + eta * cell.pull(s, u, path.weights)
        jacobians.append(product + eye if cell.minus else product - eye)
    return torch.stack(jacobians)


class InputResponse(NamedTuple):
    """The derivative of the equilibrium by the input, computed in two ways."""

    formula: Tensor  # [D, I] section 3.2
    measured: Tensor  # [D, I] central differences of the equilibrium itself
    smallest: float  # singular value of alpha I - phi' P U, relative to its largest; at 0 the formula is not defined


@torch.no_grad()
def input_response(path: InnerPath, x: Tensor, s: Tensor) -> InputResponse:
    """dh_eq/dx at the input x [I] and its equilibrium s [D], by the formula and by central differences."""
    x = x.double()

    def input_part(x: Tensor) -> Any:
        return path.cell.project(x[None, None]).u[0, 0]

    u = input_part(x)
    dF = pull_jacobians(path, s[None], u[None])[0]
    dF_du = vmap(jacrev(path.cell.pull, argnums=1), in_dims=(0, 0, None))(s[None], u[None], path.weights)[0].detach()
    formula = -torch.linalg.lstsq(dF, dF_du @ jacrev(input_part)(x).detach(), driver="gelsd").solution
    step = DIFFERENCE * max(1.0, float(x.norm()))
    shifts = step * torch.eye(len(x), dtype=x.dtype)
    above, below = (
        equilibria(path, s.expand(len(x), -1), torch.stack([input_part(row) for row in x + sign * shifts])).s
        for sign in (1, -1)
    )
    singular_values = torch.linalg.svdvals(dF)
    return InputResponse(formula, (above - below).T / (2 * step), float(singular_values[-1] / singular_values[0]))
