"""Every operation of torch that has a rule computes what torch computes, in every type, at every special number.

The first law is about special numbers: NaN, both infinities and both zeros, subnormal numbers, and the kinks of all functions.
Results and gradients of a compiled step are those of torch. The second law is about types: an operation on any mixture of
types gives what torch gives, or it is refused.
"""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.against_autograd import Setting, by_autograd, by_kernel, compiled, some_numbers
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.ir.program import InputKind
from unfading.fuse.refusal import NotFusable
from unfading.fuse.trace import aten
from unfading.fuse.trace.recorder import Signature, trace

ops = torch.ops.aten
N = 5


def signature(dtype):
    return Signature((N, N), (InputKind.SEQUENCE,) * 2, (N,), ((N, N), (N,)), dtype)


def without_gradient(function):
    def run(*args):
        with torch.no_grad():
            return function(*args)

    return run


# For each operation of torch a function of two inputs, a state, a matrix and a vector that calls it.
FUNCTIONS = {
    **{name: lambda x, y, h, W, b, name=name: getattr(torch, name)(x) for name in aten.FUNCTIONS},
    "reciprocal": lambda x, y, h, W, b: x.reciprocal(),
    "sgn": lambda x, y, h, W, b: x.sgn(),
    "rsqrt": lambda x, y, h, W, b: x.rsqrt(),
    **{f"{op} of two": lambda x, y, h, W, b, op=op: getattr(torch, op)(x, y) * b for op in sorted(aten.COMPARISONS)},
    **{name: lambda x, y, h, W, b, name=name: getattr(torch, name)(x, y) for name in ("add", "sub", "mul", "div", "rsub")},
    "add twice": lambda x, y, h, W, b: torch.add(x, y, alpha=2),
    "sub half": lambda x, y, h, W, b: torch.sub(x, y, alpha=0.5),
    **{name: lambda x, y, h, W, b, name=name: getattr(torch, name)(x, y) for name in ("maximum", "minimum")},
    "maximum of itself": lambda x, y, h, W, b: torch.maximum(x, 0.3 * x + 0.1),
    **{
        f"logical_{name}": lambda x, y, h, W, b, name=name: getattr(torch, f"logical_{name}")(x, y) * b
        for name in ("and", "or", "xor")
    },
    "logical_not": lambda x, y, h, W, b: torch.logical_not(x) * b,
    **{
        f"bitwise_{name}": lambda x, y, h, W, b, name=name: getattr(torch, f"bitwise_{name}")(x > 0, y > 0) * b
        for name in ("and", "or", "xor")
    },
    "bitwise_not": lambda x, y, h, W, b: ~(x > 0) * b,
    **{f"power {p}": lambda x, y, h, W, b, p=p: x**p for p in (-3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 17)},
    "clamp": lambda x, y, h, W, b: x.clamp(-1, 1),
    "clamp_min": lambda x, y, h, W, b: x.clamp_min(0.5),
    "clamp_max": lambda x, y, h, W, b: x.clamp_max(0.5),
    "clamp the wrong way": lambda x, y, h, W, b: x.clamp(1, -1),
    "clamp to tensors": lambda x, y, h, W, b: torch.clamp(x, y, y + 1),
    "clamp to one tensor": lambda x, y, h, W, b: torch.clamp(x, max=y),
    **{
        name: lambda x, y, h, W, b, name=name: getattr(F, name)(x)
        for name in ("hardtanh", "relu6", "hardsigmoid", "hardswish", "softplus", "mish", "elu", "celu", "selu", "silu", "gelu")
    },
    **{
        name: lambda x, y, h, W, b, name=name: getattr(F, name)(x)
        for name in ("leaky_relu", "softshrink", "hardshrink", "logsigmoid", "softsign", "tanhshrink")
    },
    "elu 0.3": lambda x, y, h, W, b: F.elu(x, 0.3),
    "softplus 3": lambda x, y, h, W, b: F.softplus(x, 3.0, 5.0),
    "threshold": lambda x, y, h, W, b: F.threshold(x, 0.5, 0.2),
    "prelu": lambda x, y, h, W, b: F.prelu(x, x.new_full((), 0.25)),
    "where": lambda x, y, h, W, b: torch.where(x > y, x, y),
    "masked_fill": lambda x, y, h, W, b: x.masked_fill(x > 0.5, 0.5),
    "lerp": lambda x, y, h, W, b: torch.lerp(x, y, 0.25),
    "addcmul": lambda x, y, h, W, b: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y, h, W, b: torch.addcdiv(x, y, x, value=0.5),
    "full": lambda x, y, h, W, b: torch.full((len(x), N), 0.3, dtype=x.dtype) * x,
    "zeros": lambda x, y, h, W, b: torch.zeros(len(x), N, dtype=x.dtype) + x,
    "ones": lambda x, y, h, W, b: torch.ones(len(x), N, dtype=x.dtype) - x,
    "like": lambda x, y, h, W, b: torch.full_like(x, 0.3) * x + torch.zeros_like(x) - torch.ones_like(x),
    "new": lambda x, y, h, W, b: x.new_full((N,), 0.3) * x + x.new_zeros(N) - x.new_ones(N),
    "scalar_tensor": lambda x, y, h, W, b: ops.scalar_tensor(0.3, dtype=x.dtype) * x,
    "lift_fresh": lambda x, y, h, W, b: torch.tensor(0.3) * x,
    "clone": lambda x, y, h, W, b: x.clone() + x.to(x.dtype, copy=True) + ops.alias(x) + x.contiguous(),
    "to bool": lambda x, y, h, W, b: x.bool() * b,
    "detach": lambda x, y, h, W, b: x.detach() * y,
    "under no_grad": without_gradient(lambda x, y, h, W, b: torch.exp(x)),
    "unsqueeze": lambda x, y, h, W, b: x.unsqueeze(2).squeeze(2),
    "expand": lambda x, y, h, W, b: x[:, :1].expand(-1, N),
    "permute": lambda x, y, h, W, b: torch.stack([x, y], 2).permute(0, 2, 1).transpose(1, 2).amax(2),
    "select": lambda x, y, h, W, b: x[:, 1].unsqueeze(1) * y,
    "split": lambda x, y, h, W, b: torch.cat([*x.split(2, 1)][::-1], 1) + torch.cat(x.split([1, 4], 1)[::-1], 1),
    "chunk": lambda x, y, h, W, b: torch.cat([*x.chunk(2, 1)][::-1], 1),
    "unbind": lambda x, y, h, W, b: torch.stack(x.unbind(1)[::-1], 1),
    "rows of a matrix": lambda x, y, h, W, b: sum(row * x for row in W),
    "sum": lambda x, y, h, W, b: x.sum(1, keepdim=True) + y,
    "mean": lambda x, y, h, W, b: x.mean(1, keepdim=True) + y,
    "amax": lambda x, y, h, W, b: x.amax(1, keepdim=True) + y,
    "amin": lambda x, y, h, W, b: x.amin(1, keepdim=True) + y,
    **{
        f"norm {p}": lambda x, y, h, W, b, p=p: torch.linalg.vector_norm(x, p, 1, keepdim=True) + y
        for p in (1, 1.5, 2, 3, math.inf)
    },
    **{
        f"norm {p} of one": lambda x, y, h, W, b, p=p: torch.linalg.vector_norm(x.unsqueeze(2), p, 2) + y
        for p in (1, 1.5, 2, 3)
    },
    "normalize one": lambda x, y, h, W, b: F.normalize(x[:, :1], dim=1) + y,
    "var_mean": lambda x, y, h, W, b: torch.cat(torch.var_mean(x, 1, keepdim=True), 1).sum(1, keepdim=True) + y,
    "var": lambda x, y, h, W, b: x.var(1, keepdim=True) + y,
    "std": lambda x, y, h, W, b: x.std(1, keepdim=True) + y,
    "layer_norm": lambda x, y, h, W, b: F.layer_norm(x, (N,), b, b),
    "softmax": lambda x, y, h, W, b: torch.softmax(x, 1),
    "log_softmax": lambda x, y, h, W, b: torch.log_softmax(x, 1),
    "logsumexp": lambda x, y, h, W, b: torch.logsumexp(x, 1, keepdim=True) + y,
    "mm": lambda x, y, h, W, b: x @ W,
    "linear": lambda x, y, h, W, b: F.linear(x, W, b),
    "linear under no_grad": without_gradient(lambda x, y, h, W, b: torch.sigmoid(F.linear(x, W))),
    "mv": lambda x, y, h, W, b: (x @ b).unsqueeze(1) * y,
    "mm of a reshaped matrix": lambda x, y, h, W, b: x @ W.unflatten(0, (1, N))[0].T,
    "bmm with a parameter": lambda x, y, h, W, b: (
        torch.bmm(x.unflatten(1, (N, 1)).transpose(0, 1), W.unsqueeze(1)).transpose(0, 1).sum(1)
    ),
    "bmm of a value without its gradient": lambda x, y, h, W, b: torch.bmm(
        without_gradient(lambda v: v.transpose(0, 1))(x.unsqueeze(1)), W.unsqueeze(0)
    ).squeeze(0),
    "bmm": lambda x, y, h, W, b: torch.bmm(x.unsqueeze(2), y.unsqueeze(1)).sum(2),
    "a number over x": lambda x, y, h, W, b: 2 / x,
    "x over a small number": lambda x, y, h, W, b: x / 1e-39,
    "large factors": lambda x, y, h, W, b: x * 1e30 * 1e30,
    "small and large factors": lambda x, y, h, W, b: x * 1e-30 * 1e-30 * 1e30 * 1e30,
    "half of twice": lambda x, y, h, W, b: 0.5 * (2 * x),
    "x + 0": lambda x, y, h, W, b: 1 / (x + 0),
    "x - 0": lambda x, y, h, W, b: 1 / (x - 0),
    "x * 0": lambda x, y, h, W, b: x * 0,
    "std of large numbers": lambda x, y, h, W, b: (x * 1e30).std(1, keepdim=True) + y,
}
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1e-30, 1e30, -1e30, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0]
SPECIAL += [6.0, 7.0, 20.0, -20.0, 0.3, 1 / 7]


