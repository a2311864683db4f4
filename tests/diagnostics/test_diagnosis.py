"""Jacobians, norms over the lag, gradients, activations and memory maps agree with brute-force autograd."""

import inspect
import math

import pytest
import torch
from scipy import stats
from torch import nn

import unfading
from tests.helpers.variants import defaults_of, every_cell, hidden_size, name, sampled
from unfading import catalogue
from unfading.diagnostics.measure import jacobian, lag, memory, random_probes, saturation
from unfading.diagnostics.measure.observe import observe
from unfading.layers.factory import layer
from unfading.tasks.base import Batch

# Everything is in float64, so only the order of sums over a few steps of a few units differs.
CLOSE = {"rtol": 1e-8, "atol": 1e-10}
T, B, I = 6, 3, 4
CELLS = pytest.mark.parametrize("cell", [pytest.param(c, id=name(c)) for c in catalogue.cells()])
SOME = pytest.mark.parametrize("cell", sampled(catalogue.cells()))


def chain_of(cell):
    # A cell with a table over steps behaves differently at each step; the noise makes every parameter non-zero.
    counts = {"steps": T} if "steps" in inspect.signature(cell).parameters else {}
    rnn = layer(cell)(I, hidden_size(cell), dtype=torch.float64, **counts)
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    x = torch.randn(T, B, I, dtype=torch.float64)
    return observe(rnn, Batch(x, x)).chains[0]


def onward(chain, t, row):
    """The whole state after the last step as a function of the whole state after t steps."""
    sizes = list(chain.parts.values())

    def run(flat):
        state = type(chain.states[0])(*flat.split(sizes, dim=-1))
        for s in range(t, int(chain.ends[row])):
            one = [v if v.shape[0] == 1 else v[row : row + 1] for v in leaves(chain.inputs[s])]
            state = chain.cell.step(rebuilt(chain.inputs[s], one), state, chain.weights)
        return torch.cat(list(state), dim=-1)

    return run


def leaves(inputs):
    return torch.utils._pytree.tree_leaves(inputs)


def rebuilt(inputs, values):
    return torch.utils._pytree.tree_unflatten(values, torch.utils._pytree.tree_structure(inputs))


def at(chain, t, row):
    return torch.cat([part[row : row + 1] for part in chain.states[t]], dim=-1).detach()


def brute(chain, t, row):
    """ds_T/ds_t [n, n]"""
    n = chain.size
    return torch.autograd.functional.jacobian(onward(chain, t, row), at(chain, t, row)).reshape(n, n)


@pytest.mark.parametrize(("cell", "options"), defaults_of(every_cell()))
@pytest.mark.sample(9)
def test_observing_does_not_change_the_output(cell, options):
    rnn = layer(cell)(I, hidden_size(cell, options), num_layers=2, bidirectional=True, dtype=torch.float64, **options)
    x, lengths = torch.randn(T, B, I, dtype=torch.float64), torch.tensor([T, 1, 3])
    watched = observe(rnn, Batch(x, x, lengths)).prediction
    with unfading.use_backend("reference"):
        output, _ = rnn.eval()(x, lengths=lengths)
    torch.testing.assert_close(watched, output, **CLOSE)


@SOME
@pytest.mark.sample(2)
def test_step_jacobians_are_those_of_autograd(cell):
    chain = chain_of(cell)
    J = jacobian.state_jacobians(chain, [0, 3, T - 1], [2, 0])
    K = jacobian.input_jacobians(chain, [0, 3, T - 1], [2, 0])
    for i, t in enumerate([0, 3, T - 1]):
        for k, row in enumerate([2, 0]):
            # The step from t to t + 1, for this row only.
            one = [v if v.shape[0] == 1 else v[row : row + 1] for v in leaves(chain.inputs[t])]
            sizes = list(chain.parts.values())

            def step(flat, t=t, one=one, sizes=sizes):
                state = type(chain.states[0])(*flat.split(sizes, dim=-1))
                return torch.cat(list(chain.cell.step(rebuilt(chain.inputs[t], one), state, chain.weights)), dim=-1)

            want = torch.autograd.functional.jacobian(step, at(chain, t, row)).reshape(chain.size, chain.size)
            torch.testing.assert_close(J[i, k], want, **CLOSE)

            def fed(x, t=t, row=row):
                state = type(chain.states[0])(*(part[row : row + 1].detach() for part in chain.states[t]))
                inputs = chain.cell.project(x.reshape(1, 1, I), t)
                return chain.cell.step(rebuilt(inputs, [v[0] for v in leaves(inputs)]), state, chain.weights)[0]

            of_input = torch.autograd.functional.jacobian(fed, chain.x[t][row]).reshape(-1, I)
            torch.testing.assert_close(K[i, k], of_input, **CLOSE)


