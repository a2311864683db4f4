"""The stores of a stage by width: what is computed in one loop over the channels of a pixel."""

from typing import NamedTuple

from unfading.fuse.ir.program import Program, Store, Value, in_order


class Group(NamedTuple):
    """The stores of one width, and the values that they need."""

    width: int
    stores: list[Store]
    values: list[Value]


def groups(program: Program) -> list[Group]:
    """The stores of a program by width."""
    widths = dict.fromkeys(store.value.size for store in program.stores)
    out = []
    for n in widths:
        stores = [store for store in program.stores if store.value.size == n]
        out.append(Group(n, stores, in_order(store.value for store in stores)))
    return out
