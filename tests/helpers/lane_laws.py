"""Tests of steps whose units are independent, under Triton's interpreter and on a GPU.

Each module that imports these tests has a fixture `device`, on which the kernels run.
"""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import unfading
from tests.helpers.compiled import built
from tests.helpers.triton_laws import agree, everything
from tests.helpers.variants import name
from tests.user.oscillator import RotatingCell
from unfading.fuse.plan import plan, triton_kernel

LINEAR = [unfading.MinGRUCell, unfading.MinLSTMCell, unfading.LRUCell, unfading.GatedLRUCell, RotatingCell]
DIAGONAL = [unfading.IndRNNCell, unfading.UnICORNNCell, unfading.BRCell]


class MaskedInputs(NamedTuple):
    a: Tensor
    mask: Tensor  # [1, B, H]


class MaskedCell(unfading.MinGRUCell):
    """A linear step with an input that is the same at all steps."""

    constant = ("mask",)

    def project(self, x, start=0):
        return MaskedInputs(*super().project(x, start), x[:1, :, :1].sigmoid().expand(1, x.shape[1], self.output_size))

    def step(self, inputs, state, weights):
        return super().step(inputs, type(state)(inputs.mask * state.h), weights)


@pytest.mark.parametrize("cell", [*LINEAR, *DIAGONAL], ids=name)
@pytest.mark.parametrize("backend", ["fused", "scan"])
@pytest.mark.sample(4)
def test_lanes_agree_with_the_reference_in_float64(cell, backend, device):
    if backend == "scan" and cell in DIAGONAL:
        pytest.skip("a scan needs a linear step")
    T, B, H = (5, 3, 5) if device == "cpu" else (77, 9, 40)
    layer = built(cell, H, torch.float32, bidirectional=True, learn_initial_state=True).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    assert triton_kernel(plan(layer.runners[0]).key).lanes is not None
    x = torch.randn(T, B, 3)
    for lengths in (None, torch.randint(1, T + 1, (B,))):
        agree(everything(layer, x, lengths, backend), everything(exact, x, lengths, "reference"))


@pytest.mark.parametrize("cell", [*LINEAR, *DIAGONAL], ids=name)
@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.sample(3)
def test_the_number_of_chunks_does_not_change_the_result(cell, chunks, device, monkeypatch):
    T, B, H = (7, 2, 3) if device == "cpu" else (301, 5, 70)
    layer = built(cell, H, torch.float32).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    lanes = triton_kernel(plan(layer.runners[0]).key).lanes

    def in_chunks(loop, extent, gpu, scan):
        return chunks if loop == "back" or lanes.not_linear() is None else 1

    monkeypatch.setattr(lanes, "chunks", in_chunks)
    x = torch.randn(T, B, 3)
    for lengths in (None, torch.randint(1, T + 1, (B,))):
        agree(everything(layer, x, lengths, "fused"), everything(exact, x, lengths, "reference"))


@pytest.mark.parametrize("cell", [unfading.MinGRUCell, unfading.UnICORNNCell], ids=name)
@pytest.mark.sample(1)
def test_lanes_run_a_fleet_in_one_launch(cell, device):
    layers = [built(cell, 4, torch.float32).to(device) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(layers)
    x = torch.randn(5, 2, 3, device=device)

    def loss(own):
        return torch.func.functional_call(layers[0], own, (x,))[0].square().sum()

    with unfading.use_backend("fused"):
        together = torch.func.vmap(torch.func.grad(loss))(parameters)
        for k, layer in enumerate(layers):
            alone = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
            for (key, _), gradient in zip(layer.named_parameters(), alone, strict=True):
                torch.testing.assert_close(together[key][k], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", [unfading.MinGRUCell, unfading.IndRNNCell], ids=name)
@pytest.mark.sample(1)
def test_lanes_with_resets_and_one_feature(cell, device):
    layer = unfading.Recurrent(lambda size: cell(size, 5), 1, learn_initial_state=True).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x, resets = torch.randn(6, 3, 1), torch.rand(6, 3) < 0.4
    for backend in ("fused", "scan") if cell in LINEAR else ("fused",):
        agree(everything(layer, x, None, backend, resets), everything(exact, x, None, "reference", resets))
    agree(everything(layer, x, None, "fused"), everything(exact, x, None, "reference"))


def test_the_gradient_of_an_input_that_is_constant_in_time(device):
    layer = unfading.Recurrent(lambda size: MaskedCell(size, 5), 3).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x = torch.randn(6, 3, 3)
    agree(everything(layer, x, None, "fused"), everything(exact, x, None, "reference"))


def test_a_scan_refuses_what_it_cannot_run(device):
    x = torch.randn(4, 2, 3, device=device)
    for cell, reason in (
        (unfading.IndRNNCell, "not linear in its state, to which it applies relu"),
        (unfading.LSTMCell, "mixes its units"),
        (MaskedCell, "constant in time"),
    ):
        layer = unfading.Recurrent(lambda size, cell=cell: cell(size, 4), 3).to(device)
        with unfading.use_backend("scan"), pytest.raises(RuntimeError, match=reason):
            layer(x)
        assert layer(x)[0].shape == (4, 2, 4)