def special_inputs(dtype):
    """All pairs of special numbers, one pair to a row among ordinary numbers, and rows of special numbers alone."""
    n, generator = len(SPECIAL), torch.Generator().manual_seed(3)
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    x, y = (torch.randn(n * n, N, generator=generator, dtype=torch.float64) for _ in range(2))
    x[:, 0], y[:, 0] = special.repeat_interleave(n), special.repeat(n)
    rows = [special[torch.randint(0, n, (40, N), generator=generator)] for _ in range(2)]
    return [torch.cat([a, b]).to(dtype).unsqueeze(0) for a, b in zip((x, y), rows, strict=True)]


def step_of(name):
    return lambda inputs, states, weights: [FUNCTIONS[name](*inputs, *states, *weights) + 0.5 * states[0]]


@cache
def kernels(dtype, optimised):
    programs = [trace(step_of(name), signature(dtype)) for name in FUNCTIONS]
    return dict(zip(FUNCTIONS, compiled(programs, dtype, optimised=optimised), strict=True))


# torch's own gradient of these at NaN depends on where in memory the number is: its code for whole vectors differs from that
# for the rest. A compiled step follows the latter, which is the definition.
UNSETTLED = ("hardtanh", "relu6", "hardswish", "elu", "elu 0.3", "celu", "selu", "softshrink", "hardshrink")
# Where torch's own formula breaks down, though a result exists or is not finite either.
LOST = {
    "gelu": lambda x, y: x.isinf(),  # NaN in vectors of float32, inf elsewhere
    "addcdiv": lambda x, y: (x.square() == 0) | x.square().isinf() | (x.abs() < 1e-19),  # x * x underflows or overflows
    "var": lambda x, y: x.isinf().any(-1, keepdim=True).expand_as(x),  # inf, and NaN here: the mean is infinite
    "var_mean": lambda x, y: x.isinf().any(-1, keepdim=True).expand_as(x),
    "logsumexp": lambda x, y: x.isinf().any(-1, keepdim=True).expand_as(x),
}


