"""A stage of an exported model: one program, with the numbers that it reads.

A model for a small device is a list of stages. Each reads a vector, the output of the stage before it, and writes one:

    sample -> normalisation -> encoder -> layer 0 -> ... -> layer n - 1 -> head -> output

The program of a stage is in the language of `fuse/ir`. Its input 0 is the vector that it reads; its further inputs are rows
of tables that depend on the index of the step alone. It stores the states after the step, and with the index behind those of
the states its output, where that is not the first state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfading.fuse.ir.interpret import evaluate
from unfading.fuse.ir.program import NUMBERS, Op, Program, TensorKind, Value

Array = NDArray[np.float64]
ROUNDING = 0.02  # of the sum of all entries: the most by which rounding to 8 bits may change a table
Watch = Callable[[Value, Tensor], None]  # called with every value of a program and its entries [B, ...]


@dataclass(frozen=True)
class Stage:
    """One program, with its weights, the state before the first step, and tables by the index of the step."""

    name: str  # an identifier of C
    program: Program
    weights: tuple[Array, ...]
    states: tuple[Array, ...] = ()  # before the first step
    state_names: tuple[str, ...] = ()
    tables: Mapping[int, Array] = None  # type: ignore[assignment]  # by input: [P, n]; after row P - 1 that row is repeated

    def __post_init__(self) -> None:
        if self.tables is None:
            object.__setattr__(self, "tables", {})

    @property
    def input_size(self) -> int:
        """The size of the vector that it reads."""
        return self.program.widths[TensorKind.INPUT, 0]

    @property
    def output(self) -> int:
        """The index among the stored tensors of its output."""
        return len(self.states) if (TensorKind.NEXT, len(self.states)) in self.program.widths else 0

    @property
    def output_size(self) -> int:
        return self.program.widths[TensorKind.NEXT, self.output]

    @cached_property
    def order(self) -> list[Value]:
        """The values of the program, each after its arguments."""
        return self.program.values()

    @property
    def short_tables(self) -> frozenset[int]:
        """The tables that 8 bits hold: of a layer, such as step sizes, read entry by entry, and little changed by rounding."""
        dots = (value for value in self.program.values() if value.op is Op.DOT)
        leaves = (arg.leaf for value in dots for arg in value.args if arg.op is Op.LEAF)
        vectors = {leaf.index for leaf in leaves if leaf.kind is TensorKind.INPUT}
        return frozenset(i for i, table in self.tables.items() if self.states and i not in vectors and _fits_8_bits(table))

    def with_program(self, program: Program, weights: tuple[Array, ...]) -> "Stage":
        """The same stage with another program that computes the same."""
        return replace(self, program=program, weights=weights)


def _fits_8_bits(table: Array) -> bool:
    """Whether rounding to 8 bits changes a table by little; it would not where a few entries are far larger than the rest."""
    unit = np.abs(table).max() / 127
    change = np.abs(np.round(table / unit) * unit - table).sum() if unit else 0.0
    return bool(unit < 1e4 and change <= ROUNDING * np.abs(table).sum())


def run_step(
    stage: Stage, weights: Sequence[Tensor], inputs: Mapping[int, Tensor], states: Sequence[Tensor], watch: Watch | None = None
) -> dict[int, Tensor]:
    """Run the program of a stage in torch: what it stores, by index, each [B, n].

    Args:
        stage: the stage.
        weights: its weights as tensors.
        inputs: by number; input 0 is x [B, n], the others may have one row.
        states: before the step.
        watch: called with every value and its entries.
    """
    x = inputs[0]
    results: dict[int, Tensor] = {}
    sources = {TensorKind.INPUT: inputs, TensorKind.STATE: dict(enumerate(states))}
    for value in stage.order:
        if value.op is Op.LEAF and value.leaf.kind is TensorKind.WEIGHT:
            result = weights[value.leaf.index].reshape(-1)[value.leaf.start : value.leaf.stop]
        elif value.op is Op.LEAF:
            result = sources[value.leaf.kind][value.leaf.index][:, value.leaf.start : value.leaf.stop]
        elif value.op in NUMBERS:
            result = x.new_full((), value.number if value.op is Op.CONST else 0.0)
        else:
            result = evaluate(value, [results[arg.id] for arg in value.args], weights)
        results[value.id] = result
        if watch is not None:
            watch(value, result)
    stored: dict[int, list[tuple[int, Tensor]]] = {}
    for store in stage.program.stores:
        part = results[store.value.id].expand((x.shape[0], *store.value.shape)).reshape(x.shape[0], -1)
        stored.setdefault(store.index, []).append((store.start, part))
    return {i: torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])], -1) for i, parts in stored.items()}


class StageRunner:
    """Runs a stage step by step on a batch, in torch: what the C code of the stage computes, without its rounding."""

    def __init__(self, stage: Stage, batch: int, dtype: torch.dtype):
        self.stage, self.position = stage, 0
        self.weights = [torch.from_numpy(weight).to(dtype) for weight in stage.weights]
        self.tables = {i: torch.from_numpy(table).to(dtype) for i, table in stage.tables.items()}
        self.states = [torch.from_numpy(part).to(dtype).expand(batch, -1) for part in stage.states]

    def push(self, x: Tensor, watch: Watch | None = None) -> Tensor:
        """Run one step on x [B, n]; return the output [B, m]."""
        inputs = {0: x}
        for i, table in self.tables.items():
            inputs[i] = table[min(self.position, len(table) - 1)].expand(len(x), -1)
        after = run_step(self.stage, self.weights, inputs, self.states, watch)
        self.states = [after[i] for i in range(len(self.states))]
        self.position += 1
        return after[self.stage.output]
