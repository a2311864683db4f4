"""Layers side by side on a GPU, in streams."""

import os

import pytest
import torch

import unfading
from tests.helpers.wavefront_laws import *  # noqa: F403
from tests.helpers.wavefront_laws import everything
from unfading.backends import choose
from unfading.fuse import wavefront, wavefront_run
from unfading.training.loop import train_together

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "1", reason="Triton interprets; `make gpu-test` has it compile"),
]


@pytest.fixture
def device(request, monkeypatch):
    """Layers run side by side outside a capture too, except in the test of captures."""
    if "captured" not in request.node.name:
        monkeypatch.setattr(wavefront, "is_worth_asking", lambda device: True)
        monkeypatch.setattr(wavefront, "_rehearsed", lambda *_: True)
    return "cuda"


@pytest.fixture
def runs(monkeypatch):
    """For every run of a stack side by side, whether it is captured. No stack was rehearsed before, of whatever shape."""
    runs = []
    monkeypatch.setattr(wavefront, "_rehearsals", {})
    forward = wavefront_run.WavefrontRun.forward

    def counted(self, *, keep):
        runs.append(torch.cuda.is_current_stream_capturing())
        return forward(self, keep=keep)

    monkeypatch.setattr(wavefront_run.WavefrontRun, "forward", counted)
    return runs


@pytest.mark.parametrize("kind", ["STAR", "LSTM"])
@pytest.mark.parametrize("lengths", [False, True])
def test_twelve_layers_are_the_same_in_every_run(kind, lengths, device, monkeypatch):
    """Streams that read what another has not yet written, or memory that is freed too early, would show."""
    layer = getattr(unfading, kind)(3, 64, num_layers=12, backend="fused").to(device)
    x = torch.randn(300, 40, 3)
    own = torch.randint(1, 301, (40,)) if lengths else None
    first = everything(layer, x, own, "fused")
    for _ in range(5):
        torch.randn(300, 40, 64, device=device)  # freed at once: what it leaves in memory must not be read
        again = everything(layer, x, own, "fused")
        assert all(torch.equal(first[key], again[key]) for key in first)
    monkeypatch.setattr(choose, "LEAST_LAYERS", 100)
    for key, want in everything(layer, x, own, "fused").items():
        error = (first[key] - want).norm() / want.norm()
        assert error < 1e-4, f"{key}: {error}"


@pytest.mark.parametrize(("dropout", "lengths"), [(0.0, False), (0.0, True), (0.2, False)])
def test_a_captured_step_is_the_step_that_would_have_run(dropout, lengths, device, runs):
    layer = unfading.STAR(3, 64, num_layers=6, dropout=dropout).to(device)
    x = torch.randn(128, 20, 3, device=device)
    own = torch.randint(1, 129, (20,), device=device) if lengths else None

    def step():
        layer.zero_grad(set_to_none=False)
        output, state = layer(x, lengths=own)
        (output.square().mean() + state.h.sum()).backward()
        return output.detach()

    step()
    assert not runs  # the default stream: no capture follows
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    assert runs == [False]  # rehearsed once
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    assert runs == [False, True]
    results = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        results.append([output.clone(), *(parameter.grad.clone() for parameter in layer.parameters())])
    same_bits = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    assert all(same_bits) if dropout == 0.0 else not same_bits[0]  # dropout draws new masks at every replay
    if dropout == 0.0:
        want = [step(), *(parameter.grad for parameter in layer.parameters())]
        for a, b in zip(results[0], want, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_without_a_warm_up_layers_are_captured_one_after_the_other(device, runs):
    layer = unfading.STAR(3, 32, num_layers=4).to(device)
    x = torch.randn(64, 8, 3, device=device)
    with torch.no_grad():
        want = layer(x)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = layer(x)[0]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, want)
    assert not runs


def test_captured_training_steps_of_a_deep_stack(device, runs, monkeypatch):
    run = unfading.Run(
        task="adding", task_options={"T": 40}, cell="STAR", hidden=16, layers=4, batch=8, steps=12, valid_every=6, device="cuda"
    )
    (got,) = train_together([run])
    assert runs == [False, True]
    monkeypatch.setattr(choose, "LEAST_LAYERS", 100)
    (want,) = train_together([run])
    assert len(runs) == 2
    for a, b in zip(got["curve"], want["curve"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_calls_on_several_streams(device):
    """Two calls at the same time share the streams of the layers, and give the results of calls one after the other."""
    layer = unfading.STAR(3, 64, num_layers=6).to(device)
    inputs = [torch.randn(128, 20, 3, device=device) for _ in range(4)]
    with torch.no_grad():
        want = [layer(x)[0] for x in inputs]
        torch.cuda.synchronize()
        streams, got = [torch.cuda.Stream() for _ in inputs], []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(layer(x)[0])
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
