"""A program as JSON text, which an exported graph carries to other processes.

    {"format": 1, "values": [[id, op, arguments, attribute, shape], ...], "stores": [[kind, index, start, id], ...],
     "widths": [[kind, index, width], ...], "kinds": [...]}

The text may come from a file of somebody else. `from_text` therefore checks every value: a program that it returns reads and
writes only entries that its tensors have.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from unfading.fuse.ir.program import (
    BINARY,
    UNARY,
    Attribute,
    Block,
    InputKind,
    Leaf,
    Op,
    Program,
    Shape,
    Slice,
    Store,
    TensorId,
    TensorKind,
    Value,
    broadcast,
)
from unfading.fuse.refusal import NotFusable

FORMAT = 1
_READ = (TensorKind.INPUT, TensorKind.STATE, TensorKind.WEIGHT)


def to_text(program: Program) -> str:
    """The program as one line of JSON."""
    values = [[value.id, value.op, [arg.id for arg in value.args], value.attr, value.shape] for value in program.values()]
    stores = [[store.kind, store.index, store.start, store.value.id] for store in program.stores]
    widths = [[kind, index, width] for (kind, index), width in program.widths.items()]
    content = {"format": FORMAT, "values": values, "stores": stores, "widths": widths, "kinds": program.kinds}
    return json.dumps(content, separators=(",", ":"))


def from_text(text: str) -> Program:
    """The program of a text; ValueError for a text that is damaged or of another version of the format."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and this version of unfading reads {FORMAT}")
        return _program(content)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, NotFusable) as error:
        raise ValueError(f"the fused loop of an exported program cannot be read: {error}. Export the layer again.") from error


def _program(content: dict[str, Any]) -> Program:
    widths: dict[TensorId, int] = {(TensorKind(kind), _count(index)): _count(width) for kind, index, width in content["widths"]}
    kinds = tuple(InputKind(kind) for kind in content["kinds"])
    _check(all((TensorKind.INPUT, i) in widths for i in range(len(kinds))), "an input has no width")
    values: dict[int, Value] = {}
    for number, name, arguments, attribute, shape in content["values"]:
        value = _value(Op(name), [values[i] for i in arguments], attribute, tuple(map(_count, shape)), _count(number))
        _check(value.id not in values, f"value {value.id} occurs twice")
        if value.op is Op.LEAF:
            leaf = value.leaf
            _check(leaf.kind in _READ, f"a step cannot read {leaf.kind}")
            _check(leaf.start <= leaf.stop <= widths[leaf.kind, leaf.index], f"{leaf} is outside its tensor")
        values[value.id] = value
    stores = []
    for kind, index, start, number in content["stores"]:
        store = Store(TensorKind(kind), _count(index), _count(start), values[number])
        _check(store.kind == TensorKind.NEXT, f"a step cannot write {store.kind}")
        _check(store.start + store.value.size <= widths[store.kind, store.index], f"{store.kind} is stored outside its tensor")
        stores.append(store)
    return Program(tuple(stores), widths, kinds)


def _value(op: Op, args: Sequence[Value], attribute: Any, shape: Shape, number: int) -> Value:
    attr = _attribute(op, attribute)
    wanted = len(attr) if op is Op.DOT and isinstance(attr, tuple) else _ARGUMENTS.get(op, len(args))
    _check(len(args) == wanted and (args or op in _WITHOUT_ARGUMENTS), f"{op} has {len(args)} arguments")
    _check(_has_shape(op, [arg.shape for arg in args], attr, shape), f"{op} does not have the shape {list(shape)}")
    return Value(op, tuple(args), attr, shape, number)


_WITHOUT_ARGUMENTS = (Op.LEAF, Op.CONST, Op.ZERO)
# How many arguments an operation has; a dot has one per block, and a concatenation any number.
_ARGUMENTS: dict[Op, int] = {
    **dict.fromkeys(_WITHOUT_ARGUMENTS, 0),
    **dict.fromkeys(UNARY, 1),
    **dict.fromkeys(BINARY, 2),
    Op.WHERE: 3,
    Op.WITH_GRADIENT: 2,
    **dict.fromkeys([Op.EXPAND, Op.RESHAPE, Op.PERMUTE, Op.SLICE, Op.SUM, Op.AMAX], 1),
}


