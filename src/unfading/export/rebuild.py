"""A value of a program in another builder: what passes over programs do with all values that they leave as they are."""

from collections.abc import Mapping

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import NUMBERS, Op, Value


def rebuilt(b: Builder, value: Value, new: Mapping[int, Value]) -> Value:
    """The same value in another builder; `new` has its arguments there, by their ids here."""
    if value.op is Op.LEAF:
        return b.leaf(*value.leaf)
    if value.op in NUMBERS:
        return b.const(value.number) if value.op is Op.CONST else b.zero(())
    return b.rebuilt(value, [new[arg.id] for arg in value.args])
