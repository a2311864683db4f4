"""How a kernel is cut for a GPU: rows of a block, warps, width of a tile, and what of the matrices stays on chip.

A multiprocessor has 227 KB of memory for a block. Matrices that fit there stay; of the others a block is loaded again at every
step, from a cache that all share. A dot right to float32 is three in tf32, on the upper and the lower halves of both factors,
and needs the matrix twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

ON_CHIP = 208 * 1024  # bytes for matrices, beside the state on its way to a dot
WHOLE = 192 * 1024  # the same where tiles are whole, and larger
BLOCK = 128 * 1024  # of one block, which a dot takes whole
LARGEST = 1024 * 1024  # of all matrices: beyond it a step spends its time loading them
DENSE = 128 * 1024  # of a matrix up to which one dense product is better than two thin ones
BYTES = {"tf32": 4, "tf32x3": 8, "bf16": 2, "fp16": 2}  # of an entry, by the precision of a dot


class Setting(NamedTuple):
    """How one loop is cut."""

    rows: int  # of the batch in a block
    warps: int
    width: int | None  # entries of a tile; None where no vector is cut
    room: int  # bytes on chip for matrices


class Loop(NamedTuple):
    """What decides how a loop is cut."""

    name: str  # infer, train or back
    widest: int  # entries of the widest state
    entries: int  # of all matrices, padded
    flat: bool  # nothing has several axes, or is summed over features: vectors may be cut


def usual(loop: Loop, precision: str) -> Setting:
    """The setting that was best on an H200, over cells and sizes."""
    warps = 8 if loop.widest > 64 else 4
    if loop.entries * BYTES[precision] <= WHOLE or not loop.flat or (loop.name == "back" and loop.widest <= 128):
        return Setting(16, warps, None, WHOLE)
    return Setting(16, warps, 64, ON_CHIP)


def refused(loops: Sequence[Loop], largest: int) -> str | None:
    """In words why no loop can be cut so that it is worth while; `largest` are the entries of the largest block."""
    total = 4 * max(loop.entries for loop in loops)
    if total > LARGEST:
        return (
            f"the recurrent matrices take {total // 1024} KB, padded to powers of two, and a loop that loads more than "
            f"{LARGEST // 1024} KB at every step gains nothing"
        )
    if 4 * largest > BLOCK and not all(loop.flat for loop in loops):
        return (
            f"a recurrent matrix takes {4 * largest // 1024} KB, padded to powers of two, more than the {BLOCK // 1024} KB of "
            "a dot, and the step cannot be cut: it reshapes its vectors or sums over them"
        )
    return None


def resident_blocks(sizes: Sequence[int], room: int) -> int:
    """How many matrices stay on chip: all, or as many as leave room there for the largest of the others on its way."""
    if sum(sizes) <= room:
        return len(sizes)
    for count in range(len(sizes), 0, -1):
        if sum(sizes[:count]) + max(sizes[count:], default=0) <= room:
            return count
    return 0
