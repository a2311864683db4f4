"""The order of work inside one step: loops over features, reductions and dots, level by level, and the buffers between.

A level is a set of elementwise loops, one per shape, followed by the reductions, dots and joins that read them. A value that
only its own loop reads is a local variable there. Every other value has a *slot*, a buffer of one row per batch row, which is
used again after the last level that reads it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from unfading.fuse.ir.program import ELEMENTWISE, VIEWS, Op, Program, Shape, TensorKind, Value

CHEAP = (Op.LEAF, Op.CONST, Op.ZERO)
# In a step of more than MANY operations one loop computes at most DEEPEST of them on end: the C compiler's time grows with the
# square of the length of a loop, and loops of equal length can be equal (`outline.py`).
MANY, DEEPEST = 500, 24
# A loop of more than WIDEST operations is divided into loops that have nothing to do with each other.
WIDEST = 32


class Level(NamedTuple):
    """Elementwise loops, and the other operations that read them."""

    loops: list[tuple[Shape, list[Value]]]
    rest: list[Value]  # reductions, dots and joins


class StepSchedule(NamedTuple):
    """The levels of a step, and where its values are stored."""

    only_for: dict[int, int]  # value id -> the input, where only the gradient of that input needs the value
    stores: dict[int, list[tuple[TensorKind, int, int]]]  # value id -> (kind, index, start) of its targets
    levels: list[Level]
    slots: dict[int, int]  # value id -> slot
    sizes: list[int]  # of each slot, in features


def schedule(program: Program) -> StepSchedule:
    """The schedule of a program."""
    program = addressable(program)
    stores: dict[int, list[tuple[TensorKind, int, int]]] = {}
    for store in program.stores:
        stores.setdefault(store.value.id, []).append((store.kind, store.index, store.start))
    order = program.values()
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
        grouped = [(shape, part) for (shape, _), values in loops.items() for part in _separate(values)]
        levels.append(Level(grouped, [value for value in here if value.op not in ELEMENTWISE]))
    return StepSchedule(only_for, stores, levels, slots, sizes)


def _separate(values: list[Value]) -> list[list[Value]]:
    """The values of a loop; if it is long, each set of values that do not read each other, such as one head of a cell."""
    if len(values) <= WIDEST:
        return [values]
    loops: dict[int, list[Value]] = {}  # by value id
    for value in values:
        joined = {id(loops[arg.id]): loops[arg.id] for arg in value.args if arg.id in loops}
        loop = [*(each for part in joined.values() for each in part), value]
        loops |= dict.fromkeys((each.id for each in loop), loop)
    return list({id(loop): loop for loop in loops.values()}.values())


def bases(value: Value) -> Value:
    """The value behind a chain of views."""
    while value.op in VIEWS:
        value = value.args[0]
    return value


def addressable(program: Program) -> Program:
    """The same program with every stored value elementwise and every factor of a dot a buffer.

    Copies are inserted where that is not the case. A program that is so already has the same values afterwards.
    """
    rewritten: dict[int, Value] = {}
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
        args = tuple(rewritten[arg.id] for arg in value.args)
        if value.op is Op.DOT:
            args = tuple(arg if _is_buffer(arg) else copied(arg) for arg in args)
        changed = any(a is not b for a, b in zip(args, value.args, strict=True))
        rewritten[value.id] = new(value.op, args, value) if changed else value
    stores = []
    for store in program.stores:
        value = rewritten[store.value.id]
        stores.append(store._replace(value=value if value.op in ELEMENTWISE else copied(value)))
    return program._replace(stores=tuple(stores))


def _only_for(order: list[Value], stores: dict[int, list[tuple[TensorKind, int, int]]]) -> dict[int, int]:
    """The values that only the gradient of one input needs. A kernel skips them where that gradient is not wanted."""
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
    depth: dict[int, int] = {}  # in the loop of its level
    for value in scheduled:
        waits = [level[base.id] + _gap(value, arg, base, only_for) for arg, base in _read(value)]
        first = max(waits, default=0)
        depth[value.id] = 1 + max((depth[base.id] for _, base in _read(value) if level[base.id] == first), default=0)
        if depth[value.id] > DEEPEST and len(scheduled) > MANY:
            first, depth[value.id] = first + 1, 1
        level[value.id] = first
    # An elementwise value that only a later level reads moves there, into the loop of its reader, and needs no buffer.
    readers: dict[int, list[tuple[Value, Value]]] = {}
    for value in scheduled:
        for arg, base in _read(value):
            readers.setdefault(base.id, []).append((value, arg))
    for value in reversed(scheduled):
        if value.op in ELEMENTWISE and value.id in readers and value.id not in stores:
            level[value.id] = min(level[reader.id] - _gap(reader, arg, value, only_for) for reader, arg in readers[value.id])
    return level


def _gap(reader: Value, arg: Value, base: Value, only_for: dict[int, int]) -> int:
    """The levels between a value and a value that reads it, directly or through views."""
    if base.op in ELEMENTWISE and reader.op not in ELEMENTWISE:
        return 0
    return 0 if arg is base and _same_loop(reader, base, only_for) else 1


def _read(value: Value) -> Iterator[tuple[Value, Value]]:
    """(argument, the value behind its views) for all arguments that are computed."""
    for arg in value.args:
        base = bases(arg)
        if base.op not in CHEAP:
            yield arg, base


def _slots(order: list[Value], level: dict[int, int], only_for: dict[int, int]) -> tuple[dict[int, int], list[int]]:
    """The slot of every value that needs one, and the sizes of the slots. A slot is free after the last level that reads it."""
    needed, last = _buffered(order, level, only_for)
    slots: dict[int, int] = {}
    sizes: list[int] = []
    free: dict[int, list[int]] = {}  # by size
    ends: list[tuple[int, int]] = []  # (last level, slot)
    for number in range(max(level.values(), default=-1) + 1):
        for end, slot in [pair for pair in ends if pair[0] < number]:
            ends.remove((end, slot))
            free.setdefault(sizes[slot], []).append(slot)
        for value in (value for value in order if value.id in needed and level.get(value.id) == number):
            if free.get(value.size):
                slot = free[value.size].pop()
            else:
                slot = len(sizes)
                sizes.append(value.size)
            slots[value.id] = slot
            ends.append((last.get(value.id, number), slot))
    return slots, sizes


def _buffered(order: list[Value], level: dict[int, int], only_for: dict[int, int]) -> tuple[set[int], dict[int, int]]:
    """The values that need a buffer, and the last level that reads each value."""
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
    return needed, last
