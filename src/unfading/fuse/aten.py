"""What each operation of torch is in the language of programs: one rule per operation.

A rule gets a `Call` and returns what the operation made: a Row (a value, with or without the batch axis), a Matrix (a view
of a recurrent matrix), or a list of these. Operations that torch itself can write in simpler ones have no rule here.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.fuse.build import Builder
from unfading.fuse.program import Block, NotFusable, Shape, Value

ops = torch.ops.aten


# Rows of the example, and its steps: primes that are no feature sizes, so that every axis tells by its size what it is.
BATCH = 1_000_003
TIME = 7_919


def lead(shape: Sequence[int]) -> int:
    """How many axes in front of the features stand for rows: [B, ...] and [T B, ...] have one, [T, B, ...] two."""
    if tuple(shape[:2]) == (TIME, BATCH):
        return 2
    return int(len(shape) > 0 and shape[0] in (BATCH, TIME * BATCH))


class Row(NamedTuple):
    """A value, and how many axes the tensor it stands for has in front of the value's own; 0 for a parameter's."""

    value: Value
    lead: int

    @property
    def batched(self) -> bool:
        return self.lead > 0


class Opaque(NamedTuple):
    """What the language has no word for, where that is allowed: it must not come into the step."""

    reason: str


class Matrix(NamedTuple):
    """W[r0:r1, c0:c1] of weight number `index`, or its transpose: what a dot can use as it is."""

    index: int
    flat: Value
    shape: Shape
    r0: int
    r1: int
    c0: int
    c1: int
    turned: bool = False

    def t(self) -> "Matrix":
        return self._replace(turned=not self.turned)

    def cut(self, axis: int, start: int, stop: int) -> "Matrix":
        if (axis == 0) != self.turned:
            return self._replace(r0=self.r0 + start, r1=self.r0 + stop)
        return self._replace(c0=self.c0 + start, c1=self.c0 + stop)

    def block(self) -> Block:
        """As v @ self uses it."""
        return Block(self.index, self.r0, self.r1, self.c0, self.c1, transposed=not self.turned)

    def entries(self, b: Builder) -> Value:
        """As an ordinary value, for elementwise work."""
        whole = b.reshape(self.flat, self.shape)
        cut = b.slice(b.slice(whole, 0, self.r0, self.r1), 1, self.c0, self.c1)
        return b.permute(cut, (1, 0)) if self.turned else cut


class Call(NamedTuple):
    """One operation: its arguments as rows and matrices, and the tensors without data that it made."""

    build: Builder
    packet: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    dtype: torch.dtype

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def row(self, position: int) -> Row:
        x = self.args[position]
        if isinstance(x, Matrix):
            return Row(x.entries(self.build), 0)
        if not isinstance(x, Row):
            raise NotFusable(f"{self.packet} of {x!r}")
        return x

    def features(self, out: Tensor | None = None) -> Shape:
        """Of what was made, the axes that are no rows."""
        shape = tuple((self.out if out is None else out).shape)
        return shape[lead(shape) :]

    def made(self, value: Value, out: Tensor | None = None) -> Row:
        """A value as the tensor that was made."""
        shape = tuple((self.out if out is None else out).shape)
        return Row(value, lead(shape))

    def map(self, op: str, *operands: Any, attr: float | None = None) -> Row:
        """An elementwise operation on rows and numbers, with the shape torch gave it."""
        rows = [Row(x.entries(self.build), 0) if isinstance(x, Matrix) else x for x in operands]
        axes = max((x.lead for x in rows if isinstance(x, Row)), default=0)
        rank = max((len(x.value.shape) + x.lead for x in rows if isinstance(x, Row)), default=0)
        values: list[Value | float] = []
        for x in rows:
            if not isinstance(x, Row):
                values.append(float(x))
                continue
            value = x.value if x.lead else _without_rows(self.build, x.value, len(x.value.shape) - (rank - axes))
            values.append(value)
        return Row(self.build.map(op, *values, attr=attr), axes)

    def shaped(self, row: Row) -> Row:
        return self.made(self.build.expand(row.value, self.features()))

    def axis(self, axis: int, row: Row) -> int:
        """An axis of the tensor as one of the row's features; negative for one of the rows."""
        rank = len(row.value.shape) + row.lead
        return axis % rank - row.lead


def _without_rows(build: Builder, value: Value, axes: int) -> Value:
    """A parameter's value without its leading axes of size 1, which stand for rows."""
    if axes <= 0:
        return value
    if any(size != 1 for size in value.shape[:axes]):
        raise NotFusable(f"a parameter of shape {value.shape} goes along the rows")
    return build.reshape(value, value.shape[axes:])


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
    return call.shaped(call.map("sub", call.args[1], call.args[0]))


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


