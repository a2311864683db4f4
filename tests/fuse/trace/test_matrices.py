"""Products with parts of a weight: matrices of a stack one by one, and batched products with all of them."""

import re
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.testing import assert_close

import unfading
from tests.helpers.compiled import agree, agrees_with_the_reference, built, everything
from unfading.fuse.plan import PROGRAMS, plan

HEADS = 3


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H]


class Weights(NamedTuple):
    U: Tensor  # [heads, D, D]


class State(NamedTuple):
    h: Tensor  # [B, H]


class StackCell(unfading.Cell[Inputs, State, Weights]):
    """h_t = tanh(W x_t + b + y_t), with y_t = U_k h_{t-1} in each group k of units."""

    def __init__(self, input_size, hidden_size, *, bias=True, product=None):
        super().__init__(input_size, hidden_size)
        self.product = product
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.U = nn.Parameter(torch.randn(HEADS, hidden_size // HEADS, hidden_size // HEADS) / 2)

    def project(self, x, start=0):
        return Inputs(self.from_input(x))

    def weights(self):
        return Weights(self.U)

    def initial_state(self, batch):
        return State(self.U.new_zeros(batch, self.output_size))

    def step(self, inputs, state, weights):
        v = state.h.unflatten(-1, (HEADS, -1))  # [B, heads, D]
        return State(torch.tanh(inputs.a + self.product(v, weights.U)))


def loop(v, U):
    return torch.cat([v[:, k] @ U[k].T for k in range(HEADS)], dim=-1)


def unbound(v, U):
    return torch.cat([part @ W.T for part, W in zip(v.unbind(1), U, strict=True)], dim=-1)


def bmm(v, U):
    return torch.bmm(v.transpose(0, 1), U.mT).transpose(0, 1).flatten(1)


def matmul(v, U):
    return (v.transpose(0, 1) @ U.mT).transpose(0, 1).flatten(1)


def einsum(v, U):
    return torch.einsum("bkd,ked->bke", v, U).flatten(1)


def gates(v, U):
    """Several products of each group at once."""
    gate, y = torch.einsum("bkd,gked->bgke", v, U.expand(2, -1, -1, -1)).unbind(1)
    return (torch.sigmoid(gate) * y).flatten(1)


WAYS = [loop, unbound, bmm, matmul]


def program_of(product):
    """The text of a program, with its values numbered in the order of their appearance."""
    text, numbers = str(PROGRAMS[plan(StackCell(3, 6, product=product)).key]), {}
    return re.sub(r"%\d+", lambda match: f"%{numbers.setdefault(match[0], len(numbers))}", text)


def test_all_ways_to_write_a_product_with_a_stack_are_one_program():
    assert len({program_of(product) for product in WAYS}) == 1


def test_einsum_with_a_stack():
    agrees_with_the_reference(StackCell, 5, 4, 6, torch.float64, product=einsum)


@pytest.mark.long
@pytest.mark.parametrize("product", [gates, lambda v, U: einsum(v, U.mT)], ids=["gates", "transposed"])
def test_other_products_with_a_stack(product):
    agrees_with_the_reference(StackCell, 5, 4, 6, torch.float64, product=product, bidirectional=True)


def test_a_stack_in_several_models_at_once():
    layers = [built(StackCell, 6, product=bmm) for _ in range(2)]
    with torch.no_grad():
        layers[1].cells[0].U.neg_()
    parameters, _ = stack_module_state(layers)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    both = vmap(lambda own: functional_call(layers[0], own, (x,))[0])(parameters)
    for one, layer in zip(both, layers, strict=True):
        agree({"output": one}, {"output": everything(layer, x, "reference")["output"]}, torch.float64)


@pytest.mark.long
def test_a_stack_is_exported():
    layer, x = unfading.layer(StackCell)(3, 6, product=einsum), torch.randn(5, 4, 3)
    program = torch.export.export(layer, (x,))
    assert any("fused_forward" in str(node.target) for node in program.graph.nodes)
    assert_close(program.module()(x)[0], layer(x)[0])
