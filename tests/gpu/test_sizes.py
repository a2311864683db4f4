"""Compiled loops on a GPU at sizes from 96 to 1024 units, for one row to a thousand: every result against float64."""

import copy
import os

import pytest
import torch

import unfading
from tests.helpers.contractive import LIMITS, contractive, errors
from tests.helpers.triton_laws import everything
from tests.helpers.variants import name

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "1", reason="Triton interprets; `make gpu-test` has it compile"),
]

CELLS = [unfading.STARCell, unfading.LSTMCell, unfading.GRUCell, unfading.ElmanCell]
UNITS = [96, 200, 256, 300, 512, 650, 1024]
BATCHES = [1, 7, 128, 1000]


@pytest.mark.parametrize("cell", CELLS, ids=name)
@pytest.mark.parametrize("H", UNITS)
def test_all_batches_agree_with_float64_in_every_gradient(cell, H, device, precision):
    layer = contractive(cell, H).to(device)
    exact = copy.deepcopy(layer).double()
    for B in BATCHES:
        x, lengths = torch.randn(6, B, 3), torch.randint(1, 7, (B,))
        got, want = everything(layer, x, lengths, "fused"), everything(exact, x, lengths, "reference")
        for what, error in errors(got, want).items():
            assert error <= LIMITS[precision], f"{what} at {B} rows: {error}"


@pytest.mark.parametrize("memory", [64, 256])
def test_nru_with_a_memory_in_one_program_and_divided(memory, device, precision):
    """The fifth roots of its norms, and gates that do not saturate, enlarge what is rounded."""
    layer = contractive(unfading.NRUCell, 200, memory_size=memory).to(device)
    exact = copy.deepcopy(layer).double()
    for B in (7, 100):
        x, lengths = torch.randn(6, B, 3), torch.randint(1, 7, (B,))
        got, want = everything(layer, x, lengths, "fused"), everything(exact, x, lengths, "reference")
        for what, error in errors(got, want).items():
            assert error <= 10 * LIMITS[precision], f"{what} at {B} rows: {error}"
        again = everything(layer, x, lengths, "fused")
        assert all(torch.equal(value, again[what]) for what, value in got.items())
