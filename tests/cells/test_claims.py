"""Check by computation what cells declare about themselves and what the papers claim."""

import pytest
import torch
from torch.func import jacrev
from torch.testing import assert_close

from tests.helpers import laws
from tests.helpers.variants import every_cell_that_claims, name
from unfading.cells.incremental import IncrementalRNNCell
from unfading.cells.linear_unit import GatedLRUCell, LRUCell
from unfading.cells.lstm import LSTMCell, State
from unfading.initialise import orthogonal_
from unfading.reference import scan

N = 12


def orthogonal_cell(cell, options):
    """Square, every matrix orthogonal, every bias and peephole zero: the conditions of STAR's analysis."""
    instance = cell(N, N, **options).double()
    with torch.no_grad():
        for parameter in instance.parameters():
            blocks = len(parameter) // parameter.shape[-1]
            if parameter.dim() == 2 and blocks and len(parameter) == blocks * parameter.shape[1]:
                orthogonal_(parameter, blocks=blocks)
            else:
                parameter.zero_()
    return instance


def jacobians(cell, state):
    """dh/dx and dh/dh_{t-1} at zero input, with the other parts of the state fixed."""
    x = torch.zeros(1, 1, N, dtype=torch.float64)

    def h(x, h_before):
        inputs = cell.project(x)
        inputs = type(inputs)(*(field[0] for field in inputs))
        return cell.step(inputs, state._replace(h=h_before), cell.weights()).h[0]

    return jacrev(h, 0)(x, state.h)[:, 0, 0], jacrev(h, 1)(x, state.h)[:, 0]


@pytest.mark.parametrize(("cell", "options"), every_cell_that_claims("singular_values_at_zero"))
def test_declared_singular_values_at_zero(cell, options):
    instance = orthogonal_cell(cell, options)
    claim = instance.singular_values_at_zero
    for jacobian, (low, high) in zip(jacobians(instance, instance.initial_state(1)), claim, strict=True):
        values = torch.linalg.svdvals(jacobian)
        assert values.min() >= low - 1e-12
        assert values.max() <= high + 1e-12
        if low == high:
            assert_close(values, torch.full_like(values, low), rtol=0, atol=1e-12)
        else:
            assert values.max() - values.min() > 0.1 * (high - low), "the interval is wider than what it holds"


def test_lstm_gain_of_the_whole_state_is_larger_than_with_c_fixed():
    """STAR's 0.25 is for h with c fixed; the Jacobian of (h, c) has its largest singular value near 0.79, radius 0.75."""
    cell = orthogonal_cell(LSTMCell, {})
    inputs = cell.project(torch.zeros(1, 1, N, dtype=torch.float64))

    def step(both):
        h, c = both.chunk(2)
        new = cell.step(type(inputs)(inputs.a[0]), State(h[None], c[None]), cell.weights())
        return torch.cat([new.h[0], new.c[0]])

    jacobian = jacrev(step)(torch.zeros(2 * N, dtype=torch.float64))
    radius = torch.linalg.eigvals(jacobian).abs().max()
    top = torch.linalg.svdvals(jacobian).max()
    assert 0.70 < radius <= 0.75 + 1e-12
    assert abs(top - 0.79) < 0.01


@pytest.mark.parametrize(("cell", "options"), every_cell_that_claims("bounded_state"))
@pytest.mark.sample(25)
def test_declared_bound_of_the_output(cell, options):
    instance = laws.make(cell, options)
    x = 50 * torch.randn(200, 8, laws.I, *(laws.FRAME if instance.example_frame else ()), dtype=torch.float64)
    with torch.no_grad():
        for parameter in instance.parameters():
            parameter.mul_(3)
        output = instance.output(laws.run(instance, x)[0])
    assert output.abs().max() <= instance.bounded_state


# The incremental RNN: A_k = I + eta_k (phi' P U - alpha I), and what Theorem 1 says in the limit.


def incremental(K, *, eta, norm=None, **options):
    cell = IncrementalRNNCell(3, N, rank=N, inner_steps=K, eta=eta, activation="tanh", **options).double()
    if norm is not None:
        with torch.no_grad():
            # Eq. 5 with a full U of the given norm: P = I, U = I + dense.
            U = torch.randn(N, N, dtype=torch.float64)
            U *= norm / torch.linalg.matrix_norm(U, 2)
            cell.U.factors[0].copy_(U - torch.eye(N, dtype=torch.float64))
    return cell


def step_jacobian(cell, x, h):
    inputs = cell.project(x)
    inputs = type(inputs)(*(field[0] for field in inputs))
    return jacrev(lambda h: cell.step(inputs, cell.initial_state(1)._replace(h=h[None]), cell.weights()).h[0])(h)


