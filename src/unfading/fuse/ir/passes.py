"""Compiler passes: rewrites of a whole program that leave its results as they are.

`join_dots` serves both emitters and runs on every traced program. `narrow` serves a GPU, which keeps as many blocks of
matrices on chip as it has room for: the smaller they are, the less room is left over.
"""

from collections.abc import Sequence

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import NUMBERS, Op, Program, Store, Value, pieces_of


def join_dots(builder: Builder, program: Program) -> Program:
    """Sums of dots that nothing else reads become one dot: a + x W^T + h U^T is one pass over one buffer."""
    readers: dict[int, int] = {}
    for value in program.values():
        for arg in value.args:
            readers[arg.id] = readers.get(arg.id, 0) + 1
    new: dict[int, Value] = {}
    for value in program.values():
        args = [new[arg.id] for arg in value.args]
        if value.op is Op.ADD and all(readers[arg.id] == 1 for arg in value.args):
            new[value.id] = _sum_with_one_dot(builder, args)
        elif any(a is not b for a, b in zip(args, value.args, strict=True)):
            new[value.id] = builder.rebuilt(value, args)
        else:
            new[value.id] = value
    return program._replace(stores=tuple(store._replace(value=new[store.value.id]) for store in program.stores))


def _sum_with_one_dot(builder: Builder, args: Sequence[Value]) -> Value:
    """a + b, where dots that are a or b, or one of the two terms of a or b, are joined to one."""
    dots: list[Value] = []
    rest: list[Value] = []
    for arg in args:
        terms = arg.args if arg.op is Op.ADD and any(term.op is Op.DOT for term in arg.args) else (arg,)
        for term in terms:
            (dots if term.op is Op.DOT else rest).append(term)
    if len(dots) < 2 or len({dot.shape for dot in dots}) > 1:
        return builder.map(Op.ADD, *args)
    total = builder.dot([factor for dot in dots for factor in dot.factors])
    for term in rest:
        total = builder.map(Op.ADD, total, term)
    return total


def narrow(program: Program, width: int) -> Program:
    """The same program with every vector cut into pieces of at most `width` entries.

        y = tanh(v W^T)        becomes        y_j = tanh(sum over i of v_i W_ji^T)        for pieces i of v and j of y

    Only a value with several axes is joined again.
    """
    b = Builder()
    new: dict[int, Value] = {}
    for value in program.values():
        if value.op is Op.LEAF:
            kind, index, start, _ = value.leaf
            pieces = [b.leaf(kind, index, start + first, start + last) for first, last in _edges(value.size, width)]
            new[value.id] = b.cat(pieces, 0)
        elif value.op in NUMBERS:
            new[value.id] = b.const(value.number) if value.op is Op.CONST else b.zero(())
        else:
            rebuilt = b.rebuilt(value, [new[arg.id] for arg in value.args])
            if value.op is Op.DOT:
                rebuilt = b.cat([b.slice(rebuilt, 0, first, last) for first, last in _edges(value.size, width)], 0)
            new[value.id] = rebuilt
    stores = [piece for store in program.stores for piece in _split(store._replace(value=new[store.value.id]))]
    return program._replace(stores=tuple(stores))


def _edges(size: int, width: int) -> list[tuple[int, int]]:
    return [(first, min(first + width, size)) for first in range(0, size, width)]


def _split(store: Store) -> list[Store]:
    """A store of a concatenation as one store for each piece."""
    value = store.value
    if value.op is not Op.CAT or len(value.shape) != 1:
        return [store]
    return [store._replace(start=store.start + first, value=piece) for first, _, piece in pieces_of(value.args, 0)]
