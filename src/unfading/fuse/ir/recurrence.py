"""The structure of a recurrence: which entries of the state a step mixes, and whether it is linear in them.

    dense       every unit may read every other one
    block       units form groups that do not read each other, such as the heads of an sLSTM
    diagonal    a unit reads only itself:             h_i' = f_i(h_i, x)
    linear      and is linear in its own state:       h_i' = m_i(x) h_i + c_i(x)

A step whose units are independent has *lanes*: for each unit, the entries of all states (or of both halves of a state that
holds pairs). Lanes need no exchange, so a GPU runs them side by side. A linear lane is an affine map, and maps of consecutive
steps can be composed: a chunk of time becomes one map before the state at its beginning is known. The gradients of any diagonal
step, linear or not, are such maps too, since a derivative is linear in what it is multiplied with.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import ELEMENTWISE, NUMBERS, Op, Program, Store, TensorKind, Value

# The kind of a carried value before a step, by its kind after it.
BEFORE = {TensorKind.NEXT: TensorKind.STATE, TensorKind.D_STATE: TensorKind.CARRY}

Lane = tuple[int, int]  # a state and the first of the entries of all units in it


class Recurrence(StrEnum):
    """The structure of a recurrence."""

    DENSE = "dense"
    BLOCK = "block"
    DIAGONAL = "diagonal"
    LINEAR = "linear"


def recurrence(program: Program) -> Recurrence:
    """The structure of the recurrence of a forward program."""
    step = program._replace(stores=tuple(store for store in program.stores if store.kind == TensorKind.NEXT))
    if independent_units(step) is not None:
        return Recurrence.LINEAR if isinstance(affine_map(step, TensorKind.NEXT), AffineMap) else Recurrence.DIAGONAL
    return Recurrence.BLOCK if _has_groups(step) else Recurrence.DENSE


# -- diagonal -----------------------------------------------------------------------------------------------------------------


def independent_units(program: Program, late: Iterable[Value] = ()) -> int | None:
    """The number of units of a step whose units are independent; None where they are not.

    What depends on the inputs alone may be computed in any way in `recurrence`, which does not run the program; a kernel of
    lanes needs all values to be such (`only_lanes`).

    Args:
        late: values that are left out: sums over units that are computed after the loop.
    """
    stores = [store for store in program.stores if store.kind in BEFORE]
    if not stores:
        return None
    units, carried = stores[0].value.size, BEFORE[stores[0].kind]
    starts = {(store.index, store.start) for store in stores}
    skipped = {value.id for value in late}
    depends: dict[int, bool] = {}
    for value in program.values():
        if value.id in skipped:
            continue
        is_carried = value.op is Op.LEAF and value.leaf.kind == carried
        depends[value.id] = is_carried or any(depends.get(arg.id, False) for arg in value.args)
        if not depends[value.id]:
            continue
        if is_carried and (value.leaf.index, value.leaf.start) not in starts:
            return None
        if value.shape != (units,) or not (is_carried or value.op in ELEMENTWISE):
            return None
    return units if all(store.value.size == units for store in stores) else None


def only_lanes(program: Program, units: int, late: Iterable[Value] = ()) -> bool:
    """Whether every value of a program has one entry for each unit, or one for all of them."""
    skipped = {value.id for value in late}
    for value in program.values():
        if value.id in skipped or value.op in NUMBERS:
            continue
        if value.size not in (1, units) or len(value.shape) > 1:
            return False
        if not (value.op in ELEMENTWISE or value.op in (Op.LEAF, Op.EXPAND) or (value.op is Op.RESHAPE and value.size == 1)):
            return False
    return all(store.value.size == units or store.value.id in skipped for store in program.stores)


# -- linear -------------------------------------------------------------------------------------------------------------------


class AffineMap(NamedTuple):
    """What a step does to its lanes: s_i' = sum over j of slopes[i, j] s_j + offsets[i], where what is missing is zero."""

    lanes: tuple[Lane, ...]
    slopes: dict[tuple[int, int], Value]
    offsets: dict[int, Value]
    program: Program  # stores the slopes, then the offsets, in the order of both

    def composed(self) -> list[tuple[int, int]]:
        """The slopes of a map of several steps that are not zero, whatever the numbers are."""
        filled = {(i, i) for i in range(len(self.lanes))} | set(self.slopes)
        while True:
            more = {(i, l) for i, j in filled for k, l in filled if j == k}
            if more <= filled:
                return sorted(filled)
            filled |= more


class _Form(NamedTuple):
    """A value as a linear function of the lanes: the slope of each lane that it depends on, and the rest."""

    slopes: dict[int, Value]
    rest: Value | None


