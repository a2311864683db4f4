"""Reverse mode: from the gradient of the states after a step to the gradient of everything that the step reads.

The reverse program reads the inputs and the states of the forward pass, which exist anyway. Dots, and the results of
nonlinear functions that are costly to compute, are *saved* by the forward pass; all other values are computed again. A value
that decides a branch is computed again only where that gives the same bits (`_is_steady`), and saved otherwise: the backward
pass takes the branches that the forward pass took.

The gradients of matrices are not summed in the loop: for y = dot(v, W) the reverse program stores v and dy at every step, and
dW = sum over t of dy_t^T v_t is one matrix product after the loop.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import (
    COMPARISONS,
    NUMBERS,
    VIEWS,
    Block,
    InputKind,
    Op,
    Program,
    Store,
    TensorId,
    TensorKind,
    Value,
)
from unfading.fuse.ir.rules import RULES
from unfading.fuse.refusal import NotFusable

# Saved for the backward pass instead of computed again, unless it follows directly from values that are available anyway.
COSTLY = frozenset(
    [
        *(Op.EXP, Op.EXPM1, Op.LOG, Op.LOG1P, Op.TANH, Op.SIGMOID, Op.RELU),
        *(Op.SIN, Op.COS, Op.ERF, Op.POWER, Op.SQRT, Op.AMAX),
    ]
)

# Operations whose gradient depends on how their arguments compare.
DECIDING = frozenset([*COMPARISONS, Op.SIGN, Op.ABS, Op.RELU, Op.MAX, Op.MIN, Op.AMAX])
ARGUMENTS = (TensorKind.INPUT, TensorKind.STATE, TensorKind.WEIGHT)  # of a loop


class Source(NamedTuple):
    """A sequence of row vectors, a factor of a matrix product: entries from `start` on of a tensor."""

    kind: TensorKind  # state (before the step), next, input, saved, dinput or sequence
    index: int  # type: ignore[assignment]
    start: int


class Outer(NamedTuple):
    """A gradient computed after the loop: W[block] += scale * sum over t and rows of dy^T v (v^T dy if transposed)."""

    block: Block
    dy: Source
    v: Source
    scale: float


class Total(NamedTuple):
    """A gradient computed after the loop: entries from `start` on of a weight get the sum over t and rows of dy."""

    weight: int
    start: int
    dy: Source
    width: int


class Reversed(NamedTuple):
    """A program and its reverse."""

    forward: Program  # it also stores what the reverse reads, as kind saved
    reverse: Program
    outer: tuple[Outer, ...]
    totals: tuple[Total, ...]

    def has_gradient(self) -> tuple[bool, ...]:
        """For every input, state and weight: whether a gradient reaches it. An initial state counts as reached."""
        reached = {(kind.primal, i) for kind, i in self.reverse.widths if kind in (TensorKind.D_INPUT, TensorKind.D_WEIGHT)}
        reached |= {(TensorKind.WEIGHT, product.block.weight) for product in self.outer}
        reached |= {(TensorKind.WEIGHT, total.weight) for total in self.totals}
        counts = [sum(own == kind for own, _ in self.forward.widths) for kind in ARGUMENTS]
        tensors = [(kind, i) for kind, count in zip(ARGUMENTS, counts, strict=True) for i in range(count)]
        return tuple(tensor[0] == TensorKind.STATE or tensor in reached for tensor in tensors)


def differentiate(program: Program, *, save_light: bool = True) -> Reversed:
    """The forward program with the values it must save, its reverse, and the matrix products left for after the loop.

    Args:
        save_light: also save what depends on a few inputs and weights alone. A GPU computes it again sooner than it reads
            it from memory.
    """
    b = Builder()
    forward = _Forward(b, program, save_light)
    gradients = _Gradients(b)
    for store in program.stores:
        stop = store.start + store.value.size
        gradients.add(store.value, b.leaf(TensorKind.CARRY, store.index, store.start, stop))

    stores: list[Store] = []
    outer: list[tuple[Block, Value, Value]] = []
    for value in reversed(program.values()):
        d = None if value.op in NUMBERS else gradients.total(value)
        if d is None:
            continue
        if value.op is Op.LEAF:
            leaf = value.leaf
            stores.append(Store(leaf.kind.gradient, leaf.index, leaf.start, d))
        elif value.op is Op.DOT:
            for v, block in value.factors:
                outer.append((block, d, forward.values[v.id]))
                gradients.add_product(v, b.dot([(d, block._replace(transposed=not block.transposed))]))
        else:
            _apply_rule(b, value, d, forward, gradients)

    stores, products, totals = _after_the_loop(_apart(b, program, stores), outer, program.kinds)
    return forward.finished(Program(tuple(stores), _widths(program, stores), program.kinds), products, totals)


def _apply_rule(b: Builder, value: Value, d: Value, forward: "_Forward", gradients: "_Gradients") -> None:
    """Pass the gradient of a value on to its arguments, by the rule of its operation."""
    if value.op not in RULES:
        raise NotFusable(f"{value.op} has no derivative")
    x = [forward.values[arg.id] for arg in value.args]
    for arg, dx in zip(value.args, RULES[value.op](b, value, x, forward.values[value.id], d), strict=True):
        if dx is not None and not dx.is_zero:
            gradients.add(arg, dx)


class _Gradients:
    """The gradients that have reached each value so far; a value has one from each of its readers."""

    def __init__(self, b: Builder):
        self.b = b
        self.parts: dict[int, list[Value]] = {}  # by the id of the value
        self.products: set[int] = set()  # ids of gradients that are dots nobody else reads: they may be joined to one

    def add(self, value: Value, d: Value) -> None:
        self.parts.setdefault(value.id, []).append(d)
        self.products.discard(d.id)  # passed on as it is: others may read it too

    def add_product(self, value: Value, d: Value) -> None:
        """Add a gradient that is a dot of its own."""
        self.parts.setdefault(value.id, []).append(d)
        self.products.add(d.id)

    def total(self, value: Value) -> Value | None:
        """The sum of all gradients that reach a value, with dots joined to one; None where nothing reaches it."""
        parts = self.parts.pop(value.id, [])
        dots = [part for part in parts if part.op is Op.DOT and part.id in self.products]
        rest = [part for part in parts if not (part.op is Op.DOT and part.id in self.products)]
        if dots:
            rest.insert(0, self.b.dot([factor for dot in dots for factor in dot.factors]))
        if not rest:
            return None
        total = rest[0]
        for part in rest[1:]:
            total = self.b.map(Op.ADD, total, part)
        return None if total.is_zero else self.b.expand(total, value.shape)


class _Forward:
    """The values of the forward program as the reverse program has them: read from memory, or computed again."""

    def __init__(self, b: Builder, program: Program, save_light: bool):
        self.b = b
        self.program = program
        self.save_light = save_light
        self.saved: list[Value] = []
        self.values: dict[int, Value] = {}  # by the id of the forward value
        self.stored = {store.value.id: store for store in program.stores}
        self.available: set[int] = set()  # ids of values that the reverse has without reading an input or a saved value
        self.light: set[int] = set()  # ids of values that depend on a few inputs and weights alone
        self.steady: set[int] = set()  # ids of values that have the same bits in both programs
        values = program.values()
        self.deciding = {_base(arg).id for value in values if value.op in DECIDING for arg in value.args}
        for value in values:
            if all(arg.id in self.light for arg in value.args) and (value.op is not Op.LEAF or _is_light(value)):
                self.light.add(value.id)
            self.values[value.id] = self._in_reverse(value)
            if self.values[value.id].op in (Op.LEAF, *NUMBERS) or _is_steady(value, self.steady):
                self.steady.add(value.id)

    def _in_reverse(self, value: Value) -> Value:
        """The value in the reverse program."""
        b = self.b
        if value.op is Op.LEAF:
            if value.leaf.kind != TensorKind.INPUT:
                self.available.add(value.id)
            return b.leaf(*value.leaf)
        if value.op in NUMBERS:
            self.available.add(value.id)
            return b.const(value.number) if value.op is Op.CONST else b.zero(())
        store = self.stored.get(value.id)
        if store is not None and value.shape == (value.size,):
            self.available.add(value.id)
            return b.leaf(TensorKind.NEXT, store.index, store.start, store.start + value.size)
        follows = bool(value.args) and all(arg.id in self.available for arg in value.args)
        if value.op is Op.WITH_GRADIENT:
            return self.values[value.args[0].id]
        if self._is_saved(value, follows):
            self.steady.add(value.id)
            leaf = b.leaf(TensorKind.SAVED, len(self.saved), 0, value.size)
            self.saved.append(value)
            return b.reshape(leaf, value.shape)
        if follows and value.op not in COSTLY:
            self.available.add(value.id)
        return b.rebuilt(value, [self.values[arg.id] for arg in value.args])

    def _is_saved(self, value: Value, follows: bool) -> bool:
        if value.id in self.deciding and not _is_steady(value, self.steady):
            return True
        if value.op is Op.DOT:
            return not _is_short(value)
        return value.op in COSTLY and not follows and (self.save_light or value.id not in self.light)

    def finished(self, reverse: Program, outer: tuple[Outer, ...], totals: tuple[Total, ...]) -> Reversed:
        """Both programs, with those values saved that the reverse turned out to read, as parts of one tensor."""
        saved = TensorKind.SAVED
        used = sorted(reverse.reads(saved) | {product.v.index for product in outer if product.v.kind == saved})
        starts, width = {}, 0
        stores = list(self.program.stores)
        for k in used:
            starts[k] = width
            stores.append(Store(saved, 0, width, self.saved[k]))
            width += self.saved[k].size
        for value in reverse.values():
            if value.op is Op.LEAF and value.leaf.kind == saved:
                leaf = value.leaf
                start = starts[leaf.index]
                value.attr = leaf._replace(index=0, start=start + leaf.start, stop=start + leaf.stop)
        widths = dict(self.program.widths) | ({(saved, 0): width} if used else {})
        forward = self.program._replace(stores=tuple(stores), widths=widths)
        outer = tuple(p._replace(v=Source(saved, 0, starts[p.v.index] + p.v.start)) if p.v.kind == saved else p for p in outer)
        return Reversed(forward, reverse._replace(widths=reverse.widths | widths), outer, totals)


def _base(value: Value) -> Value:
    """The value behind a chain of views."""
    while value.op in VIEWS:
        value = value.args[0]
    return value


def _is_steady(value: Value, steady: set[int]) -> bool:
    """Whether a value computed again from equal arguments has equal bits in another program.

    A compiler joins a product and a sum to one operation with one rounding, or does not, depending on what else reads the
    product, and adds the terms of a sum in an order of its own. A GPU computes d (1 - y) as d - d y where y is in memory.
    """
    if value.op in (Op.SUM, Op.DOT) or any(arg.id not in steady for arg in value.args):
        return False
    if value.op in (Op.ADD, Op.SUB):
        return not any(_is_product(arg) for arg in value.args)
    if value.op is Op.MUL:
        return not any(base.op is Op.SUB and base.args[0].constant == 1.0 for base in map(_base, value.args))
    return True


def _is_product(value: Value) -> bool:
    """Whether the last operation of a value is a product; that of exp is, in C."""
    while value.op in VIEWS or value.op in (Op.NEG, Op.STOP, Op.COPY, Op.WITH_GRADIENT):
        value = value.args[0]
    return value.op in (Op.MUL, Op.EXP)


def _is_short(dot: Value) -> bool:
    """True for a dot of a few inputs, which costs less to compute again than to save."""
    return all(arg.op is Op.LEAF and arg.leaf.kind == TensorKind.INPUT and arg.size <= 16 for arg in dot.args)


def _is_light(value: Value) -> bool:
    return value.leaf.kind == TensorKind.WEIGHT or (value.leaf.kind == TensorKind.INPUT and value.size == 1)


def _apart(b: Builder, program: Program, stores: Sequence[Store]) -> list[Store]:
    """Stores that do not overlap: gradients of overlapping entries are summed, and entries that nothing reads get zero."""
    out = []
    tensors: dict[TensorId, None] = {(store.kind, store.index): None for store in stores} | {
        (TensorKind.D_STATE, index): None for kind, index in program.widths if kind == TensorKind.STATE
    }
    for kind, index in tensors:
        pieces = [store for store in stores if (store.kind, store.index) == (kind, index)]
        edges = {0, program.widths[kind.primal, index]} if kind != TensorKind.D_WEIGHT else set()
        edges |= {edge for piece in pieces for edge in (piece.start, piece.start + piece.value.size)}
        for start, stop in pairwise(sorted(edges)):
            here = [piece for piece in pieces if piece.start < stop and start < piece.start + piece.value.size]
            total = b.zero((stop - start,))
            for piece in here:
                total = b.map(Op.ADD, total, b.slice(piece.value, 0, start - piece.start, stop - piece.start))
            if here or kind != TensorKind.D_WEIGHT:
                out.append(Store(kind, index, start, total))
    return out


# -- the matrix products after the loop ---------------------------------------------------------------------------------------


def _after_the_loop(
    stores: Sequence[Store], outer: Sequence[tuple[Block, Value, Value]], kinds: Sequence[InputKind]
) -> tuple[list[Store], tuple[Outer, ...], tuple[Total, ...]]:
    """The stores with those of the products' factors, the products, and the sums that are left for after the loop."""
    factors = _Factors(stores, kinds)
    products: list[Outer] = []
    for block, dy, v in sorted(outer, key=lambda product: (product[0].weight, product[2].id, product[0])):
        (a, dy), (b, v) = _scale(dy), _scale(v)
        last = products[-1] if products else None
        follows = last is not None and last.block._replace(r0=last.block.r1, r1=block.r1) == block
        beside = last.dy._replace(start=last.dy.start + last.block.width) if last is not None and follows else None
        products.append(Outer(block, factors.source(dy, beside), factors.source(v), a * b))
    rest, totals = _bias_gradients(stores, factors.places)
    return [*rest, *factors.sequences], _joined(products), totals