def _between(call: Call, x: Row, low: float, high: float) -> Row:
    """As clamp, but with gradient 0 at the bounds themselves: so torch has it in hardtanh and its kin."""
    above = call.map("where", call.map("le", x, low), low, x)
    return call.map("where", call.map("ge", above, high), high, above)


def _hardtanh(call: Call) -> Row:
    return call.shaped(_between(call, call.row(0), call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0)))


def _hardsigmoid(call: Call) -> Row:
    x = call.row(0)
    gate = call.map("mul", _between(call, call.map("add", x, 3.0), 0.0, 6.0), 1 / 6)
    return call.shaped(call.map("mul", x, gate) if call.packet is ops.hardswish else gate)


def _soft_plus(call: Call, x: Row, beta: float, threshold: float) -> Row:
    """log(1 + exp(beta x)) / beta, or x where that is as good. A branch not taken must stay finite: 0 times infinity is NaN."""
    scaled = call.map("mul", x, beta)
    far = call.map("gt", scaled, threshold)
    curve = call.map("log1p", call.map("exp", call.map("where", far, 0.0, scaled)))
    return call.map("where", far, x, call.map("mul", curve, 1 / beta))


def _softplus(call: Call) -> Row:
    return call.shaped(_soft_plus(call, call.row(0), call.argument(1, "beta", 1.0), call.argument(2, "threshold", 20.0)))


def _mish(call: Call) -> Row:
    x = call.row(0)
    return call.shaped(call.map("mul", x, call.map("tanh", _soft_plus(call, x, 1.0, 20.0))))


def _elu(call: Call) -> Row:
    x, alpha = call.row(0), call.argument(1, "alpha", 1.0)
    scale, inner = call.argument(2, "scale", 1.0), call.argument(3, "input_scale", 1.0)
    if call.packet is ops.celu:
        inner = 1 / alpha
    positive = call.map("gt", x, 0.0)
    curve = call.map("expm1", call.map("mul", call.map("where", positive, 0.0, x), inner))
    return call.shaped(call.map("where", positive, call.map("mul", x, scale), call.map("mul", curve, alpha * scale)))


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


def _reshape(call: Call) -> Any:
    x = call.args[0]
    if isinstance(x, Matrix) and tuple(call.out.shape) == (x.r1 - x.r0, x.c1 - x.c0) and not x.turned:
        return x
    row = call.row(0)
    if row.batched != (lead(call.out.shape) > 0) or math.prod(call.features()) != row.value.size:
        raise NotFusable(f"{call.packet} mixes rows with features")
    return call.made(call.build.reshape(row.value, call.features()))


def _expand(call: Call) -> Row:
    row = call.row(0)
    if row.lead and lead(call.out.shape) != row.lead:
        raise NotFusable("an axis put in front of the rows")
    value = _without_rows(call.build, row.value, len(row.value.shape) - len(call.features()))
    return call.made(call.build.expand(value, call.features()))


def _permute(call: Call) -> Any:
    x = call.args[0]
    rank = 2 if isinstance(x, Matrix) else len(x.value.shape) + x.lead
    if call.packet is ops.permute:
        axes = [axis % rank for axis in call.args[1]]
    else:
        axes = list(range(rank))
        a, b = (0, 1) if call.packet is ops.t else (call.args[1] % rank, call.args[2] % rank)
        if rank > 1:
            axes[a], axes[b] = axes[b], axes[a]
    if isinstance(x, Matrix):
        return x.t() if axes == [1, 0] else x
    if axes[: x.lead] != list(range(x.lead)):
        raise NotFusable(f"{call.packet} moves the rows")
    return Row(call.build.permute(x.value, tuple(axis - x.lead for axis in axes[x.lead :])), x.lead)


def _cut(call: Call, x: Any, axis: int, start: int, stop: int) -> Any:
    if isinstance(x, Matrix):
        return x.cut(axis % 2, start, stop)
    own = call.axis(axis, x)
    if own < 0:
        if (start, stop) == (0, _extent(x, axis)):
            return x
        raise NotFusable(f"{call.packet} along the rows")
    return Row(call.build.slice(x.value, own, start, stop), x.lead)


def _extent(x: Any, axis: int) -> int:
    if isinstance(x, Matrix):
        return (x.c1 - x.c0) if (axis % 2 == 1) != x.turned else (x.r1 - x.r0)
    shape = ((), (BATCH,), (TIME, BATCH))[x.lead] + x.value.shape
    return shape[axis]


