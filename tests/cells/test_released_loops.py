"""coRNN, LEM and UnICORNN agree with loops in the parametrisation of their authors' code, and start as that code starts."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import unfading
from tests.helpers import laws
from tests.helpers.benchmarks import script

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


rivals = script("rivals")
OPTIONS = {
    "CoRNN": {"dt": 0.3, "gamma": 1.5, "epsilon": 0.7},
    "LEM": {"dt": 0.6},
    "UnICORNN": {"dt": 0.4, "alpha": 0.8},
}


@pytest.mark.parametrize("name", rivals.LOOPS)
def test_outputs_and_all_gradients_agree_with_the_released_loop(name):
    options = OPTIONS[name]
    cell = laws.make(getattr(unfading, f"{name}Cell"), options)
    released = rivals.LOOPS[name](cell.input_size, cell.output_size, **options).double()
    rivals.copy_weights(released, cell)
    x, other = laws.random_input().requires_grad_(), laws.random_input().requires_grad_()
    output, theirs = cell.output(laws.run(cell, x)[0]), released(other)
    assert output.abs().max() > 0.01
    assert_close(output, theirs, **CLOSE)
    output.square().sum().backward()
    theirs.square().sum().backward()
    assert_close(x.grad, other.grad, **CLOSE)
    # Ours are their parameters cut and stacked, so the gradients of theirs follow from those of ours.
    copied = released.ours()
    assert copied.keys() == dict(cell.named_parameters()).keys()
    names, parameters = zip(*released.named_parameters(), strict=True)
    ours = [cell.get_parameter(key).grad for key in copied]
    pulled = torch.autograd.grad(list(copied.values()), parameters, ours)
    for key, parameter, gradient in zip(names, parameters, pulled, strict=True):
        assert_close(gradient, parameter.grad, **CLOSE, msg=lambda text, key=key: f"{key}: {text}")


def uniform(tensor, low, high):
    """Whether the entries look like thousands of draws from U(low, high): range, mean and variance."""
    width = high - low
    return (
        low <= tensor.min() < low + 0.01 * width
        and high - 0.01 * width < tensor.max() <= high
        and abs(tensor.mean() - (low + high) / 2) < 0.02 * width
        and abs(tensor.std() - width / math.sqrt(12)) < 0.02 * width
    )


def test_initial_values_are_those_of_the_released_code():
    size, hidden = 40, 2000
    for parameter in unfading.CoRNNCell(size, hidden).parameters():  # nn.Linear's default, for one layer of all inputs
        k = 1 / math.sqrt(size + 2 * hidden)
        assert uniform(parameter, -k, k)
    for parameter in unfading.LEMCell(size, hidden).parameters():
        assert uniform(parameter, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
    cell = unfading.UnICORNNCell(size, hidden)
    k = nn.init.kaiming_uniform_(torch.empty(hidden, size), a=8).abs().max().item()
    assert uniform(cell.from_input.weight, -1.001 * k, 1.001 * k)
    assert not cell.from_input.bias.any()
    assert uniform(cell.w, 0.0, 1.0)
    assert uniform(cell.c, -0.1, 0.1)
