"""The measurements of incremental cells agree with brute force in float64."""

import json

import numpy as np
import pytest
import torch
from scipy.optimize import root
from torch.func import jacrev
from torch.testing import assert_close

from tests.helpers import laws
from tests.helpers.variants import every_cell, sampled
from unfading.cells.equilibrium import EquilibriumRNNCell
from unfading.cells.incremental import IncrementalRNNCell, InnerStepsCell
from unfading.cells.star import STARCell
from unfading.diagnostics.equilibrium.analysis import eigenvalue_shares, equilibrium
from unfading.diagnostics.equilibrium.fixed_point import convergence, equilibria, scipy_root
from unfading.diagnostics.equilibrium.inner_path import (
    end_points,
    inner_path,
    matrix_norm,
    observed_path,
    pull_jacobians,
    start_points,
)
from unfading.diagnostics.equilibrium.inner_steps import conditions, input_response, step_jacobians
from unfading.diagnostics.measure.observe import observe
from unfading.layers.factory import layer
from unfading.tasks.base import Batch

D = 12
PHI = {"tanh": np.tanh, "relu": lambda a: np.maximum(a, 0), "sigmoid": lambda a: 1 / (1 + np.exp(-a))}
INCREMENTAL = [param for param in every_cell() if issubclass(param.values[0], InnerStepsCell)]


def contractive(activation="tanh", *, eta=0.5, alpha=1.0, norm=0.6, seed=0, **options):
    """Eq. 5 with a full U of norm 0.6 alpha, which satisfies the assumptions of the propositions."""
    torch.manual_seed(seed)
    cell = IncrementalRNNCell(
        3, D, **{"rank": D, "projection_rank": 0, "inner_steps": 4, **options}, eta=eta, alpha=alpha, activation=activation
    ).double()
    with torch.no_grad():
        U = torch.randn(D, D, dtype=torch.float64)
        cell.U.factors[0].copy_(norm * alpha / torch.linalg.matrix_norm(U, 2) * U - torch.eye(D))
        cell.from_input.weight.normal_()
        cell.from_input.bias.normal_()
    return cell


def inputs(T=5, B=2):
    return torch.randn(T, B, 3, dtype=torch.float64)


@pytest.mark.parametrize(("cell", "options"), INCREMENTAL)
def test_the_path_ends_where_the_cell_does(cell, options):
    own = laws.make(cell, options)
    x = laws.random_input()
    path = inner_path(own, x, start=2)
    assert_close(path.h[1:], laws.run(own, x, start=2)[0].h.detach(), **laws.EXACT)
    before = -path.h[:-1] if own.minus else path.h[:-1]
    assert_close(path.s[:, -1], path.h[1:] + before, **laws.EXACT)


@pytest.mark.parametrize(("cell", "options"), INCREMENTAL)
@pytest.mark.sample(6)
def test_the_path_of_observed_steps_is_part_of_the_whole_path(cell, options):
    rnn = layer(cell)(3, 8, dtype=torch.float64, **{"steps": 6, **options})
    with torch.no_grad():
        rnn.cells[0].eta.add_(0.1 * torch.rand_like(rnn.cells[0].eta))
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    again = observed_path(observe(rnn, Batch(x, x)).chains[0], [1, 2, 5], [2, 0])
    path = inner_path(rnn.cells[0], x[:, [2, 0]])
    for field in ("s", "u", "eta"):
        assert_close(getattr(again, field), getattr(path, field)[[1, 2, 5]].detach(), **laws.EXACT)
    assert_close(again.h, path.h[[1, 2, 5, 6]].detach(), **laws.EXACT)


