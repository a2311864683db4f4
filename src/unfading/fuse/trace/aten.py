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
from unfading.fuse.trace.matrices import blocks_of
from unfading.fuse.trace.values import Call, MatrixView, Moved, RowValue, as_row, is_integer

ops = torch.ops.aten


def _elementwise(op: Op) -> Callable[[Call], RowValue]:
    """The rule of an operation that the language has as it is."""

    def rule(call: Call) -> RowValue:
        _own_type(call)
        return call.shaped(call.map(op, *call.args))

    return rule


def _own_type(call: Call) -> None:
    """Refuse what torch computes in a type that a program does not have, and options that no rule knows."""
    if call.kwargs:
        raise NotFusable(f"{call.packet} with {', '.join(call.kwargs)} is not supported")
    if call.out.dtype != call.dtype and not is_integer(call.out.dtype):
        raise NotFusable(other_type(call.packet, call.out.dtype, call.dtype))


def other_type(packet: Any, dtype: torch.dtype, own: torch.dtype) -> str:
    """The reason against an operation whose result has another type than the program."""
    if dtype.is_floating_point:
        return f"{packet} turns {own} into {dtype}; a fused step computes in one precision"
    return f"{packet} computes with {dtype}, which a fused step cannot do; convert to {own} before it"


def _comparison(op: Op) -> Callable[[Call], RowValue]:
    """The rule of a comparison. The type in which torch compares matters: a number may equal another in float32 only."""

    def rule(call: Call) -> RowValue:
        dtype = torch.result_type(*call.tensors)
        if dtype not in (call.dtype, torch.bool) and not is_integer(dtype):
            raise NotFusable(other_type(call.packet, dtype, call.dtype))
        return call.shaped(call.map(op, *call.args))

    return rule


def _bool_or(op: Op, of_bools: Op) -> Callable[[Call], RowValue]:
    """The rule of an operation that is another one on bools: True + True is True, not 2."""

    def rule(call: Call) -> RowValue:
        if call.out.dtype == torch.bool:
            return call.shaped(call.map(of_bools, *call.args[:2]))
        return _scaled(op)(call) if op in (Op.ADD, Op.SUB) else _elementwise(op)(call)

    return rule


def _truth(call: Call, x: Any) -> Any:
    """Whether an argument differs from 0."""
    if isinstance(x, bool) or (isinstance(x, RowValue) and x.dtype == torch.bool):
        return x
    return call.map(Op.NE, x, 0.0)


def _logical(op: Op) -> Callable[[Call], RowValue]:
    """logical_and and the like, of the truth of any numbers."""

    def rule(call: Call) -> RowValue:
        return call.shaped(call.map(op, *(_truth(call, x) for x in call.args)))

    return rule


def _bitwise(op: Op) -> Callable[[Call], RowValue]:
    """bitwise_and and the like: of bools only."""

    def rule(call: Call) -> RowValue:
        if call.out.dtype != torch.bool:
            raise NotFusable(other_type(call.packet, call.out.dtype, call.dtype))
        return _logical(op)(call)

    return rule


def _not(call: Call) -> RowValue:
    if call.out.dtype != torch.bool:  # bitwise_not of an integer
        raise NotFusable(other_type(call.packet, call.out.dtype, call.dtype))
    return call.shaped(call.map(Op.EQ, call.args[0], 0.0))


def _scaled(op: Op) -> Callable[[Call], RowValue]:
    """add and sub, with their alpha."""

    def rule(call: Call) -> RowValue:
        a, b = call.args[:2]
        alpha = call.argument(2, "alpha", 1)
        _own_type(call._replace(kwargs={}))
        if op is Op.SUB and any(isinstance(x, bool) or (isinstance(x, RowValue) and x.dtype == torch.bool) for x in (a, b)):
            raise NotFusable("torch does not subtract a bool; use logical_not, or convert it")
        return call.shaped(call.map(op, a, b if alpha == 1 else call.map(Op.MUL, b, alpha)))

    return rule


def _rsub(call: Call) -> RowValue:
    return _scaled(Op.SUB)(call._replace(args=[call.args[1], call.args[0], *call.args[2:]]))


