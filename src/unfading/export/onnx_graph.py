"""Graphs of ONNX, and each operation of a program as nodes in one.

A value of a program belongs to one batch row. In a graph it has axes in front of its own: [T, B] outside of the loop over time,
[B] in the loop, and none where it depends on weights alone. What depends on the index of the step alone has [T, 1] or [1].
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfading.export.stage import Array
from unfading.fuse.ir.program import Block, Op, Shape, Value

if TYPE_CHECKING:
    from onnx import NodeProto


class Entries(NamedTuple):
    """A value in a graph."""

    name: str
    lead: int = 0  # axes in front of the value's own
    full: bool = False  # whether they have the sizes of the batch, and not 1 in its place


class Constants:
    """The constants of a model, each array once. Graphs inside of graphs read them by the same names."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self._names: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def name(self, array: NDArray[Any]) -> str:
        """The name of a constant."""
        array = np.ascontiguousarray(array) if array.ndim else array
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._names:
            self._names[key] = f"constant/{len(self._names)}"
            self.arrays[self._names[key]] = array
        return self._names[key]

    def float(self, numbers: Array | float) -> str:
        """The name of a constant in float32."""
        return self.name(np.asarray(numbers, np.float32))

    def int(self, numbers: Sequence[int] | int) -> str:
        """The name of a constant in int64."""
        return self.name(np.asarray(numbers, np.int64))