def numbers_of(dtype):
    inputs = special_inputs(dtype)
    setting = Setting(1, inputs[0].shape[1])
    return some_numbers(signature(dtype), setting)._replace(inputs=inputs), setting


def reference(name, dtype):
    numbers, setting = numbers_of(dtype)
    want = by_autograd(step_of(name), signature(dtype), numbers, setting)
    if name in UNSETTLED:
        one = torch.full((1,), math.nan, dtype=dtype, requires_grad=True)
        FUNCTIONS[name](one, *[None] * 4).backward()
        d = sum(part if part.dim() == 3 else part.unsqueeze(0) for part in (*numbers.trajectory, *numbers.final))
        want["gradient of input 0"] = torch.where(numbers.inputs[0].isnan(), one.grad * d, want["gradient of input 0"])
    return want


def differences(name, got, dtype):
    """The results that are not those of torch: other NaN, other infinities, or other numbers."""
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    numbers, _ = numbers_of(dtype)
    lost = LOST.get(name, lambda x, y: torch.zeros_like(x, dtype=torch.bool))(*numbers.inputs)
    out = {}
    for what, value in reference(name, dtype).items():
        if "weight" in what:
            continue  # a sum over all rows: NaN in every entry
        a, b = got[what].double().reshape(lost.shape), value.double().reshape(lost.shape)
        finite = a.isfinite() & b.isfinite()
        same = (a == b) | (a.isnan() & b.isnan()) | lost
        scale = b.where(b.isfinite(), torch.zeros(())).abs().amax(-1, keepdim=True).clamp(min=1)
        if not (bad := ~(same | (finite & ((a - b).abs() <= tolerance * scale)))).any():
            continue
        inputs = [x.expand_as(bad)[bad] for x in numbers.inputs]
        out[what] = [tuple(map(torch.Tensor.item, row)) for row in zip(*inputs, a[bad], b[bad], strict=True)][:3]
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("optimised", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "optimised"])
@pytest.mark.sample(80)
def test_special_numbers_give_what_torch_gives(name, dtype, optimised):
    numbers, setting = numbers_of(dtype)
    got = by_kernel(kernels(dtype, optimised)[name], signature(dtype), numbers, setting)
    assert differences(name, got, dtype) == {}


