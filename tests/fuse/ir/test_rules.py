"""Every reverse rule agrees with autograd, and the comparison fails if a rule is wrong."""

from functools import cache

import pytest
import torch

from tests.helpers.against_autograd import Setting, by_autograd, by_kernel, compiled, some_numbers, wrong
from unfading.fuse.c import kernel
from unfading.fuse.ir import differentiate
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import COMPARISONS, InputKind, Op, Program, Store, TensorKind
from unfading.fuse.ir.rules import RULES
from unfading.fuse.trace.recorder import Signature, trace

SIGNATURE = Signature((3,), (InputKind.SEQUENCE,), (3,), ((3, 3), (3,)), torch.float64)
SETTINGS = [Setting(3, 5), Setting(4, 26, tuple(b % 5 for b in range(26)), reverse=True)]


def outer(x, h):
    return x.unsqueeze(2) * h.unsqueeze(1)


# For each rule a new state, computed from an input x, a state h, a matrix W and a vector b, that depends on its derivative.
CASES = {
    Op.NEG: lambda x, h, W, b: torch.exp(-h) * x,
    Op.COPY: lambda x, h, W, b: torch.sin(h) * x,  # the program is that of `with_a_copy`
    Op.EXP: lambda x, h, W, b: torch.exp(h) * x,
    Op.EXPM1: lambda x, h, W, b: torch.expm1(h) * x,
    Op.LOG: lambda x, h, W, b: torch.log(2 + x * h),
    Op.LOG1P: lambda x, h, W, b: torch.log1p(0.5 * x * h),
    Op.TANH: lambda x, h, W, b: torch.tanh(x + h),
    Op.SIGMOID: lambda x, h, W, b: torch.sigmoid(x - h),
    Op.RELU: lambda x, h, W, b: torch.relu(x + h),
    Op.ABS: lambda x, h, W, b: torch.abs(x + h),
    Op.SQRT: lambda x, h, W, b: torch.sqrt(2 + x * h),
    Op.RECIP: lambda x, h, W, b: torch.reciprocal(3 + x * h),
    Op.SIN: lambda x, h, W, b: torch.sin(2 * h) * x,
    Op.COS: lambda x, h, W, b: torch.cos(2 * h) * x,
    Op.ERF: lambda x, h, W, b: torch.erf(x + h),
    Op.POWER: lambda x, h, W, b: 0.1 * (2 + x * torch.sin(h)) ** 2.5,
    Op.ADD: lambda x, h, W, b: torch.sin(x + h),
    Op.SUB: lambda x, h, W, b: torch.sin(x - h),
    Op.MUL: lambda x, h, W, b: torch.sin(x * h),
    Op.DIV: lambda x, h, W, b: x / (2 + h),
    Op.MAX: lambda x, h, W, b: torch.maximum(x, 0.9 * h),
    Op.MIN: lambda x, h, W, b: torch.minimum(x, 0.9 * h),
    Op.WHERE: lambda x, h, W, b: torch.where(x > b, torch.sin(h), x),
    Op.WITH_GRADIENT: lambda x, h, W, b: h.clamp(-0.5, 0.5) * x,
    Op.GT: lambda x, h, W, b: (h > x) * b + 0.5 * h,
    Op.GE: lambda x, h, W, b: (h >= x) * b + 0.5 * h,
    Op.LT: lambda x, h, W, b: (h < x) * b + 0.5 * h,
    Op.LE: lambda x, h, W, b: (h <= x) * b + 0.5 * h,
    Op.EQ: lambda x, h, W, b: (h == x) * b + 0.5 * h,
    Op.NE: lambda x, h, W, b: (h != x) * b + 0.5 * h,
    Op.SIGN: lambda x, h, W, b: torch.sign(h) * x,
    Op.STOP: lambda x, h, W, b: torch.sin(h).detach() * x,
    Op.AMAX: lambda x, h, W, b: h.amax(1, keepdim=True) * x,
    Op.SUM: lambda x, h, W, b: h.sum(1, keepdim=True) * x * 0.3,
    Op.EXPAND: lambda x, h, W, b: torch.sin(h[:, :1] * x),
    Op.RESHAPE: lambda x, h, W, b: (outer(x, h) * W).sum(2),
    Op.PERMUTE: lambda x, h, W, b: (outer(x, h) * W).transpose(1, 2).reshape(-1, 9)[:, :3],
    Op.SLICE: lambda x, h, W, b: torch.cat([x[:, :1], (outer(x, h) * W).sum(2)[:, 1:]], 1),
    Op.CAT: lambda x, h, W, b: torch.stack([x, h], 2).amax(2) * b,
}


