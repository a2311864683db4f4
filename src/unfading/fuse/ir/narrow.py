"""A program whose vectors are cut into pieces of a few entries each, so that no tile and no block of a matrix is larger.

    y = tanh(v W^T)        becomes        y_j = tanh(sum over i of v_i W_ji^T)        for pieces i of v and j of y

A GPU keeps as many blocks on chip as it has room for, and the smaller they are, the less of that is left over.
"""

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Program, Store, Value


def narrow(program: Program, width: int) -> Program:
    """The same program in pieces of at most `width` entries; only what has several axes is joined again."""
    b = Builder()
    new: dict[int, Value] = {}
    for value in program.values():
        if value.op == "leaf":
            kind, index, start, _ = value.attr
            pieces = [b.leaf(kind, index, start + first, start + last) for first, last in _edges(value.size, width)]
            new[value.id] = b.cat(pieces, 0)
        elif value.op in ("const", "zero"):
            new[value.id] = b.const(value.attr) if value.op == "const" else b.zero(())
        else:
            made = b.rebuilt(value, [new[arg.id] for arg in value.args])
            if value.op == "dot":
                made = b.cat([b.slice(made, 0, first, last) for first, last in _edges(value.size, width)], 0)
            new[value.id] = made
    stores = [piece for store in program.stores for piece in _cut(store._replace(value=new[store.value.id]))]
    return program._replace(stores=tuple(stores))


def _edges(size: int, width: int) -> list[tuple[int, int]]:
    return [(first, min(first + width, size)) for first in range(0, size, width)]


def _cut(store: Store) -> list[Store]:
    """The pieces of what is stored, each on its own."""
    value = store.value
    if value.op != "cat" or len(value.shape) != 1:
        return [store]
    found, start = [], store.start
    for piece in value.args:
        found.append(store._replace(start=start, value=piece))
        start += piece.size
    return found
