"""Equilibria and ODEs, against scipy."""

import sys

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.optimize import root
from torch.testing import assert_close

from tests.helpers import laws
from unfading.cells.continuous import ContinuousRNNCell
from unfading.cells.equilibrium import EquilibriumRNNCell
from unfading.cells.incremental import IncrementalRNNCell


def built(**options):
    torch.manual_seed(1)
    cell = EquilibriumRNNCell(3, 7, **options).double()
    with torch.no_grad():
        cell.from_input.weight.normal_()
        cell.from_input.bias.normal_()
    return cell


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
def test_fixed_point_agrees_with_scipy_from_twenty_starts(activation):
    cell = built(activation=activation, alpha=0.9)
    x = torch.randn(1, 1, 3, dtype=torch.float64)
    s = cell.project(x).s[0, 0].detach().numpy()
    U, u = cell.U.detach().numpy(), cell.from_input(x)[0, 0].detach().numpy()
    phi = {"tanh": np.tanh, "relu": lambda a: np.maximum(a, 0), "sigmoid": lambda a: 1 / (1 + np.exp(-a))}[activation]
    rng = np.random.default_rng(0)
    for _ in range(20):
        solution = root(lambda g: phi(U @ g + u) - 0.9 * g, rng.normal(0, 3, 7), method="hybr", tol=1e-14)
        assert np.abs(solution.x - s).max() < 1e-10


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("minus", [False, True])
@pytest.mark.sample(3)
def test_implicit_gradient_agrees_with_500_unrolled_steps(activation, minus):
    cell = built(activation=activation, minus=minus)
    # Eq. 5 with a full U, K = 500, eta = 1: the same iteration, written out and differentiated step by step.
    unrolled = IncrementalRNNCell(
        3, 7, rank=7, projection_rank=0, inner_steps=500, eta=1.0, activation=activation, minus=minus, from_zero=True
    ).double()
    with torch.no_grad():
        unrolled.U.factors[0].copy_(cell.U - torch.eye(7, dtype=torch.float64))
        unrolled.from_input.load_state_dict(cell.from_input.state_dict())
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    weight = torch.randn(4, 2, 7, dtype=torch.float64)
    gradients = []
    for network, U in ((cell, cell.U), (unrolled, unrolled.U.factors[0])):
        states, _ = laws.run(network, x)
        network.zero_grad()
        (states.h * weight).sum().backward()
        gradients.append((states.h.detach(), U.grad, network.from_input.weight.grad, network.from_input.bias.grad))
    for implicit, explicit in zip(*gradients, strict=True):
        assert_close(implicit, explicit, rtol=0, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
def test_gradient_is_proportional_to_the_loss(scale):
    cell = built(activation="tanh").float()
    x = torch.randn(4, 2, 3)
    gradients = []
    for factor in (1.0, scale):
        cell.zero_grad()
        (factor * cell.project(x).s.square().sum()).backward()
        gradients.append(cell.U.grad / factor)
    assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def test_tiny_inputs_are_solved_to_relative_accuracy():
    cell = EquilibriumRNNCell(3, 7, bias=False)
    x = torch.randn(4, 2, 3)
    assert_close(cell.project(1e-9 * x).s * 1e9, cell.project(x).s, rtol=1e-4, atol=1e-6)


def test_second_derivative_where_the_cotangent_is_zero():
    """The Hessian of |s - target|^2 at its minimum is 2 J^T J, J being the implicit Jacobian."""
    cell = built(activation="tanh")
    x = torch.randn(1, 1, 3, dtype=torch.float64)
    target = cell.project(x).s.detach()
    J = torch.autograd.functional.jacobian(lambda x: cell.project(x).s.flatten(), x).reshape(7, 3)
    H = torch.autograd.functional.hessian(lambda x: (cell.project(x).s - target).square().sum(), x).reshape(3, 3)
    assert_close(H, 2 * J.T @ J, rtol=1e-9, atol=1e-9)


def test_exact_equilibrium_depends_only_on_parity():
    """h_T = sum_m (-1)^(T-m) s(x_m)."""
    cell = built()
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    s = cell.project(x).s
    signs = torch.tensor([(-1.0) ** (9 - m) for m in range(1, 10)], dtype=torch.float64)
    assert_close(laws.run(cell, x)[1].h, (signs[:, None, None] * s).sum(0), rtol=0, atol=1e-10)
    swapped = x[[2, 1, 0, 3, 4, 5, 6, 7, 8]]
    assert_close(laws.run(cell, swapped)[1].h, laws.run(cell, x)[1].h, rtol=0, atol=1e-10)


def test_equilibrium_stores_no_iterates():
    stored = {}
    for iterations in (10, 200):
        cell, total = built(iterations=iterations, tolerance=0.0), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, total=total: (total.append(t.numel()), t)[1], lambda t: t):
            cell.project(torch.randn(4, 2, 3, dtype=torch.float64))
        stored[iterations] = sum(total)
    assert stored[10] == stored[200]


def ode_error(steps, exponential, activation, end=2.0):
    """Distance of the cell's last state from scipy's solution, with x held constant."""
    torch.manual_seed(2)
    options = {"tau": 1.5, "alpha": 0.8, "gap": end / steps, "exponential": exponential, "activation": activation}
    cell = ContinuousRNNCell(2, 4, **options).double()
    x = torch.tensor([0.7, -1.2], dtype=torch.float64)
    U, u = cell.U.detach().numpy(), cell.from_input(x).detach().numpy()
    phi = np.tanh if activation == "tanh" else lambda a: 1 / (1 + np.exp(-a))
    exact = solve_ivp(lambda t, g: (phi(U @ g + u) - 0.8 * g) / 1.5, (0, end), np.zeros(4), rtol=1e-11, atol=1e-12)
    return np.abs(laws.run(cell, x.expand(steps, 1, 2))[1].h[0].detach().numpy() - exact.y[:, -1]).max()


@pytest.mark.parametrize("exponential", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
def test_continuous_steps_converge_to_the_ode_at_first_order(exponential, activation):
    errors = np.array([ode_error(steps, exponential, activation) for steps in (100, 200, 400)])
    orders = np.log2(errors[:-1] / errors[1:])
    assert (np.abs(orders - 1) < 0.1).all(), (errors, orders)


def test_continuous_reads_gaps_from_the_input():
    torch.manual_seed(3)
    regular = ContinuousRNNCell(2, 4, gap=0.3).double()
    irregular = ContinuousRNNCell(3, 4, gaps_in_input=True).double()
    irregular.load_state_dict(regular.state_dict())
    x = torch.randn(6, 2, 2, dtype=torch.float64)
    gaps = torch.full((6, 2, 1), 0.3, dtype=torch.float64)
    assert_close(laws.run(irregular, torch.cat([x, gaps], -1))[0].h, laws.run(regular, x)[0].h, rtol=1e-12, atol=1e-12)


def test_a_truncated_adjoint_breaks_the_implicit_gradient(monkeypatch):
    module = sys.modules["unfading.cells.equilibrium"]
    whole = module._settle
    calls = []

    def cut(f, s, iterations, tolerance):
        calls.append(s)
        return whole(f, s, iterations if len(calls) % 2 else 1, tolerance)

    monkeypatch.setattr(module, "_settle", cut)
    laws.fails(test_implicit_gradient_agrees_with_500_unrolled_steps, "tanh", False)