@SOME
@pytest.mark.sample(2)
def test_lags_are_those_of_autograd(cell):
    chain = chain_of(cell)
    norms = {(each.part, each.lag): each for each in lag.exact_norms(chain, [1], lag.choose_lags(T))}
    for t in range(1, T):
        P = brute(chain, t, row=1)
        for part, size in chain.blocks.items():
            got = norms[part, T - t]
            want = torch.linalg.svdvals(P[:size, :size])
            assert got.spectral == pytest.approx(float(want[0]), rel=1e-8, abs=1e-10)
            assert got.frobenius == pytest.approx(float(want.square().sum().sqrt()), rel=1e-8, abs=1e-10)
            assert got.spectral_low == got.spectral == got.spectral_high
    ratio = lag.ratio(list(norms.values()), "layer 1")
    h = next(iter(chain.parts.values()))
    first, last = (float(torch.linalg.svdvals(brute(chain, t, 1)[:h, :h])[0]) for t in (1, T - 1))
    assert ratio == (pytest.approx(first / last, rel=1e-8) if last > 0 else None)


@CELLS
@pytest.mark.sample(8)
def test_norms_obey_their_inequalities(cell):
    chain = chain_of(cell)
    part = "all" if "all" in chain.blocks else "h"
    norms = {each.lag: each for each in lag.exact_norms(chain, [0], lag.choose_lags(T)) if each.part == part}
    steps = torch.linalg.svdvals(jacobian.state_jacobians(chain, range(T), [0]))[:, 0, 0]
    for k, each in norms.items():
        assert each.spectral <= each.frobenius * (1 + 1e-12)
        assert each.frobenius <= math.sqrt(chain.size) * each.spectral * (1 + 1e-12)
        assert each.spectral <= float(steps[T - k :].prod()) * (1 + 1e-12)


@CELLS
@pytest.mark.sample(8)
def test_gradients_of_all_layers_are_those_of_autograd(cell):
    """Zeros are added to every state of a two-layer stack that is written out here; their gradient is dL/ds_t."""
    rnn = layer(cell)(I, hidden_size(cell), num_layers=2, dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64)
    below, above = rnn.cells
    added = {}
    value = x
    for depth, own in enumerate((below, above)):
        state, inputs, weights, outputs = own.initial_state(B), own.project(value), own.weights(), []
        for t in range(T):
            fields = [v[0 if v.shape[0] == 1 and T > 1 else t] for v in leaves(inputs)]
            new = own.step(rebuilt(inputs, fields), state, weights)
            added[depth, t] = [torch.zeros_like(part, requires_grad=True) for part in new]
            state = type(state)(*(part + zero for part, zero in zip(new, added[depth, t], strict=True)))
            outputs.append(own.output(state))
        value = torch.stack(outputs)
    target = torch.randn_like(value)
    (value - target).square().mean().backward()

    observation = observe(rnn, Batch(x, target))
    norms = lag.gradient_norms(
        observation.chains, lag.state_gradients(observation.chains, (observation.prediction - target).square().mean())
    )
    for each in norms:
        zeros = added[int(each.layer[-1]) - 1, T - 1 - each.lag]
        grads = [zero.grad if zero.grad is not None else torch.zeros_like(zero) for zero in zeros]
        whole = torch.cat(grads, dim=-1).norm(dim=-1).mean()
        assert each.norm == pytest.approx(float(whole), rel=1e-8, abs=1e-12)
        assert each.h == pytest.approx(float(grads[0].norm(dim=-1).mean()), rel=1e-8, abs=1e-12)


@CELLS
@pytest.mark.sample(8)
def test_products_with_vectors_are_those_with_the_matrix(cell):
    chain = chain_of(cell)
    products = random_probes.JacobianProducts(chain, [0, 2], T)
    v = torch.randn(3, 2, chain.size, dtype=torch.float64)
    forward = products.jvp(v, 2)
    backward = dict(products.vjps(v, 2))[2]
    for k, row in enumerate([0, 2]):
        P = brute(chain, 2, row)
        torch.testing.assert_close(forward[:, k], v[:, k] @ P.T, **CLOSE)
        torch.testing.assert_close(backward[:, k], v[:, k] @ P, **CLOSE)


def spectrum(kind, n, generator):
    """A matrix with a spectrum that is easy or hard to estimate."""
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0] for _ in range(2))
    values = {
        "one": torch.eye(n, dtype=torch.float64)[0],
        "equal": torch.ones(n, dtype=torch.float64),
        "falling": 0.8 ** torch.arange(n, dtype=torch.float64),
        "two": torch.tensor([1.0, 0.99, *[0.0] * (n - 2)], dtype=torch.float64),
    }[kind]
    return 3.7 * left @ torch.diag(values) @ right


