"""A flat start flattens the lattice in depth and in time, never worsens it, and reports all its changes."""

import copy
import math

import pytest
import torch

import unfading
from tests.helpers.variants import few_iterations, sampled
from unfading import catalogue
from unfading.diagnostics.flat_start.adjustments import Adjustment, adjusted, cell_adjustments, input_matrices
from unfading.diagnostics.flat_start.flat_start import _Search
from unfading.diagnostics.measure.lattice import lattice
from unfading.tasks.base import Batch


def deep(layer, depth=6, width=16, features=5, **options):
    torch.manual_seed(0)
    rnn = layer(features, width, depth, **options)
    return unfading.Model(torch.nn.Identity(), rnn, unfading.LastStep(rnn.output_size, 3))


def rows(T=8, B=6, features=5):
    return torch.randn(T, B, features, generator=torch.Generator().manual_seed(3))


def spread(model, x, seed, lengths=None):
    """The typical factor between a point with a gradient and the mean, under a random loss, computed here again."""
    v = torch.randn(x.shape[1], 3, generator=torch.Generator().manual_seed(seed))
    G = lattice(model, Batch(x, x, lengths), lambda prediction, _: (prediction * v).sum())
    return math.exp(G[G > 0].log().std(correction=0))


@pytest.mark.parametrize(
    "layer", [unfading.LSTM, unfading.FastGRNN, pytest.param(unfading.JANET, marks=pytest.mark.long)], ids=lambda c: c.__name__
)
@pytest.mark.sample(1)
def test_a_lattice_becomes_flatter_under_another_loss_too(layer):
    model, x = deep(layer), rows()
    before = spread(model, x, seed=7)
    done = unfading.flat_start(model, x, rounds=4)
    assert done.spread[1] < 0.6 * done.spread[0]
    assert spread(model, x, seed=7) < 0.7 * before
    assert abs(math.log(done.after.gain_per_layer)) < abs(math.log(done.before.gain_per_layer))
    assert abs(math.log(done.after.gain_per_step)) < abs(math.log(done.before.gain_per_step))


def test_in_a_deep_lstm_the_gate_biases_are_adjusted():
    done = unfading.flat_start(deep(unfading.LSTM, depth=10), rows(), rounds=3)
    i, f, _, o = (done.turns[f"from_input.bias[{start}:{start + 16}]"] for start in (0, 16, 32, 48))
    assert f < -1  # a layer passes its input on without delay
    assert i > 0
    assert o > 0


@pytest.mark.parametrize("cell", sampled(catalogue.cells()))
@pytest.mark.sample(2)
def test_no_cell_becomes_less_flat_and_the_report_matches_the_model(cell):
    # All layers have one size, hence one kernel.
    model = deep(unfading.layer(cell), depth=3, width=8, features=8, **few_iterations(cell))
    x = rows(T=4, B=2, features=8)
    before = spread(model, x, seed=0)
    done = unfading.flat_start(model, x, rounds=1)
    after = spread(model, x, seed=0)
    assert done.spread == pytest.approx((before, after), rel=1e-3)
    assert after <= before
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_turns_and_factors_describe_every_change():
    model, x = deep(unfading.LSTM, depth=4), rows()
    start = copy.deepcopy(model.state_dict())
    done = unfading.flat_start(model, x)
    assert set(done.turns) == {"W_h", "from_input.weight", *(f"from_input.bias[{k}:{k + 16}]" for k in (0, 16, 32, 48))}
    assert done.factors[0] == 1.0
    for name, part in model.state_dict().items():
        want = start[name]
        if name.startswith("rnn.cells"):
            layer, own = int(name.split(".")[2]), name.split(".", 3)[3]
            if own == "W_h":
                want = want * math.exp(done.turns["W_h"])
            elif own == "from_input.weight" and layer > 0:  # the input matrix of the bottom layer does not change
                want = want * math.exp(done.turns[own]) * done.factors[layer]
            elif own == "from_input.bias":
                want = want + torch.tensor([done.turns[f"{own}[{k}:{k + 16}]"] for k in (0, 16, 32, 48)]).repeat_interleave(16)
        torch.testing.assert_close(part, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [lambda G, turn: G ** (1 + turn), lambda G, turn: torch.where(turn > 0, math.inf, G)])