def _power(call: Call) -> RowValue:
    _own_type(call)
    exponent = call.args[1]
    if isinstance(exponent, RowValue) and (number := exponent.value.constant) is not None:
        whole = is_integer(exponent.dtype) and exponent.number is not None and exponent.number.item() == number
        if exponent.dtype != call.dtype and not whole:  # torch's gradient has the exponent less 1, in the exponent's own type
            raise NotFusable(f"the exponent of a power is a tensor {exponent.dtype}; use a number")
        exponent = number
    if not isinstance(exponent, int | float):
        raise NotFusable("the exponent of a power is a tensor; only a number is supported")
    if exponent == 0:
        return call.shaped(RowValue(call.build.const(1.0), call.row(0).lead))
    return call.shaped(call.map(Op.POWER, call.args[0], attr=float(exponent)))


def _rsqrt(call: Call) -> RowValue:
    _own_type(call)
    return call.map(Op.RECIP, call.map(Op.SQRT, call.args[0]))


def _clamp(call: Call) -> RowValue:
    """min(max(x, low), high). x has a gradient where it is inside, bounds included; a bound has it where x is outside."""
    x, y = call.row(0), call.row(0)
    low, high = call.argument(1, "min"), call.argument(2, "max")
    if call.packet is ops.clamp_max:
        low, high = None, call.args[1]
    _own_type(call._replace(kwargs={}))
    inside: Any = 1.0
    carriers = []
    if low is not None:
        y = call.map(Op.MAX, y, low)
        inside = call.map(Op.GE, x, low)
        below = call.map(Op.LT, x, low)
        below = below if high is None else call.map(Op.MUL, below, call.map(Op.LT, low, high))
        carriers.append((below, low))
    if high is not None:
        y = call.map(Op.MIN, y, high)
        inside = call.map(Op.MUL, call.map(Op.LE, x, high), inside)
        above = call.map(Op.GT, x, high)
        above = above if low is None else call.map(Op.MAX, above, call.map(Op.LT, high, low))
        carriers.append((above, high))
    carrier = call.map(Op.WHERE, inside, x, 0.0)
    for where, bound in carriers:
        if isinstance(bound, RowValue | MatrixView):
            carrier = call.map(Op.ADD, carrier, call.map(Op.WHERE, where, bound, 0.0))
    return call.shaped(call.map(Op.WITH_GRADIENT, y, carrier))


# Activations that torch would decompose into operations with another gradient.


def _hardtanh(call: Call) -> RowValue:
    """As clamp, but with gradient 0 at the bounds themselves."""
    x, low, high = call.row(0), call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0)
    above = call.map(Op.WHERE, call.map(Op.LE, x, low), low, x)
    return call.shaped(call.map(Op.WHERE, call.map(Op.GE, above, high), high, above))


def _hardsigmoid(call: Call) -> RowValue:
    x = call.row(0)
    gate = call.map(Op.DIV, _six(call, x), 6.0)
    inside = call.map(Op.MUL, call.map(Op.GT, x, -3.0), call.map(Op.LT, x, 3.0))
    sixth = torch.tensor(1 / 6, dtype=torch.float32).item()  # torch's own constant, in float64 too
    return call.shaped(call.map(Op.WITH_GRADIENT, gate, call.map(Op.WHERE, inside, call.map(Op.MUL, x, sixth), 0.0)))


def _hardswish(call: Call) -> RowValue:
    x = call.row(0)
    y = call.map(Op.DIV, call.map(Op.MUL, x, _six(call, x)), 6.0)
    below, above = call.map(Op.LE, x, -3.0), call.map(Op.LT, x, 3.0)
    inside = call.map(Op.WHERE, above, call.map(Op.WHERE, below, 0.0, x), 0.0)
    parabola = call.map(Op.MUL, inside, call.map(Op.ADD, call.map(Op.DIV, inside, 6.0), 0.5))
    carrier = call.map(Op.WHERE, below, 0.0, call.map(Op.WHERE, above, parabola, x))
    return call.shaped(call.map(Op.WITH_GRADIENT, y, carrier))


def _six(call: Call, x: RowValue) -> RowValue:
    """min(max(x + 3, 0), 6)"""
    return call.map(Op.MIN, call.map(Op.MAX, call.map(Op.ADD, x, 3.0), 0.0), 6.0)