def affine_map(program: Program, after: TensorKind) -> AffineMap | Op:
    """The map of a step with independent units, or the operation that makes it nonlinear.

    Args:
        after: the kind of the carried values after the step: NEXT, or D_STATE in a reverse program.
    """
    stores = sorted((store for store in program.stores if store.kind == after), key=lambda store: (store.index, store.start))
    lanes = tuple((store.index, store.start) for store in stores)
    places = {lane: i for i, lane in enumerate(lanes)}
    b = Builder()
    forms: dict[int, _Form] = {}
    step = program._replace(stores=tuple(stores))
    for value in step.values():
        if value.op is Op.LEAF:
            leaf = value.leaf
            own = leaf.kind == BEFORE[after]
            forms[value.id] = _Form({places[leaf.index, leaf.start]: b.const(1.0)}, None) if own else _Form({}, b.leaf(*leaf))
        elif value.op in NUMBERS:
            forms[value.id] = _Form({}, b.const(value.number) if value.op is Op.CONST else b.zero(()))
        else:
            form = _form(b, value, [forms[arg.id] for arg in value.args])
            if form is None:
                return value.op
            forms[value.id] = form
    slopes = {(i, j): slope for i, store in enumerate(stores) for j, slope in forms[store.value.id].slopes.items()}
    slopes = {place: slope for place, slope in sorted(slopes.items()) if not slope.is_zero}
    offsets = {
        i: rest for i, store in enumerate(stores) if (rest := forms[store.value.id].rest) is not None and not rest.is_zero
    }
    values = [*slopes.values(), *offsets.values()]
    return AffineMap(
        lanes,
        slopes,
        offsets,
        program._replace(stores=tuple(Store(after, number, 0, value) for number, value in enumerate(values))),
    )


def _form(b: Builder, value: Value, args: Sequence[_Form]) -> _Form | None:
    """The form of a value from those of its arguments; None where it is not linear in them."""
    moving = [k for k, form in enumerate(args) if form.slopes]
    fixed = [form.rest for form in args if not form.slopes and form.rest is not None]
    if not moving:
        return _Form({}, b.rebuilt(value, fixed))
    if value.op in (Op.COPY, Op.STOP, Op.WITH_GRADIENT):
        return args[0]
    if value.op is Op.NEG:
        return _each(args, lambda parts: b.map(Op.NEG, *_numbers(parts)))
    if value.op in (Op.ADD, Op.SUB):
        return _each(args, lambda parts: _sum(b, value.op, *parts))
    if value.op is Op.MUL and len(moving) == 1:
        return _each([args[moving[0]]], lambda parts: b.map(Op.MUL, fixed[0], *_numbers(parts)))
    if value.op is Op.DIV and moving == [0]:
        return _each(args[:1], lambda parts: b.map(Op.DIV, *_numbers(parts), fixed[0]))
    if value.op is Op.WHERE and 0 not in moving:
        return _each(args[1:], lambda parts: b.map(Op.WHERE, fixed[0], *_numbers(parts)))
    return None


def _each(forms: Sequence[_Form], combine: Callable[[Sequence[Value | None]], Value]) -> _Form:
    """Combine the slopes of each lane, and the rests, of some values. None stands for zero."""
    lanes = sorted({lane for form in forms for lane in form.slopes})
    slopes = {lane: combine([form.slopes.get(lane) for form in forms]) for lane in lanes}
    rests = [form.rest for form in forms]
    return _Form(slopes, None if all(rest is None for rest in rests) else combine(rests))


def _numbers(parts: Sequence[Value | None]) -> list[Value | float]:
    return [0.0 if part is None else part for part in parts]


def _sum(b: Builder, op: Op, left: Value | None, right: Value | None) -> Value:
    if left is None:
        assert right is not None
        return b.map(Op.NEG, right) if op is Op.SUB else right
    return left if right is None else b.map(op, left, right)


# -- block --------------------------------------------------------------------------------------------------------------------


def _has_groups(program: Program) -> bool:
    """Whether the units form several groups, none of which reads another."""
    sizes = [n for (kind, _), n in sorted(program.widths.items()) if kind == TensorKind.NEXT]
    first = np.cumsum([0, *sizes])
    total = int(first[-1])
    reads: dict[int, NDArray[np.bool_]] = {}  # of each value, [*shape, entries of the states]
    for value in program.values():
        reads[value.id] = _reads(value, [reads[arg.id] for arg in value.args], first)
    joined = np.eye(total, dtype=bool)
    for store in program.stores:
        start = int(first[store.index]) + store.start
        joined[start : start + store.value.size] |= reads[store.value.id].reshape(store.value.size, total)
    joined |= joined.T
    # The group of the first unit: all that it reaches.
    group = joined[0]
    while (grown := joined[group].any(0)).sum() > group.sum():
        group = grown
    return bool(group.sum() < total)


def _reads(value: Value, args: Sequence[NDArray[np.bool_]], first: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which entries of the states each entry of a value depends on."""
    total = int(first[-1])
    if value.op is Op.LEAF:
        out = np.zeros((value.size, total), dtype=bool)
        if value.leaf.kind == TensorKind.STATE:
            out[np.arange(value.size), int(first[value.leaf.index]) + value.leaf.start + np.arange(value.size)] = True
        return out
    if not args:
        return np.zeros((*value.shape, total), dtype=bool)
    if value.op is Op.DOT:
        return np.broadcast_to(np.any([arg.any(0) for arg in args], axis=0), (value.size, total))
    x = args[0]
    if value.op is Op.RESHAPE:
        return x.reshape(*value.shape, total)
    if value.op is Op.PERMUTE:
        return x.transpose(*value.axes, len(value.axes))
    if value.op is Op.SLICE:
        axis, start, stop = value.slice
        return x[(slice(None),) * axis + (slice(start, stop),)]
    if value.op is Op.CAT:
        return np.concatenate(args, axis=value.axis)
    if value.op in (Op.SUM, Op.AMAX):
        return x.any(axis=value.axes).reshape(*value.shape, total)
    return np.any([np.broadcast_to(arg, (*value.shape, total)) for arg in args], axis=0)