def test_every_rule_is_called(monkeypatch):
    """A rule without a function above fails here."""
    called = set()

    def spy(packet, rule):
        def run(call):
            called.add(packet)
            return rule(call)

        return run

    monkeypatch.setattr(aten, "RULES", {packet: spy(packet, rule) for packet, rule in aten.RULES.items()})
    for name in FUNCTIONS:
        trace(step_of(name), signature(torch.float32))
    # Names of torch under which no operation arrives: reshape and its like arrive as view or clone.
    unused = {ops.reshape, ops._reshape_alias, ops._unsafe_view, ops.contiguous, ops.lift_fresh_copy, ops.split}
    assert set(aten.RULES) - called <= unused


# -- types --------------------------------------------------------------------------------------------------------------------

# Operands of all types: of the step's own, truths, counts, constants of every type, and Python's numbers.
OPERANDS = {
    "real": lambda x, y, h, W, b: 2 * x,
    "other real": lambda x, y, h, W, b: y,
    "truth": lambda x, y, h, W, b: x > 0.1,
    "other truth": lambda x, y, h, W, b: y < 0.3,
    "count": lambda x, y, h, W, b: (h > 0).sum(1, keepdim=True),
    "truth as a number": lambda x, y, h, W, b: (x > 0.1).long(),
    "chosen integer": lambda x, y, h, W, b: torch.where(x > 0, 3, -2),
    "short integer": lambda x, y, h, W, b: (x > 0.1).to(torch.int8),
    "weight without axes": lambda x, y, h, W, b: b[1],
    **{
        f"{dtype} {number}": lambda x, y, h, W, b, dtype=dtype, number=number: torch.tensor(number).to(dtype)
        for dtype, number in (
            *((torch.float16, 0.1), (torch.bfloat16, 0.1), (torch.float32, 0.1), (torch.float64, 0.1), (torch.int32, 2.7)),
            *((torch.int64, 2**24 + 1), (torch.bool, 0.3), (torch.uint8, 250)),
        )
    },
    "several halves": lambda x, y, h, W, b: torch.full((len(x), N), 0.1, dtype=torch.float16),
    "several doubles": lambda x, y, h, W, b: torch.full((len(x), N), 0.1, dtype=torch.float64),
    "several integers": lambda x, y, h, W, b: torch.full((len(x), N), 200, dtype=torch.int64),
    "True": lambda x, y, h, W, b: True,
    "2": lambda x, y, h, W, b: 2,
    "0.3": lambda x, y, h, W, b: 0.3,
}
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int16, torch.int32)
ONE = {
    **{name: lambda a, name=name: getattr(torch, name)(a) for name in (*aten.FUNCTIONS, "reciprocal", "rsqrt", "sgn")},
    **{name: lambda a, name=name: getattr(torch, name)(a) for name in ("logical_not", "bitwise_not", "clone", "detach")},
    **{f"to {dtype}": lambda a, dtype=dtype: a.to(dtype) for dtype in (*TYPES, torch.int64, torch.complex64)},
    **{f"to {dtype} and back": lambda a, dtype=dtype: a.to(dtype).to(a.dtype) for dtype in TYPES},
    "sum": lambda a: a.sum(-1, keepdim=True),
    "sum as bool": lambda a: a.sum(-1, keepdim=True, dtype=torch.bool),
    "sum as float32": lambda a: a.sum(-1, keepdim=True, dtype=torch.float32),
    "mean": lambda a: a.mean(-1, keepdim=True),
    "amax": lambda a: a.amax(-1, keepdim=True),
    "amin": lambda a: a.amin(-1, keepdim=True),
    "var": lambda a: a.var(-1, keepdim=True),
    "norm": lambda a: torch.linalg.vector_norm(a, 2, -1, keepdim=True),
    "softmax": lambda a: torch.softmax(a, -1),
    "softmax in float32": lambda a: torch.softmax(a, -1, dtype=torch.float32),
    "clamp": lambda a: a.clamp(0, 1),
    "square": lambda a: a**2,
    "root": lambda a: a**0.5,
    "to the 0": lambda a: a**0,
    "zeros_like": lambda a: torch.zeros_like(a) + 1,
    "full_like": lambda a: torch.full_like(a, 2),
    "ones_like": lambda a: torch.ones_like(a, dtype=torch.float32),
    "not": lambda a: not a,
}
TWO = {
    **{name: lambda a, b, name=name: getattr(torch, name)(a, b) for name in sorted(aten.COMPARISONS)},
    **{name: lambda a, b, name=name: getattr(torch, name)(a, b) for name in ("add", "sub", "mul", "div", "rsub", "pow")},
    **{name: lambda a, b, name=name: getattr(torch, name)(a, b) for name in ("maximum", "minimum", "remainder", "fmod")},
    **{name: lambda a, b, name=name: getattr(torch, f"logical_{name}")(a, b) for name in ("and", "or", "xor")},
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "//": lambda a, b: a // b,
    "add twice": lambda a, b: torch.add(a, b, alpha=2),
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "where": lambda a, b: torch.where(a > 0.2, a, b),
    "where of a condition": lambda a, b: torch.where(a, b, 0.25),
    "masked_fill": lambda a, b: a.masked_fill(b, 0.5),
    "cat": lambda a, b: torch.cat([a.expand(len(a), N), b.expand(len(b), N)], 1),
    "stack": lambda a, b: torch.stack([a, b], 1),
}


