"""Matrices that keep their structure in training, and the properties that their papers promise."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.helpers import laws
from tests.helpers.variants import defaults_of, every_cell, every_cell_that_claims
from unfading.cells.antisymmetric import AntisymmetricRNNCell
from unfading.cells.incremental import IncrementalRNNCell
from unfading.cells.spectral import SpectralRNNCell
from unfading.cells.stable import StableIncrementalRNNCell

EXACT = {"rtol": 0, "atol": 1e-12}


def trained(cases):
    """A thousand steps take seconds. `make test` takes 200 steps with default options."""
    for case in cases:
        yield pytest.param(*case.values, 1000, id=f"{case.id}-1000", marks=pytest.mark.long)
        if not case.values[1]:
            yield pytest.param(*case.values, 200, id=f"{case.id}-200")


@pytest.mark.parametrize(("cell", "options", "steps"), [*trained(every_cell_that_claims("orthogonal_recurrence"))])
@pytest.mark.sample(2)
def test_orthogonal_after_many_steps_of_adam(cell, options, steps):
    instance = laws.make(cell, options)
    optimiser = torch.optim.Adam(instance.parameters(), lr=1e-2)
    x = laws.random_input(T=3, B=2)
    target = torch.randn(3, 2, instance.output_size, dtype=torch.float64)
    start = getattr(instance.weights(), instance.orthogonal_recurrence).detach()
    for _ in range(steps):
        loss = (instance.output(laws.run(instance, x)[0]) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    W = getattr(instance.weights(), instance.orthogonal_recurrence).detach()
    assert (W - start).abs().max() > 0.1, "training has not moved the matrix"
    assert_close(W @ W.T, torch.eye(len(W), dtype=torch.float64), **EXACT)


def structured():
    """Cells whose weights are computed from their parameters."""
    return defaults_of([p for p in every_cell() if _reparametrises(*p.values)])


def _reparametrises(cell, options):
    instance = laws.make(cell, options)
    own = {id(parameter) for parameter in instance.parameters()}
    return any(leaf.requires_grad and id(leaf) not in own for leaf in torch.utils._pytree.tree_leaves(instance.weights()))


@pytest.mark.parametrize(("cell", "options"), structured())
@pytest.mark.sample(8)
def test_parametrisations_have_the_right_gradient(cell, options):
    instance = laws.make(cell, options)
    names = [name for name, _ in instance.named_parameters()]

    def matrices(*values):
        weights = torch.func.functional_call(Build(instance), {f"cell.{n}": v for n, v in zip(names, values, strict=True)}, ())
        return tuple(torch.utils._pytree.tree_leaves(weights))

    assert torch.autograd.gradcheck(matrices, [p.detach().clone().requires_grad_() for p in instance.parameters()])


class Build(torch.nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self):
        return self.cell.weights()


def test_deep_transition_copies_a_given_network():
    network = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh())
    layer = unfading.DeepTransition(2, 5, 2, network=network)
    for cell in layer.cells:
        assert cell.f is not network
        assert torch.equal(cell.f[0].weight, network[0].weight)
    assert layer.cells[0].f[0].weight is not layer.cells[1].f[0].weight
    with pytest.raises(ValueError, match=r"must map \[B, 5\] to \[B, 5\], the hidden size; got \[2, 1\]"):
        unfading.DeepTransition(2, 5, network=torch.nn.Linear(5, 1))


@pytest.mark.parametrize("reflectors", [1, 4, 12])
def test_spectral_singular_values_stay_within_the_margin(reflectors):
    cell = SpectralRNNCell(2, 12, reflectors=reflectors, margin=0.2).double()
    with torch.no_grad():
        cell.p.normal_(0, 30)
        W = cell.weights().W_h
        values = torch.linalg.svdvals(W)
    assert values.max() <= 1.2 + 1e-12
    assert values.min() >= 0.8 - 1e-12
    assert values.max() - values.min() > 0.3


def test_antisymmetric_eigenvalues_lie_on_a_line():
    cell = AntisymmetricRNNCell(2, 9, gamma=0.3).double()
    eigenvalues = torch.linalg.eigvals(cell.weights().A)
    assert_close(eigenvalues.real, torch.full((9,), -0.3, dtype=torch.float64), **EXACT)
    assert eigenvalues.imag.abs().max() > 0.1


def test_soft_orthogonal_penalty_reaches_the_layer():
    cell = unfading.SoftOrthogonalRNN(2, 5, strength=0.5, dtype=torch.float64).cells[0]
    assert abs(cell.penalty().item()) < 1e-12
    with torch.no_grad():
        cell.W_h.mul_(2)
    assert_close(cell.penalty(), torch.tensor(0.5 * 5 * 9.0, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    layer = unfading.SoftOrthogonalRNN(2, 5, 3, zoneout=0.1)
    with torch.no_grad():
        layer.cells[1].W_h.mul_(2)
    assert_close(layer.penalty(), sum(c.penalty() for c in layer.cells))
    layer.penalty().backward()
    assert layer.cells[1].W_h.grad.abs().sum() > 0
    assert unfading.STAR(2, 5).penalty() is None


@pytest.mark.parametrize(("cell", "options"), every_cell_that_claims("jacobian_at_equilibrium"))
def test_declared_jacobian_at_equilibrium(cell, options):
    instance = laws.make(cell, options)
    inputs = instance.project(laws.random_input()[:1, :1])
    inputs = type(inputs)(*(field[0] for field in inputs))
    h = torch.randn(instance.output_size, dtype=torch.float64)
    jacobian = torch.func.jacrev(
        lambda h: instance.step(inputs, instance.initial_state(1)._replace(h=h[None]), instance.weights()).h[0]
    )(h)
    assert_close(
        jacobian, instance.jacobian_at_equilibrium * torch.eye(instance.output_size, dtype=torch.float64), rtol=0, atol=0
    )


def stable(rng, D):
    """Random A, B, C of random size, a step size within the bound, ReLU slopes, alpha; S = M - alpha I."""
    alpha = rng.uniform(0.2, 2.0)
    q = int(rng.integers(1, D + 1))
    cell = StableIncrementalRNNCell(1, D, rank=q, alpha=alpha).double()
    with torch.no_grad():
        for factor in (cell.A, cell.B, cell.C):
            factor.copy_(torch.from_numpy(rng.normal(0, rng.uniform(0.05, 1.5), (D, q))))
        M = cell.weights().M.dense().numpy()
    return alpha, M, M - alpha * np.eye(D)


def test_stable_incremental_bounds():
    """1,000 random matrices: no eigenvalue of D M - alpha I to the right of 0, and both bounds of the docstring."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        D = int(rng.integers(1, 9))
        alpha, M, S = stable(rng, D)
        slopes = np.diag(rng.integers(0, 2, D).astype(float))
        eta = rng.uniform(0, 1 / alpha)
        field = slopes @ M - alpha * np.eye(D)
        assert np.linalg.eigvals(field).real.max() <= 1e-10
        step, norm = np.eye(D) + eta * field, np.linalg.norm(S, 2)
        assert np.abs(np.linalg.eigvals(step)).max() <= np.sqrt(1 + (eta * norm) ** 2) + 1e-10
        assert np.linalg.norm(step, 2) <= 1 + eta * norm + 1e-10


@pytest.mark.parametrize("kind", [IncrementalRNNCell, StableIncrementalRNNCell])
def test_a_bounded_eta_stays_in_its_interval(kind):
    cell = kind(1, 5, bounded_eta=True, alpha=2.0, eta=0.1, steps=3, inner_steps=1).double()
    assert_close(cell.step_sizes(0, 3), torch.full((3, 1, 1), 0.1, dtype=torch.float64), rtol=1e-6, atol=0)
    with torch.no_grad():
        cell.eta.copy_(torch.tensor([[-50.0], [0.0], [50.0]]))
    eta = cell.step_sizes(0, 3).flatten()
    assert eta.min() >= 0
    assert eta.max() <= 0.5
