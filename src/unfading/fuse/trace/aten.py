"""What each operation of torch is in the language of programs: one rule per operation.

A rule gets a `Call` and returns what the operation made: a Row (a value, with or without the batch axis), a Matrix (a view
of a recurrent matrix), or a list of these. Operations that torch itself can write in simpler ones have no rule here.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from unfading.fuse.ir.program import FUNCTIONS, NotFusable
from unfading.fuse.trace import activations, reductions, views
from unfading.fuse.trace.values import Call, Matrix, Row

ops = torch.ops.aten


def _elementwise(name: str) -> Callable[[Call], Row]:
    def rule(call: Call) -> Row:
        _same_precision(call)
        if call.kwargs:
            raise NotFusable(f"{call.packet} with {', '.join(call.kwargs)}")
        return call.shaped(call.map(name, *call.args))

    return rule


def _same_precision(call: Call) -> None:
    dtype = call.out.dtype
    if dtype not in (call.dtype, torch.bool):
        raise NotFusable(f"{call.packet} makes {dtype} of {call.dtype}; a fused step keeps one precision")


def _scaled(name: str) -> Callable[[Call], Row]:
    """add and sub, with their alpha."""

    def rule(call: Call) -> Row:
        _same_precision(call)
        a, b = call.args[:2]
        if call.out.dtype == torch.bool:  # one truth and another are one truth, not 2
            return call.shaped(call.map("max", a, b))
        alpha = call.argument(2, "alpha", 1)
        return call.shaped(call.map(name, a, b if alpha == 1 else call.map("mul", b, alpha)))

    return rule


def _rsub(call: Call) -> Row:
    alpha = call.argument(2, "alpha", 1)
    taken = call.args[0] if alpha == 1 else call.map("mul", call.args[0], alpha)
    return call.shaped(call.map("sub", call.args[1], taken))


def _power(call: Call) -> Row:
    exponent = call.args[1]
    if isinstance(exponent, Row) and (number := exponent.value.constant) is not None:
        exponent = number
    if not isinstance(exponent, int | float):
        raise NotFusable("a power with an exponent that is a tensor")
    if exponent == 0:
        return call.shaped(Row(call.build.const(1.0), call.row(0).lead))
    return call.shaped(call.map("power", call.args[0], attr=float(exponent)))


def _rsqrt(call: Call) -> Row:
    return call.map("recip", call.map("sqrt", call.args[0]))


def _clamp(call: Call) -> Row:
    """Where a bound holds, its gradient does not: as torch, which lets x through where x equals the bound."""
    x = call.row(0)
    low, high = call.argument(1, "min"), call.argument(2, "max")
    if call.packet is ops.clamp_max:
        low, high = None, call.args[1]
    if low is not None:
        x = call.map("where", call.map("lt", x, low), low, x)
    if high is not None:
        x = call.map("where", call.map("gt", x, high), high, x)
    return call.shaped(x)


def _where(call: Call) -> Row:
    if len(call.args) != 3:
        raise NotFusable("torch.where with a condition alone")
    return call.shaped(call.map("where", *call.args))


def _filled(call: Call) -> Row:
    """full, zeros, ones and their kin."""
    name = str(call.packet).rpartition(".")[2]
    if name.startswith(("full", "new_full")):
        number = call.argument(2 if name == "new_full" else 1, "fill_value")
    elif name == "scalar_tensor":
        number = call.args[0]
    else:
        number = 1.0 if "ones" in name else 0.0
    if isinstance(number, Row):
        raise NotFusable(f"{call.packet} with a tensor")
    number = torch.tensor(number, dtype=call.out.dtype).item()  # 0.1 in float32 is another number
    return call.made(call.build.expand(call.build.const(number), call.features()))


def _same(call: Call) -> Any:
    x = call.args[0]
    if call.out.dtype not in (call.dtype, torch.bool) and not (isinstance(x, Row) and x.value.constant is not None):
        raise NotFusable(f"{call.packet} makes {call.out.dtype} of {call.dtype}; a fused step keeps one precision")
    return x


def _detach(call: Call) -> Row:
    return call.map("stop", call.row(0))


def _mm(call: Call) -> Row:
    v, matrix = call.args[-2:]
    if not isinstance(v, Row) or not v.batched:
        raise NotFusable("a product of two matrices inside the step; do it in weights(), once per call")
    if not isinstance(matrix, Matrix):
        raise NotFusable("a product with a matrix that was made inside the step; make it in weights(), once per call")
    if len(v.value.shape) != 1:
        raise NotFusable(f"a product of a recurrent matrix with rows of shape {v.value.shape}")
    product = Row(call.build.dot([(v.value, matrix.block())]), v.lead)
    if call.packet is not ops.addmm:
        return product
    alpha, beta = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
    product = product if alpha == 1 else call.map("mul", product, alpha)
    added = call.args[0] if beta == 1 else call.map("mul", call.args[0], beta)
    return call.map("add", product, added)


def _mv(call: Call) -> Row:
    v, vector = call.row(0), call.row(1)
    if not v.batched:
        raise NotFusable("a product of a matrix with a vector inside the step; do it in weights(), once per call")
    return reductions.reduced(call, "sum", call.map("mul", v, vector), [0])


def _bmm(call: Call) -> Row:
    a, b = call.row(0), call.row(1)
    if not (a.batched and b.batched):
        raise NotFusable("a batched product with a parameter")
    (i, j), k = a.value.shape, b.value.shape[1]
    left, right = call.build.reshape(a.value, (i, j, 1)), call.build.reshape(b.value, (1, j, k))
    return reductions.reduced(call, "sum", Row(call.build.map("mul", left, right), a.lead), [1])


UNARY = {
    **{getattr(ops, name): name for name in (*FUNCTIONS, "neg")},
    ops.reciprocal: "recip",
    ops.sgn: "sign",
}
BINARY = {
    **{getattr(ops, name): name for name in ["mul", "div", "gt", "ge", "lt", "le", "eq", "ne"]},
    ops.maximum: "max",
    ops.minimum: "min",
    ops.logical_and: "mul",
    ops.bitwise_and: "mul",
}
RULES: dict[Any, Callable[[Call], Any]] = {
    **{op: _elementwise(name) for op, name in (UNARY | BINARY).items()},
    ops.add: _scaled("add"),
    ops.sub: _scaled("sub"),
    ops.rsub: _rsub,
    ops.pow: _power,
    ops.rsqrt: _rsqrt,
    **dict.fromkeys((ops.clamp, ops.clamp_min, ops.clamp_max), _clamp),
    ops.hardtanh: activations.hardtanh,
    **dict.fromkeys((ops.hardsigmoid, ops.hardswish), activations.hardsigmoid),
    ops.softplus: activations.softplus,
    ops.mish: activations.mish,
    **dict.fromkeys((ops.elu, ops.celu), activations.elu),
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
    """Operations that torch can write in simpler ones of the same gradient. Importing these takes torch a second.

    Only those listed: torch writes them for after its own differentiation, and some have another gradient than the operation
    itself at a kink, or NaN where a branch that is not taken overflows.
    """
    from torch._decomp import get_decompositions

    listed = [ops.silu, ops.leaky_relu, ops.gelu, ops.log_sigmoid_forward, ops.glu, ops._prelu_kernel, ops.softshrink]
    listed += [ops.hardshrink, ops.threshold, ops.masked_fill, ops.addcmul, ops.addcdiv, ops.lerp, ops.logsumexp, ops.dot]
    listed += [ops.addmv, ops.baddbmm, ops.unsafe_split, ops.unsafe_split_with_sizes]
    return get_decompositions(listed)
