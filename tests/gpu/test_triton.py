"""The Triton kernels on a GPU: the laws that hold under the interpreter, and what only a GPU has."""

import copy
import os

import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.test_fused import built
from tests.triton_laws import *  # noqa: F403
from tests.triton_laws import CELLS, agree, everything
from tests.variants import name

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "1", reason="Triton interprets; `make gpu-test` has it compile"),
]

# At T = 200, relative to the norm of each tensor: rounding in float32; 10 bits of a tf32 mantissa, and gates as coarse.
LIMITS = {"ieee": 2e-6, "tf32": 2e-3}


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture(params=LIMITS)
def precision(request):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


def contractive(cell, H):
    layer = built(cell, H, torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.5)
    return layer


@pytest.mark.parametrize("cell", [unfading.STARCell, unfading.LSTMCell, unfading.GRUCell, unfading.ElmanCell], ids=name)
@pytest.mark.parametrize("H", [64, 128])
def test_two_hundred_steps_in_both_precisions(cell, H, device, precision):
    layer = contractive(cell, H).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x = torch.randn(200, 40, 3)
    got, want = everything(layer, x, None, "fused"), everything(exact, x, None, "reference")
    for what, value in want.items():
        error = ((got[what] - value).norm() / value.norm()).item()
        assert error <= LIMITS[precision], f"{what}: {error}"


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_every_cell_at_a_usual_size(cell, device):
    layer = built(cell, 32, torch.float32).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x, lengths = torch.randn(9, 50, 3), torch.randint(1, 10, (50,))
    agree(everything(layer, x, lengths, "fused"), everything(exact, x, lengths, "reference"), 1e-3)


@pytest.mark.long
def test_more_entries_than_32_bits_can_count(device):
    layer = contractive(unfading.STARCell, 128).to(device)
    T, B = 140_000, 128
    assert T * B * 128 > 2**31
    with torch.no_grad():
        x = torch.randn(T, B, 3, device=device)
        output, state = layer(x)
        last, _ = layer(x[-200:])  # long enough that the start is forgotten
        assert_close(output[-1], last[-1], rtol=1e-4, atol=1e-5)
        assert_close(state.h[0], output[-1])
