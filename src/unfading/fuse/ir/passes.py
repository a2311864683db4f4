"""Compiler passes: rewrites of a whole program that leave its results as they are.

`join_dots` serves both emitters and runs on every traced program. `narrow` serves a GPU, which keeps as many blocks of
matrices on chip as it has room for: the smaller they are, the less room is left over. `states_as_stored` and `dots_of_pieces`
serve a GPU too, on which joining pieces of a vector is slow. `dots_side_by_side` serves loops whose units are divided among
multiprocessors. `resets_first` and `input_apart` serve the forward loop on a CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, pairwise
from typing import NamedTuple

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import (
    COMPARISONS,
    NUMBERS,
    Block,
    Leaf,
    Op,
    Program,
    Slice,
    Store,
    TensorKind,
    Value,
    pieces_of,
)


class Reset(NamedTuple):
    """Entries of a state that are replaced before a step, in the rows in which a condition holds."""

    condition: Value  # a comparison of inputs and numbers, with one entry
    new: Value  # entries of an input or of a weight, or a number
    state: Value  # the leaf


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


def dots_side_by_side(program: Program, is_wanted: Callable[[Sequence[Value]], bool]) -> Program:
    """The same program with dots that read the same vectors as slices of one, where their rows of each matrix are neighbours.

        y = v W[0:4]^T, z = v W[4:36]^T        becomes        d = v W[0:36]^T, y = d[0:4], z = d[4:36]

    Args:
        is_wanted: whether some dots should be computed in this way.
    """
    alike: dict[object, list[Value]] = {}
    for value in program.values():
        if value.op is Op.DOT:
            along = [(b.weight, b.transposed, *((b.r0, b.r1) if b.transposed else (b.c0, b.c1))) for b in value.blocks]
            alike.setdefault((tuple(arg.id for arg in value.args), tuple(along)), []).append(value)
    numbers = _new_numbers(program)
    new: dict[int, Value] = {}
    for dots in alike.values():
        for group in _neighbours(sorted(dots, key=lambda dot: [block[1:] for block in dot.blocks])):
            if len(group) > 1 and is_wanted(group):
                new |= _sliced(group, numbers)
    return _with_new_values(program, new, numbers)


def states_as_stored(program: Program) -> Program:
    """The same program with each state, or its gradient, read in the pieces in which the step stores it."""
    pieces: dict[tuple[TensorKind, int], list[tuple[int, int]]] = {}
    for kind, index, start, value in program.stores:
        read = {TensorKind.NEXT: TensorKind.STATE, TensorKind.D_STATE: TensorKind.CARRY}.get(kind)
        if read is not None:
            pieces.setdefault((read, index), []).append((start, start + value.size))
    leaves = {value.leaf: value for value in program.values() if value.op is Op.LEAF}
    numbers = _new_numbers(program)
    new: dict[int, Value] = {}
    for (kind, index, start, stop), value in list(leaves.items()):
        cut = []
        for a, b in sorted(pieces.get((kind, index), ())):
            if a < stop and start < b and (a, b) != (start, stop):
                leaf = Leaf(kind, index, a, b)
                whole = leaves.setdefault(leaf, Value(Op.LEAF, (), leaf, (b - a,), next(numbers)))
                inside = Slice(0, max(start - a, 0), min(stop, b) - a)
                size = inside.stop - inside.start
                cut.append(whole if size == b - a else Value(Op.SLICE, (whole,), inside, (size,), next(numbers)))
        if cut:
            new[value.id] = cut[0] if len(cut) == 1 else Value(Op.CAT, tuple(cut), 0, value.shape, next(numbers))
    return _with_new_values(program, new, numbers)


def dots_of_pieces(program: Program) -> Program:
    """The same program with dots of joined vectors as sums over the pieces.

    y = cat(u, v) W^T        becomes        y = u W[:, :n]^T + v W[:, n:]^T        for u of n entries
    """
    numbers = _new_numbers(program)
    new: dict[int, Value] = {}
    for value in program.values():
        args = tuple(new.get(arg.id, arg) for arg in value.args)
        if value.op is Op.DOT and any(arg.op is Op.CAT for arg in args):
            factors = [
                (piece, block.rows(start, stop))
                for arg, block in zip(args, value.blocks, strict=True)
                for start, stop, piece in pieces_of(arg.args if arg.op is Op.CAT else (arg,), 0)
            ]
            pieces, blocks = zip(*factors, strict=True)
            new[value.id] = Value(Op.DOT, pieces, blocks, value.shape, next(numbers))
        elif args != value.args:
            new[value.id] = Value(value.op, args, value.attr, value.shape, next(numbers))
    return program._replace(
        stores=tuple(store._replace(value=new.get(store.value.id, store.value)) for store in program.stores)
    )


def resets_first(program: Program) -> tuple[Program, list[Reset]]:
    """The program without the choices between a state and another vector that one entry of the input makes for a whole row.

        h' = where(r > 0.5, h_0, h)        becomes        h, after the reset of the state itself, if nothing else reads h

    The resets come before all other values of the step. A row that is not reset then costs one comparison, and no copy.
    """
    values = program.values()
    readers: dict[int, int] = {}
    for value in values:
        for arg in value.args:
            readers[arg.id] = readers.get(arg.id, 0) + 1
    for store in program.stores:
        readers[store.value.id] = readers.get(store.value.id, 0) + 1
    states = [value for value in values if value.op is Op.LEAF and value.leaf.kind == TensorKind.STATE]
    resets: dict[int, Reset] = {}
    for value in values:
        reset = _as_reset(value)
        if reset is not None and readers[reset.state.id] == 1 and not any(_overlap(reset.state, each) for each in states):
            resets[value.id] = reset
    new = {number: reset.state for number, reset in resets.items()}
    return _with_new_values(program, new, _new_numbers(program)), list(resets.values())


def input_apart(program: Program, at: int) -> Program | None:
    """The program with the entries of its only input from `at` on as a second input; None where a leaf has some of both."""
    numbers = _new_numbers(program)
    new: dict[int, Value] = {}
    for value in program.values():
        if value.op is Op.LEAF and value.leaf.kind == TensorKind.INPUT and value.leaf.stop > at:
            kind, _, start, stop = value.leaf
            if start < at:
                return None
            new[value.id] = Value(Op.LEAF, (), Leaf(kind, 1, start - at, stop - at), value.shape, next(numbers))
    width = program.widths[TensorKind.INPUT, 0]
    widths = {**program.widths, (TensorKind.INPUT, 0): at, (TensorKind.INPUT, 1): width - at}
    return _with_new_values(program, new, numbers)._replace(widths=widths, kinds=2 * program.kinds)


def _as_reset(value: Value) -> Reset | None:
    if value.op is not Op.WHERE:
        return None
    condition, new, state = value.args
    while condition.op in (Op.EXPAND, Op.RESHAPE):
        condition = condition.args[0]
    alike = state.op is Op.LEAF and state.leaf.kind == TensorKind.STATE and state.shape == value.shape
    of_row = condition.op in COMPARISONS and condition.size == 1 and all(map(_is_given, condition.args))
    return Reset(condition, new, state) if alike and of_row and _is_given(new) else None


def _is_given(value: Value) -> bool:
    """Whether a value is known before the step: a number, or entries of an input or of a weight."""
    if value.op is Op.LEAF:
        return value.leaf.kind in (TensorKind.INPUT, TensorKind.WEIGHT)
    return value.op in NUMBERS or value.constant is not None


def _overlap(one: Value, other: Value) -> bool:
    """Whether two leaves have entries in common, and are not the same."""
    a, b = one.leaf, other.leaf
    return one is not other and a.index == b.index and a.start < b.stop and b.start < a.stop


def _new_numbers(program: Program) -> Iterator[int]:
    return count(1 + max(value.id for value in program.values()))


def _with_new_values(program: Program, new: dict[int, Value], numbers: Iterator[int]) -> Program:
    """The same program with some values replaced, by their ids."""
    for value in program.values() if new else ():
        if value.id not in new and any(arg.id in new for arg in value.args):
            args = tuple(new.get(arg.id, arg) for arg in value.args)
            new[value.id] = Value(value.op, args, value.attr, value.shape, next(numbers))
    stores = (store._replace(value=new.get(store.value.id, store.value)) for store in program.stores)
    return program._replace(stores=tuple(stores))


def _neighbours(dots: Sequence[Value]) -> list[list[Value]]:
    """Dots in groups, in which the columns of each follow those of the one before."""
    groups: list[list[Value]] = []
    for dot in dots:
        last = groups[-1][-1] if groups else None
        if last is not None and all(_end(a) == _start(b) for a, b in zip(last.blocks, dot.blocks, strict=True)):
            groups[-1].append(dot)
        else:
            groups.append([dot])
    return groups


def _start(block: Block) -> int:
    return block.c0 if block.transposed else block.r0


def _end(block: Block) -> int:
    return _start(block) + block.width


def _sliced(dots: Sequence[Value], numbers: Iterator[int]) -> dict[int, Value]:
    """One dot for several, and its slices by the ids of these."""
    ends = [0, *accumulate(dot.size for dot in dots)]
    blocks = tuple(block.columns(0, ends[-1]) for block in dots[0].blocks)
    whole = Value(Op.DOT, dots[0].args, blocks, (ends[-1],), next(numbers))
    return {
        dot.id: Value(Op.SLICE, (whole,), Slice(0, a, b), dot.shape, next(numbers))
        for dot, (a, b) in zip(dots, pairwise(ends), strict=True)
    }
