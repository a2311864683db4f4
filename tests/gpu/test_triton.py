"""The Triton kernels on a GPU: the tests of the interpreter, and tests that need a GPU."""

import copy
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.helpers.compiled import built
from tests.helpers.contractive import LIMITS, contractive, errors
from tests.helpers.triton_laws import *  # noqa: F403
from tests.helpers.triton_laws import CELLS, agree, everything
from tests.helpers.variants import name

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "1", reason="Triton interprets; `make gpu-test` has it compile"),
]


@pytest.mark.parametrize("cell", [unfading.STARCell, unfading.LSTMCell, unfading.GRUCell, unfading.ElmanCell], ids=name)
@pytest.mark.parametrize("H", [64, 128])
def test_two_hundred_steps_in_both_precisions(cell, H, device, precision):
    layer = contractive(cell, H).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x = torch.randn(200, 40, 3)
    got, want = everything(layer, x, None, "fused"), everything(exact, x, None, "reference")
    for what, error in errors(got, want).items():
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
        last, _ = layer(x[-200:])  # long enough to forget the start
        assert_close(output[-1], last[-1], rtol=1e-4, atol=1e-5)
        assert_close(state.h[0], output[-1])


def test_offsets_past_two_to_the_thirty_first():
    """With T B H = 2.7e9 entries, the last steps of the last rows equal those of a run with a few rows."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB on the GPU")
    T, B = 20_500, 1024
    layer = unfading.STAR(1, 128).cuda()
    x = torch.randn(T, B, 1, device="cuda")
    with torch.no_grad():
        whole, state = layer(x)
        assert whole.numel() > 2**31
        rows, _ = layer(x[:, -16:].contiguous())
    assert torch.equal(whole[:, -16:], rows)
    assert torch.equal(state.h[0], whole[-1])
    del whole, rows
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool, tmp_path):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on this machine")
    script = tmp_path / "small.py"
    script.write_text(
        "import torch, unfading\n"
        "for layer in (unfading.STAR(3, 5), unfading.LSTM(1, 20, bidirectional=True)):\n"
        "    layer.cuda()\n"
        "    x = torch.randn(3, 17, layer.input_size, device='cuda', requires_grad=True)\n"
        "    lengths = torch.tensor([1 + i % 3 for i in range(17)], device='cuda')\n"
        "    with unfading.use_backend('fused'):\n"
        "        layer(x, lengths=lengths)[0].sum().backward()\n"
        "torch.cuda.synchronize()\n"
    )
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert answer.returncode == 0, (answer.stdout + answer.stderr)[-2000:]
