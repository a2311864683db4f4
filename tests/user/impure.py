"""Users' cells that read and write more than their arguments: attributes of all kinds, globals, closures, caches, hooks."""

import functools
import random
import threading
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import unfading
from unfading import linear

H = 5
FACTOR = 0.5
TABLE = {"factor": [0.5]}


class Inputs(NamedTuple):
    a: Tensor


class State(NamedTuple):
    h: Tensor


class Weights(NamedTuple):
    U: Tensor


class Plain(unfading.Cell):
    """h_t = tanh(W x_t + factor U h_{t-1})"""

    def __init__(self, input_size, **attributes):
        super().__init__(input_size, H)
        self.W = nn.Linear(input_size, H)
        self.U = nn.Parameter(torch.randn(H, H) / H**0.5)
        for name, value in attributes.items():
            setattr(self, name, value)

    def factor(self):
        return 0.5

    def project(self, x, start=0):
        return Inputs(self.W(x))

    def weights(self):
        return Weights(self.U)

    def initial_state(self, batch):
        return State(self.U.new_zeros(batch, H))

    def step(self, inputs, state, weights):
        return State(torch.tanh(inputs.a + self.factor() * linear(state.h, weights.U)))


# -- cells that read something which may change --------------------------------------------------------------------------------


class Attribute(Plain):
    def factor(self):
        return self.o


class OfObject(Plain):
    def factor(self):
        return self.o.alpha


class OfContainer(Plain):
    def factor(self):
        return self.o["a"][0]["b"]


class OfArray(Plain):
    def factor(self):
        return float(self.o[0])


class OfClass(Plain):
    alpha = 0.5

    def factor(self):
        return self.alpha


class OfMethod(Plain):
    def factor(self):
        return 0.5


class OfGlobal(Plain):
    def factor(self):
        return FACTOR


class OfGlobalContainer(Plain):
    def factor(self):
        return TABLE["factor"][0]


class OfCall(Plain):
    def factor(self):
        return self.o()


class OfSlots(Plain):
    def factor(self):
        return self.o.alpha


class Slots:
    __slots__ = ("alpha",)

    def __init__(self, alpha):
        self.alpha = alpha


class Callable:
    slope = 0.5

    def __call__(self):
        return self.slope


class OfBuffer(Plain):
    def __init__(self, input_size):
        super().__init__(input_size)
        self.register_buffer("o", torch.tensor([0.5]))

    def factor(self):
        return self.o.tolist()[0]


def closure(holder):
    return lambda: holder["alpha"]


# -- cells that write something -------------------------------------------------------------------------------------------


class Normalised(Plain):
    def __init__(self, input_size):
        super().__init__(input_size)
        self.norm = nn.BatchNorm1d(H)

    def project(self, x, start=0):
        a = self.W(x)
        return Inputs(self.norm(a.flatten(0, 1)).view_as(a))


class LazyConstant(Plain):
    mask = None

    def factor(self):
        if self.mask is None:
            self.mask = torch.full((H,), 0.5)
        return self.mask


class LazyNumber(Plain):
    number = None

    def factor(self):
        if self.number is None:
            self.number = 0.25 * 2
        return self.number


class PositionTable(Plain):
    table = None

    def project(self, x, start=0):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.sin(torch.arange(len(x), dtype=x.dtype))[:, None, None]
        return Inputs(self.W(x) + self.table[: len(x)])


class StoresLast(Plain):
    calls = 0

    def project(self, x, start=0):
        a = self.W(x)
        self.last = a.detach()
        self.calls += 1
        return Inputs(a)


class StoresInStep(Plain):
    def step(self, inputs, state, weights):
        new = super().step(inputs, state, weights)
        self.last = new.h.detach()
        return new


class Spectral(Plain):
    def __init__(self, input_size):
        super().__init__(input_size)
        nn.utils.parametrizations.spectral_norm(self, "U")


class Draws(Plain):
    """Draws from every generator there is, in project."""

    def __init__(self, input_size):
        super().__init__(input_size)
        self.own, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)

    def project(self, x, start=0):
        numbers = random.random() + np.random.rand() + self.own.random() + self.numpy.random()
        noise = torch.rand_like(x) + torch.rand(x.shape, generator=self.torch).to(x)
        return Inputs(self.W(x + noise + numbers))


@functools.cache
def constant(n):
    return torch.full((n,), 0.5)


class Cached(Plain):
    """Its table is cached by functools."""

    def project(self, x, start=0):
        return Inputs(self.W(x) + constant(H))


# -- cells that hold what cannot be compared ------------------------------------------------------------------------------


class HoldsMuch(Plain):
    """Holds a lock, a generator, a large array and a long list; its step reads none of them."""

    def __init__(self, input_size):
        super().__init__(input_size)
        self.lock, self.numbers = threading.Lock(), iter([1, 2])
        self.array, self.list = np.zeros(100_000), list(range(100_000))
        self.self = SimpleNamespace(cell=self)


class ReadsArray(HoldsMuch):
    def factor(self):
        return 0.5 + float(self.array[0])


class ReadsList(HoldsMuch):
    def factor(self):
        return 0.5 + self.list[0]


class ReadsLock(HoldsMuch):
    def factor(self):
        with self.lock:
            return 0.5
