"""The operations of torch in the language of programs: one rule per operation.

A rule takes a `Call` and returns the result of the operation: a RowValue (a value of each row, or a parameter), a MatrixView
(a view of a recurrent matrix), or a list of these. This file has the table of all rules, and the rules for elementwise
operations and products; `views.py` and `reductions.py` have the others. An operation without a rule is decomposed by torch
where `decompositions` lists it, and is refused otherwise.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from unfading.fuse.ir.program import COMPARISONS, FUNCTIONS, Op
from unfading.fuse.refusal import NotFusable
from unfading.fuse.trace import reductions, views
from unfading.fuse.trace.values import Call, MatrixView, RowValue

ops = torch.ops.aten


def _elementwise(op: Op) -> Callable[[Call], RowValue]:
    """The rule of an operation that the language has as it is."""

    def rule(call: Call) -> RowValue:
        _same_precision(call)
        if call.kwargs:
            raise NotFusable(f"{call.packet} with {', '.join(call.kwargs)} is not supported")
        return call.shaped(call.map(op, *call.args))

    return rule


def _same_precision(call: Call) -> None:
    if call.out.dtype not in (call.dtype, torch.bool):
        raise NotFusable(other_precision(call.packet, call.out.dtype, call.dtype))


def other_precision(packet: Any, dtype: torch.dtype, own: torch.dtype) -> str:
    """The reason against an operation that changes the precision."""
    return f"{packet} turns {own} into {dtype}; a fused step computes in one precision"


def _scaled(op: Op) -> Callable[[Call], RowValue]:
    """add and sub, with their alpha."""

    def rule(call: Call) -> RowValue:
        _same_precision(call)
        a, b = call.args[:2]
        if call.out.dtype == torch.bool:  # True + True is True, not 2
            return call.shaped(call.map(Op.MAX, a, b))
        alpha = call.argument(2, "alpha", 1)
        return call.shaped(call.map(op, a, b if alpha == 1 else call.map(Op.MUL, b, alpha)))

    return rule


def _rsub(call: Call) -> RowValue:
    alpha = call.argument(2, "alpha", 1)
    subtracted = call.args[0] if alpha == 1 else call.map(Op.MUL, call.args[0], alpha)
    return call.shaped(call.map(Op.SUB, call.args[1], subtracted))


def _power(call: Call) -> RowValue:
    exponent = call.args[1]
    if isinstance(exponent, RowValue) and (number := exponent.value.constant) is not None:
        exponent = number
    if not isinstance(exponent, int | float):
        raise NotFusable("the exponent of a power is a tensor; only a number is supported")
    if exponent == 0:
        return call.shaped(RowValue(call.build.const(1.0), call.row(0).lead))
    return call.shaped(call.map(Op.POWER, call.args[0], attr=float(exponent)))


def _rsqrt(call: Call) -> RowValue:
    return call.map(Op.RECIP, call.map(Op.SQRT, call.args[0]))


def _clamp(call: Call) -> RowValue:
    """x has no gradient beyond a bound; where x equals the bound it has, as in torch."""
    x = call.row(0)
    low, high = call.argument(1, "min"), call.argument(2, "max")
    if call.packet is ops.clamp_max:
        low, high = None, call.args[1]
    if low is not None:
        x = call.map(Op.WHERE, call.map(Op.LT, x, low), low, x)
    if high is not None:
        x = call.map(Op.WHERE, call.map(Op.GT, x, high), high, x)
    return call.shaped(x)


# Activations that torch would decompose into operations with another gradient.


def _between(call: Call, x: RowValue, low: float, high: float) -> RowValue:
    """As clamp, but with gradient 0 at the bounds themselves, as torch defines it for hardtanh and similar functions."""
    above = call.map(Op.WHERE, call.map(Op.LE, x, low), low, x)
    return call.map(Op.WHERE, call.map(Op.GE, above, high), high, above)


def _hardtanh(call: Call) -> RowValue:
    return call.shaped(_between(call, call.row(0), call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0)))


def _hardsigmoid(call: Call) -> RowValue:
    x = call.row(0)
    gate = call.map(Op.MUL, _between(call, call.map(Op.ADD, x, 3.0), 0.0, 6.0), 1 / 6)
    return call.shaped(call.map(Op.MUL, x, gate) if call.packet is ops.hardswish else gate)


def _soft_plus(call: Call, x: RowValue, beta: float, threshold: float) -> RowValue:
    """log(1 + exp(beta x)) / beta; x itself above the threshold.

    The branch that is not taken must stay finite too, since 0 times infinity is NaN.
    """
    scaled = call.map(Op.MUL, x, beta)
    far = call.map(Op.GT, scaled, threshold)
    curve = call.map(Op.LOG1P, call.map(Op.EXP, call.map(Op.WHERE, far, 0.0, scaled)))
    return call.map(Op.WHERE, far, x, call.map(Op.MUL, curve, 1 / beta))


def _softplus(call: Call) -> RowValue:
    return call.shaped(_soft_plus(call, call.row(0), call.argument(1, "beta", 1.0), call.argument(2, "threshold", 20.0)))


def _mish(call: Call) -> RowValue:
    x = call.row(0)
    return call.shaped(call.map(Op.MUL, x, call.map(Op.TANH, _soft_plus(call, x, 1.0, 20.0))))


def _elu(call: Call) -> RowValue:
    x, alpha = call.row(0), call.argument(1, "alpha", 1.0)
    scale, inner = call.argument(2, "scale", 1.0), call.argument(3, "input_scale", 1.0)
    if call.packet is ops.celu:
        inner = 1 / alpha
    positive = call.map(Op.GT, x, 0.0)
    curve = call.map(Op.EXPM1, call.map(Op.MUL, call.map(Op.WHERE, positive, 0.0, x), inner))
    return call.shaped(call.map(Op.WHERE, positive, call.map(Op.MUL, x, scale), call.map(Op.MUL, curve, alpha * scale)))


def _where(call: Call) -> RowValue:
    if len(call.args) != 3:
        raise NotFusable("torch.where with a condition alone is not supported")
    return call.shaped(call.map(Op.WHERE, *call.args))


def _filled(call: Call) -> RowValue:
    """full, zeros, ones and the like."""
    name = str(call.packet).rpartition(".")[2]
    if name.startswith(("full", "new_full")):
        number = call.argument(2 if name == "new_full" else 1, "fill_value")
    elif name == "scalar_tensor":
        number = call.args[0]
    else:
        number = 1.0 if "ones" in name else 0.0
    if isinstance(number, RowValue):
        raise NotFusable(f"{call.packet} with a tensor as its fill value is not supported")
    number = torch.tensor(number, dtype=call.out.dtype).item()  # rounded: 0.1 in float32 is another number
    return call.result(call.build.expand(call.build.const(number), call.features()))


def _same(call: Call) -> Any:
    x = call.args[0]
    if call.out.dtype not in (call.dtype, torch.bool) and not (isinstance(x, RowValue) and x.value.constant is not None):
        raise NotFusable(other_precision(call.packet, call.out.dtype, call.dtype))
    return x


def _detach(call: Call) -> RowValue:
    return call.map(Op.STOP, call.row(0))


def _mm(call: Call) -> RowValue:
    v, matrix = call.args[-2:]
    if not isinstance(v, RowValue) or not v.batched:
        raise NotFusable("two matrices are multiplied inside the step; do it in weights(), once per call")
    if not isinstance(matrix, MatrixView):
        raise NotFusable(
            "a matrix that the step itself computes is multiplied with a vector; compute it in weights(), once per call"
        )
    if len(v.value.shape) != 1:
        raise NotFusable(f"a recurrent matrix is multiplied with a value of shape {v.value.shape}; a vector is needed")
    product = RowValue(call.build.dot([(v.value, matrix.block())]), v.lead)
    if call.packet is not ops.addmm:
        return product
    alpha, beta = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
    product = product if alpha == 1 else call.map(Op.MUL, product, alpha)
    added = call.args[0] if beta == 1 else call.map(Op.MUL, call.args[0], beta)
    return call.map(Op.ADD, product, added)


def _mv(call: Call) -> RowValue:
    v, vector = call.row(0), call.row(1)
    if not v.batched:
        raise NotFusable("a matrix is multiplied with a vector of weights inside the step; do it in weights(), once per call")
    return reductions.reduced(call, Op.SUM, call.map(Op.MUL, v, vector), [0])


def _bmm(call: Call) -> RowValue:
    a, b = call.row(0), call.row(1)
    if not (a.batched and b.batched):
        raise NotFusable("a batched product with a parameter is not supported")
    (i, j), k = a.value.shape, b.value.shape[1]
    left, right = call.build.reshape(a.value, (i, j, 1)), call.build.reshape(b.value, (1, j, k))
    return reductions.reduced(call, Op.SUM, RowValue(call.build.map(Op.MUL, left, right), a.lead), [1])


ELEMENTWISE = {
    **{getattr(ops, op): op for op in (*FUNCTIONS, Op.MUL, Op.DIV, *COMPARISONS)},
    ops.reciprocal: Op.RECIP,
    ops.sgn: Op.SIGN,
    ops.maximum: Op.MAX,
    ops.minimum: Op.MIN,
    ops.logical_and: Op.MUL,
    ops.bitwise_and: Op.MUL,
}
RULES: dict[Any, Callable[[Call], Any]] = {
    **{packet: _elementwise(op) for packet, op in ELEMENTWISE.items()},
    ops.add: _scaled(Op.ADD),
    ops.sub: _scaled(Op.SUB),
    ops.rsub: _rsub,
    ops.pow: _power,
    ops.rsqrt: _rsqrt,
    **dict.fromkeys((ops.clamp, ops.clamp_min, ops.clamp_max), _clamp),
    ops.hardtanh: _hardtanh,
    **dict.fromkeys((ops.hardsigmoid, ops.hardswish), _hardsigmoid),
    ops.softplus: _softplus,
    ops.mish: _mish,
    **dict.fromkeys((ops.elu, ops.celu), _elu),
    ops.where: _where,
    **dict.fromkeys(
        (
            ops.full,
            ops.full_like,
            ops.new_full,
            ops.zeros,
            ops.zeros_like,
            ops.new_zeros,
            ops.ones,
            ops.ones_like,
            ops.new_ones,
        ),
        _filled,
    ),
    ops.scalar_tensor: _filled,
    **dict.fromkeys((ops.clone, ops.contiguous, ops.alias, ops._to_copy, ops.lift_fresh, ops.lift_fresh_copy), _same),
    ops.detach: _detach,
    **dict.fromkeys((ops.view, ops.reshape, ops._unsafe_view, ops._reshape_alias, ops.unsqueeze, ops.squeeze), views.reshape),
    ops.expand: views.expand,
    **dict.fromkeys((ops.permute, ops.transpose, ops.t), views.permute),
    ops.slice: views.sliced,
    ops.select: views.select,
    **dict.fromkeys((ops.split, ops.split_with_sizes), views.split),
    ops.unbind: views.unbind,
    ops.cat: views.cat,
    ops.stack: views.stack,
    ops.sum: reductions.total,
    ops.mean: reductions.mean,
    **dict.fromkeys((ops.amax, ops.amin), reductions.largest),
    ops.linalg_vector_norm: reductions.norm,
    ops.var_mean: reductions.var_mean,
    **dict.fromkeys((ops.var, ops.std), reductions.var),
    ops.native_layer_norm: reductions.layer_norm,
    **dict.fromkeys((ops._softmax, ops._log_softmax), reductions.softmax),
    **dict.fromkeys((ops.mm, ops.addmm), _mm),
    ops.mv: _mv,
    ops.bmm: _bmm,
}


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operations that torch can decompose into simpler ones with the same gradient. Importing these takes torch a second.

    The list is explicit since torch decomposes after its own differentiation: some decompositions have another gradient at a
    kink, or NaN where a branch that is not taken overflows.
    """
    from torch._decomp import get_decompositions

    listed = [ops.silu, ops.leaky_relu, ops.gelu, ops.log_sigmoid_forward, ops.glu, ops._prelu_kernel, ops.softshrink]
    listed += [ops.hardshrink, ops.threshold, ops.masked_fill, ops.addcmul, ops.addcdiv, ops.lerp, ops.logsumexp, ops.dot]
    listed += [ops.addmv, ops.baddbmm, ops.unsafe_split, ops.unsafe_split_with_sizes]
    return get_decompositions(listed)
