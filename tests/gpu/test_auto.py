"""The choice of a loop on a real GPU: settings that do not fit, a changed precision, and what `unfading.tune` stores."""

import os

import pytest
import torch
from torch.testing import assert_close

import unfading
from unfading.backends.choose import choose, observe_backends, runs_compiled
from unfading.fuse.plan import plan, triton_kernel
from unfading.fuse.triton.launch_settings import LaunchSettings
from unfading.layers.tune import AgainstGraphs

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "1", reason="Triton interprets; `make gpu-test` has it compile"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFADING_CACHE", str(tmp_path / "cache"))


def call(layer, x):
    layer.zero_grad()
    output, _ = layer(x)
    output.square().sum().backward()
    return [output, *(parameter.grad.clone() for parameter in layer.parameters())]


def test_settings_that_do_not_fit_are_replaced(device):
    layer, x = unfading.LSTM(3, 216).to(device), torch.randn(5, 70, 3, device=device)
    kernel = triton_kernel(plan(layer.runners[0]).key)
    large = LaunchSettings(64, 4, None, 0, 32)  # 655 KB on a multiprocessor
    for name in kernel.shapes:
        kernel.set(name, "tf32x3", (1, 70), torch.device(device, 0), large)
    with unfading.use_backend("reference"):
        wanted = call(layer, x)
    with unfading.use_backend("fused"):
        assert_close(call(layer, x), wanted, rtol=1e-3, atol=1e-3)
    assert kernel.setting("back", "tf32x3", (1, 70), torch.device(device, 0)) != large


def test_the_backward_pass_has_the_precision_of_the_forward_pass(device, monkeypatch):
    layer, x = unfading.GRU(3, 100).to(device), torch.randn(5, 7, 3, device=device)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    output, _ = layer(x)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
    output.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("batch", [1, 33, 700])
def test_the_chosen_loop_agrees_with_the_reference(batch, device):
    layer, x = unfading.RecurrentHighway(3, 150).to(device), torch.randn(6, batch, 3, device=device)
    with unfading.use_backend("reference"):
        wanted = call(layer, x)
    assert_close(call(layer, x), wanted, rtol=1e-3, atol=2e-3)


def test_graphs_that_were_measured_to_be_faster_run(device):
    layer, x = unfading.STAR(3, 24).to(device), torch.randn(6, 9, 3, device=device)
    kernel, on = triton_kernel(plan(layer.runners[0]).key), torch.device(device, 0)
    assert runs_compiled(choose(layer.runners[0], "auto", 9))
    wanted = call(layer, x)
    try:
        kernel.set_graphs("tf32x3", (1, 9), on, keep=True, faster=True)
        with observe_backends() as observed:
            assert_close(call(layer, x), wanted, rtol=1e-3, atol=1e-4)
        assert observed["STARCell"]["backend"] == "graph"
        assert "measured to be faster" in observed["STARCell"]["reason"]
    finally:
        kernel.graphs_win.clear()
        kernel.add_settings({})


@pytest.mark.long
def test_tune_compares_settings_and_graphs(device):
    choices = unfading.tune(unfading.STAR(3, 80).to(device), steps=20, batch=20)["cells.0"]
    assert [choice.loop for choice in choices[:3]] == ["infer", "train", "back"]
    assert all(choice.milliseconds <= choice.usual for choice in choices[:3])
    assert [type(choice) for choice in choices[3:]] == [AgainstGraphs] * 2


def test_rounding_to_tf32_is_no_dependence_on_other_rows(device, monkeypatch):
    """The sign of a number near zero decides a jump of b, and products of three digits decide that sign."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    layer = unfading.EURNN(3, 256).to(device)
    with torch.no_grad():
        layer.cells[0].b.fill_(0.5)
    assert runs_compiled(choose(layer.cells[0], "fused", 10))
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
