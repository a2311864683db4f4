"""A model in all-integer arithmetic, run in Python: bit for bit what the exported C computes."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unfading.export.calibrate import inputs_of, observe
from unfading.export.instructions import (
    LARGEST,
    LOOKUP_INTERVALS,
    ONE_BITS,
    TANH_INTERVALS,
    Aligned,
    Carried,
    Chosen,
    Dot,
    Instruction,
    IntegerProduct,
    IntegerStage,
    IntegerSum,
    Joined,
    Largest,
    Lookup,
    Quotient,
    Reciprocal,
    Root,
    Sign,
    Squashed,
    Unary,
    bits_for,
    lower,
    rounded,
    tanh_table,
)
from unfading.export.int8 import Integers
from unfading.export.model_stages import Exported, exported
from unfading.fuse.c.schedule import addressable
from unfading.fuse.ir.program import Op, TensorKind, Value, pieces_of
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent
from unfading.lengths import checked_lengths
from unfading.tasks.base import LastStep
from unfading.tasks.scaling import Scale

IntegerWatch = Callable[[Value, Integers, int], None]  # called with every value, its entries [B, ...], and how many were cut


def quantised(model: Model | Recurrent, batches: Iterable[Any], *, scale: Scale | None = None) -> "Quantised":
    """The model in all-integer arithmetic: int8 matrices, int16 state and values, 32-bit sums.

    Each value can hold the largest number that the calibration data give, and up to twice that. What exceeds it later is cut to
    it (saturates), and is counted. Calibrate on enough data: some hundred sequences.

    Args:
        model: the model, or a recurrent layer.
        batches: calibration data: inputs [T, B, I], or batches that begin with them, as of a DataLoader. With `scale`, inputs
            before the normalisation.
        scale: mean and spread of the normalisation (x - mean) / spread of samples, which becomes a part of the model.
    """
    with_floats = exported(model, scale)
    if with_floats.pooling:
        head = "MeanOverTime" if with_floats.pooling == "mean" else "PooledOverTime"
        raise ValueError(f"{head} sums the outputs of all steps, which int16 cannot hold. Export it in float32 or int8.")
    stages = tuple(stage.with_program(addressable(stage.program), stage.weights) for stage in with_floats.stages)
    with_floats = with_floats._replace(stages=stages)
    inputs = inputs_of(batches, with_floats)
    last = isinstance(model, Model) and isinstance(model.head, LastStep)
    twin = Quantised(with_floats, inputs, last_step=last)
    for x in inputs:
        twin(x)
    return twin


class Quantised:
    """A model in all-integer arithmetic; `prediction = quantised(x)` takes x [T, B, I] in float32, or tokens [T, B].

    Attributes:
        saturations: how many entries were cut to int16 so far, by the name of their stage.
        entries: how many entries were computed so far, by the name of their stage.
    """

    def __init__(self, model: Exported, inputs: list[Tensor], *, last_step: bool):
        observed = observe(model, inputs)
        self.model, self.last_step = model, last_step
        self.sample_bits = bits = bits_for(observed.sample)
        self.stages: list[IntegerStage] = []
        for stage, largest in zip(model.stages, observed.values, strict=True):
            self.stages.append(lower(stage, largest, bits))
            bits = self.stages[-1].output_bits
        self.output_bits = bits
        self.saturations: Counter[str] = Counter()
        self.entries: Counter[str] = Counter()

    def __call__(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The prediction as floats: [B, n] for a model that reads the last step, else [T, B, n]."""
        outputs = self.run(self.samples(x))
        prediction = torch.from_numpy(outputs * 2.0**-self.output_bits).float()
        if not self.last_step:
            return prediction
        if lengths is None:
            return prediction[-1]
        return prediction[checked_lengths(lengths, prediction) - 1, torch.arange(prediction.shape[1])]

    def samples(self, x: Tensor) -> Integers:
        """Samples as the C code takes them: int16 with `sample_bits`, or tokens."""
        (x,) = inputs_of([x], self.model)
        return x.numpy() if self.model.tokens is not None else rounded(x.double().numpy(), self.sample_bits)

    def run(self, samples: Integers) -> Integers:
        """The int16 outputs [T, B, n] of `model_push` for the samples of each step."""
        if self.model.tokens is not None:
            samples = rounded(self.model.tokens, self.sample_bits)[samples]
        runners = [IntegerRunner(stage, samples.shape[1]) for stage in self.stages]
        outputs = []
        for x in samples:
            for runner in runners:
                x = runner.push(x)
            outputs.append(x)
        for runner in runners:
            self.saturations[runner.stage.stage.name] += runner.saturated
            self.entries[runner.stage.stage.name] += runner.entries
        return np.stack(outputs)


