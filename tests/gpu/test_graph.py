"""CUDA graphs on a GPU: the tests of the replacement, and tests that need a GPU."""

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.helpers.compiled import built, everything
from tests.helpers.graph_laws import *  # noqa: F403
from tests.helpers.graph_laws import EXACT, State, agree, given, own, same_as_the_reference
from tests.helpers.triton_laws import everything as in_float64
from tests.helpers.variants import hidden_size, name, sampled
from tests.user.quiet import QuietCell
from unfading import catalogue
from unfading.backends.choose import choose
from unfading.backends.cuda_graph import backend as graph
from unfading.backends.cuda_graph import chunks
from unfading.backends.cuda_graph.backend import graph_if_possible, graph_refusal
from unfading.fuse.fused import refusal
from unfading.fuse.triton import kernel
from unfading.fuse.triton.launch_settings import Gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

KINDS = ["LSTM", "NRU", "IncrementalRNN", "EquilibriumRNN", "UnitaryRNN", "DeepTransition", "StatisticalRNN", "Quiet"]
CELLS = sampled([*catalogue.cells(), QuietCell], KINDS)


@pytest.fixture
def device():
    return "cuda:0"


@pytest.fixture
def usual_chunks(monkeypatch, short_chunks):
    monkeypatch.setattr(chunks, "CHUNK", 32)


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_agrees_with_the_reference(cell, device):
    same_as_the_reference(built(cell, hidden_size(cell), bidirectional=True), device)


@pytest.mark.usefixtures("usual_chunks")
def test_auto_takes_graphs_where_matrices_are_too_large_for_a_kernel(device, monkeypatch):
    monkeypatch.setattr(kernel, "gpu", lambda device: Gpu(8, kernel.ON_CHIP))  # more units than these have room for
    layer = built(unfading.LSTMCell, 1040, torch.float32).to(device)  # a size that no other test uses
    cell, x = layer.cells[0], torch.randn(75, 6, 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.5)
    assert "KB" in (refusal(cell) or ""), refusal(cell)
    assert choose(cell, "auto") is graph_if_possible, graph_refusal(cell)
    exact = in_float64(copy.deepcopy(layer).cpu().double(), x, None, "reference")
    got = in_float64(layer, x, None, "auto")
    assert graph_refusal(cell) is None
    assert graph._recordings[cell], "auto has recorded nothing"
    agree(got, exact, 1e-3)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_precision_of_products_is_that_of_the_call(precision, device):
    layer, x = built(unfading.LSTMCell, 256, torch.float32).to(device), given(device, 8, 64, torch.float32)
    before, results = torch.backends.cuda.matmul.fp32_precision, {}
    try:
        for now in ("ieee", "tf32", precision):
            torch.backends.cuda.matmul.fp32_precision = now
            results[now] = everything(layer, x, "graph")
            agree(results[now], everything(layer, x, "reference"), 1e-5)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert not torch.equal(results["ieee"]["output"], results["tf32"]["output"])


def test_training_follows_the_weights(device):
    """Recordings read the parameters of each call: ten steps of Adam give the same losses."""
    losses = []
    for backend in ("graph", "reference"):
        layer = built(unfading.GRUCell, 5, num_layers=2, backend=backend).to(device)
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
        torch.manual_seed(1)
        x = given(device)
        for _ in range(10):
            loss = (layer(x)[0] - 0.3).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[:10] == pytest.approx(losses[10:], rel=1e-9)
    assert losses[9] < losses[0]


def test_inside_the_capture_of_a_caller_auto_takes_the_reference(device):
    layer, x = own(lambda cell, a, s, U: State(a @ U + s.h, s.h), device, "auto"), given(device)
    with torch.no_grad():
        want = layer(x)[0]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), unfading.use_backend("reference"):
            layer(x)
        torch.cuda.current_stream().wait_stream(side)
        outer = torch.cuda.CUDAGraph()
        with torch.cuda.graph(outer):
            assert "just now" in (graph_refusal(layer.cells[0]) or "")
            output = layer(x)[0]
        x.copy_(2 * x)
        outer.replay()
        assert not torch.equal(output, want)
        assert_close(output, layer(x)[0], rtol=EXACT, atol=EXACT)


def test_a_capture_that_fails_does_no_harm(device):
    """torch.cuda.synchronize is no operation of torch, so only the capture itself fails."""

    def waits(cell, a, s, U):
        torch.cuda.synchronize()
        return State(a @ U + s.h, s.h)

    layer, x = own(waits, device), given(device)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot run as CUDA graphs: recording it failed"):
            layer(x)
    print(f"\n{graph_refusal(layer.cells[0])}")
    layer.backend = "auto"
    layer(x)[0].sum().backward()
    assert layer.cells[0].U.grad.isfinite().all()
    same_as_the_reference(built(unfading.LSTMCell, 5), device)
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()


def test_recordings_go_with_their_cell(device):
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layer = built(unfading.LSTMCell, 64, torch.float32, backend="graph").to(device)
    layer(given(device, dtype=torch.float32))[0].sum().backward()
    (recordings,) = graph._recordings[layer.cells[0]].values()
    watched = weakref.ref(next(iter(recordings.loops.values())))
    assert torch.cuda.memory_allocated() > before
    del recordings, layer
    gc.collect()
    assert watched() is None
    # cuBLAS does not free its workspaces.
    assert torch.cuda.memory_allocated() - before < 128 << 20


def test_streams_and_threads_take_turns(device):
    layer = built(unfading.STARCell, 16, backend="graph").to(device)
    xs = [given(device, 40, 7) for _ in range(6)]
    with (
        unfading.use_backend("reference"),
        torch.no_grad(),
    ):  # the autograd graph belongs to one stream, and torch warns about others
        want = [layer(x)[0] for x in xs]
    with torch.no_grad():  # record first: recording while another thread records is refused
        layer(xs[0])
    torch.autograd.grad(layer(xs[0])[0].sum(), list(layer.parameters()))
    torch.cuda.synchronize()
    got = [None] * len(xs)

    # The leaves belong to several streams; torch warns about them, and waits correctly.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def run(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                got[i] = layer(xs[i])[0]
                torch.autograd.grad(got[i].sum(), list(layer.parameters()))
            stream.synchronize()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want, strict=True):
        assert a is not None, "a thread failed; see above"
        assert_close(a, b, rtol=EXACT, atol=EXACT)


@pytest.mark.usefixtures("usual_chunks")
@pytest.mark.parametrize("cell", [unfading.LSTMCell, unfading.NRUCell], ids=name)
def test_it_is_faster_than_the_loop_it_records(cell, device):
    layer, x, times = unfading.layer(cell)(1, 256).to(device), torch.randn(256, 64, 1, device=device), {}
    for backend in ("graph", "reference"):
        with unfading.use_backend(backend):
            for i in range(4):
                if i == 1:  # after the recording
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                layer(x)[0][-1].sum().backward()
        torch.cuda.synchronize()
        times[backend] = (time.perf_counter() - start) / 3
    milliseconds = f"graph {1e3 * times['graph']:.1f} ms, loop {1e3 * times['reference']:.1f} ms"
    summary = f"{name(cell)}, 256 units, T=256, B=64: {milliseconds}"
    print(f"\n{summary}")
    assert times["graph"] < times["reference"], summary