def test_a_cell_in_float32_is_measured_in_float64_and_not_changed():
    cell = contractive().float()
    before = {name: value.clone() for name, value in cell.state_dict().items()}
    path = inner_path(cell, inputs())
    assert path.s.dtype == torch.float64
    assert all(torch.equal(value, before[name]) for name, value in cell.state_dict().items())


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
def test_pull_jacobians_are_phi_prime_M_minus_alpha(activation):
    cell = contractive(activation, alpha=0.8)
    path = inner_path(cell, inputs())
    s, u, _ = end_points(path)
    a = s @ path.weights.M.T + u
    slope = {"tanh": 1 - torch.tanh(a) ** 2, "relu": (a > 0).double(), "sigmoid": torch.sigmoid(a) * (1 - torch.sigmoid(a))}
    want = slope[activation].unsqueeze(-1) * path.weights.M - 0.8 * torch.eye(D, dtype=torch.float64)
    assert_close(pull_jacobians(path, s, u), want.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
def test_equilibria_are_the_roots_that_scipy_finds_from_another_start(activation):
    cell = contractive(activation, alpha=0.9)
    path = inner_path(cell, inputs(T=3, B=4))
    s, u, _ = end_points(path)
    near = equilibria(path, s, u)
    assert near.converged.all()
    M, phi, rng = path.weights.M.detach().numpy(), PHI[activation], np.random.default_rng(0)
    for ours, part in zip(near.s.numpy(), u.numpy(), strict=True):
        theirs = root(lambda g, part=part: phi(M @ g + part) - 0.9 * g, rng.normal(0, 3, D), method="hybr", tol=1e-14).x
        assert np.abs(ours - theirs).max() < 1e-10
    assert_close(scipy_root(path, s[0], u[0]), near.s[0], rtol=0, atol=1e-10)


def test_no_equilibrium_is_reported_if_there_is_none():
    """relu(s + 1) = s has no solution."""
    cell = contractive("relu")
    with torch.no_grad():
        cell.U.factors[0].zero_()
        cell.from_input.weight.zero_()
        cell.from_input.bias.fill_(1.0)
    path = inner_path(cell, inputs())
    s, u, _ = end_points(path)
    assert not equilibria(path, s, u).converged.any()
    result = equilibrium(cell, inputs())
    assert result.found == 0
    assert result.convergence is None
    assert result.input_response is None
    assert result.hypotheses is False
    assert result.eigenvalues["zero"] == 1
    assert json.loads(json.dumps(result._asdict()))["distance"] == [None] * 5


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("eta", [0.1, 0.5, 1.0])
@pytest.mark.sample(4)
def test_fitted_rate_is_the_spectral_radius_and_under_the_bound(activation, eta):
    for seed in range(6):
        cell = contractive(activation, eta=eta, seed=seed)
        path = inner_path(cell, inputs(T=2, B=1))
        near = equilibria(path, path.s[-1, -1], path.u[-1])
        fit = convergence(path, path.s[-1, 0, 0], path.u[-1, 0], near.s[0], eta)
        assert abs(fit.fitted_rate / fit.spectral_radius - 1) < 0.02
        assert fit.bound == pytest.approx(1 - eta + 0.6 * eta)
        assert fit.fitted_rate <= fit.bound
        assert fit.bound_holds
        # Proposition 2 with its missing exponent, at every step; rounding errors are far below 1e-12 here.
        d = np.array(fit.distances)
        assert (d[1:] <= fit.bound ** np.arange(len(d) - 1) * d[1] + 1e-12).all()
        assert d[-1] < 1e-6 * d[0]


def test_the_bound_is_not_checked_if_its_assumptions_do_not_hold():
    for options in ({"norm": 1.5}, {"eta": 1.5}, {"eta": -0.1}):
        cell = contractive(**options)
        path = inner_path(cell, inputs(T=1, B=1))
        near = equilibria(path, path.s[-1, -1], path.u[-1])
        assert convergence(path, path.s[-1, 0, 0], path.u[-1, 0], near.s[0], float(path.eta[0, 0])).bound_holds is None


def test_conditions_as_the_paper_prints_them():
    cell = contractive("tanh", norm=2.0, eta=0.7)
    with torch.no_grad():
        cell.eta.add_(0.4 * torch.randn_like(cell.eta))
    path = inner_path(cell, inputs())
    points = start_points(path)
    at_points = conditions(path, points)
    assert len(at_points.theorem_2) == 5 * 4 * 2
    for i, (s, u, eta) in enumerate(zip(*points, strict=True)):
        F = cell.pull(s, u, path.weights).detach()
        dF = jacrev(lambda s, u=u: cell.pull(s, u, path.weights))(s).detach()
        printed = eta**2 * (dF @ F).norm() ** 2 + 2 * eta * F @ dF @ F
        assert bool(printed < 0) == bool(at_points.theorem_2[i] < 1)
        assert_close(at_points.theorem_2[i] ** 2, 1 + printed / F.norm() ** 2, rtol=1e-8, atol=1e-8)
        A = torch.eye(D, dtype=torch.float64) + eta * dF
        assert_close(at_points.corollary_1[i], torch.linalg.svdvals(A)[0], rtol=1e-10, atol=1e-10)
        want, got = (np.sort_complex(np.round(e.numpy(), 8)) for e in (torch.linalg.eigvals(dF), at_points.eigenvalues[i]))
        assert np.abs(want - got).max() < 1e-7
    assert 0 < (at_points.theorem_2 < 1).double().mean() < 1, "one-sided: the test would not see a wrong sign"


@pytest.mark.parametrize("minus", [False, True])
@pytest.mark.parametrize("from_zero", [False, True])
def test_step_jacobians_are_those_of_the_step_itself(minus, from_zero):
    """The identity dh_m/dh_{m-1} = c A_K ... A_1 - I, at every K, to 1e-12."""
    for K in (1, 3, 6):
        cell = contractive(eta=0.4, alpha=0.8, inner_steps=K, minus=minus, from_zero=from_zero)
        x = inputs(T=3)
        path = inner_path(cell, x)
        u = type(cell.project(x))(*(field[-1] for field in cell.project(x)))

        def step(h, cell=cell, u=u):
            both = u._replace(u=u.u[1:2])
            return cell.step(both, cell.initial_state(1)._replace(h=h[None]), cell.weights()).h[0]

        want = jacrev(step)(path.h[-2, 1]).detach()
        assert_close(step_jacobians(path, 2, 1, K)[-1], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("minus", "limit"), [(False, -1.0), (True, 1.0)])
def test_step_jacobian_converges_to_the_limit_of_theorem_1(minus, limit):
    """The limit is also the exact Jacobian of EquilibriumRNN."""
    cell = contractive(minus=minus, from_zero=True)
    jacobians = step_jacobians(inner_path(cell, inputs(T=1)), 0, 0, 200)
    assert_close(jacobians[-1], limit * torch.eye(D, dtype=torch.float64), rtol=0, atol=1e-12)
    assert EquilibriumRNNCell(3, D, minus=minus).jacobian_at_equilibrium == limit


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("projection_rank", [0, 4, None])
def test_input_response_is_the_formula_of_section_3_2(activation, projection_rank):
    cell = contractive(activation, alpha=0.9, projection_rank=projection_rank, norm=0.5)
    x = inputs()
    path = inner_path(cell, x)
    near = equilibria(path, path.s[-1, -1], path.u[-1])
    assert near.converged.all()
    response = input_response(path, x[-1, 0], near.s[0])
    # (alpha I - phi' P U)^{-1} phi' P W, written out.
    U = cell.U().detach()
    P = (
        U
        if projection_rank is None
        else torch.eye(D, dtype=torch.float64)
        if projection_rank == 0
        else cell.P().dense().detach()
    )
    W, b = cell.from_input.weight.detach(), cell.from_input.bias.detach()
    a = P @ (U @ near.s[0] + W @ x[-1, 0] + b)
    slope = torch.diag(
        {"tanh": 1 - torch.tanh(a) ** 2, "relu": (a > 0).double(), "sigmoid": torch.sigmoid(a) * torch.sigmoid(-a)}[activation]
    )
    want = torch.linalg.solve(0.9 * torch.eye(D, dtype=torch.float64) - slope @ P @ U, slope @ P @ W)
    assert_close(response.formula, want, rtol=0, atol=1e-12)
    assert_close(response.measured, want, rtol=0, atol=1e-8)
    assert response.smallest > 0.1


def test_input_response_agrees_with_the_solved_cell():
    """The implicit derivative of EquilibriumRNN is a third, independent computation."""
    cell = contractive("tanh")
    solved = EquilibriumRNNCell(3, D, activation="tanh").double()
    with torch.no_grad():
        solved.U.copy_(cell.U())
        solved.from_input.load_state_dict(cell.from_input.state_dict())
    x = inputs(T=1, B=1)
    path = inner_path(cell, x)
    near = equilibria(path, path.s[-1, -1], path.u[-1])
    want = jacrev(lambda x: solved.project(x[None, None]).s[0, 0])(x[0, 0]).detach()
    assert_close(input_response(path, x[0, 0], near.s[0]).formula, want, rtol=0, atol=1e-10)


def test_the_form_of_the_experiments_has_zero_eigenvalues_and_breaks_corollary_1():
    """With ReLU and rank r, each active unit beyond the first r gives an eigenvalue of exactly zero."""
    torch.manual_seed(0)
    cell = IncrementalRNNCell(3, 32, rank=4).double()
    path = inner_path(cell, inputs(T=10))
    points = end_points(path)
    on = (points.s @ path.weights.M.dense().T + points.u > 0).sum(1)
    values = conditions(path, points).eigenvalues
    assert (((values.abs() < 1e-7).sum(1)) >= on - 4).all()
    assert (on > 4).any()
    result = equilibrium(cell, inputs(T=10))
    assert result.matrix_norm > 1
    assert result.hypotheses is False
    assert result.corollary_1["holds"] == 0


def test_if_the_hypotheses_hold_all_claims_of_the_paper_hold():
    for minus in (False, True):
        result = equilibrium(contractive(minus=minus, from_zero=True), inputs(T=6))
        assert result.hypotheses
        assert result.matrix_norm == pytest.approx(0.6)
        assert result.found == 1
        assert result.scipy_gap < 1e-10
        assert result.theorem_2["holds"] == result.corollary_1["holds"] == 1
        assert len(result.theorem_2["worst_of_step"]) == 6
        assert result.eigenvalues["points_all_negative"] == 1
        assert result.input_response["gap"] < 1e-8
        assert result.jacobians[-1]["K"] == 30
        assert result.jacobians[-1]["from_limit"] < 1e-3
        json.dumps(result._asdict(), allow_nan=False)


@pytest.mark.parametrize(
    ("cell", "options"), sampled(INCREMENTAL, ["IncrementalRNN", "StableIncrementalRNN", "DeepTransition"])
)
@pytest.mark.sample(1)
def test_every_incremental_cell_can_be_measured(cell, options):
    own = laws.make(cell, options)
    result = equilibrium(own, laws.random_input(), inner_steps=3)
    assert (result.matrix_norm is None) == (cell.__name__ == "DeepTransitionCell")
    json.dumps(result._asdict(), allow_nan=False)


def test_eta_is_summarised_by_sign_and_range():
    cell = contractive(steps=5, inner_steps=2, eta=0.5)
    with torch.no_grad():
        cell.eta[0, 0], cell.eta[1, 1] = -0.25, 1.25
    eta = equilibrium(cell, inputs(T=5)).eta
    assert (eta["least"], eta["most"], eta["negative"], eta["above_1_over_alpha"]) == (-0.25, 1.25, 0.1, 0.1)
    assert eta["mean_of_inner_step"] == pytest.approx([0.35, 0.65])


def test_eigenvalue_shares():
    shares = eigenvalue_shares(torch.tensor([[-1.0, 0.0, 0.5, -0.2], [-1.0, -1.0, -0.1, -3.0]], dtype=torch.complex128), 1.0)
    assert shares["negative"] == 6 / 8
    assert shares["zero"] == shares["positive"] == 1 / 8
    assert shares["minus_alpha"] == 3 / 8
    assert shares["points_all_negative"] == 1 / 2
    assert (shares["largest"], shares["least"]) == (0.5, -3.0)


def test_an_inner_network_has_no_matrix_norm():
    from unfading.cells.deep import DeepTransitionCell

    assert matrix_norm(inner_path(DeepTransitionCell(3, 4), inputs())) is None


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: equilibrium(STARCell(3, 4), inputs()), "cells that take inner steps towards one .* got STARCell"),
        (lambda: equilibrium(contractive(), inputs()[0]), r"x must be \[T, B, 3\] with T and B at least 1; got \[2, 3\]"),
        (lambda: equilibrium(contractive(), inputs(), rows=0), "rows must be at least 1; got 0"),
        (
            lambda: equilibrium(contractive("relu", norm=30.0, eta=1.0), inputs(T=200)),
            r"the state overflows at step \d+ of 200",
        ),
    ],
)
def test_wrong_arguments(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()
