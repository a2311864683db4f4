"""The operations of a program in Triton: an expression for each elementwise operation, and the functions that these call.

`FAST` is set where dots run in tf32 or less: tanh and sigmoid are then hardware instructions, accurate to about 2^-11, as such
a dot is. Otherwise they are accurate to rounding, as in C. NaN and infinity give the same results as in torch.
"""

import math

from unfading.fuse.ir.program import Op

PRELUDE = """import triton
import triton.language as tl


@triton.jit
def factor(W, PRECISION: tl.constexpr):
    # A matrix as a dot takes it.
    if PRECISION == "bf16":
        V = W.to(tl.bfloat16)
    elif PRECISION == "fp16":
        V = W.to(tl.float16)
    else:
        V = W
    return V


@triton.jit
def product(x, W, total, PRECISION: tl.constexpr):
    # total + x W, summed in float32.
    if PRECISION == "bf16" or PRECISION == "fp16":
        y = tl.dot(factor(x, PRECISION), W, total)
    else:
        y = tl.dot(x, W, total, input_precision=PRECISION)
    return y


@triton.jit
def tanh(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        size = tl.abs(x)
        square = x * x
        p = 0.020795856571381846 - 0.005895027026152599 * square
        p = -0.33333297986736143 + square * (0.13331923710784382 + square * (-0.05378379542203656 + square * p))
        far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
        y = tl.where(size < 0.6, x + x * square * p, tl.where(x < 0.0, -far, far))
    return y


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    if FAST:
        y = 0.5 + 0.5 * tanh(0.5 * x, FAST)
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def rest(d, y, FAST: tl.constexpr):
    # d * (1 - y), with y where d is: a tile that was loaded lies otherwise among the threads than what a dot makes.
    if FAST:
        z = d - d * y
    else:
        z = d * (1.0 - y)
    return z


@triton.jit
def one_less_square(d, y, FAST: tl.constexpr):
    # d * (1 - y * y), likewise.
    if FAST:
        z = d - (d * y) * y
    else:
        z = d * (1.0 - y * y)
    return z


@triton.jit
def expm1(x):
    y = tl.exp(x)
    near = tl.where(y == 1.0, x, (y - 1.0) * x / tl.log(y))
    return tl.where(tl.abs(x) < 0.5, near, y - 1.0)


@triton.jit
def log1p(x):
    y = 1.0 + x
    near = tl.where(y == 1.0, x, tl.log(y) * x / (y - 1.0))
    return tl.where(tl.abs(x) < 0.5, near, tl.log(y))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
"""

EXPRESSIONS: dict[Op, str] = {
    Op.NEG: "-{0}",
    Op.EXP: "tl.exp({0})",
    Op.EXPM1: "expm1({0})",
    Op.LOG: "tl.log({0})",
    Op.LOG1P: "log1p({0})",
    Op.TANH: "tanh({0}, FAST)",
    Op.SIGMOID: "sigmoid({0}, FAST)",
    Op.RELU: "tl.where({0} < 0.0, 0.0, {0})",
    Op.ABS: "tl.abs({0})",
    Op.SQRT: "tl.sqrt({0})",
    Op.RECIP: "1.0 / {0}",
    Op.SIGN: "({0} > 0.0).to(tl.float32) - ({0} < 0.0).to(tl.float32)",
    Op.SIN: "tl.sin({0})",
    Op.COS: "tl.cos({0})",
    Op.ERF: "tl.erf({0})",
    Op.COPY: "{0}",
    Op.STOP: "{0}",
    Op.ADD: "{0} + {1}",
    Op.SUB: "{0} - {1}",
    Op.MUL: "{0} * {1}",
    Op.DIV: "{0} / {1}",
    Op.MAX: "larger({0}, {1})",
    Op.MIN: "smaller({0}, {1})",
    Op.GT: "({0} > {1}).to(tl.float32)",
    Op.GE: "({0} >= {1}).to(tl.float32)",
    Op.LT: "({0} < {1}).to(tl.float32)",
    Op.LE: "({0} <= {1}).to(tl.float32)",
    Op.EQ: "({0} == {1}).to(tl.float32)",
    Op.NE: "({0} != {1}).to(tl.float32)",
    Op.WHERE: "tl.where({0} != 0.0, {1}, {2})",
    Op.WITH_GRADIENT: "{0}",
}
SLOPES = {  # products of d with a function of y, where y was loaded from memory
    "1 - y": "rest({0}, {1}, FAST)",
    "y (1 - y)": "rest({0} * {1}, {1}, FAST)",
    "1 - y y": "one_less_square({0}, {1}, FAST)",
}


def number(x: float) -> str:
    if x != x or math.isinf(x):
        return f'float("{x}")'
    return repr(x) if x >= 0 else f"({x!r})"


def power(x: str, exponent: float) -> str:
    """x to a constant power. Small whole powers are products in the program already."""
    if exponent == -0.5:
        return f"1.0 / tl.sqrt({x})"
    if not exponent.is_integer():
        base = f'tl.where({x} == float("-inf"), float("inf"), {x})'
        return f"tl.exp2({number(exponent)} * tl.log2({base}))"
    size = f"tl.exp2({number(exponent)} * tl.log2(tl.abs({x})))"
    return size if exponent % 2 == 0 else f"tl.where({x} < 0.0, -{size}, {size})"
