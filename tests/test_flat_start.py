"""A flat start makes the layers of a lattice equally high, keeps all but the input's matrices, and says what it did."""

import math
import sys

import pytest
import torch

import unfading
from unfading import catalogue
from unfading.diagnose.flat_start import _reading
from unfading.diagnose.lattice import lattice
from unfading.tasks.base import Batch


def deep(layer, depth=6, width=16, **options):
    torch.manual_seed(0)
    rnn = layer(5, width, depth, **options)
    return unfading.Model(torch.nn.Identity(), rnn, unfading.LastStep(rnn.output_size, 3))


def heights(model, x):
    v = torch.randn(x.shape[1], 3, generator=torch.Generator().manual_seed(7))
    G = lattice(model, Batch(x, x), lambda prediction, _: (prediction * v).sum())
    return G.log().mean(dim=1)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(kind, id=kind.__name__, marks=[] if kind in (unfading.LSTM, unfading.Elman) else pytest.mark.long)
        for kind in (unfading.LSTM, unfading.GRU, unfading.FastGRNN, unfading.Elman)
    ],
)
def test_the_layers_become_equally_high(layer):
    model = deep(layer)
    x = torch.randn(8, 12, 5)
    before = heights(model, x)
    done = unfading.flat_start(model, x, within=1.2)
    after = heights(model, x)  # under a loss that it has not seen
    assert done.spread <= 1.2
    assert float(after.max() - after.min()) < math.log(3)
    assert float(after.max() - after.min()) < float(before.max() - before.min())
    assert done.after.gain_per_layer == pytest.approx(1, abs=0.06)
    assert abs(math.log(done.after.gain_per_layer)) < abs(math.log(done.before.gain_per_layer))


def test_only_what_reads_the_input_of_an_upper_layer_is_scaled():
    model, x = deep(unfading.LSTM), torch.randn(8, 4, 5)
    before = {name: part.clone() for name, part in model.state_dict().items()}
    done = unfading.flat_start(model, x)
    for name, part in model.state_dict().items():
        layer = int(name.split(".")[2]) if name.startswith("rnn.cells") else None
        factor = done.factors[layer] if layer is not None and name.endswith("from_input.weight") else 1.0
        torch.testing.assert_close(part, factor * before[name], rtol=1e-5, atol=0)
    assert done.factors[0] == 1.0
    assert max(done.factors) > 1.5  # what fades in an LSTM is made louder
    assert all(p.grad is None for p in model.parameters())


def test_a_flat_stack_and_a_single_layer_are_left_alone():
    model = deep(unfading.Elman, depth=1)
    assert unfading.flat_start(model, torch.randn(4, 3, 5))[2:] == (1.0, (1.0,), 0)
    model = deep(unfading.STAR, depth=3)
    x = torch.randn(6, 8, 5)
    first = unfading.flat_start(model, x)
    again = unfading.flat_start(model, x)
    assert first.rounds > again.rounds == 0
    assert again.factors == (1.0, 1.0, 1.0)


def test_a_round_that_made_it_worse_is_taken_back(monkeypatch):
    heights = iter([[0.0, 1.0], [0.0, 0.2], [0.0, 3.0], [0.0, 2.0]])
    told = lambda *_: torch.tensor(next(heights)).exp().unsqueeze(1).double()  # noqa: E731, as a lattice is told
    monkeypatch.setattr(sys.modules["unfading.diagnose.flat_start"], "lattice", told)
    model = deep(unfading.GRU, depth=2)
    before = model.rnn.cells[1].from_input.weight.clone()
    done = unfading.flat_start(model, torch.randn(3, 2, 5), rounds=3)
    assert done.factors == pytest.approx((1.0, math.exp(0.5)))
    assert done.spread == pytest.approx(math.exp(0.2))
    torch.testing.assert_close(model.rnn.cells[1].from_input.weight, math.exp(0.5) * before)


def test_where_it_cannot_become_flat_the_best_round_is_kept():
    model, x = deep(unfading.LSTM, depth=10), torch.randn(3, 4, 5)
    done = unfading.flat_start(model, x, within=1.0001, rounds=3)
    assert done.rounds == 3
    torch.manual_seed(0)
    v = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    G = lattice(model, Batch(x, x), lambda prediction, _: (prediction * v).sum())
    rows = G.log().mean(dim=1)
    assert done.spread == pytest.approx(float((rows.max() - rows.min()).exp()), rel=1e-3)


def test_a_batch_with_lengths_will_do():
    model = deep(unfading.GRU, depth=3)
    batch = Batch(torch.randn(6, 3, 5), torch.zeros(3), torch.tensor([2, 6, 4]))
    assert unfading.flat_start(model, batch).spread < 1.2


@pytest.mark.parametrize("cell", catalogue.cells(), ids=lambda cell: cell.__name__)
def test_every_cell_has_something_to_scale(cell):
    made = cell(8, 8)
    names = {id(p): name for name, p in made.named_parameters()}
    found = {names[id(p)] for p in _reading(made)}
    assert found
    assert not any(name in ("W_h", "R", "W_phi", "eta") for name in found)


def test_bad_input_is_told_in_a_sentence():
    model = deep(unfading.GRU, depth=2)
    with pytest.raises(ValueError, match="within - 1 must be above 0"):
        unfading.flat_start(model, torch.zeros(2, 2, 5), within=1.0)
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        unfading.flat_start(model, torch.zeros(2, 2, 5), rounds=0)
    with pytest.raises(ValueError, match="bidirectional"):
        unfading.flat_start(deep(unfading.GRU, depth=2, bidirectional=True), torch.zeros(2, 2, 5))
