"""Cut a step into stages, between which the multiprocessors that share its units exchange values.

The units of a long vector are divided among the programs of a grid, and a table (a value of several axes) whose last axis is
long is divided along it. An elementwise operation needs nothing from the others. A dot reads all entries of its row vector, a
sum along a divided axis the sums of all programs, a reshape the entries of other programs: what they read is *exchanged*. Each
program stores its part of the value in memory that all of them read, and they wait for each other. A stage is what can be
computed between two such exchanges.

    LSTM     h' = o tanh(c)                                      one exchange per step: h'
    GRU      n = tanh(W x + U (r h))                             two: r h, then h'
    NRU      tables p q^T, read as [heads, M], and their norms   five: h', [p, q, ..], the largest entries, the sums, m'

A short vector, and a small table, is computed whole by every program, which costs less than an exchange. The state that a dot
reads is exchanged at the step before. A large table with a short last axis, such as p q^T, is *spread*: it is nowhere as a
whole. Each program computes the entries that it needs from values that it has, or that have been exchanged: those that a view
of the table picks, or those of its share of the sums along an axis, which are exchanged in turn.

Where products are *summed* (`summed_tiles.py`), a dot takes two stages: its products of a share of the row vector, which are
exchanged, and their sums.
"""

import math
from collections.abc import Set

from unfading.fuse.ir.program import ELEMENTWISE, REDUCTIONS, VIEWS, Op, Program, Shape, TensorKind, Value
from unfading.fuse.triton.tile_shapes import LEAST

# Vectors of up to this many entries, and up to half of the longest state, are computed whole by every program.
SHORT = 64
# A table with more entries is divided or spread.
TABLE = 256
REARRANGED = VIEWS | {Op.CAT}