class _Factors:
    """Where the products after the loop find their factors: in a tensor that exists, or in a sequence stored for them."""

    def __init__(self, stores: Sequence[Store], kinds: Sequence[InputKind]):
        self.kinds = kinds
        self.places: dict[int, Source] = {}  # by the id of the value
        for store in stores:
            if store.kind == TensorKind.D_INPUT and kinds[store.index] == InputKind.SEQUENCE:
                self.places.setdefault(store.value.id, Source(store.kind, store.index, store.start))
        self.sequences: list[Store] = []
        self.ends: list[int] = []  # of each sequence

    def source(self, value: Value, beside: Source | None = None) -> Source:
        """The place of a value. One that must be stored goes to `beside`, if that is the end of its sequence."""
        if value.op is Op.LEAF and self._is_sequence(value):
            return Source(value.leaf.kind, value.leaf.index, value.leaf.start)
        if value.id not in self.places:
            if beside is None or beside.kind != TensorKind.SEQUENCE or self.ends[beside.index] != beside.start:
                beside = Source(TensorKind.SEQUENCE, len(self.ends), 0)
                self.ends.append(0)
            self.places[value.id] = beside
            self.sequences.append(Store(TensorKind.SEQUENCE, beside.index, beside.start, value))
            self.ends[beside.index] += value.size
        return self.places[value.id]

    def _is_sequence(self, value: Value) -> bool:
        """Whether a leaf is entries of a tensor [T, B, n]."""
        kind, index, *_ = value.leaf
        if kind == TensorKind.INPUT:
            return self.kinds[index] == InputKind.SEQUENCE
        return kind in (TensorKind.STATE, TensorKind.NEXT, TensorKind.SAVED)