class Graph:
    """Nodes in the order in which they are computed.

    The names of their outputs contain a slash, so that none is the name of an input or an output of the model.

    Args:
        constants: of the model.
        scope: the first part of the names; of every graph another.
        sizes: the name of the sizes of the axes in front of values, int64.
        lead: the number of these axes.
    """

    def __init__(self, constants: Constants, scope: str, sizes: str, lead: int):
        self.constants, self.scope, self.sizes, self.lead = constants, scope, sizes, lead
        self.nodes: list[NodeProto] = []

    def add(self, operator: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Append a node; return the name of its first output."""
        from onnx import helper

        names = list(outputs) or [f"{self.scope}/{len(self.nodes)}"]
        node = helper.make_node(operator, list(inputs), names, name=f"{self.scope}/{operator}{len(self.nodes)}", **attributes)
        self.nodes.append(node)
        return names[0]

    def full(self, x: Entries, shape: Shape) -> str:
        """The name of a value with its axes in front, each in its full size."""
        if x.full and x.lead == self.lead:
            return x.name
        return self.add("Expand", x.name, self.add("Concat", self.sizes, self.constants.int(shape), axis=0))

    def value(self, value: Value, args: Sequence[Entries], weights: Sequence[Array]) -> Entries:
        """Write one operation of a program."""
        lead = max(arg.lead for arg in args)
        if value.op is Op.CAT and len({(arg.lead, arg.full) for arg in args}) > 1:
            pieces = [self.full(arg, piece.shape) for arg, piece in zip(args, value.args, strict=True)]
            return Entries(self.add("Concat", *pieces, axis=value.axis - len(value.shape)), self.lead, True)
        names = [arg.name for arg in args]
        if value.op is Op.DOT:
            blocks = [_matrix(weights[block.weight], block) for block in value.blocks]
            name = _dot(self, names, blocks)
        elif value.op in ELEMENTWISE:
            name = ELEMENTWISE[value.op](self, *names)
        else:
            name = WITH_ATTRIBUTES[value.op](self, names, value, lead)
        return Entries(name, lead, any(arg.full for arg in args))


def _matrix(weight: Array, block: Block) -> Array:
    """The matrix of a block, by which a row vector is multiplied."""
    part = weight[block.r0 : block.r1, block.c0 : block.c1]
    return part if block.transposed else part.T


def _dot(g: Graph, vectors: Sequence[str], matrices: Sequence[Array]) -> str:
    products = [g.add("MatMul", v, g.constants.float(m)) for v, m in zip(vectors, matrices, strict=True)]
    total = products[0]
    for product in products[1:]:
        total = g.add("Add", total, product)
    return total


# -- elementwise operations, in the order of `fuse/ir/interpret.py` -----------------------------------------------------------


def _node(operator: str) -> Callable[..., str]:
    return lambda g, *names: g.add(operator, *names)


def _comparison(operator: str) -> Callable[..., str]:
    return lambda g, a, b: _number(g, g.add(operator, a, b))


def _number(g: Graph, truth: str) -> str:
    """1 where true, 0 where false."""
    from onnx import TensorProto

    return g.add("Cast", truth, to=TensorProto.FLOAT)


def _expm1(g: Graph, x: str) -> str:
    """exp(x) - 1 = tanh(x / 2) (exp(x) + 1), which is exact to rounding near 0 as well."""
    half = g.add("Tanh", g.add("Mul", g.constants.float(0.5), x))
    return g.add("Mul", half, g.add("Add", g.add("Exp", x), g.constants.float(1.0)))


def _log1p(g: Graph, x: str) -> str:
    """log(u) x / (u - 1) with u = 1 + x as it is rounded, x itself where u is 1, and log(u) where x is large."""
    one = g.constants.float(1.0)
    u = g.add("Add", one, x)
    log = g.add("Log", u)
    corrected = g.add("Mul", log, g.add("Div", x, g.add("Sub", u, one)))
    near = g.add("Where", g.add("Equal", u, one), x, corrected)
    return g.add("Where", g.add("Less", x, one), near, log)


def _where(g: Graph, condition: str, a: str, b: str) -> str:
    from onnx import TensorProto

    return g.add("Where", g.add("Cast", condition, to=TensorProto.BOOL), a, b)


ELEMENTWISE: dict[Op, Callable[..., str]] = {
    Op.EXP: _node("Exp"),
    Op.EXPM1: _expm1,
    Op.LOG: _node("Log"),
    Op.LOG1P: _log1p,
    Op.TANH: _node("Tanh"),
    Op.SIGMOID: _node("Sigmoid"),
    Op.RELU: _node("Relu"),
    Op.ABS: _node("Abs"),
    Op.SQRT: _node("Sqrt"),
    Op.SIGN: _node("Sign"),
    Op.SIN: _node("Sin"),
    Op.COS: _node("Cos"),
    Op.ERF: _node("Erf"),
    Op.NEG: _node("Neg"),
    Op.ADD: _node("Add"),
    Op.SUB: _node("Sub"),
    Op.MUL: _node("Mul"),
    Op.DIV: _node("Div"),
    Op.GT: _comparison("Greater"),
    Op.GE: _comparison("GreaterOrEqual"),
    Op.LT: _comparison("Less"),
    Op.LE: _comparison("LessOrEqual"),
    Op.EQ: _comparison("Equal"),
    Op.NE: lambda g, a, b: _number(g, g.add("Not", g.add("Equal", a, b))),
    Op.RECIP: _node("Reciprocal"),
    Op.MAX: _node("Max"),
    Op.MIN: _node("Min"),
    Op.WHERE: _where,
}  # without the operations that matter for gradients alone, which `fold` removes


# -- operations with attributes -----------------------------------------------------------------------------------------------


def _power(g: Graph, names: list[str], value: Value, lead: int) -> str:
    return g.add("Pow", names[0], g.constants.float(value.number))


def _cat(g: Graph, names: list[str], value: Value, lead: int) -> str:
    return g.add("Concat", *names, axis=value.axis - len(value.shape))


def _expand(g: Graph, names: list[str], value: Value, lead: int) -> str:
    own, more = value.args[0].shape, len(value.shape) - len(value.args[0].shape)
    name = names[0]
    if lead and more:
        name = g.add("Reshape", name, g.constants.int([0] * lead + [1] * more + list(own)))  # 0 leaves a size as it is
    return g.add("Expand", name, g.constants.int([1] * lead + list(value.shape)))


def _reshape(g: Graph, names: list[str], value: Value, lead: int) -> str:
    return g.add("Reshape", names[0], g.constants.int([0] * lead + list(value.shape)))


def _slice(g: Graph, names: list[str], value: Value, lead: int) -> str:
    axis, start, stop = value.slice
    return cut(g, names[0], start, stop, axis - len(value.shape))


def _permute(g: Graph, names: list[str], value: Value, lead: int) -> str:
    return g.add("Transpose", names[0], perm=[*range(lead), *(lead + axis for axis in value.axes)])


def _reduction(operator: str) -> Callable[[Graph, list[str], Value, int], str]:
    def write(g: Graph, names: list[str], value: Value, lead: int) -> str:
        axes = [axis - len(value.shape) for axis in value.axes]
        return g.add(operator, names[0], g.constants.int(axes), keepdims=1)

    return write


def cut(g: Graph, x: str, start: int, stop: int, axis: int) -> str:
    """Entries start..stop along an axis."""
    return g.add("Slice", x, *(g.constants.int([number]) for number in (start, stop, axis)))


WITH_ATTRIBUTES: dict[Op, Callable[[Graph, list[str], Value, int], str]] = {
    Op.POWER: _power,
    Op.CAT: _cat,
    Op.EXPAND: _expand,
    Op.RESHAPE: _reshape,
    Op.SLICE: _slice,
    Op.PERMUTE: _permute,
    Op.SUM: _reduction("ReduceSum"),
    Op.AMAX: _reduction("ReduceMax"),
}
