"""Loops with divided units on a GPU, in each of their three ways: short sequences, some gradients, streams and captures."""

import copy
import os

import pytest
import torch

import unfading
from tests.helpers.contractive import contractive, errors
from tests.helpers.triton_laws import everything
from tests.helpers.variants import name
from unfading.fuse.plan import plan, triton_kernel
from unfading.fuse.triton.launch_settings import LaunchSettings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "1", reason="Triton interprets; `make gpu-test` has it compile"),
]

H = 200
CELLS = [unfading.LSTMCell, unfading.GRUCell]
WAYS = {
    "on chip": LaunchSettings(16, 4, None, 0, 16),
    "loaded": LaunchSettings(32, 8, 64, 0, 16),
    "summed": LaunchSettings(64, 8, None, 0, 8, summed=True),
}
CLOSE = 1e-5  # to float64, relative to the norm of each result


@pytest.fixture(params=WAYS)
def layer_of(request, device):
    """A function that builds a layer whose loops run in one way for the numbers of rows that are given."""
    kernels = []

    def build(cell, *batches):
        layer = contractive(cell, H).to(device)
        kernel = triton_kernel(plan(layer.runners[0]).key)
        for rows in batches:
            for loop in kernel.shapes:
                kernel.set(loop, "tf32x3", (1, rows), torch.device(device, 0), WAYS[request.param])
        kernels.append((kernel, batches))
        return layer

    yield build
    for kernel, batches in kernels:
        for rows in batches:
            for loop in kernel.shapes:  # no other way was taken instead
                assert kernel.setting(loop, "tf32x3", (1, rows), torch.device(device, 0)) == WAYS[request.param]
        kernel.settings.clear()
        kernel.add_settings({})


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_one_step_one_row_and_rows_in_turns(cell, layer_of):
    layer = layer_of(cell, 1, 70, 1000)
    exact = copy.deepcopy(layer).double()
    for T, B in ((1, 1), (1, 70), (2, 1), (5, 70), (3, 1000)):
        x, lengths = torch.randn(T, B, 3), torch.randint(1, T + 1, (B,))
        for own in (None, lengths):
            got, want = everything(layer, x, own, "fused"), everything(exact, x, own, "reference")
            for what, error in errors(got, want).items():
                assert error <= CLOSE, f"{what} of {T} steps and {B} rows: {error}"


def test_repeated_runs_give_the_same_bits(layer_of):
    layer, x = layer_of(unfading.LSTMCell, 130), torch.randn(300, 130, 3)
    first = everything(layer, x, None, "fused")
    for _ in range(5):
        torch.randn(300, 130, H, device="cuda")  # freed at once: what it leaves in memory must not be read
        again = everything(layer, x, None, "fused")
        assert all(torch.equal(first[what], again[what]) for what in first)


def test_some_gradients_of_tensors_that_lie_apart_in_memory(layer_of, device):
    layer = layer_of(unfading.LSTMCell, 70)
    frozen, *others = layer.parameters()
    frozen.requires_grad_(False)
    x = torch.randn(70, 6, 5, device=device).transpose(0, 1)[..., ::2]
    state = [torch.randn(1, 70, 2 * H, device=device)[..., ::2].requires_grad_() for _ in "hc"]
    gradient = torch.randn(1, 1, H, device=device).expand(6, 70, H)
    results = []
    for backend in ("fused", "reference"):
        with unfading.use_backend(backend):
            output, _ = layer(x, tuple(state))
        results.append([output, *torch.autograd.grad(output, [state[1], *others], gradient)])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 10 * CLOSE * want.norm()


def test_another_stream(layer_of, device):
    layer, x = layer_of(unfading.LSTMCell, 70), torch.randn(100, 70, 3)
    want = everything(layer, x, None, "fused")
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = everything(layer, x, None, "fused")
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(got[what], value) for what, value in want.items())


def test_captured_twice(layer_of, device):
    layer, x = layer_of(unfading.GRUCell, 70), torch.randn(100, 70, 3, device=device)
    parameters = list(layer.parameters())

    def call():
        output, _ = layer(x)
        # Detached: a graph that lives on keeps the nodes of its parameters on the stream of an earlier call.
        return [output.detach(), *torch.autograd.grad(output.square().sum(), parameters)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    captures = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        captures.append((graph, results))
    for _ in range(3):
        x.normal_()
        for graph, _ in captures:
            graph.replay()
        torch.cuda.synchronize()
        for first, second, want in zip(captures[0][1], captures[1][1], call(), strict=True):
            assert torch.equal(first, second)
            assert (first - want).norm() <= CLOSE * want.norm()  # cuBLAS may take other products after the loop in a capture