@pytest.mark.parametrize("kind", ["one", "equal", "falling", "two"])
def test_intervals_contain_the_norm_in_two_hundred_trials(kind):
    """Each interval fails in at most one of 1,000 trials, so three failures in 200 have a probability below 0.002."""
    generator = torch.Generator().manual_seed(1)
    P = spectrum(kind, 24, generator)
    sigma, frobenius = float(torch.linalg.matrix_norm(P, 2)), float(P.norm())
    misses = [0, 0]
    for _ in range(200):
        g = torch.randn(16, 1, 24, dtype=torch.float64, generator=generator)
        (interval,) = random_probes.spectral_norms(lambda v: v @ P.T, lambda w: w @ P, g)
        misses[0] += not interval.low * (1 - 1e-9) <= sigma <= interval.high * (1 + 1e-9)
        assert interval.high <= 1.4 * interval.low
        estimate = random_probes.frobenius_norm((g[:, 0] @ P).square().sum(dim=-1))
        misses[1] += not estimate.low <= frobenius <= estimate.high
    assert max(misses) <= 2, misses


def test_an_interval_that_is_too_narrow_is_caught(monkeypatch):
    monkeypatch.setattr(random_probes, "DELTA", 0.2)
    with pytest.raises(AssertionError):
        test_intervals_contain_the_norm_in_two_hundred_trials("one")


@pytest.mark.parametrize("cell", ["STAR", "LSTM", "NRU"])
@pytest.mark.sample(1)
def test_intervals_of_a_chain_contain_the_exact_value(cell):
    chain = chain_of(getattr(unfading, cell).cell)
    lags = [1, 3, T - 1]
    exact = {(each.part, each.lag): each for each in lag.exact_norms(chain, [0], lags)}
    generator = torch.Generator().manual_seed(0)
    for each in lag.estimated_norms(chain, [0], lags, probes=16, generator=generator):
        truth = exact[each.part, each.lag]
        assert each.spectral_low * (1 - 1e-9) <= truth.spectral <= each.spectral_high * (1 + 1e-9)
        assert each.frobenius_low <= truth.frobenius <= each.frobenius_high
    steps = {(s.part, s.step): s for s in jacobian.spectra(chain, [0, 4], [0])}
    for each in random_probes.spectra(chain, [0, 4], [0], probes=16, generator=generator):
        truth = steps[each.part, each.step]
        assert each.largest_low * (1 - 1e-9) <= truth.largest <= each.largest_high * (1 + 1e-9)
        assert (each.input_largest, each.input_smallest) == pytest.approx((truth.input_largest, truth.input_smallest))


@pytest.mark.parametrize("degrees", [1, 8, 32])
@pytest.mark.parametrize("share", [5e-4, 0.5, 0.9995])
def test_quantiles_are_those_of_scipy(degrees, share):
    assert random_probes.chi_squared_quantile(degrees, share) == pytest.approx(stats.chi2.ppf(share, degrees), rel=1e-9)


def test_spectral_radius_and_singular_values_at_a_known_step():
    rnn = unfading.LinearRNN(2, 3, dtype=torch.float64)
    with torch.no_grad():
        rnn.cells[0].W_h.copy_(torch.tensor([[0.0, 2.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.3]]))
    x = torch.randn(4, 1, 2, dtype=torch.float64)
    (step, *_) = jacobian.spectra(observe(rnn, Batch(x, x)).chains[0], [1], [0])
    assert (step.largest, step.median, step.smallest, step.radius) == pytest.approx((2.0, 0.5, 0.3, 1.0))


def test_a_row_among_longer_ones_is_measured_as_if_it_were_alone():
    rnn = unfading.LSTM(I, 5, bidirectional=True, dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64)
    among = observe(rnn, Batch(x, x, torch.tensor([T, 4, T]))).chains
    alone = observe(rnn, Batch(x[:4, 1:2], x)).chains
    for i in (0, 1):
        assert lag.exact_norms(among[i], [1], [1, 2, 3]) == [
            pytest.approx(each) for each in lag.exact_norms(alone[i], [0], [1, 2, 3])
        ]


def test_backward_is_forward_on_the_reversed_sequence():
    both = unfading.GRU(I, 5, bidirectional=True, dtype=torch.float64)
    one = unfading.GRU(I, 5, dtype=torch.float64)
    one.cells[0].load_state_dict(both.cells[1].state_dict())
    x = torch.randn(T, B, I, dtype=torch.float64)
    turned, plain = observe(both, Batch(x, x)).chains[1], observe(one, Batch(x.flip(0), x)).chains[0]
    assert [each[2:] for each in lag.exact_norms(turned, [0], [1, 4])] == [
        pytest.approx(each[2:]) for each in lag.exact_norms(plain, [0], [1, 4])
    ]