@pytest.mark.parametrize(("from_zero", "minus", "c"), [(False, False, 2), (True, False, 1), (False, True, 0), (True, True, 1)])
@pytest.mark.parametrize("projection_rank", [None, 0])
@pytest.mark.parametrize("K", [1, 4])
def test_incremental_step_jacobian_identity(K, projection_rank, from_zero, minus, c):
    """dh_m/dh_{m-1} = c A_K...A_1 - I, or I - c A_K...A_1 for the -h form."""
    alpha = 0.8
    cell = incremental(K, eta=0.3, alpha=alpha, projection_rank=projection_rank, from_zero=from_zero, minus=minus)
    with torch.no_grad():
        cell.eta.add_(0.1 * torch.randn_like(cell.eta))
    x, h = torch.randn(1, 1, 3, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    eye = torch.eye(N, dtype=torch.float64)
    U = eye + cell.U.factors[0].detach()
    P = U if projection_rank is None else eye
    W, b = cell.from_input.weight.detach(), cell.from_input.bias.detach()
    old = -h if minus else h
    g = torch.zeros(N, dtype=torch.float64) if from_zero else h
    product = eye
    for eta in cell.eta.detach()[0]:
        argument = P @ (U @ (g + old) + W @ x[0, 0] + b)
        slope = torch.diag(1 - torch.tanh(argument) ** 2)
        product = (eye + eta * (slope @ P @ U - alpha * eye)) @ product
        g = g + eta * (torch.tanh(argument) - alpha * (g + old))
    want = eye - c * product if minus else c * product - eye
    assert_close(step_jacobian(cell, x, h), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("from_zero", [False, True])
def test_incremental_jacobian_tends_to_minus_identity_where_the_theorem_holds(from_zero):
    """Theorem 1: ||U|| = 0.6 alpha, eta alpha <= 1, K -> infinity."""
    alpha = 0.9
    cell = incremental(2000, eta=0.5, norm=0.6 * alpha, alpha=alpha, projection_rank=0, from_zero=from_zero)
    x, h = torch.randn(1, 1, 3, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    assert_close(step_jacobian(cell, x, h), -torch.eye(N, dtype=torch.float64), rtol=0, atol=1e-12)


def test_incremental_with_published_initial_values_is_a_residual_network():
    """At eta = 0.01 with g_0 = h the Jacobian is near +I, not near the theorem's -I; with g_0 = 0 it is near zero."""
    x, h = torch.randn(1, 1, 3, dtype=torch.float64), torch.randn(128, dtype=torch.float64)
    diagonals = []
    for from_zero in (False, True):
        cell = IncrementalRNNCell(3, 128, rank=16, inner_steps=1, from_zero=from_zero).double()
        diagonals.append(step_jacobian(cell, x, h).diagonal().mean().item())
    assert abs(diagonals[0] - 0.98) < 0.02
    assert abs(diagonals[1]) < 0.02


@pytest.mark.parametrize("rank", [3, N])
@pytest.mark.parametrize("projection_rank", [None, 2, N])
def test_incremental_eq_9_is_eq_5_with_merged_weights(rank, projection_rank):
    """phi(P [U s + W x + b]) = phi((P U) s + P W x + P b)."""
    nine = IncrementalRNNCell(3, N, rank=rank, projection_rank=projection_rank, inner_steps=3, eta=0.2).double()
    five = IncrementalRNNCell(3, N, rank=N, projection_rank=0, inner_steps=3, eta=0.2).double()
    eye = torch.eye(N, dtype=torch.float64)
    with torch.no_grad():
        nine.from_input.bias.normal_()
        dense = [
            m.factors[0] if len(m.factors) == 1 else m.factors[0] @ m.factors[1] for m in (nine.U, nine.P) if m is not None
        ]
        U = eye + dense[0]
        P = U if projection_rank is None else eye + dense[1]
        five.U.factors[0].copy_(P @ U - eye)
        five.from_input.weight.copy_(P @ nine.from_input.weight)
        five.from_input.bias.copy_(P @ nine.from_input.bias)
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    assert_close(laws.run(nine, x)[0].h, laws.run(five, x)[0].h, rtol=1e-12, atol=1e-12)


def test_incremental_accumulator_has_no_gradient_of_its_matrix():
    """The -h form with g_0 = h at K = 1 and P = I: J = I exactly, and U is never used."""
    cell = IncrementalRNNCell(3, 5, inner_steps=1, minus=True, projection_rank=0).double()
    x, h = torch.randn(1, 1, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    assert_close(step_jacobian(cell, x, h), torch.eye(5, dtype=torch.float64), rtol=0, atol=0)
    laws.run(cell, torch.randn(6, 2, 3, dtype=torch.float64))[0].h.sum().backward()
    assert all((factor.grad == 0).all() for factor in cell.U.factors)
    assert cell.from_input.weight.grad.abs().sum() > 0


def test_incremental_uses_the_last_row_of_eta_past_the_table():
    cell = IncrementalRNNCell(3, 5, steps=4, inner_steps=2)
    with torch.no_grad():
        cell.eta.copy_(torch.arange(8.0).reshape(4, 2))
    eta = cell.project(torch.zeros(5, 1, 3), start=2).eta[:, 0]
    assert eta.tolist() == [[4, 5], [6, 7], [6, 7], [6, 7], [6, 7]]


@pytest.mark.parametrize(("rank", "usual"), [(64, 0.1), (300, 0.3 / 300**0.5)])
def test_incremental_starts_with_the_given_standard_deviation(rank, usual):
    for std in (None, 0.01):
        cell = IncrementalRNNCell(3, 300, rank=rank, std=std)
        for factor in cell.U.factors:
            assert factor.std().item() == pytest.approx(usual if std is None else std, rel=0.02)


# LRU and GatedLRU: complex units that do not read each other.


def complex_state(h):
    return torch.complex(*h.chunk(2, dim=-1))


def eigenvalues(cell):
    return torch.exp(torch.complex(-torch.exp(cell.nu), torch.exp(cell.theta))).detach()


def steps_of(cell, z, h, *, argument=None):
    """The states after the inputs z [T, 1, N], complex, from the state h; argument of r is that of GatedLRU's gate."""
    parts = [z.real, z.imag] if argument is None else [z.real, z.imag, argument]
    inputs = cell.project(torch.zeros(len(z), 1, N, dtype=torch.float64))._replace(z=torch.cat(parts, dim=-1))
    state = cell.initial_state(1)._replace(h=torch.cat([h.real, h.imag], dim=-1))
    return complex_state(scan(cell, inputs, state, cell.weights())[0].h).detach()


def noise(*shape):
    return torch.randn(*shape, dtype=torch.complex128)


def test_lru_without_input_turns_and_decays_by_its_eigenvalues():
    """h_t = lambda^t h_0, so that a gradient over t steps has the factor |lambda|^t, exactly and for any input."""
    cell, h, t = LRUCell(N, N, bias=False).double(), noise(1, N), 500
    found = steps_of(cell, torch.zeros(t, 1, N, dtype=torch.complex128), h)
    powers = eigenvalues(cell) ** torch.arange(1, t + 1)[:, None, None]
    assert_close(found, powers * h, rtol=1e-11, atol=0)
    inputs = noise(t, 1, N)
    difference = steps_of(cell, inputs, h) - steps_of(cell, inputs, torch.zeros_like(h))
    assert_close(difference, powers * h, rtol=0, atol=1e-12)


def test_gated_lru_with_a_closed_gate_keeps_its_state_and_reads_nothing():
    cell, h = GatedLRUCell(N, N).double(), noise(1, N)
    closed = steps_of(cell, noise(100, 1, N), h, argument=torch.full((100, 1, N), -60.0, dtype=torch.float64))
    # g is at least 1e-6, since its derivative at 0 is infinite.
    assert_close(closed, h.expand_as(closed), rtol=0, atol=1e-4)


def test_gated_lru_with_an_open_gate_is_lru():
    gated, plain = GatedLRUCell(N, N).double(), LRUCell(N, N).double()
    with torch.no_grad():
        plain.nu.copy_(gated.nu)
        plain.theta.copy_(gated.theta)
    z, h = noise(20, 1, N), noise(1, N)
    opened = steps_of(gated, z, h, argument=torch.full((20, 1, N), 60.0, dtype=torch.float64))
    assert_close(opened, steps_of(plain, z, h), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", [LRUCell, GatedLRUCell], ids=name)
def test_the_variance_of_linear_units_does_not_depend_on_their_eigenvalues(cell):
    """For white noise z of variance 1 it is the sum of the squared weights of all z in h_T, 1 - |lambda|^(2 S), where S is the
    sum of the r_t (T in LRU). It tends to 1 for every lambda."""
    T, instance = 60, cell(N, N, r_min=0.5, r_max=0.97).double()
    argument = torch.randn(T, 1, N, dtype=torch.float64) if cell is GatedLRUCell else None
    passed = T if argument is None else torch.sigmoid(argument).sum(0)
    weights = []
    for k in range(T):
        impulse = torch.zeros(T, 1, N, dtype=torch.complex128)
        impulse[k] = 1
        weights.append(steps_of(instance, impulse, torch.zeros(1, N, dtype=torch.complex128), argument=argument)[-1])
    variance = torch.stack(weights).abs().square().sum(0)
    modulus = eigenvalues(instance).abs()
    assert_close(variance, (1 - modulus ** (2 * passed)).expand_as(variance), rtol=1e-11, atol=0)
    assert modulus.max() - modulus.min() > 0.2
    assert variance.min() > 0.8