def _bias_gradients(stores: Sequence[Store], places: dict[int, Source]) -> tuple[list[Store], tuple[Total, ...]]:
    """The gradient of a bias is the sum of what is stored for the product of its matrix: it needs no store of its own."""
    totals: list[Total] = []
    rest = []
    for store in sorted(stores, key=lambda store: store[:3]):
        if store.kind != TensorKind.D_WEIGHT or store.value.id not in places:
            rest.append(store)
            continue
        total = Total(store.index, store.start, places[store.value.id], store.value.size)
        if totals and _end(totals[-1]) == total[:3]:
            totals[-1] = totals[-1]._replace(width=totals[-1].width + total.width)
        else:
            totals.append(total)
    return rest, tuple(totals)


def _end(total: Total) -> tuple[int, int, Source]:
    """The weight, start and source of a total that continues this one."""
    return total.weight, total.start + total.width, total.dy._replace(start=total.dy.start + total.width)


def _scale(value: Value) -> tuple[float, Value]:
    """A constant factor of a value, and the rest of it."""
    if value.op is Op.MUL and (number := value.args[0].constant) is not None:
        return number, value.args[1]
    return 1.0, value


def _joined(products: Sequence[Outer]) -> tuple[Outer, ...]:
    """One product for rows of one matrix whose dy are neighbours in one tensor: an LSTM has one instead of four."""
    out: list[Outer] = []
    for product in sorted(products, key=lambda p: (p.block.weight, p.block.transposed, p.v, p.block.c0, p.dy, p.block.r0)):
        if out and not product.block.transposed:
            last = out[-1]
            neighbours = (last.dy._replace(start=last.dy.start + last.block.width), last.v, last.scale) == product[1:]
            if neighbours and last.block._replace(r0=last.block.r1, r1=product.block.r1) == product.block:
                out[-1] = last._replace(block=last.block._replace(r1=product.block.r1))
                continue
        out.append(product)
    return tuple(out)


def _widths(program: Program, stores: Sequence[Store]) -> dict[TensorId, int]:
    """The width of every tensor that the reverse program carries or stores."""
    widths: dict[TensorId, int] = {}
    for kind, index in program.widths:
        if kind == TensorKind.NEXT:
            widths[TensorKind.CARRY, index] = widths[TensorKind.D_STATE, index] = program.widths[kind, index]
    for store in stores:
        if store.kind == TensorKind.SEQUENCE:
            widths[store.kind, store.index] = widths.get((store.kind, store.index), 0) + store.value.size
        elif store.kind != TensorKind.D_STATE:
            widths[store.kind, store.index] = program.widths[store.kind.primal, store.index]
    return widths
