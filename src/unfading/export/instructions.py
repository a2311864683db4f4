"""All-integer arithmetic: for each value of a program the integer instruction that computes it.

An entry of a value is an int16 q that stands for q 2^-bits, with one number of bits for the whole value. Matrices are int8
with one scale each, and tables of step sizes are int8. Every instruction ends with `limit`, which cuts a result to int16, and
a shift rounds to nearest:

    shift(x, n) = floor(x / 2^n + 1/2)  for n > 0,    x 2^-n  for n <= 0
    limit(x)    = min(max(x, -32768), 32767)

`lower` chooses bits and shifts so that no sum or product before `limit` leaves 32 bits, whatever the entries are. (A sum of
products is multiplied by its scale in 64 bits.) `c_integer.py` writes the instructions in C, and `quantised.py` runs them in
NumPy; both give the same bits.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from unfading.export.int8 import Integers, block_entries, int8_of
from unfading.export.stage import Array, Stage
from unfading.fuse.ir.interpret import OPERATIONS
from unfading.fuse.ir.program import COMPARISONS, NUMBERS, VIEWS, Op, Store, TensorKind, Value

MOST_BITS, LEAST_BITS = 30, -15
LARGEST = 32767
ONE_BITS = 14  # of the number 1 as the result of `sign`
TANH_BITS, TANH_INTERVALS = 12, 256  # the table of tanh covers [0, 8) in this many intervals
LOOKUP_INTERVALS = 256  # of other functions, over all of int16


class Aligned(NamedTuple):
    """a + b, a - b, max, min or a comparison: shift both to the same bits, then the result."""

    op: Op
    shifts: tuple[int, int]
    shift: int


class Carried(NamedTuple):
    """a + b or a - b where a or b is the state that the result replaces: what a shift drops is kept for the next step.

        sum = shift(a) +- shift(b) + rest,    result = shift(sum),    rest = sum - 2^shift result

    Without it a state loses all updates that are smaller than half of its unit, however many there are.
    """

    op: Op
    shifts: tuple[int, int]
    shift: int  # from 1 to 15
    state: int
    start: int  # of the entries of the state


class IntegerProduct(NamedTuple):
    """shift(a b)."""

    shift: int


class Quotient(NamedTuple):
    """shift(a, shift) / b, towards zero; by 0 the largest number of its sign."""

    shift: int


class Reciprocal(NamedTuple):
    """2^power / b, as a Quotient."""

    power: int


class Root(NamedTuple):
    """floor(sqrt(a 2^power)); of a negative number 0."""

    power: int


class Squashed(NamedTuple):
    """tanh or sigmoid, from the table of tanh, of shift(a)."""

    op: Op
    shift: int


class Lookup(NamedTuple):
    """Another function, from a table over all of int16, with interpolation."""

    table: tuple[int, ...]


class Unary(NamedTuple):
    """shift(a), -a, |a| or max(a, 0)."""

    op: Op
    shift: int


class Sign(NamedTuple):
    """-1, 0 or 1, with ONE_BITS."""


class Chosen(NamedTuple):
    """shift(b) where a is not 0, else shift(c)."""

    shifts: tuple[int, int]


class IntegerSum(NamedTuple):
    """shift(sum of entries)."""

    shift: int


class Largest(NamedTuple):
    """The largest entry."""


class Joined(NamedTuple):
    """A concatenation: shift(part) for each."""

    shifts: tuple[int, ...]


class DotFactor(NamedTuple):
    """One part of a dot: (sum_i Q[j, i] v[i]) multiplier 2^-shift, over entries start..stop of argument v."""

    argument: int
    start: int
    stop: int
    matrix: Integers  # [width, stop - start], int8
    multiplier: int  # below 2^31
    shift: int


class Dot(NamedTuple):
    """A sum of factors."""

    factors: tuple[DotFactor, ...]


Instruction: TypeAlias = (
    Aligned
    | Carried
    | IntegerProduct
    | Quotient
    | Reciprocal
    | Root
    | Squashed
    | Lookup
    | Unary
    | Sign
    | Chosen
    | IntegerSum
    | Largest
    | Joined
    | Dot
)


class IntegerStage(NamedTuple):
    """A stage in integers."""

    stage: Stage  # its program is addressable: every value that a loop stores is elementwise
    bits: Mapping[int, int]  # of each value, by its id
    code: Mapping[int, Instruction]  # by the id of a value
    numbers: Mapping[int, int]  # constants, by the id of a value
    vectors: Mapping[int, Integers]  # weights that are read entry by entry
    tables: Mapping[int, Integers]
    units: Mapping[int, int]  # of the tables that int8 holds: the number of which their entries are multiples
    states: tuple[Integers, ...]  # before the first step
    state_bits: tuple[int, ...]
    output_bits: int

    @property
    def rests(self) -> dict[int, int]:
        """The size of each state that has a rest (`Carried`)."""
        carried = {code.state for code in self.code.values() if isinstance(code, Carried)}
        return {i: len(self.states[i]) for i in sorted(carried)}

    def stored_bits(self, index: int) -> int:
        """The bits of tensor `index` of the state after the step, or of the output behind them."""
        return self.state_bits[index] if index < len(self.state_bits) else self.output_bits


def bits_for(largest: float) -> int:
    """The most bits with which int16 holds a number."""
    if largest <= 0:
        return 15
    return max(LEAST_BITS, min(MOST_BITS, math.floor(math.log2(LARGEST / largest))))


def rounded(numbers: Array, bits: int) -> Integers:
    """Numbers as int16 entries."""
    return np.clip(np.floor(np.asarray(numbers) * 2.0**bits + 0.5), -LARGEST - 1, LARGEST).astype(np.int64)


def lower(stage: Stage, largest: Mapping[int, float], input_bits: int) -> IntegerStage:
    """The integer instructions of a stage.

    Args:
        stage: with an addressable program.
        largest: the largest absolute entry of each value that was observed, by its id.
        input_bits: of the vector that the stage reads.
    """
    lowering = _Lowering(stage, largest, input_bits)
    for value in stage.program.values():
        lowering.add(value)
    return lowering.result()


class _Lowering:
    """Chooses the bits of values and the shifts between them, value by value."""

    def __init__(self, stage: Stage, largest: Mapping[int, float], input_bits: int):
        self.stage, self.largest = stage, largest
        self.bits: dict[int, int] = {}
        self.code: dict[int, Instruction] = {}
        self.numbers: dict[int, int] = {}
        self.vectors: dict[int, Integers] = {}
        self.vector_bits: dict[int, int] = {}
        self.input_bits = {0: input_bits} | {i: bits_for(np.abs(table).max()) for i, table in stage.tables.items()}
        after = [0.0] * (1 + max((store.index for store in stage.program.stores), default=0))
        for store in stage.program.stores:
            after[store.index] = max(after[store.index], self.largest[store.value.id])
        initial = [float(np.abs(part).max(initial=0.0)) for part in stage.states]
        self.state_bits = [bits_for(max(after[i], part)) for i, part in enumerate(initial)]
        self.stores = {store.value.id: store for store in stage.program.stores if store.index < len(stage.states)}
        self.output_bits = bits_for(after[stage.output]) if stage.output == len(stage.states) else self.state_bits[0]

    def result(self) -> IntegerStage:
        stage = self.stage
        tables = {i: self._table(i) for i in stage.tables}
        return IntegerStage(
            stage,
            self.bits,
            self.code,
            self.numbers,
            self.vectors,
            {i: entries for i, (entries, _) in tables.items()},
            {i: unit for i, (_, unit) in tables.items() if i in stage.short_tables},
            tuple(rounded(part, bits) for part, bits in zip(stage.states, self.state_bits, strict=True)),
            tuple(self.state_bits),
            self.output_bits,
        )

    def _table(self, index: int) -> tuple[Integers, int]:
        """The entries of a table, and the number of which they are multiples: 1 unless int8 holds the table."""
        entries = rounded(self.stage.tables[index], self.input_bits[index])
        unit = max(1, -(-int(np.abs(entries).max()) // 127)) if index in self.stage.short_tables else 1
        return np.round(entries / unit).astype(np.int64) * unit, unit

    def add(self, value: Value) -> None:
        """Choose the bits and the instruction of a value, after its arguments."""
        if value.op is Op.LEAF:
            self.bits[value.id] = self._leaf_bits(value)
        elif value.op in NUMBERS:
            self._number(value)
        elif value.op in VIEWS:
            self.bits[value.id] = self.bits[value.args[0].id]
        else:
            wanted = bits_for(self.largest[value.id])
            self.bits[value.id], self.code[value.id] = self._instruction(value, wanted)

    def _leaf_bits(self, value: Value) -> int:
        kind, index = value.leaf.kind, value.leaf.index
        if kind is TensorKind.STATE:
            return self.state_bits[index]
        if kind is TensorKind.INPUT:
            return self.input_bits[index]
        if index not in self.vectors:
            numbers = self.stage.weights[index].reshape(-1)
            self.vector_bits[index] = bits_for(float(np.abs(numbers).max(initial=0.0)))
            self.vectors[index] = rounded(numbers, self.vector_bits[index])
        return self.vector_bits[index]

    def _number(self, value: Value) -> None:
        number = value.number if value.op is Op.CONST else 0.0
        if not math.isfinite(number):
            raise ValueError(f"{self.stage.name} computes with {number}, which integers do not have. Export it in float32.")
        self.bits[value.id] = bits_for(abs(number))
        self.numbers[value.id] = int(rounded(np.array(number), self.bits[value.id]))

    def _instruction(self, value: Value, wanted: int) -> tuple[int, Instruction]:
        args = [self.bits[arg.id] for arg in value.args]
        rule = _RULES.get(value.op)
        if rule is None:
            return wanted, Lookup(_table(value, args[0], wanted))
        return rule(self, value, wanted, args)

    def aligned(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        # Both below 2^29, so that a sum is below 2^30.
        common = min(max(args), min(args) + 14)
        shifts = (args[0] - common, args[1] - common)
        if value.op in COMPARISONS:
            return 0, Aligned(value.op, shifts, 0)
        store = self.stores.get(value.id)
        if value.op in (Op.ADD, Op.SUB) and store is not None and any(_is_state(arg, store) for arg in value.args):
            bits = self.state_bits[store.index]
            if 0 < common - bits <= 15:
                return bits, Carried(value.op, shifts, common - bits, store.index, store.start)
        bits = max(min(wanted, common), common - 30)
        return bits, Aligned(value.op, shifts, common - bits)

    def product(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        bits = max(min(wanted, sum(args)), sum(args) - 30)
        return bits, IntegerProduct(sum(args) - bits)

    def quotient(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        bits = max(min(wanted, 15 + args[0] - args[1]), args[0] - args[1] - 15)
        return bits, Quotient(-(bits + args[1] - args[0]))

    def reciprocal(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        bits = max(min(wanted, 30 - args[0]), -args[0])
        return bits, Reciprocal(bits + args[0])

    def root(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        power = 16 - (args[0] + 16) % 2
        return (args[0] + power) // 2, Root(power)

    def squashed(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        return 15, Squashed(value.op, max(args[0] - (TANH_BITS if value.op is Op.TANH else TANH_BITS - 1), -15))

    def sign(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        return ONE_BITS, Sign()

    def moved(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        bits = _near(wanted, args[0])
        return bits, Unary(value.op, args[0] - bits)

    def chosen(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        bits = _near(wanted, *args[1:])
        return bits, Chosen((args[1] - bits, args[2] - bits))

    def total(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        bits = max(min(wanted, args[0]), args[0] - 30)
        return bits, IntegerSum(args[0] - bits)

    def most(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        return args[0], Largest()

    def joined(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        bits = _near(wanted, *args)
        return bits, Joined(tuple(each - bits for each in args))

    def dot(self, value: Value, wanted: int, args: list[int]) -> tuple[int, Instruction]:
        pieces = []
        for number, block in enumerate(value.blocks):
            matrix, scale = int8_of(block_entries(self.stage, block))
            for start, stop in _within_32_bits(matrix):
                pieces.append((number, start, stop, matrix[start:stop].T, scale * 2.0 ** -args[number]))
        # The largest sum of all parts, in units of the result with 0 bits.
        worst = sum(float(np.abs(matrix).sum(axis=1).max()) * 32768 * unit for *_, matrix, unit in pieces)
        bits = min(wanted, math.floor(math.log2((2.0**31 - 1 - len(pieces)) / worst))) if worst else wanted
        factors = []
        for number, start, stop, matrix, unit in pieces:
            multiplier, shift = _fraction(unit * 2.0**bits if matrix.any() else 0.0)
            factors.append(DotFactor(number, start, stop, np.ascontiguousarray(matrix), multiplier, shift))
        return bits, Dot(tuple(factors))


_RULES: dict[Op, Callable[[_Lowering, Value, int, list[int]], tuple[int, Instruction]]] = {
    **dict.fromkeys([Op.ADD, Op.SUB, Op.MAX, Op.MIN, *COMPARISONS], _Lowering.aligned),
    Op.MUL: _Lowering.product,
    Op.DIV: _Lowering.quotient,
    Op.RECIP: _Lowering.reciprocal,
    Op.SQRT: _Lowering.root,
    **dict.fromkeys([Op.TANH, Op.SIGMOID], _Lowering.squashed),
    Op.SIGN: _Lowering.sign,
    **dict.fromkeys([Op.RELU, Op.ABS, Op.NEG, Op.COPY], _Lowering.moved),
    Op.WHERE: _Lowering.chosen,
    Op.SUM: _Lowering.total,
    Op.AMAX: _Lowering.most,
    Op.CAT: _Lowering.joined,
    Op.DOT: _Lowering.dot,
}


def _is_state(value: Value, store: Store) -> bool:
    """Whether a value is the entries of the state that are stored."""
    leaf = value.leaf if value.op is Op.LEAF else None
    return leaf is not None and leaf[:3] == (TensorKind.STATE, store.index, store.start)


def _near(wanted: int, *args: int) -> int:
    """Bits that are at most 15 above those of any argument, and at most 30 below: shifts of int16 that fit in 32 bits."""
    return max(min(wanted, min(args) + 15), max(args) - 30)


def _fraction(number: float) -> tuple[int, int]:
    """multiplier and shift with number = multiplier 2^-shift, nearly; the multiplier is below 2^31."""
    if number == 0:
        return 0, 1
    mantissa, exponent = math.frexp(number)
    multiplier, shift = round(mantissa * 2**31), 31 - exponent
    if multiplier == 2**31:
        multiplier, shift = multiplier // 2, shift - 1
    if shift > 62:  # the product of a sum below 2^31 and this is below 1/2
        return 0, 1
    return multiplier, shift


def _within_32_bits(matrix: Integers) -> list[tuple[int, int]]:
    """Cuts of the rows of [length, width], so that the sum over each, with any int16 vector, is below 2^31."""
    cuts, start = [], 0
    sums = np.abs(matrix[0]).copy()
    for row in range(1, len(matrix)):
        sums += np.abs(matrix[row])
        if sums.max() * 32768 >= 2**31:
            cuts.append((start, row))
            start, sums = row, np.abs(matrix[row]).copy()
    return [*cuts, (start, len(matrix))]


def _table(value: Value, bits: int, result_bits: int) -> tuple[int, ...]:
    """The entries of a function at the ends of all intervals of its int16 argument."""
    steps = 65536 // LOOKUP_INTERVALS
    x = torch.arange(-32768, 32768 + 1, steps, dtype=torch.float64) * 2.0**-bits
    y = x**value.number if value.op is Op.POWER else OPERATIONS[value.op](x)
    largest = LARGEST * 2.0**-result_bits
    y = torch.nan_to_num(y, nan=0.0, posinf=largest, neginf=-largest)
    return tuple(rounded(y.numpy(), result_bits).tolist())


def tanh_table() -> list[int]:
    """tanh on [0, 8], with 15 bits."""
    x = np.arange(TANH_INTERVALS + 1) * (8.0 / TANH_INTERVALS)
    return np.minimum(rounded(np.tanh(x), 15), LARGEST).tolist()
