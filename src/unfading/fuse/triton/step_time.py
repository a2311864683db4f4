"""The estimated time of a step that is not compiled: recorded as CUDA graphs, or run by the reference loop.

On a GPU both are limited by the number of operations, each of which is a kernel of its own, unless the matrices are large. The
numbers were fitted to times of an H200. `launch_settings.py` has the same for compiled loops.
"""

from typing import NamedTuple

from unfading.fuse.ir.program import NUMBERS, VIEWS, Op, Program

FREE = NUMBERS | VIEWS | {Op.LEAF, Op.DOT}


class StepShape(NamedTuple):
    """The properties of a step that its time depends on."""

    forward: int  # operations
    backward: int
    products: int  # multiply-adds of one row, forward


def step_shape(program: Program, reverse: Program) -> StepShape:
    """The shape of a step and of its reverse."""
    blocks = [block for value in program.values() if value.op is Op.DOT for block in value.blocks]
    products = sum(block.length * block.width for block in blocks)
    return StepShape(operations(program) + _dots(program), operations(reverse) + _dots(reverse), products)


def operations(program: Program) -> int:
    """The number of operations beside dots."""
    return sum(value.op not in FREE for value in program.values())


def _dots(program: Program) -> int:
    return sum(value.op is Op.DOT for value in program.values())


def graph_microseconds(step: StepShape, rows: int, *, keep: bool) -> float:
    """By CUDA graphs; with `keep`, forward and backward. The backward pass runs the forward pass once more."""
    launched, passes = (2 * step.forward + step.backward, 4) if keep else (step.forward, 1)
    return 9.0 + 1.6 * launched + 1.8e-8 * passes * rows * step.products


def reference_microseconds(step: StepShape, *, keep: bool) -> float:
    """By the reference loop; with `keep`, forward and backward. The host launches every operation."""
    return 12.0 * (step.forward + step.backward if keep else step.forward)
