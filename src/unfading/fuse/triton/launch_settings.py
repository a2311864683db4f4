"""Launch settings of a loop on a GPU: rows per block, warps, width of a tile, and which matrices stay on chip.

A multiprocessor has 227 KB of memory for a block of the grid. Matrices that fit there stay there; every other block of a matrix
is loaded again at every step, from the L2 cache. A dot that is exact to float32 is three dots in tf32, on the upper and lower
halves of both factors, and needs the matrix twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

ON_CHIP = 208 * 1024  # bytes for matrices, beside the state that a dot reads
WHOLE = 192 * 1024  # the same for whole tiles, which are larger
BLOCK = 128 * 1024  # of one block of a matrix, which a dot takes whole
LARGEST = 1024 * 1024  # of all matrices: beyond that, a step spends its time loading them
DENSE = 128 * 1024  # of a low-rank matrix: up to that, one dense product is faster than two thin ones
BYTES = {"tf32": 4, "tf32x3": 8, "bf16": 2, "fp16": 2}  # per entry, by the precision of a dot


class LaunchSettings(NamedTuple):
    """The settings of one loop."""

    rows: int  # of the batch in one block of the grid
    warps: int
    width: int | None  # of a tile in entries; None where vectors are not divided
    room: int  # for matrices on chip, in bytes


class LoopShape(NamedTuple):
    """The properties of a loop that its settings depend on."""

    name: str  # infer, train or back
    widest: int  # entries of the widest state
    entries: int  # of all matrices, padded
    flat: bool  # no value has several axes or is summed over features, so vectors may be divided


def usual(loop: LoopShape, precision: str) -> LaunchSettings:
    """The settings that were fastest on an H200, over cells and sizes."""
    warps = 8 if loop.widest > 64 else 4
    if loop.entries * BYTES[precision] <= WHOLE or not loop.flat or (loop.name == "back" and loop.widest <= 128):
        return LaunchSettings(16, warps, None, WHOLE)
    return LaunchSettings(16, warps, 64, ON_CHIP)


def refused(loops: Sequence[LoopShape], largest: int) -> str | None:
    """The reason why no settings make a loop fast enough; None if some do. `largest` is the size of the largest block."""
    total = 4 * max(loop.entries for loop in loops)
    if total > LARGEST:
        return (
            f"the recurrent matrices take {total // 1024} KB, padded to powers of two, and a loop that loads more than "
            f"{LARGEST // 1024} KB at every step is not faster"
        )
    if 4 * largest > BLOCK and not all(loop.flat for loop in loops):
        return (
            f"a recurrent matrix takes {4 * largest // 1024} KB, padded to powers of two, more than the {BLOCK // 1024} KB of "
            "a dot, and the step cannot be divided: it reshapes its vectors or sums over them"
        )
    return None


def resident_blocks(sizes: Sequence[int], room: int) -> int:
    """How many matrices stay on chip: all of them, or as many as leave room for the largest of the others while it is used."""
    if sum(sizes) <= room:
        return len(sizes)
    for count in range(len(sizes), 0, -1):
        if sum(sizes[:count]) + max(sizes[count:], default=0) <= room:
            return count
    return 0
