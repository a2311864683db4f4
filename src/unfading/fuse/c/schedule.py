"""The order of work inside one step: loops over features, reductions and dots, level by level, and the buffers between.

A level is a set of elementwise loops, one per shape, and then the reductions, dots and joins that read them. A value that
is read in its own loop only is a local variable there; every other one has a *slot*, a buffer of a row's size that is used
again once its last reader has passed.
"""

from collections.abc import Iterator
from typing import NamedTuple

from unfading.fuse.ir.program import ELEMENTWISE, VIEWS, Op, Program, Shape, TensorKind, Value, in_order

CHEAP = (Op.LEAF, Op.CONST, Op.ZERO)


class Level(NamedTuple):
    loops: list[tuple[Shape, list[Value]]]
    rest: list[Value]  # reductions, dots and joins


class Schedule(NamedTuple):
    only_for: dict[int, int]  # value id -> the input whose gradient alone needs it
    stores: dict[int, list[tuple[TensorKind, int, int]]]  # value id -> (kind, index, start) of where it goes
    levels: list[Level]
    slots: dict[int, int]  # value id -> slot
    sizes: list[int]  # of each slot, in features


def schedule(program: Program) -> Schedule:
    stores, order = _addressable(program)
    only_for = _only_for(order, stores)
    level = _levels(order, stores, only_for)
    slots, sizes = _slots(order, level, only_for)
    levels = []
    for number in range(max(level.values(), default=-1) + 1):
        here = [value for value in order if level.get(value.id) == number]
        loops: dict[tuple[Shape, int | None], list[Value]] = {}
        for value in here:
            if value.op in ELEMENTWISE:
                loops.setdefault((value.shape, only_for.get(value.id)), []).append(value)
        grouped = [(shape, values) for (shape, _), values in loops.items()]
        levels.append(Level(grouped, [value for value in here if value.op not in ELEMENTWISE]))
    return Schedule(only_for, stores, levels, slots, sizes)


def bases(value: Value) -> Value:
    """What a chain of views looks at."""
    while value.op in VIEWS:
        value = value.args[0]
    return value


def _addressable(program: Program) -> tuple[dict[int, list[tuple[TensorKind, int, int]]], list[Value]]:
    """Every stored value elementwise, every factor of a dot in a buffer of its own: by copies where it is not so."""
    made: dict[int, Value] = {}
    copies: dict[int, Value] = {}
    number = max((value.id for value in program.values()), default=0)

    def new(op: Op, args: tuple[Value, ...], like: Value) -> Value:
        nonlocal number
        number += 1
        return Value(op, args, like.attr if op == like.op else None, like.shape, number)

    def copied(value: Value) -> Value:
        if value.id not in copies:
            copies[value.id] = new(Op.COPY, (value,), value)
        return copies[value.id]

    for value in program.values():
        args = tuple(made[arg.id] for arg in value.args)
        if value.op is Op.DOT:
            args = tuple(arg if _is_buffer(arg) else copied(arg) for arg in args)
        changed = any(a is not b for a, b in zip(args, value.args, strict=True))
        made[value.id] = new(value.op, args, value) if changed else value
    stores: dict[int, list[tuple[TensorKind, int, int]]] = {}
    roots = []
    for store in program.stores:
        value = made[store.value.id]
        value = value if value.op in ELEMENTWISE else copied(value)
        roots.append(value)
        stores.setdefault(value.id, []).append((store.kind, store.index, store.start))
    return stores, in_order(roots)


def _only_for(order: list[Value], stores: dict[int, list[tuple[TensorKind, int, int]]]) -> dict[int, int]:
    """What the gradient of one input alone needs: a kernel leaves it out where that gradient is not wanted."""
    users: dict[int, set[int | None]] = {}
    for value in reversed(order):
        mine = users.setdefault(value.id, set())
        mine |= {index if kind == TensorKind.D_INPUT else None for kind, index, _ in stores.get(value.id, ())}
        for arg in value.args:
            users.setdefault(arg.id, set()).update(mine)
    return {number: next(iter(mine)) for number, mine in users.items() if len(mine) == 1 and None not in mine}  # type: ignore[misc]


def _is_buffer(value: Value) -> bool:
    if value.op is Op.LEAF:
        return value.leaf.kind in (TensorKind.STATE, TensorKind.CARRY)
    return value.op in ELEMENTWISE or value.op is Op.DOT


def _same_loop(reader: Value, arg: Value, only_for: dict[int, int]) -> bool:
    both = reader.op in ELEMENTWISE and arg.op in ELEMENTWISE and reader.shape == arg.shape
    return both and only_for.get(reader.id) == only_for.get(arg.id)


def _levels(
    order: list[Value], stores: dict[int, list[tuple[TensorKind, int, int]]], only_for: dict[int, int]
) -> dict[int, int]:
    scheduled = [value for value in order if value.op not in CHEAP and value.op not in VIEWS]
    level: dict[int, int] = {}
    for value in scheduled:
        waits = [level[base.id] + _gap(value, arg, base, only_for) for arg, base in _read(value)]
        level[value.id] = max(waits, default=0)
    # Work that only a later level reads goes there, into its reader's loop, rather than through a buffer.
    readers: dict[int, list[tuple[Value, Value]]] = {}
    for value in scheduled:
        for arg, base in _read(value):
            readers.setdefault(base.id, []).append((value, arg))
    for value in reversed(scheduled):
        if value.op in ELEMENTWISE and value.id in readers and value.id not in stores:
            level[value.id] = min(level[reader.id] - _gap(reader, arg, value, only_for) for reader, arg in readers[value.id])
    return level


def _gap(reader: Value, arg: Value, base: Value, only_for: dict[int, int]) -> int:
    """Levels between a value and one that reads it, directly or through views."""
    if base.op in ELEMENTWISE and reader.op not in ELEMENTWISE:
        return 0
    return 0 if arg is base and _same_loop(reader, base, only_for) else 1


def _read(value: Value) -> Iterator[tuple[Value, Value]]:
    """(argument, what it looks at) of all arguments that are computed."""
    for arg in value.args:
        base = bases(arg)
        if base.op not in CHEAP:
            yield arg, base


def _slots(order: list[Value], level: dict[int, int], only_for: dict[int, int]) -> tuple[dict[int, int], list[int]]:
    needed: set[int] = set()
    last: dict[int, int] = {}
    for value in order:
        if value.id not in level:
            continue
        if value.op not in ELEMENTWISE:
            needed.add(value.id)
        for arg, base in _read(value):
            last[base.id] = max(last.get(base.id, 0), level[value.id])
            if not (arg is base and _same_loop(value, base, only_for) and level[base.id] == level[value.id]):
                needed.add(base.id)
    slots: dict[int, int] = {}
    sizes: list[int] = []
    free: dict[int, list[int]] = {}
    ends: list[tuple[int, int]] = []  # (last level, slot)
    for number in range(max(level.values(), default=-1) + 1):
        for end, slot in [pair for pair in ends if pair[0] < number]:
            ends.remove((end, slot))
            free.setdefault(sizes[slot], []).append(slot)
        for value in order:
            if value.id in needed and level.get(value.id) == number:
                if free.get(value.size):
                    slot = free[value.size].pop()
                else:
                    slot = len(sizes)
                    sizes.append(value.size)
                slots[value.id] = slot
                ends.append((last.get(value.id, number), slot))
    return slots, sizes
