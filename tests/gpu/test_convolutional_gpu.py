"""Convolutional layers on a GPU: a compiled step recorded as CUDA graphs, against the reference loop in float64 on the CPU."""

import copy

import pytest
import torch

import unfading
from tests.helpers.variants import name
from unfading import catalogue
from unfading.backends import choose as choosing
from unfading.backends.choose import observe_backends
from unfading.backends.cuda_graph import backend
from unfading.bench.agreement import relative_error
from unfading.torch_state import float32_products

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

each = pytest.mark.parametrize("cell", catalogue.convolutional_cells(), ids=name)
# The largest error of a result, as a norm. Factors of a convolution have 24, 11 and 8 bits.
LIMITS = {"ieee": 2e-5, "tf32": 1e-2, "bf16": 1e-1}


def everything(layer, x, **keywords):
    """Outputs, final state, and the gradients of a random function of them."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(3)
    output, state = layer(x, **keywords)
    parts = [output, *torch.utils._pytree.tree_leaves(state)]
    generator = torch.Generator().manual_seed(5)
    sum((p * torch.randn(p.shape, generator=generator).to(p)).sum() for p in parts).backward()
    return [*parts, x.grad, *(p.grad for p in layer.parameters())]


def agrees(layer, x, limit, **keywords):
    """Run a layer on the GPU twice, once to record it and once from the recording, and compare with float64 on the CPU."""
    double = copy.deepcopy(layer).double()
    with unfading.use_backend("reference"):
        exact = everything(double, x.double(), **keywords)
    layer = layer.cuda()
    on_gpu = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in keywords.items()}
    for _ in range(2):
        with observe_backends() as observed:
            results = everything(layer, x.cuda(), **on_gpu)
        assert {each["backend"] for each in observed.values()} == {"fused"}
        for got, want in zip(results, exact, strict=True):
            assert got.isfinite().all()
            assert relative_error(got.detach().cpu(), want.detach()) < limit


def layer_of(cell, channels=5, hidden=12, **options):
    torch.manual_seed(0)
    return unfading.layer(cell)(channels, hidden, **options)


def frames(steps=7, batch=3, channels=5, frame=(9, 6)):
    return torch.randn(steps, batch, channels, *frame, generator=torch.Generator().manual_seed(1))


OPTIONS = {
    "default": {},
    "stack": {"num_layers": 2, "bidirectional": True, "learn_initial_state": True},
    "stride, dilation": {"stride": 2, "dilation": (2, 1)},
    "kernel 5": {"kernel_size": 5},
    "checkpoints": {"checkpoint_every": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
@each
def test_every_cell_agrees_with_float64(cell, options):
    with float32_products("ieee"):
        agrees(layer_of(cell, **OPTIONS[options]), frames(), LIMITS["ieee"], lengths=torch.tensor([7, 2, 5]))


@each
def test_groups(cell):
    with float32_products("ieee"):
        agrees(layer_of(cell, 6, 12, groups=3), frames(channels=6), LIMITS["ieee"])


@each
def test_tf32(cell):
    with float32_products("tf32"):
        agrees(layer_of(cell, 16, 32), frames(channels=16, frame=(16, 16)), LIMITS["tf32"])


@each
def test_autocast(cell):
    layer, x = layer_of(cell, 16, 32), frames(channels=16, frame=(16, 16))
    double = copy.deepcopy(layer).double()
    with unfading.use_backend("reference"):
        exact = everything(double, x.double())
    with torch.autocast("cuda", torch.bfloat16):
        results = everything(layer.cuda(), x.cuda())
    assert results[0].dtype == torch.float32
    for got, want in zip(results, exact, strict=True):
        assert relative_error(got.detach().cpu(), want.detach()) < LIMITS["bf16"]


@each
def test_without_a_recording(cell, monkeypatch):
    """The same kernels, launched one by one."""
    monkeypatch.setattr(choosing, "_graph_refusal", lambda cell: "switched off")
    with float32_products("ieee"):
        agrees(layer_of(cell), frames(), LIMITS["ieee"])


@each
def test_large_calls_are_not_recorded(cell, monkeypatch):
    monkeypatch.setattr(backend, "LARGEST_INPUTS", 0)
    monkeypatch.setattr(backend, "RecordedLoop", None)
    with float32_products("ieee"):
        agrees(layer_of(cell), frames(), LIMITS["ieee"])


@each
def test_longer_than_one_recording(cell):
    with float32_products("ieee"):
        agrees(layer_of(cell), frames(steps=45), LIMITS["ieee"])


@each
def test_without_gradients(cell):
    layer, x = layer_of(cell), frames()
    with float32_products("ieee"), torch.no_grad():
        with unfading.use_backend("reference"):
            want = copy.deepcopy(layer).double()(x.double())[0]
        assert relative_error(layer.cuda()(x.cuda())[0].cpu(), want) < LIMITS["ieee"]