def test_joined_calls_equal_one_call_and_a_detached_state_ends_the_gradient():
    rnn = unfading.STAR(I, 5, num_layers=2, dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64)

    class Pieces(nn.Module):
        def __init__(self, cut):
            super().__init__()
            self.rnn, self.cut = rnn, cut

        def forward(self, x):
            first, state = self.rnn(x[:4])
            second, _ = self.rnn(x[4:], unfading.detach(state) if self.cut else state, start=4)
            return torch.cat([first, second])

    def norms(model):
        chains = observe(model, Batch(x, x)).chains
        gradients = lag.state_gradients(chains, lag.random_end_loss(chains, torch.Generator().manual_seed(0)))
        return [each[1:] for each in lag.gradient_norms(chains, gradients)]

    whole, joined, cut = norms(rnn), norms(Pieces(False)), norms(Pieces(True))
    assert joined == [pytest.approx(each) for each in whole]
    assert [each[-1] for each in cut] == [lag < 2 for lag in range(T)] * 2


def test_gates_are_found_and_their_shares_are_right():
    rnn = unfading.LSTM(I, 5, dtype=torch.float64)
    with torch.no_grad():
        rnn.cells[0].from_input.bias[:5] = torch.tensor([20.0, 20.0, -20.0, 0.0, 0.0])  # input gates
    x = torch.randn(T, B, I, dtype=torch.float64)
    activations = {each.name: each for each in saturation.activations(observe(rnn, Batch(x, x)).chains[0], [0, 1])}
    assert set(activations) == {f"torch.{gate}" for gate in ("sigmoid(i)", "sigmoid(f)", "tanh(z)", "sigmoid(o)", "tanh(c)")}
    gate = activations["torch.sigmoid(i)"]
    assert (gate.kind, gate.units, gate.low, gate.high) == ("sigmoid", 5, pytest.approx(0.2), pytest.approx(0.4))
    assert activations["torch.sigmoid(f)"].saturated == 0


def test_dead_units_are_those_that_are_zero_throughout():
    rnn = unfading.Elman(I, 5, activation="relu", dtype=torch.float64)
    with torch.no_grad():
        rnn.cells[0].from_input.bias[:2] = -100.0
    x = torch.randn(T, B, I, dtype=torch.float64)
    chain = observe(rnn, Batch(x, x)).chains[0]
    (activation,) = saturation.activations(chain, [0, 1, 2])
    output, _ = rnn(x)
    assert activation.dead == pytest.approx((output == 0).all(0).all(0).double().mean().item())
    assert activation.low == pytest.approx((output == 0).double().mean().item())
    sizes = saturation.state_sizes(chain)
    assert [each.rms for each in sizes] == pytest.approx(output.square().mean(dim=(1, 2)).sqrt().tolist())


@pytest.mark.parametrize("h", [5, 40])
def test_a_memory_map_is_change_and_sensitivity(h):
    rnn = unfading.NRU(I, h, memory_size=4, heads=1, dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64)
    chain = observe(rnn, Batch(x, x)).chains[0]
    tiles = memory.memory_map(chain, [0, 1], probes=32, generator=torch.Generator().manual_seed(0))
    m = rnn.trajectory(x).m[:, 0, :2]
    change = torch.cat([m[:1], m[1:] - m[:-1]]).square().mean(1).sqrt()
    read = jacobian.state_jacobians(chain, range(T), [0, 1])[:, :, :h, h:].square().sum(2).mean(1).sqrt()
    assert [(each.step, each.entry) for each in tiles] == [(t + 1, j) for t in range(T) for j in range(4)]
    assert [each.write for each in tiles] == pytest.approx(change.flatten().tolist())
    # With 32 probes and two rows, the estimate for the larger h is within a half.
    assert [each.read for each in tiles] == pytest.approx(read.flatten().tolist(), rel=1e-8 if h == 5 else 0.5)


def test_measured_lags_are_dense_at_first_and_reach_the_end():
    for length in (1, 2, 3, 40, 784):
        lags = lag.choose_lags(length)
        assert lags[: min(32, length - 1)] == list(range(1, min(33, length)))
        assert lags == sorted(set(lags))
        assert lags[-1:] == ([length - 1] if length > 1 else [])
    assert len(lag.choose_lags(784)) < 110


def test_a_norm_beyond_the_range_of_floats_is_capped():
    rnn = unfading.LinearRNN(2, 3)
    with torch.no_grad():
        rnn.cells[0].W_h.copy_(1000.0 * torch.eye(3))
    x = torch.zeros(150, 1, 2)
    norms = lag.exact_norms(observe(rnn, Batch(x, x)).chains[0], [0], [1, 90, 149])
    assert [each.spectral for each in norms] == pytest.approx([1e3, 1e270, 1e300])
