"""The estimated time of a step that is not compiled: recorded as CUDA graphs, or run by the reference loop.

On a GPU both are limited by the number of operations, each of which is a kernel of its own, unless the matrices are large. The
numbers were fitted to times of an H200. `launch_settings.py` has the same for compiled loops.
"""

from typing import NamedTuple

from unfading.fuse.ir.program import NUMBERS, VIEWS, Op, Program, TensorKind

FREE = NUMBERS | VIEWS | {Op.LEAF, Op.DOT}


class StepShape(NamedTuple):
    """The properties of a step that its time depends on."""

    forward: int  # operations
    backward: int
    products: int  # multiply-adds of one row, forward
    widest: int  # entries of the widest state


def step_shape(program: Program, reverse: Program) -> StepShape:
    """The shape of a step and of its reverse."""
    blocks = [block for value in program.values() if value.op is Op.DOT for block in value.blocks]
    products = sum(block.length * block.width for block in blocks)
    widest = max(n for (kind, _), n in program.widths.items() if kind == TensorKind.NEXT)
    return StepShape(operations(program) + _dots(program), operations(reverse) + _dots(reverse), products, widest)


def operations(program: Program) -> int:
    """The number of operations beside dots."""
    return sum(value.op not in FREE for value in program.values())


def _dots(program: Program) -> int:
    return sum(value.op is Op.DOT for value in program.values())


def graph_microseconds(step: StepShape, rows: int, *, keep: bool) -> float:
    """By CUDA graphs; with `keep`, forward and backward. The backward pass runs the forward pass once more."""
    start, launched, passes = (20.0, 2 * step.forward + step.backward, 4) if keep else (9.0, step.forward, 1)
    return start + launched * (1.6 + 1.9e-6 * rows * step.widest) + 1e-8 * passes * rows * step.products


def reference_microseconds(step: StepShape, *, keep: bool) -> float:
    """By the reference loop; with `keep`, forward and backward. The host launches every operation."""
    return 12.0 * (step.forward + step.backward if keep else step.forward)
