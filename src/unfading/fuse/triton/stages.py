"""Cut a step into stages, between which the multiprocessors that share its units exchange values.

The units of a long vector are divided among the programs of a grid. An elementwise operation needs nothing from the others. A
dot reads all entries of its row vector, a sum over features the sums of all programs: what they read is *exchanged*. Each
program stores its part of the value in memory that all of them read, and they wait for each other. A stage is what can be
computed between two such exchanges.

    LSTM     h' = o tanh(c)                                      one exchange per step: h'
    GRU      n = tanh(W x + U (r h))                             two: r h, then h'

A short vector, and any value of several axes, is computed whole by every program, which costs less than an exchange. The state
that a dot reads is exchanged at the step before.
"""

from collections.abc import Set

from unfading.fuse.ir.program import ELEMENTWISE, REDUCTIONS, Leaf, Op, Program, TensorKind, Value
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.tile_shapes import LEAST

# Vectors of up to this many entries, and up to half of the longest state, are computed whole by every program.
SHORT = 64
OTHER_PIECES = "the step reads a state in other pieces than it stores it, so its units cannot be divided"
DIVIDED = ELEMENTWISE | {Op.LEAF, Op.DOT, Op.EXPAND}


class Stages:
    """The stage of each value, and what is exchanged after each stage.

    Args:
        skipped: ids of values that are not computed in the loop.

    Attributes:
        order: all values, in the order in which they are computed.
        of: the stage of each value, by its id.
        exchanged: the values that are exchanged after each stage.
        partial: the sums and maxima over divided vectors, by the stage after which their parts are exchanged.
        carriers: for the id of a state that is read whole, the value that was exchanged for it at the step before.
        places: for the id of an exchanged value, the entry at which it begins in a line of the exchange.
        width: the entries of that line, without those of `partial`.
        longest: the entries of the longest value that is divided, or of which each program stores a part.
    """

    def __init__(self, program: Program, skipped: Set[int] = frozenset()):
        widest = max(n for (kind, _), n in program.widths.items() if kind in (TensorKind.NEXT, TensorKind.CARRY))
        self.short = max(1, min(SHORT, widest // 2))
        self.order = program.values()
        self.of: dict[int, int] = {}
        self.exchanged: dict[int, list[Value]] = {}
        self.partial: dict[int, list[Value]] = {}
        self.carriers: dict[int, Value] = {}
        self.places: dict[int, int] = {}
        self.width = 0
        self._next = {
            (store.index, store.start, store.start + store.value.size): store.value
            for store in program.stores
            if store.kind == TensorKind.NEXT
        }
        for value in self.order:
            stage = max((self.of[arg.id] for arg in value.args), default=0)
            self.of[value.id] = stage if value.id in skipped else self._stage(value, stage)
        for value in self.carriers.values():
            self._exchange(value)
        self.count = 1 + max(self.of.values())
        # Each program also stores its own part of a long value that all of them have computed whole.
        stored = [store.value for store in program.stores]
        stored += [arg for value in self.order if value.id in skipped for arg in value.args]
        parted = [value.size for value in self.order if self.is_divided(value)]
        self.longest = max([1, *parted, *(value.size for value in stored if value.size > self.short)])

    def is_divided(self, value: Value) -> bool:
        """Whether each program has its own units of a value."""
        return len(value.shape) == 1 and value.size > self.short and value.op in DIVIDED

    def is_partial(self, value: Value) -> bool:
        """Whether a value is a reduction of a divided one."""
        return value.op in REDUCTIONS and self.is_divided(value.args[0])

    def _stage(self, value: Value, stage: int) -> int:
        if self.is_partial(value):
            before = self.of[value.args[0].id]
            self.partial.setdefault(before, []).append(value)
            return before + 1
        if self.is_divided(value) and value.op is not Op.DOT:
            return stage
        for arg in value.args:
            if not self.is_divided(arg):
                continue
            if arg.op is Op.LEAF and arg.leaf.kind == TensorKind.STATE and self._next:
                self.carriers[arg.id] = self._after(arg.leaf)
            else:
                self._exchange(arg)
                stage = max(stage, self.of[arg.id] + 1)
        return stage

    def _after(self, leaf: Leaf) -> Value:
        """The value that these entries of a state have after the step."""
        value = self._next.get(leaf[1:])
        if value is None:
            raise NotFusable(OTHER_PIECES)
        return value

    def _exchange(self, value: Value) -> None:
        if value.id not in self.places:
            self.exchanged.setdefault(self.of[value.id], []).append(value)
            self.places[value.id] = self.width
            self.width += -(-value.size // LEAST) * LEAST
