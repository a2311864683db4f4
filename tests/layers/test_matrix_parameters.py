"""Which parameters are matrices, for every cell, whatever their names and shapes are."""

import pytest
import torch
from torch import nn

import unfading
from tests.helpers.variants import few_iterations, hidden_size, name
from tests.user.quiet import QuietCell
from unfading import catalogue
from unfading.layers.matrix_parameters import matrices

CELLS = [*catalogue.cells(), QuietCell]
# Names of parameters that only vectors are multiplied by or added to, or that a matrix is computed from.
NOT = {
    "bias",
    "b",
    "b_heads",
    "c_n",
    "eta",
    "gain",
    "logits",
    "omega",
    "p",
    "peepholes",
    "phases",
    "phi",
    "reflections",
    "shift",
}
NOT |= {"leak", "symmetric", "theta"}
# Lists of numbers that are matrices in one cell and in another are not.
COMPUTED = {
    "BR": {"w"},
    "SpectralRNN": {"U", "V"},
    "FullUnitaryRNN": {"skew"},
    "GatedLRU": {"nu"},
    "ExpRNN": {"skew"},
    "IndRNN": {"u"},
    "LipschitzRNN": {"M_A", "M_W"},
    "LRU": {"nu"},
    "UnICORNN": {"c", "w"},
}


def model_of(cell, **options):
    torch.manual_seed(0)
    rnn = unfading.layer(cell)(3, hidden_size(cell), **few_iterations(cell), **options)
    return unfading.Model(nn.Identity(), rnn, unfading.LastStep(rnn.output_size, 2))


@pytest.mark.parametrize("cell", CELLS, ids=name)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "learn_initial_state": True}], ids=str)
@pytest.mark.sample(20)
def test_every_cell(cell, options):
    if name(cell) == "SLSTM" and options:
        pytest.skip("random numbers in the place of a learned initial state make its normaliser negative")
    model = model_of(cell, **options)
    before = {key: part.clone() for key, part in model.state_dict().items()}
    left_out = NOT | COMPUTED.get(name(cell), set())
    expected = [each for each in model.trainable if each.rpartition(".")[2] not in left_out and "learned_state" not in each]
    assert matrices(model, torch.zeros(4, 3, 3)) == expected
    assert all(torch.equal(part, before[key]) for key, part in model.state_dict().items())


@pytest.mark.parametrize(
    ("cell", "options"),
    [("FastGRNN", {"rank": 2, "input_rank": 2}), ("IncrementalRNN", {"rank": 5, "projection_rank": 0}), ("GRU", {"heads": 5})],
)
def test_factors_and_blocks_are_matrices(cell, options):
    rnn = getattr(unfading, cell)(3, 5, **options)
    model = unfading.Model(nn.Identity(), rnn, unfading.LastStep(5, 2))
    expected = [each for each in model.trainable if each.rpartition(".")[2] not in NOT]
    assert matrices(model, torch.randn(4, 3, 3)) == expected


@pytest.mark.parametrize("cell", catalogue.convolutional_cells(), ids=name)
def test_kernels_are_matrices(cell):
    rnn = unfading.layer(cell)(2, 4)
    model = unfading.Model(nn.Identity(), rnn, unfading.LastFrame(4, 2))
    expected = ["rnn.cells.0.W_h", "rnn.cells.0.from_input.weight", "head.answer.weight"]
    assert matrices(model, torch.randn(4, 3, 2, 5, 5)) == expected


def test_tokens():
    model = unfading.Model(nn.Embedding(7, 3), unfading.STAR(3, 5), unfading.EveryStep(5, 7))
    expected = ["rnn.cells.0.W_h", "rnn.cells.0.from_input.weight", "head.answer.weight"]
    assert matrices(model, torch.zeros(4, 3, dtype=torch.int64)) == expected
