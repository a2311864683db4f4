"""How a kernel is cut for a GPU: rows of a block, warps, width of a tile, and what of the matrices stays on chip.

A multiprocessor has 227 KB of memory for a block. Matrices that fit there stay; of the others a block is loaded again at every
step, from a cache that all share. A dot right to float32 is three in tf32, on the upper and the lower halves of both factors,
and needs the matrix twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

ON_CHIP = 208 * 1024  # bytes for matrices, beside the state on its way to a dot
WHOLE = 192 * 1024  # the same where tiles are whole, and larger
LARGEST = 1024 * 1024  # bytes of all matrices: beyond it a step spends its time loading them
DENSE = 128 * 1024  # bytes up to which one dense matrix is better than two thin ones
BYTES = {"tf32": 4, "tf32x3": 8, "bf16": 2, "fp16": 2}  # of an entry, by the precision of a dot


class Setting(NamedTuple):
    """How one loop is cut."""

    rows: int  # of the batch in a block
    warps: int
    width: int | None  # entries of a tile; None where no vector is cut
    room: int  # bytes on chip for matrices


def usual(widest: int, entries: int, precision: str) -> Setting:
    """The setting for a step whose widest state has so many entries, and whose matrices have so many together."""
    warps = 8 if widest > 64 else 4
    if entries * BYTES[precision] <= WHOLE:
        return Setting(16, warps, None, WHOLE)
    return Setting(16, warps, 64 if widest <= 128 else 128, ON_CHIP)


def resident_blocks(sizes: Sequence[int], room: int) -> int:
    """How many matrices stay on chip: all, or as many as leave room there for the largest of the others on its way."""
    if sum(sizes) <= room:
        return len(sizes)
    for count in range(len(sizes), 0, -1):
        if sum(sizes[:count]) + max(sizes[count:], default=0) <= room:
            return count
    return 0
