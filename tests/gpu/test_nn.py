"""unfading.nn on a GPU: the numbers of cuDNN, from our kernels."""

import os

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import unfading
from unfading.backends.choose import observe_backends
from unfading.torch_state import float32_products

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "1", reason="Triton interprets; `make gpu-test` has it compile"),
]


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}], ids=str
)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_numbers_are_those_of_cudnn(kind, options, device):
    theirs = getattr(nn, kind)(3, 33, device=device, **options)
    ours = getattr(unfading.nn, kind)(3, 33, device=device, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(9, 17, 3, device=device)
    results = []
    with float32_products("ieee"), observe_backends() as ran:
        for layer in (ours, theirs):
            output, state = layer(x)
            parts = [output, *(state if kind == "LSTM" else [state])]
            results.append([*parts, *torch.autograd.grad(sum(part.sin().sum() for part in parts), list(layer.parameters()))])
    assert {each["backend"] for each in ran.values()} == {"fused"}
    for mine, their in zip(*results, strict=True):
        assert_close(mine, their, rtol=1e-4, atol=1e-5 * their.abs().max().item())


def test_a_projected_lstm(device):
    theirs = nn.LSTM(3, 20, proj_size=7, device=device)
    ours = unfading.nn.LSTM(3, 20, proj_size=7, device=device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(9, 5, 3, device=device)
    with float32_products("ieee"):
        assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_a_scan_runs_compiled(device):
    def step(h, a, W):
        h = torch.tanh(a + unfading.linear(h, W))
        return h, (h, 2 * h)

    init, xs, W = (
        torch.zeros(5, 20, device=device),
        torch.randn(9, 5, 20, device=device),
        torch.randn(20, 20, device=device) / 5,
    )
    W.requires_grad_()
    results = []
    for backend in ("fused", "reference"):
        carry, ys = unfading.scan(step, init, xs, weights=W, backend=backend)
        results.append([carry, *ys, *torch.autograd.grad(carry.sum() + ys[1].sin().sum(), W)])
    for mine, expected in zip(*results, strict=True):
        assert_close(mine, expected, rtol=1e-3, atol=1e-3)
