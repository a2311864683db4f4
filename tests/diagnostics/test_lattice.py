"""The lattice agrees with autograd on a separate copy of the parameters for every layer and step."""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

import unfading
from tests.helpers.variants import few_iterations, sampled
from unfading import catalogue
from unfading.diagnostics.measure.draws import (
    StackSizes,
    initial_parameters,
    is_bias,
    lattice_statistics,
    lattices,
    make_stack,
    random_signals,
    worker_pool,
)
from unfading.diagnostics.measure.lag import state_gradients
from unfading.diagnostics.measure.lattice import flatness, has_lattice, lattice, observed_points
from unfading.diagnostics.measure.lattice_step import LatticeStep
from unfading.diagnostics.measure.observe import observe
from unfading.tasks import Adding, Copying
from unfading.tasks.base import Batch

CELLS = catalogue.cells()
named = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)


class Loop(nn.Module):
    """One step of a cell, implemented here again."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, u, state, t):
        inputs = self.cell.project(u.unsqueeze(0), t)
        new = self.cell.step(type(inputs)(*(field[0] for field in inputs)), state, self.cell.weights())
        return new, self.cell.output(new)


def with_copies(cells, thetas, x, loss, lengths=None):
    """G by brute force: a copy of the parameters for every layer and step, all of them leaves of one graph."""
    outputs, copies = list(x), []
    for cell, theta in zip(cells, thetas, strict=True):
        state, row, new_outputs = cell.initial_state(x.shape[1]), [], []
        trained = {f"cell.{name}" for name, _ in cell.named_parameters()}  # no buffers
        for t, u in enumerate(outputs):
            copy = {name: part.detach().clone().requires_grad_(name in trained) for name, part in theta.items()}
            row.append([part for part in copy.values() if part.requires_grad])
            new, output = functional_call(Loop(cell), copy, (u, state, t))
            if lengths is not None:
                going = (t < lengths).unsqueeze(1)
                new = type(new)(*(torch.where(going, n, old) for n, old in zip(new, state, strict=True)))
                output = output * going
            state = new
            new_outputs.append(output)
        copies.append(row)
        outputs = new_outputs
    leaves = [part for row in copies for copy in row for part in copy]
    gradients = iter(torch.autograd.grad(loss(torch.stack(outputs)), leaves, allow_unused=True))
    by_copy = [[[next(gradients) for _ in copy] for copy in row] for row in copies]
    norms = [[math.sqrt(sum(float(g.square().sum()) for g in copy if g is not None)) for copy in row] for row in by_copy]
    return torch.tensor(norms, dtype=torch.float64)


def own(cells):
    return [{f"cell.{name}": part for name, part in cell.named_parameters()} for cell in cells]


@pytest.mark.parametrize("cell", sampled(CELLS))
@pytest.mark.parametrize("B", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.sample(2)
def test_the_lattice_of_a_model_is_that_of_autograd_with_copies(cell, B):
    torch.manual_seed(B)
    rnn = unfading.Recurrent(
        lambda size: cell(size, 8, **few_iterations(cell)), 8, 3, dtype=torch.float64
    )  # one size, hence one kernel
    model = unfading.Model(nn.Identity(), rnn, unfading.MeanOverTime(rnn.output_size, 2).double())
    x = torch.randn(4, B, 8, dtype=torch.float64)
    batch = Batch(x, torch.randn(B, 2, dtype=torch.float64))

    def loss(prediction, batch):
        return (prediction - batch.target).square().mean()

    G = lattice(model, batch, loss)
    wanted = with_copies(rnn.cells, own(rnn.cells), x, lambda y: loss(model.head(y), batch))
    assert G.dtype == torch.float64
    torch.testing.assert_close(G, wanted, rtol=1e-8, atol=1e-12 * float(wanted.max()))


@pytest.mark.parametrize("cell", sampled(CELLS))
@pytest.mark.parametrize("lengths", [pytest.param(None, marks=pytest.mark.long), [4, 1, 3]], ids=["whole", "lengths"])
@pytest.mark.sample(2)
def test_the_lattice_of_observed_states_is_the_same(cell, lengths):
    torch.manual_seed(0)
    # A cell with a table over steps behaves differently at each step.
    counts = {"steps": 4} if "steps" in inspect.signature(cell).parameters else few_iterations(cell)
    rnn = unfading.Recurrent(lambda size: cell(size, 8, **counts), 8, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model = unfading.Model(nn.Identity(), rnn, unfading.MeanOverTime(rnn.output_size, 2).double())
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    batch = Batch(x, torch.randn(3, 2, dtype=torch.float64), None if lengths is None else torch.tensor(lengths))

    def loss(prediction, batch):
        return (prediction - batch.target).square().mean()

    prediction, chains = observe(model, batch)
    gradients = state_gradients(chains, loss(prediction, batch))
    wanted = lattice(model, batch, loss)
    # dL/ds_t does not determine the gradient of parameters that compute the output from the state.
    computing_an_output = (unfading.GatedLRUCell, unfading.LRUCell, unfading.SCRNCell, unfading.StatisticalRNNCell)
    assert [has_lattice(chain) for chain in chains] == [cell not in computing_an_output] * 2
    for l, chain in enumerate(chains):
        if has_lattice(chain):
            points = observed_points(chain, [3, 1], {"loss": gradients[l]})
            assert [(point.depth, point.step, point.of) for point in points] == [(l + 1, 4, "loss"), (l + 1, 2, "loss")]
            values = torch.tensor([point.value for point in points], dtype=torch.float64)
            torch.testing.assert_close(values, wanted[l, [3, 1]], rtol=1e-8, atol=1e-12 * float(wanted.max()))


def test_gains_from_a_subset_of_steps_are_the_same():
    down, back = torch.arange(3, -1, -1.0).unsqueeze(1), torch.arange(19, -1, -1.0)
    G = 0.8**down * 0.9**back
    some = [0, 3, 4, 11, 19]
    assert flatness(G[:, some], some)[3:] == pytest.approx((0.8, 0.9))
    assert flatness(G)[3:] == pytest.approx((0.8, 0.9))


@named
@pytest.mark.sample(10)
def test_draws_at_once_equal_draws_one_by_one(cell):
    torch.manual_seed(0)
    sizes, draws = StackSizes(layers=2, steps=3, width=8), 3
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        cells = make_stack(lambda size: cell(size, 8, **few_iterations(cell)), sizes)
        thetas = [initial_parameters(each, draws) for each in cells]
        x, v = random_signals(sizes, cells[-1].output_size, draws)
        G = lattices(cells, thetas, x, v)
        for d in range(draws):
            one = [{name: part[d] for name, part in theta.items()} for theta in thetas]
            for i in range(2):
                wanted = with_copies(cells, one, x[d], lambda y, d=d, i=i: (y * v[d, i]).sum())
                torch.testing.assert_close(G[d, i], wanted, rtol=1e-8, atol=1e-12 * float(wanted.max()))
    finally:
        torch.set_default_dtype(before)


@named
def test_draws_use_the_cells_initialisation_with_zero_biases(cell):
    torch.manual_seed(0)
    own = cell(8, 8)
    before = {name: part.clone() for name, part in own.state_dict().items()}
    many = initial_parameters(own, 3)
    for name, part in own.state_dict().items():
        assert torch.equal(part, before[name])  # the cell itself is not changed
        drawn_part = many[f"cell.{name}"]
        if is_bias(name):
            assert not drawn_part.any(), name
        elif name in dict(own.named_parameters()) and before[name].unique().numel() > 2:  # random, not a constant
            assert not torch.equal(drawn_part[0], drawn_part[1]), name
    if cell in (unfading.LSTMCell, unfading.STARCell):
        for W in many["cell.W_h"]:
            for block in W.chunk(len(W) // 8):
                torch.testing.assert_close(block @ block.T, torch.eye(8), rtol=0, atol=1e-5)


def test_rows_that_have_ended_pass_no_gradient():
    torch.manual_seed(0)
    rnn = unfading.LSTM(3, 4, 2, dtype=torch.float64)
    model = unfading.Model(nn.Identity(), rnn, unfading.LastStep(4, 1).double())
    x, lengths = torch.randn(5, 3, 3, dtype=torch.float64), torch.tensor([2, 5, 3])
    batch = Batch(x, torch.zeros(3, 1), lengths)

    def loss(prediction, batch):
        return prediction.square().sum()

    wanted = with_copies(rnn.cells, own(rnn.cells), x, lambda y: loss(model.head(y, lengths), batch), lengths)
    torch.testing.assert_close(lattice(model, batch, loss), wanted, rtol=1e-8, atol=0)
    # Without the two rows that have ended, the last two steps are the same.
    alone = lattice(model, Batch(x[:, 1:2], batch.target[1:2], lengths[1:2]), loss)
    torch.testing.assert_close(lattice(model, batch, loss)[:, 3:], alone[:, 3:])


def test_over_one_step_the_lattice_is_the_gradient_of_each_layer():
    torch.manual_seed(0)
    task = Copying(T=5)
    rnn = unfading.GRU(task.input_size, 7, 3)
    model = unfading.Model(task.encoder(), rnn, task.head(7))
    batch = task.batch(0, 4, split="train", seed=0, device="cpu")
    batch = Batch(batch.x[:1], batch.target[:1])
    task.loss(model(batch.x)[0], batch).backward()
    wanted = [torch.cat([p.grad.flatten() for p in cell.parameters()]).norm().double() for cell in rnn.cells]
    torch.testing.assert_close(lattice(model, batch, task.loss).squeeze(1), torch.stack(wanted), rtol=1e-4, atol=0)


def test_measuring_does_not_change_the_model():
    task = Adding(T=6)
    model = unfading.Model(task.encoder(), rnn := unfading.STAR(2, 5, 2, dropout=0.5), task.head(5))
    model.train()
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    batch = task.batch(0, 3, split="train", seed=0, device="cpu")
    first = lattice(model, batch, task.loss)
    assert torch.equal(first, lattice(model, batch, task.loss))  # dropout is off
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert rnn.training
    assert torch.equal(random, torch.get_rng_state())


def test_a_seed_determines_the_lattice_and_the_generator_is_not_changed():
    random = torch.get_rng_state()
    sizes = StackSizes(layers=2, steps=2, width=4)
    first, again, other = (lattice_statistics(_elman, 5, sizes, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(random, torch.get_rng_state())
    for loss in ("last", "all"):
        assert torch.equal(first[loss].mean, again[loss].mean)
        assert not torch.equal(first[loss].mean, other[loss].mean)


def _elman(size):
    return unfading.ElmanCell(size, 4)


@pytest.mark.long
def test_the_number_of_processes_does_not_change_the_result():
    sizes = StackSizes(layers=2, steps=2, width=4)
    alone = lattice_statistics(_elman, 150, sizes)
    with worker_pool(2) as pool:
        shared = lattice_statistics(_elman, 150, sizes, pool=pool)
    assert torch.equal(alone["all"].mean, shared["all"].mean)
    assert torch.equal(alone["all"].deviation, shared["all"].deviation)


def test_mean_and_deviation_are_over_the_draws():
    sizes = StackSizes(layers=2, steps=3, width=4)
    torch.manual_seed(0)
    statistics = lattice_statistics(_elman, 7, sizes)["last"]
    from unfading.tasks.draw import stream

    torch.manual_seed(stream(0, "train", 0, "cpu", purpose="lattice").initial_seed())
    cells = make_stack(_elman, sizes)
    thetas = [initial_parameters(cell, 7) for cell in cells]
    G = lattices(cells, thetas, *random_signals(sizes, 4, 7))[:, 0]
    torch.testing.assert_close(statistics.mean, G.mean(0))
    torch.testing.assert_close(statistics.deviation, G.std(0, correction=0) / G.mean(0))


def test_stars_claims_of_plain_lstm_and_star_stacks():
    """Towards the bottom gradients grow in a plain RNN, vanish in an LSTM, and stay within a factor of two in STAR (Fig. 2)."""
    ratios = {}
    for cell in (unfading.ElmanCell, unfading.LSTMCell, unfading.STARCell):
        statistics = lattice_statistics(lambda size, cell=cell: cell(size, 32), 24, StackSizes(width=32))["last"]
        ratios[cell] = flatness(statistics.mean).bottom_to_top
    assert ratios[unfading.ElmanCell] > 1.8
    assert ratios[unfading.LSTMCell] < 3e-3
    assert 0.5 < ratios[unfading.STARCell] < 2


def test_flatness_of_a_known_lattice():
    down, back = torch.arange(4.0).flip(0), torch.arange(5.0).flip(0)
    numbers = flatness(3 * 2.0 ** down.unsqueeze(1) * 0.5**back)
    assert numbers.gain_per_layer == pytest.approx(2)
    assert numbers.gain_per_step == pytest.approx(0.5)
    assert numbers.bottom_to_top == pytest.approx(8)
    assert numbers.first_to_last == pytest.approx(8 / 16)
    # 2^(a - b) with a in 0..3 and b in 0..4: only 2^-4 is not within a factor of ten of 1.
    assert numbers.share_within_ten == pytest.approx(19 / 20)
    flat = flatness(torch.ones(1, 1))
    assert (flat.gain_per_layer, flat.gain_per_step) == pytest.approx((1, 1))
    assert math.isnan(flatness(torch.zeros(2, 2)).gain_per_layer)


def test_a_matrix_that_is_used_in_two_ways_gets_its_full_gradient():
    class Both(unfading.ElmanCell):
        def step(self, inputs, state, weights):
            return (
                super().step(inputs, state, weights)._replace(h=state.h @ weights.W_h + unfading.linear(state.h, weights.W_h))
            )

    torch.manual_seed(0)
    step = LatticeStep(Both(4, 4), 1, 5)
    assert "cell.W_h" in step.others
    rnn = unfading.Recurrent(lambda size: Both(size, 4), 4, 2, learn_initial_state=False, dtype=torch.float64)
    for cell in rnn.cells:
        cell.initial_state = lambda batch, like=cell: type(unfading.ElmanCell(4, 4).initial_state(1))(
            torch.ones(batch, 4, dtype=torch.float64)
        )
    model = unfading.Model(nn.Identity(), rnn, unfading.LastStep(4, 1).double())
    batch = Batch(torch.randn(3, 1, 4, dtype=torch.float64), torch.zeros(1, 1))

    def loss(prediction, batch):
        return prediction.square().sum()

    wanted = with_copies(rnn.cells, own(rnn.cells), batch.x, lambda y: loss(model.head(y), batch))
    torch.testing.assert_close(lattice(model, batch, loss), wanted, rtol=1e-8, atol=0)


def test_wrong_arguments_raise_a_clear_error():
    model = unfading.Model(nn.Identity(), unfading.GRU(2, 3, bidirectional=True), unfading.LastStep(6, 1))
    with pytest.raises(ValueError, match="one direction of time, and this stack is bidirectional"):
        lattice(model, Batch(torch.zeros(2, 1, 2), torch.zeros(1)), lambda p, b: p.sum())

    class NoStart(unfading.ElmanCell):
        reset_parameters = property()

    cell = unfading.ElmanCell(2, 2)
    cell.__class__ = NoStart
    with pytest.raises(TypeError, match="NoStart has no reset_parameters"):
        initial_parameters(cell, 2)
    with pytest.raises(ValueError, match="draws must be at least 1"):
        lattice_statistics(_elman, 0)