def _soft_plus(call: Call, x: RowValue, beta: float, threshold: float) -> RowValue:
    """log(1 + exp(beta x)) / beta; x itself above the threshold.

    The branch that is not taken must stay finite too, since 0 times infinity is NaN.
    """
    scaled = call.map(Op.MUL, x, beta)
    far = call.map(Op.GT, scaled, threshold)
    curve = call.map(Op.LOG1P, call.map(Op.EXP, call.map(Op.WHERE, far, 0.0, scaled)))
    return call.map(Op.WHERE, far, x, call.map(Op.DIV, curve, beta))


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
    negative = call.map(Op.LE, x, 0.0)
    curve = call.map(Op.EXPM1, call.map(Op.MUL, call.map(Op.WHERE, negative, x, 0.0), inner))
    return call.shaped(call.map(Op.WHERE, negative, call.map(Op.MUL, curve, alpha * scale), call.map(Op.MUL, x, scale)))


def _shrink(call: Call) -> RowValue:
    """softshrink, x moved towards 0 by `lambd`, and hardshrink, x itself; 0 inside."""
    x, lambd = call.row(0), call.argument(1, "lambd", 0.5)
    inside = call.map(Op.MUL, call.map(Op.GE, x, -lambd), call.map(Op.LE, x, lambd))
    outside = x
    if call.packet is ops.softshrink:
        moved = call.map(Op.WHERE, call.map(Op.GT, x, lambd), call.map(Op.SUB, x, lambd), call.map(Op.ADD, x, lambd))
        outside = moved
    return call.shaped(call.map(Op.WHERE, inside, 0.0, outside))


def _where(call: Call) -> RowValue:
    if len(call.args) != 3:
        raise NotFusable("torch.where with a condition alone is not supported")
    if call.out.dtype != torch.bool:
        _own_type(call)
    return call.shaped(call.map(Op.WHERE, *call.args))


def _filled(call: Call) -> RowValue:
    """full, zeros, ones and the like."""
    name = str(call.packet).rpartition(".")[2]
    if name.startswith(("full", "new_full")):
        fill = call.argument(2 if name == "new_full" else 1, "fill_value")
    elif name == "scalar_tensor":
        fill = call.args[0]
    else:
        fill = 1.0 if "ones" in name else 0.0
    if isinstance(fill, RowValue):
        raise NotFusable(f"{call.packet} with a tensor as its fill value is not supported")
    return call.constant(torch.tensor(fill, dtype=call.out.dtype))


def _same(call: Call) -> Any:
    """Copies, and casts of what is not a constant. An integer is cast to one of another size: it is small in both."""
    x, dtype = call.args[0], call.out.dtype
    own = x.dtype if isinstance(x, RowValue) else call.dtype
    if dtype in (own, call.dtype) or (is_integer(dtype) and own in (torch.bool, torch.int32, torch.int64)):
        return x
    if dtype == torch.bool:
        return call.shaped(_truth(call, x))
    raise NotFusable(other_type(call.packet, dtype, call.dtype))


def _detach(call: Call) -> Any:
    x = call.args[0]
    return x._replace(stopped=True) if isinstance(x, MatrixView) else call.map(Op.STOP, x)


def _mm(call: Call) -> RowValue:
    v, matrix = (x if isinstance(x, MatrixView) else as_row(call.build, x) for x in call.args[-2:])
    if not isinstance(v, RowValue) or not v.batched:
        raise NotFusable("two matrices are multiplied inside the step; do it in weights(), once per call")
    if isinstance(matrix, MatrixView) and matrix.stopped and torch.is_grad_enabled():
        raise NotFusable("a matrix without its gradient is multiplied with a vector; detach it in weights(), once per call")
    if len(v.value.shape) != 1:
        raise NotFusable(f"a recurrent matrix is multiplied with a value of shape {v.value.shape}; a vector is needed")
    blocks = [matrix.block()] if isinstance(matrix, MatrixView) else blocks_of(matrix.value, call.columns)
    product = RowValue(call.build.cat([call.build.dot([(v.value, block)]) for block in blocks], 0), v.lead)
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


def _bmm(call: Call) -> RowValue | Moved:
    if isinstance(call.args[0], Moved):
        return _bmm_with_parameter(call)
    a, b = call.row(0), call.row(1)
    if not (a.batched and b.batched):
        raise NotFusable("a product with a matrix for each row; write it as [n, B, m] times n matrices")
    (i, j), k = a.value.shape, b.value.shape[1]
    left, right = call.build.reshape(a.value, (i, j, 1)), call.build.reshape(b.value, (1, j, k))
    return reductions.reduced(call, Op.SUM, RowValue(call.build.map(Op.MUL, left, right), a.lead), [1])


