"""A user's cells with projections of every kind: `ALONG_TIME` must see the whole sequence, `LOCAL` see one step at a time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import unfading

H = 6


class Inputs(NamedTuple):
    a: torch.Tensor


class Weights(NamedTuple):
    U: torch.Tensor


class State(NamedTuple):
    h: torch.Tensor


class Along(unfading.Cell):
    """h_t = tanh(a_t + U h_{t-1}), a = W x mixed in some way by subclasses."""

    def __init__(self, input_size):
        super().__init__(input_size, H)
        self.W = nn.Linear(input_size, H)
        self.U = nn.Parameter(torch.randn(H, H) / H)

    def project(self, x, start=0):
        return Inputs(self.mixed(self.W(x), x, start))

    def mixed(self, a, x, start):
        return a

    def weights(self):
        return Weights(self.U)

    def initial_state(self, batch):
        return State(self.U.new_zeros(batch, H))

    def step(self, inputs, state, weights):
        return State(torch.tanh(inputs.a + unfading.linear(state.h, weights.U)))


# -- along time ---------------------------------------------------------------------------------------------------------------


class CausalConvolution(Along):
    def __init__(self, input_size):
        super().__init__(input_size)
        self.conv = nn.Conv1d(input_size, H, 3)

    def mixed(self, a, x, start):
        return a + self.conv(F.pad(x.permute(1, 2, 0), (2, 0))).permute(2, 0, 1)


class LongReach(Along):
    """Silent in a test of a few steps."""

    def mixed(self, a, x, start):
        reach = 90
        return a + F.pad(a, (0, 0, 0, 0, reach, 0))[: len(a)]


class Shift(Along):
    def mixed(self, a, x, start):
        return a + torch.cat([torch.zeros_like(a[:1]), a[:-1]])


class Ahead(Along):
    def mixed(self, a, x, start):
        return a + a.roll(-1, 0)


class Cumsum(Along):
    def mixed(self, a, x, start):
        return a + 0.1 * a.cumsum(0)


class SilentGate(Along):
    """Local as long as the gate is zero, as it is at the start of training."""

    def __init__(self, input_size):
        super().__init__(input_size)
        self.gate = nn.Parameter(torch.zeros(H))

    def mixed(self, a, x, start):
        return a + self.gate * a.cumsum(0)


class NormOverTime(Along):
    def mixed(self, a, x, start):
        return a / (a.norm(dim=0) + 1)


class Largest(Along):
    def mixed(self, a, x, start):
        return a / x.abs().max().clamp(min=3.0)


class OneOverSteps(Along):
    def mixed(self, a, x, start):
        return a / len(x)


class RelativePosition(Along):
    def mixed(self, a, x, start):
        return a + torch.linspace(0, 1, len(x), dtype=a.dtype).reshape(-1, 1, 1)


class IndexWithoutStart(Along):
    def mixed(self, a, x, start):
        return a + torch.arange(len(x), dtype=a.dtype).reshape(-1, 1, 1).sin()


class Statistics(Along):
    """In training; in evaluation it is local."""

    def __init__(self, input_size):
        super().__init__(input_size)
        self.norm = nn.BatchNorm1d(H)

    def mixed(self, a, x, start):
        return self.norm(a.flatten(0, 1)).view_as(a)


class Attention(Along):
    def mixed(self, a, x, start):
        rows = a.transpose(0, 1)
        return a + F.scaled_dot_product_attention(rows, rows, rows).transpose(0, 1)


class OneMask(Along):
    """One draw for all time, which is no field of its own."""

    def mixed(self, a, x, start):
        return a * torch.bernoulli(torch.full_like(a[:1], 0.5))


class Memory(Along):
    """Right in order, one piece after the other, and wrong when a segment is run again."""

    last = None

    def mixed(self, a, x, start):
        before = torch.zeros_like(a[:1]) if self.last is None or start == 0 else self.last
        self.last = a[-1:].detach()
        return a + torch.cat([before, a[:-1]])


class SharedInputs(NamedTuple):
    a: torch.Tensor
    pace: torch.Tensor  # [T, 1, 1]


class SharedOverSteps(Along):
    shared = ("pace",)

    def project(self, x, start=0):
        return SharedInputs(self.W(x), torch.linspace(0.5, 1, len(x), dtype=x.dtype).reshape(-1, 1, 1))

    def step(self, inputs, state, weights):
        return State(torch.tanh(inputs.pace * inputs.a + unfading.linear(state.h, weights.U)))


class ConstantOfX(Along):
    constant = ("pace",)

    def project(self, x, start=0):
        return SharedInputs(self.W(x), x.mean(0, keepdim=True).mean(2, keepdim=True).expand(1, x.shape[1], H))

    step = SharedOverSteps.step


ALONG_TIME = [
    CausalConvolution, LongReach, Shift, Ahead, Cumsum, SilentGate, NormOverTime, Largest, OneOverSteps, RelativePosition,
    IndexWithoutStart, Statistics, Attention, OneMask, SharedOverSteps, ConstantOfX,
]  # fmt: skip


# -- one step at a time -------------------------------------------------------------------------------------------------------


class Deep(Along):
    def mixed(self, a, x, start):
        return F.layer_norm(F.gelu(a).sort(dim=-1).values, (H,))


class Position(Along):
    """Not in reverse, where steps are numbered from the end."""

    def mixed(self, a, x, start):
        return a + torch.arange(start, start + len(x), dtype=a.dtype).reshape(-1, 1, 1).sin()


class Table(Along):
    """Of as many steps as the tests use, and no more."""

    def __init__(self, input_size):
        super().__init__(input_size)
        self.register_buffer("table", torch.randn(50, 1, H))

    def mixed(self, a, x, start):
        if start + len(x) > 50:
            raise ValueError("a table of 50 steps")
        return a + self.table[start : start + len(x)]


class Tokens(Along):
    def __init__(self, input_size):
        super().__init__(input_size)
        self.embedding = nn.Embedding(2, H)

    def mixed(self, a, x, start):
        return a + self.embedding(x[..., 0].long())


class OverRows(Along):
    """Not in reverse with lengths, where a step has other rows beside it."""

    def mixed(self, a, x, start):
        return a - a.mean(1, keepdim=True)


class Dropped(Along):
    def mixed(self, a, x, start):
        return F.dropout(a, 0.5, self.training)


class Clock(SharedOverSteps):
    def project(self, x, start=0):
        clock = torch.arange(start + 1, start + len(x) + 1, dtype=x.dtype)
        return SharedInputs(self.W(x), clock.rsqrt().reshape(-1, 1, 1))


class ConstantTable(ConstantOfX):
    def project(self, x, start=0):
        return SharedInputs(self.W(x), torch.linspace(0, 1, H, dtype=x.dtype).expand(1, x.shape[1], H))


class ConstantMask(ConstantOfX):
    def project(self, x, start=0):
        a = self.W(x)
        return SharedInputs(a, torch.bernoulli(torch.full_like(a[:1], 0.5)) if self.training else torch.ones_like(a[:1]))


class SinglePrecision(Along):
    """Computes in float32 only."""

    def mixed(self, a, x, start):
        if a.dtype != torch.float32:
            raise TypeError("float32 only")
        return a.sin()


LOCAL = [Along, Deep, Position, Table, Tokens, OverRows, Dropped, Clock, ConstantTable, ConstantMask, SinglePrecision]
FORWARD_ONLY = [Position, Table, OverRows]
