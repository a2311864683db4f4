"""At kinks, in flat parts and after overflows the results and gradients of a compiled step are those of torch.

A state that starts at zero is at the kink of relu6, and at the pole of a standard deviation.
"""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.against_autograd import Setting, by_autograd, by_kernel, compiled, some_numbers, wrong
from unfading.fuse.ir.program import InputKind
from unfading.fuse.trace.recorder import Signature, trace

SIGNATURE = Signature((5,), (InputKind.SEQUENCE,), (5,), (), torch.float64)
SETTING = Setting(1, 26)
FUNCTIONS = {
    **{name: getattr(torch, name) for name in ("relu", "abs", "sign", "tanh", "sigmoid", "erf", "exp", "expm1")},
    **{
        name: getattr(F, name)
        for name in ("relu6", "hardtanh", "hardswish", "elu", "celu", "selu", "leaky_relu", "silu", "mish")
    },
    **{name: getattr(F, name) for name in ("softplus", "gelu", "logsigmoid", "softsign", "softshrink", "hardshrink")},
    "threshold": lambda x: F.threshold(x, 0.5, 0.2),
    "prelu": lambda x: F.prelu(x, x.new_full((), 0.25)),
    "glu": lambda x: F.glu(torch.cat([x, x - 1], 1), 1),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.5),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp to a tensor": lambda x: torch.clamp(x, min=torch.zeros_like(x)),
    "maximum": lambda x: torch.maximum(x, -x),
    "minimum": lambda x: torch.minimum(x, torch.zeros_like(x)),
    "where": lambda x: torch.where(x >= 0, x, 2 * x),
    "amax": lambda x: x.amax(1, keepdim=True) + x,
    "amin": lambda x: x.abs().amin(1, keepdim=True) + x,
    **{f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, 1, keepdim=True) + x for p in (1, 1.5, 2, 3, math.inf)},
    "std": lambda x: x.std(1, keepdim=True) + x,
    "var": lambda x: x.var(1, keepdim=True) + x,
    "normalize": lambda x: F.normalize(x, dim=1),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "softmax": lambda x: torch.softmax(x, 1),
    "log_softmax": lambda x: torch.log_softmax(x, 1),
    "logsumexp": lambda x: torch.logsumexp(x, 1, keepdim=True) + x,
    "square": lambda x: x**2,
    "power": lambda x: x.abs() ** 2.5,
    "truth plus truth": lambda x: ((x > 0) + (x > -0.5)).to(x.dtype) * x,
    "a count of truths": lambda x: (x > 0).sum(1, keepdim=True) * x,
}
# The kinks of all functions above.
BENDS = torch.tensor([-6.0, -3.0, -1.0, -0.5, 0.0, 0.2, 0.5, 1.0, 3.0, 6.0], dtype=torch.float64)
POINTS = {
    "bends": lambda random: BENDS[torch.randint(0, len(BENDS), (1, 26, 5), generator=random)],
    "zero": lambda random: torch.zeros(1, 26, 5, dtype=torch.float64),
    "all equal": lambda random: torch.randn(1, 26, 1, generator=random, dtype=torch.float64).expand(1, 26, 5),
    "large": lambda random: 1000 * torch.randn(1, 26, 5, generator=random, dtype=torch.float64),
    "tiny": lambda random: 1e-200 * torch.randn(1, 26, 5, generator=random, dtype=torch.float64),
}


def step_of(name):
    return lambda inputs, states, weights: [FUNCTIONS[name](inputs[0]) + 0.5 * states[0]]


@cache
def kernels():
    return dict(zip(FUNCTIONS, compiled([trace(step_of(name), SIGNATURE) for name in FUNCTIONS]), strict=True))


def test_the_maximum_is_computed_again_in_the_backward_pass():
    """In optimised code the backward pass computes the same sums with other roundings."""

    def step(inputs, states, weights):
        (x,), (h,) = inputs, states
        return [0.5 * torch.tanh(x + (0.5 * h + 0.4 * torch.tanh(x + h)).amax(1, keepdim=True))]

    (kernel,) = compiled([trace(step, SIGNATURE)], optimised=True)
    setting = Setting(6, 26)
    numbers = some_numbers(SIGNATURE, setting)
    assert wrong(by_kernel(kernel, SIGNATURE, numbers, setting), by_autograd(step, SIGNATURE, numbers, setting)) == {}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_at_kinks_and_extremes_are_those_of_torch(name):
    for where, points in POINTS.items():
        if (name, where) in (("exp", "large"), ("expm1", "large")):
            continue  # infinite, as they should be
        numbers = some_numbers(SIGNATURE, SETTING)._replace(inputs=[points(torch.Generator().manual_seed(3))])
        want = by_autograd(step_of(name), SIGNATURE, numbers, SETTING)
        assert wrong(by_kernel(kernels()[name], SIGNATURE, numbers, SETTING), want) == {}, where
