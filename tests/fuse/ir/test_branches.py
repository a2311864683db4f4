"""The backward pass takes the branches that the forward pass took, also at exact ties, where another rounding decides."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.against_autograd import Setting, by_autograd, by_kernel, compiled, some_numbers, wrong
from unfading.fuse.ir.differentiate import differentiate
from unfading.fuse.ir.program import InputKind, Op, Program, Store, TensorKind
from unfading.fuse.trace.recorder import Signature, trace

N = 8
SIGNATURE = Signature((N,) * 4, (InputKind.SEQUENCE,) * 4, (N,), ((N,),), torch.float64)

# Each decides on a difference that is exactly 0 where the input stands still.
DECISIONS = {
    "sign": lambda z, p: torch.sign(z) * p,
    "abs": lambda z, p: z.abs(),
    "leaky_relu": lambda z, p: F.leaky_relu(z, 0.3),
    "relu": lambda z, p: torch.relu(z) * p,
    "maximum": lambda z, p: torch.maximum(z, 0.5 * z) * p,
    "where": lambda z, p: torch.where(z >= 0, z * p, -z),
    "amax": lambda z, p: z + z.amax(1, keepdim=True) * p,
    "a sum": lambda z, p: torch.where(z.sum(1, keepdim=True) >= 0, z * p, -z),
}


def step_of(name):
    def step(inputs, states, weights):
        (a, b, c, d), (h,), (p,) = inputs, states, weights
        u = torch.lerp(a, b, c) * d
        return [torch.where(h < -50, u, u + DECISIONS[name](h - u, p))]

    return step


def numbers_that_stand_still(setting):
    numbers = some_numbers(SIGNATURE, setting)
    inputs = [x[:1].expand(setting.T, -1, -1).contiguous() for x in numbers.inputs]
    return numbers._replace(inputs=inputs, states=[torch.full_like(numbers.states[0], -100.0)])


def test_ties_are_decided_alike_in_both_passes():
    setting = Setting(3, 26)
    kernels = compiled([trace(step_of(name), SIGNATURE) for name in DECISIONS], optimised=True)
    numbers = numbers_that_stand_still(setting)
    for name, kernel in zip(DECISIONS, kernels, strict=True):
        want = by_autograd(step_of(name), SIGNATURE, numbers, setting)
        assert wrong(by_kernel(kernel, SIGNATURE, numbers, setting), want) == {}, name


def decided(program):
    """The arguments of all comparisons of a program."""
    return [arg for value in program.values() if value.op in (Op.GE, Op.LT, Op.SIGN, Op.EQ) for arg in value.args]


@pytest.mark.parametrize("name", DECISIONS)
def test_what_decides_is_read_and_not_computed_again(name):
    """On a GPU products and sums are joined in ways that the two kernels need not share."""
    both = differentiate(trace(step_of(name), SIGNATURE))
    for value in decided(both.reverse):
        inside = Program((Store(TensorKind.NEXT, 0, 0, value),), {}, ()).values()
        assert not any(v.op is Op.SUM for v in inside if v.shape != value.shape)
        assert not any(v.op in (Op.ADD, Op.SUB) and any(arg.op is Op.MUL for arg in v.args) for v in inside), (
            f"{value} is computed again"
        )
