"""coRNN, LEM and UnICORNN agree with loops in the parametrisation of their authors' code, and start as that code starts."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import unfading
from tests.helpers import laws

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
H = 5


class CoRNN(nn.Module):
    """One linear layer of the input, the velocities and the positions, in this order."""

    def __init__(self, size, dt, gamma, epsilon):
        super().__init__()
        self.dt, self.gamma, self.epsilon = dt, gamma, epsilon
        self.i2h = nn.Linear(size + H + H, H)

    def forward(self, x):
        hy = hz = x.new_zeros(x.shape[1], H)
        outputs = []
        for x_t in x:
            force = torch.tanh(self.i2h(torch.cat([x_t, hz, hy], dim=1)))
            hz = hz + self.dt * (force - self.gamma * hy - self.epsilon * hz)
            hy = hy + self.dt * hz
            outputs.append(hy)
        return torch.stack(outputs)

    def ours(self, cell):
        size = cell.input_size
        weight, bias = self.i2h.weight, self.i2h.bias
        parts = {"from_input.weight": weight[:, :size], "V": weight[:, size : size + H], "W": weight[:, size + H :]}
        return parts | {"from_input.bias": bias}


class LEM(nn.Module):
    """Rows of inp2hid: the steps of y and z, the terms of y and z; of hid2hid: both steps, the term of z."""

    def __init__(self, size, dt):
        super().__init__()
        self.dt = dt
        self.inp2hid, self.hid2hid, self.transform_z = nn.Linear(size, 4 * H), nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x):
        y = z = x.new_zeros(x.shape[1], H)
        outputs = []
        for x_t in x:
            i_1, i_2, i_z, i_y = self.inp2hid(x_t).chunk(4, 1)
            h_1, h_2, h_y = self.hid2hid(y).chunk(3, 1)
            step_1, step_2 = self.dt * torch.sigmoid(i_1 + h_1), self.dt * torch.sigmoid(i_2 + h_2)
            z = (1 - step_2) * z + step_2 * torch.tanh(i_y + h_y)
            y = (1 - step_1) * y + step_1 * torch.tanh(self.transform_z(z) + i_z)
            outputs.append(y)
        return torch.stack(outputs)

    def ours(self, cell):
        weight, bias = (torch.cat([t.chunk(4)[i] for i in (1, 0, 3, 2)]) for t in (self.inp2hid.weight, self.inp2hid.bias))
        W, second = (torch.cat([t.chunk(3)[i] for i in (1, 0, 2)]) for t in (self.hid2hid.weight, self.hid2hid.bias))
        # Our one bias of each line is the sum of their two.
        bias = bias + torch.cat([second, self.transform_z.bias])
        return {"from_input.weight": weight, "from_input.bias": bias, "W": W, "W_y": self.transform_z.weight}


class UnICORNN(nn.Module):
    """A linear layer over time, then a loop without a matrix."""

    def __init__(self, size, dt, alpha):
        super().__init__()
        self.dt, self.alpha = dt, alpha
        self.fc = nn.Linear(size, H)
        self.weight_hh, self.c_ = nn.Parameter(torch.rand(H)), nn.Parameter(0.2 * torch.rand(H) - 0.1)

    def forward(self, x):
        hy = hz = x.new_zeros(x.shape[1], H)
        outputs = []
        for u in self.fc(x):
            hz = hz - self.dt * torch.sigmoid(self.c_) * (torch.tanh(hy * self.weight_hh + u) + self.alpha * hy)
            hy = hy + self.dt * torch.sigmoid(self.c_) * hz
            outputs.append(hy)
        return torch.stack(outputs)

    def ours(self, cell):
        return {"from_input.weight": self.fc.weight, "from_input.bias": self.fc.bias, "w": self.weight_hh, "c": self.c_}


LOOPS = {
    "CoRNN": (CoRNN, {"dt": 0.3, "gamma": 1.5, "epsilon": 0.7}),
    "LEM": (LEM, {"dt": 0.6}),
    "UnICORNN": (UnICORNN, {"dt": 0.4, "alpha": 0.8}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_outputs_and_all_gradients_agree_with_the_released_loop(name):
    loop, options = LOOPS[name]
    cell = laws.make(getattr(unfading, f"{name}Cell"), options)
    released = loop(cell.input_size, **options).double()
    with torch.no_grad():
        for key, tensor in released.ours(cell).items():
            cell.get_parameter(key).copy_(tensor)
    x, other = laws.random_input().requires_grad_(), laws.random_input().requires_grad_()
    output, theirs = cell.output(laws.run(cell, x)[0]), released(other)
    assert output.abs().max() > 0.01
    assert_close(output, theirs, **CLOSE)
    output.square().sum().backward()
    theirs.square().sum().backward()
    assert_close(x.grad, other.grad, **CLOSE)
    # Ours are their parameters cut and stacked, so the gradients of theirs follow from those of ours.
    copied = released.ours(cell)
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