def _bmm_with_parameter(call: Call) -> Moved:
    """[n, B, m] times n matrices of a weight: a dot for each of them."""
    build, a, b = call.build, call.args[0], call.row(1)
    if a.at != 1 or b.batched:
        raise NotFusable("a batched product of a tensor whose batch is not its first axis takes n matrices from weights()")
    n, m = a.value.shape
    products = []
    for k in range(n):
        v = build.reshape(build.slice(a.value, 0, k, k + 1), (m,))
        blocks = blocks_of(build.reshape(build.slice(b.value, 0, k, k + 1), b.value.shape[1:]), call.columns)
        product = build.cat([build.dot([(v, block)]) for block in blocks], 0)
        products.append(build.reshape(product, (1, product.size)))
    return Moved(build.cat(products, 0), 1)


ELEMENTWISE = {
    **{getattr(ops, op): op for op in (*FUNCTIONS, Op.DIV)},
    ops.reciprocal: Op.RECIP,
    ops.sgn: Op.SIGN,
}
RULES: dict[Any, Callable[[Call], Any]] = {
    **{packet: _elementwise(op) for packet, op in ELEMENTWISE.items()},
    **{getattr(ops, op): _comparison(op) for op in sorted(COMPARISONS)},
    ops.add: _bool_or(Op.ADD, Op.MAX),
    ops.mul: _bool_or(Op.MUL, Op.MUL),
    ops.maximum: _bool_or(Op.MAX, Op.MAX),
    ops.minimum: _bool_or(Op.MIN, Op.MIN),
    ops.logical_and: _logical(Op.MUL),
    ops.logical_or: _logical(Op.MAX),
    ops.logical_xor: _logical(Op.NE),
    ops.bitwise_and: _bitwise(Op.MUL),
    ops.bitwise_or: _bitwise(Op.MAX),
    ops.bitwise_xor: _bitwise(Op.NE),
    **dict.fromkeys((ops.logical_not, ops.bitwise_not), _not),
    ops.sub: _scaled(Op.SUB),
    ops.rsub: _rsub,
    ops.pow: _power,
    ops.rsqrt: _rsqrt,
    **dict.fromkeys((ops.clamp, ops.clamp_min, ops.clamp_max), _clamp),
    ops.hardtanh: _hardtanh,
    ops.hardsigmoid: _hardsigmoid,
    ops.hardswish: _hardswish,
    ops.softplus: _softplus,
    ops.mish: _mish,
    **dict.fromkeys((ops.elu, ops.celu), _elu),
    **dict.fromkeys((ops.softshrink, ops.hardshrink), _shrink),
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
    ops.var: reductions.var,
    ops.std: reductions.std,
    ops.native_layer_norm: reductions.layer_norm,
    **dict.fromkeys((ops._softmax, ops._log_softmax), reductions.softmax),
    **dict.fromkeys((ops.mm, ops.addmm), _mm),
    ops.mv: _mv,
    ops.bmm: _bmm,
}


# Operations that move entries. The result of one on a constant is the same constant.
_MOVING = (views.reshape, views.expand, views.permute, views.sliced, views.select, views.split, views.unbind, _same, _detach)
MOVES = frozenset(packet for packet, rule in RULES.items() if rule in _MOVING)


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operations that torch can decompose into simpler ones with the same gradient. Importing these takes torch a second.

    The list is explicit since torch decomposes after its own differentiation: some decompositions have another gradient at a
    kink, or NaN where a branch that is not taken overflows.
    """
    from torch._decomp import get_decompositions

    listed = [ops.silu, ops.leaky_relu, ops.gelu, ops.log_sigmoid_forward, ops.glu, ops._prelu_kernel]
    listed += [ops.threshold, ops.masked_fill, ops.addcmul, ops.addcdiv, ops.lerp, ops.logsumexp, ops.dot]
    listed += [ops.addmv, ops.baddbmm, ops.unsafe_split, ops.unsafe_split_with_sizes]
    return get_decompositions(listed)