def as_state(result, h):
    """A result of any type and shape as a new state."""
    result = torch.as_tensor(result)
    if result.dim() > 1:
        result = result.reshape(len(h), -1)[:, -N:]
    return 0.5 * h + result.to(h.dtype)


def typed_steps():
    for name, function in ONE.items():
        for operand, a in OPERANDS.items():
            yield f"{name}({operand})", lambda i, s, w, f=function, a=a: [as_state(f(a(*i, *s, *w)), s[0])]
    for name, function in TWO.items():
        for first, a in OPERANDS.items():
            for second, b in OPERANDS.items():
                step = lambda i, s, w, f=function, a=a, b=b: [as_state(f(a(*i, *s, *w), b(*i, *s, *w)), s[0])]  # noqa: E731
                yield f"{name}({first}, {second})", step


def of_step(step, tensors):
    """The new state and the gradients of all arguments; None where torch refuses the step itself."""
    leaves = [[tensor.clone().requires_grad_() for tensor in group] for group in tensors]
    flat = [leaf for group in leaves for leaf in group]
    try:
        (new,) = step(*leaves)
        return new.detach(), torch.autograd.grad(new.sum(), flat, materialize_grads=True)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None


def mistyped(dtype, every):
    """The steps that are compiled and differ from torch, and how many steps are compiled and refused."""
    generator = torch.Generator().manual_seed(1)
    shapes = [[(7, N)] * 2, [(7, N)], [(N, N), (N,)]]
    tensors = [[torch.randn(shape, generator=generator, dtype=dtype) for shape in group] for group in shapes]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    bad, count, refused = {}, 0, 0
    for number, (name, step) in enumerate(typed_steps()):
        if number % every:
            continue
        want = of_step(step, tensors)
        try:
            program = trace(step, signature(dtype))
        except NotFusable:
            refused += 1
            continue
        count += 1
        got = of_step(lambda i, s, w, program=program: next_states(program, i, s, w), tensors)
        close = want is not None and all(
            torch.allclose(a, b, rtol=0, atol=tolerance * max(1, b.nan_to_num(0, 0, 0).abs().max().item()), equal_nan=True)
            for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
        )
        if not close:
            bad[name] = "torch refuses it" if want is None else (got[0][0].tolist(), want[0][0].tolist())
    return bad, count, refused


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.sample(1)
def test_a_mixture_of_types_gives_what_torch_gives(dtype):
    bad, count, refused = mistyped(dtype, every=29)
    assert bad == {}
    assert count > 200
    assert refused > 200


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_mixture_of_types_gives_what_torch_gives(dtype):
    assert mistyped(dtype, every=1)[0] == {}
