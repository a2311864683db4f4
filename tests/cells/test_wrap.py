"""Recurrent dropout and zoneout work with every cell, as keywords of layers, and follow their papers."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.helpers import laws
from tests.helpers.compiled import agree, everything
from tests.helpers.variants import every_cell, hidden_size, name, sampled
from unfading import catalogue
from unfading.cells.wrap import RecurrentDropoutCell, ZoneoutCell

EXACT = {"rtol": 1e-12, "atol": 1e-12}
without_matrix = {"BR", "EquilibriumRNN", "GatedLRU", "IndRNN", "LRU", "MinGRU", "MinLSTM", "UnICORNN"}


def with_matrix():
    return [p for p in every_cell() if name(p.values[0]) not in without_matrix]


def layer_of(cell, **keywords):
    return unfading.layer(cell)(laws.I, hidden_size(cell, keywords), dtype=torch.float64, **keywords)


@pytest.mark.parametrize("cell", catalogue.cells(), ids=name)
@pytest.mark.sample(8)
def test_zoneout_in_every_cell(cell):
    layer, x = layer_of(cell, zoneout=0.5, backend="reference"), laws.random_input()
    a, b = layer(x)[0], layer(x)[0]
    assert not torch.equal(a, b)
    assert torch.isfinite(a).all()
    a.sum().backward()
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    assert torch.isfinite(layer(x, lengths=torch.tensor([7, 2, 5]))[0]).all()


@pytest.mark.parametrize(("cell", "options"), with_matrix())
@pytest.mark.sample(30)
def test_recurrent_dropout_in_every_cell(cell, options):
    layer, x = layer_of(cell, recurrent_dropout=0.5, backend="reference", **options), laws.random_input()
    assert any(not torch.equal(layer(x)[0], layer(x)[0]) for _ in range(5))
    layer(x)[0].sum().backward()
    layer.eval()
    plain = layer_of(cell, backend="reference", **options).eval()
    plain.load_state_dict(layer.state_dict())
    assert_close(layer(x)[0], plain(x)[0], **EXACT)


def noise_is_that_of_the_reference(layer):
    x, lengths = laws.random_input(), torch.tensor([7, 2, 5])
    for training, own in ((True, None), (True, lengths), (False, lengths)):
        layer.train(training)
        agree(everything(layer, x, "fused", own), everything(layer, x, "reference", own), torch.float64)


@pytest.mark.parametrize("cell", sampled(catalogue.cells(), ["STAR", "LSTM", "NRU"]))  # states of one part, two, and two sizes
@pytest.mark.sample(2)
def test_zoneout_of_the_compiled_loop(cell):
    noise_is_that_of_the_reference(layer_of(cell, zoneout=0.5))


@pytest.mark.parametrize(("cell", "options"), sampled(with_matrix()))
@pytest.mark.sample(4)
def test_recurrent_dropout_of_the_compiled_loop(cell, options):
    noise_is_that_of_the_reference(layer_of(cell, recurrent_dropout=0.5, **options))


def test_dropout_mask_is_one_per_row_for_all_time_and_has_mean_one():
    cell = RecurrentDropoutCell(unfading.LSTMCell(2, 50), 0.25)
    (mask,) = cell.project(torch.zeros(9, 400, 2)).masks
    assert mask.shape == (1, 400, 50)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(mask.mean() - 1) < 0.02
    assert not torch.equal(mask[0, 0], mask[0, 1])


def test_dropout_acts_on_the_input_of_the_matrix_and_not_on_the_state():
    inner = unfading.STARCell(2, 5).double()
    cell, x = RecurrentDropoutCell(inner, 0.5), laws.random_input()
    inputs = cell.project(x)
    states, _ = unfading.reference.scan(cell, inputs, cell.initial_state(3), cell.weights())
    h = torch.zeros(3, 5, dtype=torch.float64)
    for t in range(len(x)):
        k = torch.sigmoid(inputs.inner.a[t] + (h * inputs.masks[0][0]) @ inner.W_h.T)
        h = torch.tanh((1 - k) * h + k * inputs.inner.z[t])
        assert_close(states.h[t], h, **EXACT)


def test_zoneout_keeps_entries_and_uses_the_expectation_in_evaluation():
    inner = unfading.LSTMCell(2, 5).double()
    cell, x = ZoneoutCell(inner, 0.3), laws.random_input()
    inputs = cell.project(x)
    states, _ = unfading.reference.scan(cell, inputs, cell.initial_state(3), cell.weights())
    for t in range(1, len(x)):
        for mask, part in zip(inputs.masks, states, strict=True):
            still = mask[t] == 1
            assert torch.equal(part[t][still], part[t - 1][still])
            assert not torch.equal(part[t][~still], part[t - 1][~still])
    cell.eval()
    state = type(states)(*(part[3] for part in states))
    one = x[:1]
    expected, _ = unfading.reference.scan(cell, cell.project(one), state, cell.weights())
    moved, _ = unfading.reference.scan(inner, inner.project(one), state, inner.weights())
    for e, m, old in zip(expected, moved, state, strict=True):
        assert_close(e[0], 0.3 * old + 0.7 * m[0], **EXACT)


def test_zoneout_draws_a_new_mask_at_each_step_with_the_given_rate():
    cell = ZoneoutCell(unfading.STARCell(2, 30), 0.2)
    (mask,) = cell.project(torch.zeros(40, 50, 2)).masks
    assert mask.shape == (40, 50, 30)
    assert abs(mask.mean() - 0.2) < 0.01
    assert not torch.equal(mask[0], mask[1])


def test_noise_changes_no_parameter_names_and_survives_copies():
    noisy = unfading.LSTM(2, 5, 2, recurrent_dropout=0.2, zoneout=0.1, bidirectional=True)
    plain = unfading.LSTM(2, 5, 2, bidirectional=True)
    assert list(noisy.state_dict()) == list(plain.state_dict())
    x = torch.randn(6, 3, 2)
    noisy.eval()
    for other in (copy.deepcopy(noisy), pickle.loads(pickle.dumps(noisy))):
        assert torch.equal(other(x)[0], noisy(x)[0])
        with torch.no_grad():
            other.cells[0].W_h.zero_()
        assert not torch.equal(other(x)[0], noisy(x)[0])
    noisy.double()
    assert noisy(x.double())[0].dtype == torch.float64
    assert "recurrent_dropout=0.2, zoneout=0.1" in repr(noisy)


@pytest.mark.parametrize("noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.5}], ids=str)
def test_every_model_of_a_vmap_draws_its_own_noise(noise):
    layers = [unfading.GRU(2, 5, **noise) for _ in range(3)]
    x = torch.randn(6, 3, 2)
    parameters, buffers = torch.func.stack_module_state([layers[0]] * 3)

    def run(p, b):
        return torch.func.functional_call(layers[0], (p, b), (x,))[0]

    outputs = torch.func.vmap(run, randomness="different")(parameters, buffers)
    assert not torch.equal(outputs[0], outputs[1])


def test_a_replaced_cell_is_the_one_that_runs():
    layer, x = unfading.STAR(2, 5, zoneout=0.1).eval(), torch.randn(6, 3, 2)
    before = layer(x)[0]
    layer.cells[0] = unfading.STARCell(2, 5).eval()
    assert not torch.equal(layer(x)[0], before)


def test_the_error_names_products_outside_linear():
    class Direct(unfading.ElmanCell):
        def step(self, inputs, state, weights):
            return state._replace(h=torch.tanh(inputs.a + state.h @ weights.W_h.T))

    layer = unfading.Recurrent(lambda size: Direct(size, 5), 2, recurrent_dropout=0.5)
    with pytest.raises(TypeError, match=r"acts where Direct.step calls unfading.linear\(v, W\); it uses one of W_h"):
        layer(torch.randn(6, 3, 2))


def test_same_seed_same_noise():
    layer, x = unfading.GRU(2, 5, recurrent_dropout=0.5, zoneout=0.3), torch.randn(6, 3, 2)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(layer(x)[0])
    assert torch.equal(*outputs)


def test_inverted_zoneout_breaks_its_law(monkeypatch):
    whole = ZoneoutCell.step

    def inverted(self, inputs, state, weights):
        return whole(self, inputs._replace(masks=tuple(1 - m for m in inputs.masks)), state, weights)

    monkeypatch.setattr(ZoneoutCell, "step", inverted)
    laws.fails(test_zoneout_keeps_entries_and_uses_the_expectation_in_evaluation)