def _slice(call: Call) -> Any:
    x, axis = call.args[0], call.argument(1, "dim", 0)
    size = _extent(x, axis)
    start, stop, step = call.argument(2, "start") or 0, call.argument(3, "end"), call.argument(4, "step", 1)
    if step != 1:
        raise NotFusable("a slice with a stride")
    start, stop, _ = slice(start, stop).indices(size)
    return _cut(call, x, axis, start, max(start, stop))


def _select(call: Call) -> Row:
    x, axis, index = call.args
    size = _extent(x, axis)
    piece = _cut(call, x, axis, index % size, index % size + 1)
    row = Row(piece.entries(call.build), 0) if isinstance(piece, Matrix) else piece
    return call.made(call.build.reshape(row.value, call.features()))


def _split(call: Call) -> list[Any]:
    x, axis = call.args[0], call.argument(2, "dim", 0)
    out, start = [], 0
    for piece in call.out:
        size = piece.shape[axis]
        out.append(_cut(call, x, axis, start, start + size))
        start += size
    return out


def _unbind(call: Call) -> list[Row]:
    x, axis = call.row(0), call.argument(1, "dim", 0)
    return [
        call.made(call.build.reshape(cut.value, call.features(piece)), piece)
        for i, piece in enumerate(call.out)
        for cut in [_cut(call, x, axis, i, i + 1)]
    ]


def _cat(call: Call) -> Row:
    rows = [Row(x.entries(call.build), 0) if isinstance(x, Matrix) else x for x in call.args[0]]
    axis = call.argument(1, "dim", 0) % len(call.out.shape) - lead(call.out.shape)
    if axis < 0:
        raise NotFusable("torch.cat along the rows")
    if len({row.lead for row in rows}) > 1:
        raise NotFusable("torch.cat of a parameter with a value of each row; expand the parameter first")
    return call.made(call.build.cat([row.value for row in rows if row.value.size], axis))


def _stack(call: Call) -> Row:
    rows = [Row(x.entries(call.build), 0) if isinstance(x, Matrix) else x for x in call.args[0]]
    axis = call.argument(1, "dim", 0) % len(call.out.shape) - lead(call.out.shape)
    if axis < 0 or len({row.lead for row in rows}) > 1:
        raise NotFusable("torch.stack along the rows, or of parameters with values")
    shapes = [row.value.shape[:axis] + (1,) + row.value.shape[axis:] for row in rows]
    pieces = [call.build.reshape(row.value, shape) for row, shape in zip(rows, shapes, strict=True)]
    return call.made(call.build.cat(pieces, axis))


def _axes(call: Call, position: int, row: Row) -> list[int]:
    rank = len(row.value.shape) + row.lead
    dims = call.argument(position, "dim")
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    axes = [axis % rank - row.lead for axis in dims]
    if any(axis < 0 for axis in axes):
        raise NotFusable(f"{call.packet} over the batch; rows do not mix")
    return axes


def _reduced(call: Call, op: str, x: Row, axes: list[int], out: Tensor | None = None) -> Row:
    value = call.build.reduce(op, x.value, axes)
    return call.made(call.build.reshape(value, call.features(out)), out)


def _sum(call: Call) -> Row:
    x = call.row(0)
    return _reduced(call, "sum", x, _axes(call, 1, x))


def _mean(call: Call) -> Row:
    x = call.row(0)
    axes = _axes(call, 1, x)
    count = math.prod(x.value.shape[axis] for axis in axes)
    return call.map("mul", _reduced(call, "sum", x, axes), 1 / count)


def _amax(call: Call) -> Row:
    x = call.row(0)
    if call.packet is ops.amin:
        return call.map("neg", _reduced(call, "amax", call.map("neg", x), _axes(call, 1, x)))
    return _reduced(call, "amax", x, _axes(call, 1, x))


def _norm(call: Call) -> Row:
    """(sum |x|^p)^(1/p), with gradient 0 where the norm is 0, as torch has it."""
    x, order = call.row(0), float(call.argument(1, "ord", 2))
    axes = _axes(call, 2, x)
    size = call.map("abs", x)
    if order == math.inf:
        return _reduced(call, "amax", size, axes)
    if order < 1:  # below 1 the gradient has poles at 0, which torch sets to 0
        raise NotFusable(f"a norm of order {order}")
    total = _reduced(call, "sum", call.map("power", size, attr=order), axes)
    return total if order == 1 else _root(call, total, order)


def _var_mean(call: Call) -> list[Row]:
    x = call.row(0)
    axes = _axes(call, 1, x)
    count = math.prod(x.value.shape[axis] for axis in axes)
    correction = call.argument(2, "correction", 1)
    free = count - (1 if correction is None else float(correction))
    mean = Row(call.build.map("mul", call.build.reduce("sum", x.value, axes), 1 / count), x.lead)
    apart = call.map("sub", x, mean)
    out = call.out if isinstance(call.out, tuple) else (call.out, call.out)
    squares = _reduced(call, "sum", call.map("mul", apart, apart), axes, out[0])
    kept = call.made(call.build.reshape(mean.value, call.features(out[1])), out[1])
    return [call.map("mul", squares, 1 / free), kept]