def _attribute(op: Op, attribute: Any) -> Attribute:
    reader = _ATTRIBUTES.get(op)
    if reader is None:
        _check(attribute is None, f"{op} has an attribute")
        return None
    return reader(attribute)


def _leaf(attribute: Any) -> Leaf:
    kind, index, start, stop = attribute
    return Leaf(TensorKind(kind), _count(index), _count(start), _count(stop))


def _blocks(attribute: Any) -> tuple[Block, ...]:
    blocks = []
    for weight, r0, r1, c0, c1, transposed in attribute:
        block = Block(_count(weight), _count(r0), _count(r1), _count(c0), _count(c1), bool(transposed))
        _check(r0 <= r1 and c0 <= c1, f"{block} has no size")
        blocks.append(block)
    return tuple(blocks)


def _axes(attribute: Any) -> tuple[int, ...]:
    return tuple(map(_count, attribute))


def _number(attribute: Any) -> float:
    _check(isinstance(attribute, int | float), f"{attribute!r} is not a number")
    return float(attribute)


_ATTRIBUTES: dict[Op, Callable[[Any], Attribute]] = {
    Op.LEAF: _leaf,
    Op.CONST: _number,
    Op.POWER: _number,
    Op.SLICE: lambda attribute: Slice(*map(_count, attribute)),
    Op.CAT: lambda attribute: _count(attribute),
    Op.PERMUTE: _axes,
    Op.SUM: _axes,
    Op.AMAX: _axes,
    Op.DOT: _blocks,
}


def _has_shape(op: Op, shapes: Sequence[Shape], attr: Any, shape: Shape) -> bool:
    """Whether an operation on arguments of these shapes has this shape."""
    rule = _SHAPES.get(op)
    return shape == broadcast(*shapes) if rule is None else rule(shapes, attr, shape)


def _reduced(shapes: Sequence[Shape], axes: Any, shape: Shape) -> bool:
    return shape == tuple(1 if axis in axes else size for axis, size in enumerate(shapes[0]))


def _sliced(shapes: Sequence[Shape], cut: Any, shape: Shape) -> bool:
    axis, start, stop = cut
    return start <= stop <= shapes[0][axis] and shape == (*shapes[0][:axis], stop - start, *shapes[0][axis + 1 :])


def _joined(shapes: Sequence[Shape], axis: Any, shape: Shape) -> bool:
    others = {(*part[:axis], *part[axis + 1 :]) for part in (*shapes, shape)}
    return len(others) == 1 and shape[axis] == sum(part[axis] for part in shapes)


_SHAPES: dict[Op, Callable[[Sequence[Shape], Any, Shape], bool]] = {
    Op.LEAF: lambda shapes, leaf, shape: shape == (leaf.stop - leaf.start,),
    Op.CONST: lambda shapes, attr, shape: shape == (),
    Op.ZERO: lambda shapes, attr, shape: shape == (),
    Op.EXPAND: lambda shapes, attr, shape: shape == broadcast(shapes[0], shape),
    Op.RESHAPE: lambda shapes, attr, shape: math.prod(shapes[0]) == math.prod(shape),
    Op.PERMUTE: lambda shapes, axes, shape: (
        sorted(axes) == list(range(len(shape))) and shape == tuple(shapes[0][axis] for axis in axes)
    ),
    Op.SLICE: _sliced,
    Op.CAT: _joined,
    Op.SUM: _reduced,
    Op.AMAX: _reduced,
    Op.DOT: lambda shapes, blocks, shape: all(
        part == (block.length,) and shape == (block.width,) for part, block in zip(shapes, blocks, strict=True)
    ),
}


def _count(number: Any) -> int:
    _check(type(number) is int and number >= 0, f"{number!r} is not a count")
    return int(number)


def _check(condition: Any, reason: str) -> None:
    if not condition:
        raise ValueError(reason)
