"""The work of the host around the loops of a GPU, and the gradients of weights after them, under Triton's interpreter."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import unfading
from unfading.fuse import fused
from unfading.fuse.plan import interpreted, plan, triton_kernel
from unfading.fuse.triton.launch import Launcher
from unfading.fuse.triton.source import triton_missing

pytestmark = [
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="TRITON_INTERPRET is off"),
    pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed"),
]

VIEWS = ("view", "detach", "slice", "transpose", "split_with_sizes", "unbind", "unsqueeze", "alias", "select", "new_empty")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with interpreted():
        yield


class Operations(TorchDispatchMode):
    """The operations of torch that run inside the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("layer", "operations"), [("STAR", 7), ("LSTM", 8), ("GRU", 10)])
@pytest.mark.sample(1)
def test_a_call_launches_few_operations_beside_its_loops(layer, operations, monkeypatch):
    layer, x = getattr(unfading, layer)(1, 6), torch.randn(4, 3, 1)
    layer(x)[0].sum().backward()
    monkeypatch.setattr(fused, "_get_current_dispatch_mode_stack", list)  # the mode here only counts
    launched = []
    monkeypatch.setattr(Launcher, "launch", lambda self, function, *rest, **options: launched.append(function.name))
    gradient = torch.ones(4, 3, 6)
    layer.zero_grad()
    with Operations() as ran:
        layer(x)[0].backward(gradient)
    assert launched == ["train", "back"]
    launches = [name for name in ran.names if name not in VIEWS]
    assert len(launches) <= operations, launches


def test_a_gradient_of_sums_or_of_one_product_is_written_once():
    kernel = triton_kernel(plan(unfading.STARCell(1, 6)).key)
    layer, x = unfading.STAR(1, 6), torch.randn(4, 3, 1)
    layer(x)[0].sum().backward()
    terms = kernel.after_loop._terms
    assert [(terms[i].run is not None, terms[i].one) for i in range(3)] == [(False, True), (True, False), (True, False)]


def test_autocast_does_not_change_gradients_of_a_loop_that_ran_outside_of_it():
    layer, x = unfading.LSTM(1, 6), torch.randn(4, 3, 1)
    parameters = list(layer.parameters())
    output = layer(x)[0].square().sum()
    want = torch.autograd.grad(output, parameters, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(output, parameters)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_tensor_that_has_outlived_a_transform_is_taken():
    layer, outside = unfading.STAR(1, 6), []

    def loss(x):
        outside.append(x * 2)
        return outside[0].sum()

    x = torch.randn(4, 3, 1)
    torch.func.grad(loss)(x)
    assert torch.equal(layer(outside[0])[0], layer(x * 2)[0])