def shift(x: Integers, n: int) -> Integers:
    """x / 2^n, rounded to nearest."""
    return (x + (1 << (n - 1))) >> n if n > 0 else x * (1 << -n)


class IntegerRunner:
    """Runs the instructions of a stage, step by step, on a batch."""

    def __init__(self, stage: IntegerStage, batch: int):
        self.stage, self.batch, self.position = stage, batch, 0
        self.order = stage.stage.program.values()
        self.states = [np.broadcast_to(part, (batch, len(part))) for part in stage.states]
        self.rests = {i: np.zeros((batch, size), np.int64) for i, size in stage.rests.items()}
        self.saturated = self.entries = 0
        self.tanh = np.array(tanh_table())

    def push(self, x: Integers, watch: IntegerWatch | None = None) -> Integers:
        """One step on x [B, n]; returns the output [B, m]."""
        stage, program = self.stage, self.stage.stage.program
        results: dict[int, Integers] = {}
        for value in self.order:
            before = self.saturated
            results[value.id] = self._value(value, results, x)
            if watch is not None:
                watch(value, results[value.id], self.saturated - before)
        after = {
            index: np.empty((self.batch, width), np.int64)
            for (kind, index), width in program.widths.items()
            if kind is TensorKind.NEXT
        }
        for _, index, start, value in program.stores:
            moved = self.limit(shift(results[value.id], stage.bits[value.id] - stage.stored_bits(index)))
            rows = np.broadcast_to(moved, (self.batch, *value.shape)).reshape(self.batch, -1)
            after[index][:, start : start + value.size] = rows
        self.states = [after[i] for i in range(len(self.states))]
        self.position += 1
        return after[stage.stage.output]

    def limit(self, x: Integers) -> Integers:
        """Cut to int16, and count what is cut."""
        cut = np.clip(x, -LARGEST - 1, LARGEST)
        self.saturated += int((cut != x).sum())
        self.entries += x.size
        return cut

    def _value(self, value: Value, results: dict[int, Integers], x: Integers) -> Integers:
        """The entries of a value, with the batch in front."""
        stage = self.stage
        if value.op is Op.LEAF:
            kind, index, start, stop = value.leaf
            if kind is TensorKind.WEIGHT:
                return stage.vectors[index][None, start:stop]
            if kind is TensorKind.STATE:
                return self.states[index][:, start:stop]
            if index == 0:
                return x[:, start:stop]
            table = stage.tables[index]
            return table[min(self.position, len(table) - 1)][None, start:stop]
        if value.id in stage.numbers:
            return np.array(stage.numbers[value.id]).reshape(1)
        args = [results[arg.id] for arg in value.args]
        if value.id in stage.code:
            return self.run(stage.code[value.id], value, args)
        return _view(value, args[0])

    def run(self, instruction: Instruction, value: Value, args: list[Integers]) -> Integers:
        """The result of an instruction, with the batch in front."""
        if isinstance(instruction, Dot):
            return self._dot(instruction, args)
        if isinstance(instruction, Joined):
            parts = [self.limit(shift(arg, n)) for arg, n in zip(args, instruction.shifts, strict=True)]
            whole = np.empty((self.batch, *value.shape), np.int64)
            for (start, stop, _), part in zip(pieces_of(value.args, value.axis), parts, strict=True):
                whole[(slice(None),) * (1 + value.axis) + (slice(start, stop),)] = part
            return whole
        if isinstance(instruction, IntegerSum | Largest):
            axes = tuple(1 + axis for axis in value.axes)
            if isinstance(instruction, Largest):
                return args[0].max(axis=axes, keepdims=True)
            return self.limit(shift(args[0].sum(axis=axes, keepdims=True), instruction.shift))
        args = [_with_axes(arg, value) for arg in args]
        return self.limit(self._elementwise(instruction, args))

    def _elementwise(self, instruction: Instruction, args: list[Integers]) -> Integers:
        """An elementwise instruction before its limit."""
        match instruction:
            case Aligned(op, (na, nb), n):
                return shift(_ALIGNED[op](shift(args[0], na), shift(args[1], nb)), n)
            case Carried(op, (na, nb), n, state, start):
                total = _ALIGNED[op](shift(args[0], na), shift(args[1], nb))
                rest = self.rests[state][:, start : start + total.shape[1]]
                total = total + rest
                result = shift(total, n)
                rest[:] = total - (result << n)
                return result
            case IntegerProduct(n):
                return shift(args[0] * args[1], n)
            case Squashed(op, n):
                tanh = self._tanh(shift(args[0], n))
                return tanh if op is Op.TANH else 16384 + ((tanh + 1) >> 1)
            case Unary(op, n):
                return shift(_MOVED[op](args[0]), n)
        return _rare(instruction, args)

    def _tanh(self, x: Integers) -> Integers:
        a = np.minimum(np.abs(x), LARGEST)
        return np.where(x < 0, -1, 1) * _interpolated(self.tanh, a, 32768 // TANH_INTERVALS)

    def _dot(self, instruction: Dot, args: list[Integers]) -> Integers:
        total: Any = 0
        for factor in instruction.factors:
            # In float64, which is exact below 2^53 and much faster: NumPy has no fast product of integers.
            vector = args[factor.argument][:, factor.start : factor.stop].astype(np.float64)
            sums = (vector @ factor.matrix.T.astype(np.float64)).astype(np.int64)
            total = total + ((sums * factor.multiplier + (1 << (factor.shift - 1))) >> factor.shift)
        return self.limit(total)


def _rare(instruction: Instruction, args: list[Integers]) -> Integers:
    """Those elementwise instructions that few cells have."""
    match instruction:
        case Quotient(n):
            return _quotient(shift(args[0], n), args[1])
        case Reciprocal(power):
            return _quotient(np.full_like(args[0], 1 << power), args[0])
        case Root(power):
            return np.sqrt(np.maximum(args[0], 0) << power).astype(np.int64)  # the whole part: float64 is exact here
        case Lookup(table):
            return _interpolated(np.array(table), args[0] + 32768, 65536 // LOOKUP_INTERVALS)
        case Sign():
            return np.sign(args[0]) * (1 << ONE_BITS)
        case Chosen((nb, nc)):
            return np.where(args[0] != 0, shift(args[1], nb), shift(args[2], nc))
    raise TypeError(f"{type(instruction).__name__} is not elementwise.")


_ALIGNED: dict[Op, Callable[[Integers, Integers], Integers]] = {
    Op.ADD: np.add,
    Op.SUB: np.subtract,
    Op.MAX: np.maximum,
    Op.MIN: np.minimum,
    Op.GT: lambda a, b: (a > b).astype(np.int64),
    Op.GE: lambda a, b: (a >= b).astype(np.int64),
    Op.LT: lambda a, b: (a < b).astype(np.int64),
    Op.LE: lambda a, b: (a <= b).astype(np.int64),
    Op.EQ: lambda a, b: (a == b).astype(np.int64),
    Op.NE: lambda a, b: (a != b).astype(np.int64),
}
_MOVED: dict[Op, Callable[[Integers], Integers]] = {
    Op.COPY: lambda a: a,
    Op.NEG: lambda a: -a,
    Op.ABS: np.abs,
    Op.RELU: lambda a: np.maximum(a, 0),
}


def _interpolated(table: Integers, x: Integers, step: int) -> Integers:
    """The entry of a table at x / step, between its neighbours."""
    i = x // step
    return table[i] + (((table[i + 1] - table[i]) * (x - i * step) + step // 2) // step)


def _quotient(a: Integers, b: Integers) -> Integers:
    """a / b towards zero; by 0 the largest number with the sign of a."""
    whole = np.abs(a) // np.maximum(np.abs(b), 1) * np.sign(a) * np.sign(b)
    return np.where(b == 0, np.sign(a) * (LARGEST + 1), whole)


def _with_axes(x: Integers, value: Value) -> Integers:
    """A result with axes of size 1 behind the batch, so that it broadcasts to the shape of a value."""
    missing = 1 + len(value.shape) - x.ndim
    return x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:]) if missing > 0 else x


def _view(value: Value, x: Integers) -> Integers:
    """A view of a result, with the batch in front."""
    own = value.args[0].shape
    if value.op is Op.EXPAND:
        wide = x.reshape(x.shape[0], *(1,) * (len(value.shape) - len(own)), *own)
        return np.broadcast_to(wide, (x.shape[0], *value.shape))
    if value.op is Op.RESHAPE:
        return x.reshape(x.shape[0], *value.shape)
    if value.op is Op.PERMUTE:
        return x.transpose(0, *(1 + axis for axis in value.axes))
    axis, start, stop = value.slice
    return x[(slice(None),) * (1 + axis) + (slice(start, stop),)]
