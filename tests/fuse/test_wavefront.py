"""Layers side by side without a GPU: the order and the slices of the chunks, without streams, with loops in plain torch."""

import os

import pytest
import torch

import unfading
from tests.helpers.plain_loops import PlainLoop
from tests.helpers.triton_laws import agree, everything
from tests.helpers.wavefront_laws import *  # noqa: F403
from unfading.fuse import wavefront, wavefront_run
from unfading.fuse.plan import interpreted, plan, triton_kernel
from unfading.fuse.triton import kernel
from unfading.fuse.triton.launch_settings import H200
from unfading.fuse.triton.source import triton_missing

pytestmark = [
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="TRITON_INTERPRET is off"),
    pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the contents of the padding
]


@pytest.fixture
def device(monkeypatch):
    for module in (kernel, wavefront_run):
        monkeypatch.setattr(module, "ReadyLoop", PlainLoop)
    with interpreted():
        yield "cpu"


@pytest.mark.parametrize("reverse", [False, True])
def test_plain_loops_are_the_loops_of_the_kernel(reverse, device):
    layer = unfading.GRU(3, 4, bidirectional=reverse)
    x = torch.randn(4, 3, 3)
    for lengths in (None, torch.tensor([2, 4, 1])):
        agree(everything(layer, x, lengths, "fused"), everything(layer, x, lengths, "reference"))


def test_the_kernels_themselves_run_in_chunks(chunks, one_by_one):
    layer, stacks = unfading.STAR(3, 4, num_layers=3), chunks(1)
    with interpreted():
        same(layer, torch.randn(2, 3, 3), torch.tensor([1, 2, 2]), one_by_one)  # noqa: F405
    assert len(stacks) == 1


def test_a_rehearsal_runs_every_kernel_of_a_capture(device, chunks, monkeypatch):
    """Which tensors are given decides which kernel is compiled: also where only the final states have a gradient."""
    layer, stacks, x = unfading.STAR(3, 4, num_layers=3), chunks(2), torch.randn(5, 2, 3)
    kernels, run, arguments = set(), PlainLoop.run, []

    def recorded(self, tensors, lengths, extent):
        kernels.add((id(self.program), frozenset(key for key, tensor in tensors.items() if tensor is None)))
        run(self, tensors, lengths, extent)

    def loss(*weights):
        output, state = layer(x)
        pairs = zip(weights, (output, state), strict=True)
        return sum(weight * torch.stack([*parts]).sum() for weight, parts in pairs if weight)

    original = wavefront_run.WavefrontRun.__init__
    monkeypatch.setattr(PlainLoop, "run", recorded)
    monkeypatch.setattr(
        wavefront_run.WavefrontRun, "__init__", lambda self, *given: (arguments.append(given), original(self, *given))[1]
    )
    for weights in ((1, 0), (0, 1), (1, 1)):
        loss(*weights).backward()
    assert len(stacks) == 3
    captured = kernels.copy()
    kernels.clear()
    assert wavefront._rehearse(*arguments[0], keep=True)
    assert captured <= kernels


@pytest.mark.parametrize(
    ("cell", "units", "layers", "rows", "pays"),
    [
        ("STAR", 128, 12, 128, True),
        ("LSTM", 128, 12, 128, True),
        ("GRU", 128, 12, 128, True),
        ("STAR", 64, 3, 128, True),
        ("STAR", 128, 12, 4096, False),  # a layer fills the GPU with its rows
        ("LSTM", 512, 12, 128, False),  # and with its units
    ],
)
@pytest.mark.sample(2)
def test_it_pays_where_a_layer_leaves_most_of_the_gpu_idle(cell, units, layers, rows, pays, monkeypatch):
    monkeypatch.setattr(wavefront, "gpu", lambda device: H200)
    with interpreted():
        loops = triton_kernel(plan(getattr(unfading, cell)(units, units).runners[0]).key)
        settings = wavefront._settings(loops, (layers, rows), torch.device("cpu"), "tf32")
    assert (settings is not None) == pays