def _var(call: Call) -> Row:
    variance, _ = _var_mean(call)
    return _root(call, variance, 2.0) if call.packet is ops.std else variance


def _root(call: Call, x: Row, order: float) -> Row:
    """x^(1/order), with gradient 0 where x is 0."""
    empty = call.map("eq", x, 0.0)
    return call.map("where", empty, 0.0, call.map("power", call.map("where", empty, 1.0, x), attr=1 / order))


def _layer_norm(call: Call) -> list[Row]:
    x, (shape, gain, shift, epsilon) = call.row(0), call.args[1:]
    axes = list(range(len(x.value.shape) - len(shape), len(x.value.shape)))
    count = math.prod(shape)
    b = call.build
    mean = Row(b.map("mul", b.reduce("sum", x.value, axes), 1 / count), x.lead)
    apart = call.map("sub", x, mean)
    variance = Row(b.map("mul", b.reduce("sum", b.map("mul", apart.value, apart.value), axes), 1 / count), x.lead)
    scale = call.map("recip", call.map("sqrt", call.map("add", variance, epsilon)))
    y = call.map("mul", apart, scale)
    y = y if gain is None else call.map("mul", y, gain)
    return [y if shift is None else call.map("add", y, shift), mean, scale]


def _softmax(call: Call) -> Row:
    x = call.row(0)
    axis = call.axis(call.args[1], x)
    if axis < 0:
        raise NotFusable("softmax over the batch; rows do not mix")
    b = call.build
    largest = Row(b.map("stop", b.reduce("amax", x.value, [axis])), x.lead)
    apart = call.map("sub", x, largest)
    e = call.map("exp", apart)
    total = Row(b.reduce("sum", e.value, [axis]), x.lead)
    return call.map("sub", apart, call.map("log", total)) if call.packet is ops._log_softmax else call.map("div", e, total)


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
    return _reduced(call, "sum", call.map("mul", v, vector), [0])


def _bmm(call: Call) -> Row:
    a, b = call.row(0), call.row(1)
    if not (a.batched and b.batched):
        raise NotFusable("a batched product with a parameter")
    (i, j), k = a.value.shape, b.value.shape[1]
    left, right = call.build.reshape(a.value, (i, j, 1)), call.build.reshape(b.value, (1, j, k))
    return _reduced(call, "sum", Row(call.build.map("mul", left, right), a.lead), [1])


UNARY = {
    **{getattr(ops, name): name for name in "neg exp expm1 log log1p tanh sigmoid relu abs sqrt sign sin cos erf".split()},
    ops.reciprocal: "recip",
    ops.sgn: "sign",
}
BINARY = {
    **{getattr(ops, name): name for name in "mul div gt ge lt le eq ne".split()},
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
    ops.hardtanh: _hardtanh,
    **dict.fromkeys((ops.hardsigmoid, ops.hardswish), _hardsigmoid),
    ops.softplus: _softplus,
    ops.mish: _mish,
    **dict.fromkeys((ops.elu, ops.celu), _elu),
    ops.where: _where,
    **dict.fromkeys(
        (ops.full, ops.full_like, ops.new_full, ops.zeros, ops.zeros_like, ops.new_zeros, ops.ones, ops.ones_like, ops.new_ones),
        _filled,
    ),
    ops.scalar_tensor: _filled,
    **dict.fromkeys((ops.clone, ops.contiguous, ops.alias, ops._to_copy, ops.lift_fresh, ops.lift_fresh_copy), _same),
    ops.detach: _detach,
    **dict.fromkeys((ops.view, ops.reshape, ops._unsafe_view, ops._reshape_alias, ops.unsqueeze, ops.squeeze), _reshape),
    ops.expand: _expand,
    **dict.fromkeys((ops.permute, ops.transpose, ops.t), _permute),
    ops.slice: _slice,
    ops.select: _select,
    **dict.fromkeys((ops.split, ops.split_with_sizes), _split),
    ops.unbind: _unbind,
    ops.cat: _cat,
    ops.stack: _stack,
    ops.sum: _sum,
    ops.mean: _mean,
    **dict.fromkeys((ops.amax, ops.amin), _amax),
    ops.linalg_vector_norm: _norm,
    ops.var_mean: _var_mean,
    **dict.fromkeys((ops.var, ops.std), _var),
    ops.native_layer_norm: _layer_norm,
    **dict.fromkeys((ops._softmax, ops._log_softmax), _softmax),
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