class Stages:
    """The stage of each value, and what is exchanged after each stage.

    Args:
        skipped: ids of values that are not computed in the loop.
        summed: whether dots of divided vectors are sums of products that several programs have computed.

    Attributes:
        order: the values that are computed or stored, in that order; without those that are only read by index.
        of: the stage of each value, by its id.
        exchanged: the values that are exchanged after each stage.
        partial: the sums and maxima along divided axes, by the stage after which their parts are exchanged.
        shared: the sums and maxima of spread tables, by the stage after which they are exchanged.
        products: the dots whose products are summed, by the stage after which these are exchanged.
        carriers: for the id of a state that is read whole, the value that was exchanged for it at the step before.
        places: for the id of an exchanged value, the entry at which it begins in a line of the exchange.
        width: the entries of that line, without those of `partial`.
        for_dots: whether only dots read what is exchanged.
        longest: the entries of the longest axis that is divided.
    """

    def __init__(self, program: Program, skipped: Set[int] = frozenset(), *, summed: bool = False):
        self.short, self.summed = short_vectors(program), summed
        self._sources: dict[int, tuple[Value, ...]] = {}
        self.order = self._computed(program)
        self.of: dict[int, int] = {}
        self.exchanged: dict[int, list[Value]] = {}
        self.partial: dict[int, list[Value]] = {}
        self.shared: dict[int, list[Value]] = {}
        self.products: dict[int, list[Value]] = {}
        self.carriers: dict[int, Value] = {}
        self.places: dict[int, int] = {}
        self.width = 0
        self.for_dots = True
        self._next = {
            (store.index, store.start, store.start + store.value.size): store.value
            for store in program.stores
            if store.kind == TensorKind.NEXT
        }
        for value in self.order:
            stage = max((self.of[x.id] for x in self.reads(value)), default=0)
            self.of[value.id] = stage if value.id in skipped else self._stage(value, stage)
        for value in self.carriers.values():
            self._exchange(value)
        self.count = 1 + max(self.of.values())
        self.longest = max([1, *(value.shape[-1] for value in self.order if self.is_divided(value))])

    @property
    def exchanges(self) -> int:
        """The number of exchanges in a step."""
        return len({*self.exchanged, *self.partial, *self.shared, *self.products})

    def divides(self, shape: Shape) -> bool:
        """Whether values of a shape are divided along their last axis."""
        return len(shape) > 0 and shape[-1] > self.short

    def spreads(self, shape: Shape) -> bool:
        """Whether values of a shape are nowhere as a whole."""
        return len(shape) > 1 and not self.divides(shape) and math.prod(shape) > TABLE

    def is_divided(self, value: Value) -> bool:
        """Whether each program has its own units of a value."""
        return self.divides(value.shape)

    def is_spread(self, value: Value) -> bool:
        """Whether a value is nowhere as a whole."""
        return self.spreads(value.shape) and not self.is_partial(value)

    def is_partial(self, value: Value) -> bool:
        """Whether a value is a reduction along a divided axis, whose parts all programs add up."""
        return value.op in REDUCTIONS and self.is_divided(value.args[0]) and not self.is_divided(value)

    def is_shared(self, value: Value) -> bool:
        """Whether a value is a reduction of a spread table, of which each program computes a share."""
        return value.op in REDUCTIONS and self.is_spread(value.args[0])

    def is_product(self, value: Value) -> bool:
        """Whether a value is a dot of divided vectors."""
        return value.op is Op.DOT and any(map(self.is_divided, value.args))

    def is_local(self, value: Value) -> bool:
        """Whether a divided view has, in each program, entries of this program alone."""
        if value.op not in (Op.EXPAND, Op.RESHAPE) or not self.is_divided(value.args[0]):
            return False
        before, after = value.args[0].shape, value.shape
        return before[-1] == after[-1] and (value.op is Op.EXPAND or _without_ones(before) == _without_ones(after))

    def sources(self, value: Value) -> tuple[Value, ...]:
        """The values from which a program computes any entry of a value; those of them that are divided are exchanged."""
        if value.id not in self._sources:
            self._sources[value.id] = self._new_sources(value)
        return self._sources[value.id]

    def _new_sources(self, value: Value) -> tuple[Value, ...]:
        divided, spread = self.is_divided(value), self.is_spread(value)
        if not (divided or spread) or value.op not in REARRANGED | ELEMENTWISE:
            return (value,)
        below = tuple(dict.fromkeys(source for arg in value.args for source in self.sources(arg)))
        # A divided value that every program would have to compute from others is exchanged itself.
        computed = divided and value.op in ELEMENTWISE and any(map(self.is_divided, below))
        return (value,) if computed else below

    def reads(self, value: Value) -> tuple[Value, ...]:
        """The values that the lines of a value read."""
        if self.is_shared(value) or (value.op in REARRANGED and not (self.is_divided(value) and self.is_local(value))):
            return tuple(dict.fromkeys(source for arg in value.args for source in self.sources(arg)))
        return self.sources(value) if self.is_spread(value) else value.args

    def _computed(self, program: Program) -> list[Value]:
        values = program.values()
        read = {store.value.id for store in program.stores}
        for value in reversed(values):
            if value.id in read:
                read |= {x.id for x in self.reads(value)}
        return [value for value in values if value.id in read]

    def _stage(self, value: Value, stage: int) -> int:
        if self.is_partial(value):
            self.for_dots = False
            before = self.of[value.args[0].id]
            self.partial.setdefault(before, []).append(value)
            return before + 1
        if self.is_divided(value) and (value.op in ELEMENTWISE | REDUCTIONS or self.is_local(value)):
            return stage
        read = [x for x in self.reads(value) if self.is_divided(x)]
        if any(value.op is not Op.DOT or x not in value.args for x in read):
            self.for_dots = False
        states = [x for x in read if self._next and x.op is Op.LEAF and x.leaf.kind == TensorKind.STATE]
        for x in read:
            if x not in states:
                self._exchange(x)
                stage = max(stage, self.of[x.id] + 1)
        # A view reads a state in stage 0, before another program can store its next value in the same place, or exchanges it.
        # What is only stored is computed later, after this program has said that it can do without the others.
        at_once = stage == 0 and (self.is_shared(value) or not self.is_spread(value))
        for x in states:
            if value.op is Op.DOT or at_once:
                self.carriers[x.id] = self._next[x.leaf[1:]]
            else:
                self._exchange(x)
                stage = max(stage, self.of[x.id] + 1)
        if self.is_shared(value):
            self.for_dots = False
            self.shared.setdefault(stage, []).append(value)
            self._place(value)
            stage += 1
        if self.summed and self.is_product(value):
            self.products.setdefault(stage, []).append(value)
            stage += 1
        return stage

    def _exchange(self, value: Value) -> None:
        if value.id not in self.places:
            self.exchanged.setdefault(self.of[value.id], []).append(value)
            self._place(value)

    def _place(self, value: Value) -> None:
        self.places[value.id] = self.width
        self.width += -(-value.size // LEAST) * LEAST


def short_vectors(program: Program) -> int:
    """The most entries of a vector that is computed whole by every program."""
    widest = max(n for (kind, _), n in program.widths.items() if kind in (TensorKind.NEXT, TensorKind.CARRY))
    return max(min(SHORT, widest // 2), 1)


def _without_ones(shape: Shape) -> list[int]:
    return [n for n in shape if n != 1]
