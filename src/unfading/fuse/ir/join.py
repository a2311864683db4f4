"""Dots that are added up anyway, joined to one before anything is compiled."""

from collections.abc import Sequence

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Program, Value


def joined(builder: Builder, program: Program) -> Program:
    """Sums of dots that nothing else reads become one dot: a + x W^T + h U^T is one pass over one buffer."""
    readers: dict[int, int] = {}
    for value in program.values():
        for arg in value.args:
            readers[arg.id] = readers.get(arg.id, 0) + 1
    new: dict[int, Value] = {}
    for value in program.values():
        args = [new[arg.id] for arg in value.args]
        if value.op == "add" and all(readers[arg.id] == 1 for arg in value.args):
            new[value.id] = _added(builder, args)
        elif any(a is not b for a, b in zip(args, value.args, strict=True)):
            new[value.id] = builder.rebuilt(value, args)
        else:
            new[value.id] = value
    return program._replace(stores=tuple(store._replace(value=new[store.value.id]) for store in program.stores))


def _added(builder: Builder, args: Sequence[Value]) -> Value:
    """a + b, with the dots that both sides hold as one of their two terms joined."""
    dots: list[Value] = []
    rest: list[Value] = []
    for arg in args:
        terms = arg.args if arg.op == "add" and any(term.op == "dot" for term in arg.args) else (arg,)
        for term in terms:
            (dots if term.op == "dot" else rest).append(term)
    if len(dots) < 2 or len({dot.shape for dot in dots}) > 1:
        return builder.map("add", *args)
    total = builder.dot([pair for dot in dots for pair in zip(dot.args, dot.attr, strict=True)])
    for term in rest:
        total = builder.map("add", total, term)
    return total