def test_a_round_that_makes_the_lattice_worse_is_rejected(monkeypatch, bad):
    measure = _Search.lattice
    monkeypatch.setattr(_Search, "lattice", lambda self, z: bad(measure(self, 0 * z), z.abs().sum()))
    model = deep(unfading.GRU, depth=2)
    start = copy.deepcopy(model.state_dict())
    done = unfading.flat_start(model, rows(), within=1.01, rounds=5)
    assert done.rounds == 1
    assert done.spread[0] == done.spread[1]
    assert not any(done.turns.values())
    torch.testing.assert_close(model.state_dict(), start, rtol=0, atol=0)


def test_a_lattice_that_is_flat_enough_is_not_changed():
    model = deep(unfading.GRU, depth=3)
    start = copy.deepcopy(model.state_dict())
    done = unfading.flat_start(model, rows(), within=1e6)
    assert done.rounds == 0
    torch.testing.assert_close(model.state_dict(), start, rtol=0, atol=0)


def test_a_model_without_gradients_is_not_changed():
    model = deep(unfading.Elman, depth=2)
    torch.nn.init.zeros_(model.head.answer.weight)
    start = copy.deepcopy(model.state_dict())
    assert unfading.flat_start(model, rows()).rounds == 0
    torch.testing.assert_close(model.state_dict(), start, rtol=0, atol=0)


def test_steps_after_the_end_of_a_row_do_not_count():
    model, x, lengths = deep(unfading.LSTM, depth=4), rows(T=7, B=3), torch.tensor([2, 5, 4])
    before = spread(model, x, 0, lengths)
    done = unfading.flat_start(model, Batch(x, torch.zeros(3), lengths))
    assert done.spread == pytest.approx((before, spread(model, x, 0, lengths)), rel=1e-3)
    assert done.spread[1] < done.spread[0]


def test_a_single_layer_of_one_unit_works():
    done = unfading.flat_start(deep(unfading.LSTM, depth=1, width=1), rows(), rounds=2)
    assert done.factors == (1.0,)
    assert done.spread[1] <= done.spread[0]


@pytest.mark.parametrize("cell", catalogue.cells(), ids=lambda cell: cell.__name__)
def test_every_cell_has_adjustments_and_input_matrices(cell):
    own = cell(8, 8)
    names = input_matrices(own)
    assert names
    assert not names & {"W_h", "R", "W_phi", "eta"}
    assert (
        names
        <= {adjustment.name for adjustment in cell_adjustments(own)}
        == {name for name, p in own.named_parameters() if p.requires_grad}
    )


def test_a_matrix_is_multiplied_and_a_block_of_a_bias_shifted():
    theta = {"W": torch.randn(3, 2), "b": torch.randn(6), "s": torch.tensor(0.5)}
    log_two = torch.tensor(math.log(2.0), dtype=torch.float64)
    new = adjusted(
        theta,
        [
            (Adjustment("W", None), log_two),
            (Adjustment("b", slice(3, 6)), 2 * log_two),
            (Adjustment("s", slice(0, 1)), log_two),
        ],
    )
    torch.testing.assert_close(new["W"], 2 * theta["W"])
    torch.testing.assert_close(new["b"] - theta["b"], torch.tensor([0.0, 0, 0, 1, 1, 1]) * math.log(4))
    torch.testing.assert_close(new["s"] - theta["s"], torch.tensor(math.log(2.0)))


def test_wrong_arguments_raise_a_clear_error():
    model = deep(unfading.GRU, depth=2)
    with pytest.raises(ValueError, match="within - 1 must be above 0"):
        unfading.flat_start(model, torch.zeros(2, 2, 5), within=1.0)
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        unfading.flat_start(model, torch.zeros(2, 2, 5), rounds=0)
    with pytest.raises(ValueError, match="bidirectional"):
        unfading.flat_start(deep(unfading.GRU, depth=2, bidirectional=True), torch.zeros(2, 2, 5))