def scaled(b, value, x, y, d):
    """The default fault of a rule: its gradient is too large by a thousandth."""
    return [part if part is None else b.map(Op.MUL, 1.001, part) for part in RULES[value.op](b, value, x, y, d)]


def let_through(b, value, x, y, d):
    return [d] * len(x)


def at_the_front(b, value, x, y, d):
    """The gradient of a slice, put in the place of another slice."""
    axis, start, stop = value.slice
    rest = list(x[0].shape)
    rest[axis] -= stop - start
    return [b.cat([d, b.zero(tuple(rest))], axis)]


FAULTS = {
    **dict.fromkeys((*COMPARISONS, Op.SIGN, Op.STOP), let_through),
    Op.SUB: lambda b, value, x, y, d: [d, d],
    Op.MAX: lambda b, value, x, y, d: [d, None],
    Op.MIN: lambda b, value, x, y, d: [None, d],
    Op.WHERE: lambda b, value, x, y, d: [None, d, d],
    Op.AMAX: lambda b, value, x, y, d: [b.expand(d, x[0].shape)],
    Op.SUM: lambda b, value, x, y, d: [b.map(Op.MUL, 1 / x[0].size, b.expand(d, x[0].shape))],
    Op.EXPAND: lambda b, value, x, y, d: [b.reshape(b.slice(d, 0, 0, 1), x[0].shape)],
    Op.PERMUTE: lambda b, value, x, y, d: [b.reshape(d, x[0].shape)],
    Op.SLICE: at_the_front,
    Op.CAT: lambda b, value, x, y, d: RULES[Op.CAT](b, value, x, y, d)[::-1],
}


def with_a_copy():
    """Only the scheduler writes `copy`; it is never traced."""
    b = Builder()
    x, h = b.leaf(TensorKind.INPUT, 0, 0, 3), b.leaf(TensorKind.STATE, 0, 0, 3)
    new = b.map(Op.MUL, b.map(Op.COPY, b.map(Op.SIN, h)), x)
    widths = {(kind, 0): 3 for kind in (TensorKind.INPUT, TensorKind.STATE, TensorKind.NEXT)}
    widths |= {(TensorKind.WEIGHT, 0): 9, (TensorKind.WEIGHT, 1): 3}
    return Program((Store(TensorKind.NEXT, 0, 0, new),), widths, (InputKind.SEQUENCE,))


def step_of(name):
    return lambda inputs, states, weights: [CASES[name](*inputs, *states, *weights)]


@cache
def programs():
    return {name: with_a_copy() if name is Op.COPY else trace(step_of(name), SIGNATURE) for name in CASES}


@cache
def healthy():
    return dict(zip(CASES, compiled(list(programs().values())), strict=True))


@cache
def faulty():
    """The same programs, each with its own rule replaced by a wrong one."""
    names = iter(CASES)

    def with_a_fault(program):
        name = next(names)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(differentiate, "RULES", {**RULES, name: FAULTS.get(name, scaled)})
            return differentiate.differentiate(program)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "differentiate", with_a_fault)
        return dict(zip(CASES, compiled(list(programs().values())), strict=True))


def errors(step, kernel):
    differences = {}
    for setting in SETTINGS:
        numbers = some_numbers(SIGNATURE, setting)
        want = by_autograd(step, SIGNATURE, numbers, setting)
        differences |= wrong(by_kernel(kernel, SIGNATURE, numbers, setting), want)
        assert any(value.abs().max() > 1e-3 for name, value in want.items() if "gradient" in name)
    return differences


def test_every_rule_has_its_case():
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_the_derivative_of_autograd(name):
    assert name in {value.op for value in programs()[name].values()}
    assert errors(step_of(name), healthy()[name]) == {}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_rule_turns_red(name):
    differences = errors(step_of(name), faulty()[name])
    assert differences
    assert all("gradient" in name for name in differences), "the fault is in the reverse program only"


def test_a_matrix_product_left_out_after_the_loop_turns_red(monkeypatch):
    def step(inputs, states, weights):
        return [torch.tanh(inputs[0] + states[0] @ weights[0] + weights[1])]

    program = trace(step, SIGNATURE)
    assert errors(step, compiled([program])[0]) == {}
    monkeypatch.setattr(differentiate, "_joined", lambda products: ())
    assert errors(step, compiled([program])[0]).keys() == {"gradient of weight 0"}
