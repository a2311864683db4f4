"""Compiled loops held against the reference loop: layers to compare, all that is compared, and how close it must be."""

import math
from typing import NamedTuple

import torch

import unfading

# One table: relative to the largest entry of each tensor. float64: rounding of some hundred operations. float32: the same,
# 2^29 times coarser, and NRU's fifth roots amplify it.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}


def built(cell, hidden, dtype=torch.float64, *, features=3, **keywords):
    """A layer with weights small enough that no cell of the library amplifies rounding over these few steps."""
    torch.manual_seed(3)
    layer = unfading.layer(cell)(features, hidden, dtype=dtype, **keywords)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return layer


def everything(layer, x, backend, lengths=None, resets=None):
    """Output, final state and all gradients, through output and final state, by name."""
    x = x.clone().requires_grad_()
    torch.manual_seed(4)  # for cells that draw noise
    with unfading.use_backend(backend):
        output, state = layer(x, lengths=lengths, resets=resets)
    torch.manual_seed(5)
    parts = torch.utils._pytree.tree_leaves(state)
    loss = sum((part * torch.randn_like(part)).sum() for part in [output, *parts])
    named = {"x": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {"output": output, **{f"state {i}": part for i, part in enumerate(parts)}}
    return {**found, **{f"gradient of {n}": g for n, g in zip(named, gradients, strict=True)}}


def agree(got, want, dtype):
    assert got.keys() == want.keys()
    for what, reference in want.items():
        if reference is None:
            assert got[what] is None or not got[what].any(), what
            continue
        if reference.numel() == 0:  # a parameter without entries, of one unit
            assert got[what].shape == reference.shape, what
            continue
        scale = reference.abs().max().item()
        assert math.isfinite(scale), f"{what} of the reference is not finite"
        error = (got[what] - reference).abs().max().item()
        assert error <= TOLERANCE[dtype] * max(scale, 1e-30), f"{what}: off by {error} at a scale of {scale}"
    assert any(reference is not None and reference.any() for reference in want.values())


def agrees_with_the_reference(cell, T, B, H, dtype, *, features=3, **keywords):
    layer = built(cell, H, dtype, features=features, **keywords)
    x = torch.randn(T, B, features, dtype=dtype)
    if H == 1 and not layer(x)[0].any():  # the ReLU of the only unit is off
        x = -x
    lengths = torch.randint(1, T + 1, (B,))
    for own in (None, lengths):
        agree(everything(layer, x, "fused", own), everything(layer, x, "reference", own), dtype)


class Inputs(NamedTuple):
    a: torch.Tensor


class State(NamedTuple):
    h: torch.Tensor


class AppliedCell(unfading.Cell):
    """h = f(x): a function as the kernels compute it."""

    def __init__(self, function, size):
        super().__init__(size, size)
        self.function = function
        self.scale = torch.nn.Parameter(torch.ones(size))

    def project(self, x, start=0):
        return Inputs(x)

    def weights(self):
        return Inputs(self.scale)

    def initial_state(self, batch):
        return State(self.scale.new_zeros(batch, self.output_size))

    def step(self, inputs, state, weights):
        return State(getattr(torch, self.function)(inputs.a) * weights.a)
