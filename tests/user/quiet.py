"""A user's own cell in a user's own file: nothing of the library knows it."""

from typing import NamedTuple

import torch
from torch import nn

import unfading


class Inputs(NamedTuple):
    a: torch.Tensor  # [T, B, H]
    mask: torch.Tensor  # [1, B, H] constant
    clock: torch.Tensor  # [T, 1, 1] shared


class Weights(NamedTuple):
    U: unfading.LowRank
    leak: torch.Tensor


class State(NamedTuple):
    h: torch.Tensor
    energy: torch.Tensor  # [B, 2]: a second part of another size


class QuietCell(unfading.Cell):
    """h_t = leak h + mask * tanh(W x + (I + L R) h) / clock_t, with its running energy; both go out."""

    shared = ("clock",)
    constant = ("mask",)

    def __init__(self, input_size, hidden_size, *, bias=True, leak=0.9):
        super().__init__(input_size, hidden_size + 2)
        self.hidden_size = hidden_size
        self.W = nn.Linear(input_size, hidden_size, bias=bias)
        self.L = nn.Parameter(0.3 * torch.randn(hidden_size, 1))
        self.R = nn.Parameter(0.3 * torch.randn(1, hidden_size))
        self.leak = nn.Parameter(torch.tensor(leak))

    def project(self, x, start=0):
        T, B, _ = x.shape
        clock = torch.arange(start + 1, start + T + 1, dtype=x.dtype, device=x.device).sqrt()
        mask = torch.linspace(0.5, 1.0, self.hidden_size, dtype=x.dtype, device=x.device)
        return Inputs(self.W(x), mask.expand(1, B, -1), clock.reshape(T, 1, 1))

    def weights(self):
        return Weights(unfading.LowRank(self.L, self.R), self.leak)

    def initial_state(self, batch):
        return State(self.L.new_zeros(batch, self.hidden_size), self.L.new_ones(batch, 2))

    def step(self, inputs, state, weights):
        update = torch.tanh(inputs.a + unfading.linear(state.h, weights.U))
        h = weights.leak * state.h + inputs.mask * update / inputs.clock
        both = torch.stack([h.mean(dim=-1), h.square().mean(dim=-1)], dim=-1)
        return State(h, 0.5 * state.energy + both)

    def output(self, state):
        return torch.cat([state.h, 1 - state.energy], dim=-1)


Quiet = unfading.layer(QuietCell)
