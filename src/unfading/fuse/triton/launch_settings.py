"""Launch settings of a loop on a GPU: rows per block, warps, width of a tile, which matrices stay on chip, and whether the
units are divided among multiprocessors.

A multiprocessor has 227 KB of memory for a block of the grid. Matrices that fit there stay there; every other block of a matrix
is loaded again at every step, from the L2 cache. A dot that is exact to float32 is three dots in tf32, on the upper and lower
halves of both factors, and needs the matrix twice.

Whether a program has all units or a part of them is decided by the time of a step, estimated from what was measured on an H200
(16 cells at 64 to 1024 units, with 1 to 1000 rows): half of the estimates are within 11 %, nine of ten within 28 %. Of 176
loops that were timed with several settings, 174 take at most 1.15 times as long with the chosen ones as with the fastest.
"""

import math
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

ON_CHIP = 208 * 1024  # bytes for matrices, beside the state that a dot reads
WHOLE = 192 * 1024  # the same for whole tiles, which are larger
BLOCK = 128 * 1024  # of one block of a matrix, which a dot takes whole
LARGEST = 1024 * 1024  # of all matrices: beyond that, a step spends its time loading them
SOME = 64 * 1024  # bytes that are loaded at every step while other matrices are used
DENSE = 128 * 1024  # of a low-rank matrix: up to that, one dense product is faster than two thin ones
BYTES = {"tf32": 4, "tf32x3": 8, "bf16": 2, "fp16": 2}  # per entry, by the precision of a dot
TILE = 64  # entries of a divided vector
SPLIT_FROM = 65  # units: below, no loop is faster with its units divided
ROWS = (16, 32, 64)  # of a program with a part of the units
UNITS = (8, 16, 32, 64)
CHUNK = 64  # entries of each column of a matrix that a program loads at a time, where it loads all of them at every step
CHUNKS = (32, CHUNK, 128)  # that a search tries; the source of a loop relies on the longest
SUMMED_UNITS, SUMMED_ROWS = 8, (32, 64, 128)  # the same where products are summed
MOST_SHARES = 16
STAGES = 4  # chunks on chip at the same time
MANY = 60  # operations of a backward loop: beyond, tiles of 64 and of 32 entries fill the registers twice over
RAGGED = 1.35  # how much longer 64 rows take backward where a row vector is cut into several pieces


class LaunchSettings(NamedTuple):
    """The settings of one loop."""

    rows: int  # of the batch in one block of the grid
    warps: int
    width: int | None  # of a tile, or of a chunk where `units` are divided; None for whole vectors, or matrices on chip
    room: int  # for matrices on chip, in bytes
    units: int | None = None  # of a program, where they are divided; None where each program has all of them
    summed: bool = False  # whether programs with a part of the units sum up products of each other


class Matrices(Enum):
    """Where the matrices of a loop with divided units are."""

    ON_CHIP = auto()  # a program has the columns of its units
    STREAMED = auto()  # it loads them at every step
    SUMMED = auto()  # it has some rows of the columns of several programs


class Gpu(NamedTuple):
    """The properties of a GPU that settings depend on."""

    multiprocessors: int
    on_chip: int  # bytes of memory for a block of the grid


H200 = Gpu(132, 232_448)


class LoopShape(NamedTuple):
    """The properties of a loop that its settings depend on."""

    name: str  # infer, train or back
    widest: int  # entries of the widest state
    entries: int  # of all matrices, padded
    work: int  # the same, with a matrix counted for every dot that reads it
    depth: int  # the longest chain of dots that read each other's results
    flat: bool  # no value has several axes or is summed over features, so vectors may be divided
    operations: int  # on vectors, beside dots
    sums: bool = False  # the loop adds up gradients of weights over time

    @property
    def cut(self) -> bool:
        """Whether its vectors are cut into tiles of 64 and of 32 entries, instead of being padded to 128. A tile of 16 is slow:
        STAR with 80 units took three times as long with one as with 128 entries."""
        return self.flat and TILE + 16 < self.widest <= TILE + 32


class SplitShape(NamedTuple):
    """The same for a loop with its units divided."""

    matrices: tuple[tuple[int, int, bool], ...]  # length and width of each, the latter for each unit or in all
    read: int  # entries of the row vectors of all dots
    exchanges: int  # in a step
    longest: int  # entries of the longest value of which a program has or stores a part
    products: tuple[tuple[int, int], ...] = ()  # that may be summed: entries of their row vectors, columns of each unit

    def parts(self, units: int, *, summed: bool = False) -> int:
        """The number of programs that have all units of some rows; whole teams where they sum up products of each other."""
        team = max((shares_of(*product) for product in self.products), default=1) if summed else 1
        return team * math.ceil(self.longest / (units * team))

    def summing(self, rows: int, precision: str) -> int:
        """Bytes for the matrices, and for two chunks of row vectors, where products are summed."""
        matrices = SUMMED_UNITS * sum(K * N for K, N in self.products)
        return matrices * BYTES[precision] + 2 * rows * CHUNK * max(BYTES[precision], 4)

    def summed_bytes(self, rows: int, precision: str) -> int:
        """What a program reads and stores in a step where products are summed: shares of row vectors, and products."""
        total = 0
        for K, N in self.products:
            shares = shares_of(K, N)
            total += rows * (K // shares * min(BYTES[precision], 4) + 2 * 4 * shares * N * SUMMED_UNITS)
        return total

    def on_chip(self, rows: int, units: int, precision: str) -> int:
        """Bytes for the matrices and for the row vectors of one dot."""
        vectors = rows * max((K for K, _, _ in self.matrices), default=0)
        return self.entries(units) * BYTES[precision] + vectors * min(BYTES[precision], 4)

    def in_chunks(self, rows: int, units: int) -> int:
        """The same where matrices and row vectors are loaded in chunks."""
        return 4 * STAGES * CHUNK * (rows + max((N * units if by_unit else N for _, N, by_unit in self.matrices), default=0))

    def entries(self, units: int) -> int:
        """Of all matrices of a program."""
        return sum(K * N * (units if by_unit else 1) for K, N, by_unit in self.matrices)

    def narrow(self, units: int) -> float:
        """The share of divided dots with 16 columns, which do not keep four warps busy."""
        lengths = [(K, N * units < 32) for K, N, by_unit in self.matrices if by_unit]
        return sum(K for K, few in lengths if few) / max(sum(K for K, _ in lengths), 1)


def shares_of(length: int, columns: int) -> int:
    """The programs of a team that sum up products, so that it reads and stores as little as possible.

    Args:
        length: entries of the row vectors of the product.
        columns: for each unit.
    """
    return min(1 << max(round(math.log2(length / (2 * SUMMED_UNITS * columns)) / 2), 1), MOST_SHARES)


def usual(loop: LoopShape, precision: str) -> LaunchSettings:
    """The settings of a loop in which each program has all units that were fastest on an H200, over cells and sizes."""
    warps = 8 if loop.widest > TILE else 4
    if loop.cut and not (loop.name == "back" and loop.operations > MANY):
        if loop.sums:
            return LaunchSettings(16, 4, None, WHOLE)
        return LaunchSettings(16, 8 if loop.name == "back" and loop.depth > 1 else 4, TILE, ON_CHIP)
    if loop.entries * BYTES[precision] <= WHOLE or not loop.flat or (loop.name == "back" and loop.widest <= 128):
        return LaunchSettings(16, warps, None, WHOLE)
    return LaunchSettings(16, warps, TILE, ON_CHIP)


class Candidate(NamedTuple):
    """Settings with which a loop may run, and the estimated time of a step."""

    microseconds: float
    setting: LaunchSettings


def candidates(
    loop: LoopShape, split: SplitShape | None, precision: str, rows: tuple[int, int], gpu: Gpu, whole: bool
) -> list[Candidate]:
    """The settings with which a loop may fit on a GPU, the fastest first.

    Args:
        rows: the number of models, and of rows of each.
        whole: whether each program may have all units.
    """
    every = [] if split is None else list(_split(loop, split, precision, rows, gpu))
    if whole:
        if split is not None and split.longest == 1:  # nothing is divided
            every = []
        every += _whole(loop, precision, rows, gpu)
    return sorted(every, key=lambda candidate: candidate.microseconds)


def _whole(loop: LoopShape, precision: str, rows: tuple[int, int], gpu: Gpu) -> Iterator[Candidate]:
    """Matrices beyond the memory of a multiprocessor are loaded at every step; values beyond its registers are stored."""
    waves = math.ceil(rows[0] * math.ceil(rows[1] / 16) / gpu.multiprocessors)
    first = usual(loop, precision)
    share = (96 / 128) ** 2 if loop.cut and first.width is not None else 1.0  # of the entries of whole tiles
    size, work = share * loop.entries * BYTES[precision], share * loop.work
    if loop.name == "back":
        entry = 7e-5 if share == 1 else 1e-4
        step, chain = 0.48 + entry * work + 0.11 * max(loop.operations - 30, 0), 0.1 if loop.widest <= 128 else 2.2
    else:
        step, chain = 0.37 + 4.5e-5 * work + 1e-4 * loop.operations * loop.widest, 0.1 if loop.widest <= 128 else 0.7
    crowd = 1.0
    if not loop.flat and loop.name != "back":  # values of several axes do not fit into the registers
        crowd = 10
    elif first.width is not None and loop.widest > 128 and 0 < loop.widest % TILE <= 16:  # nor do those that end in a short one
        crowd = 30
    elif first.width is not None and loop.cut and loop.depth == 1 and loop.entries > 2 * 128**2:  # nor three gates at once
        crowd = 1.2
    # Without matrices on chip, the rest of a loop may fit where it does not fit beside them.
    for room in (first.room, 0) if size else (first.room,):
        loaded = max(size - min(room, WHOLE), 0)
        microseconds = crowd * (step + chain * (loop.depth - 1)) + 1.5e-5 * loaded + 1e-4 * max(loaded - SOME, 0)
        yield Candidate(waves * microseconds, first._replace(room=room))


def _split(loop: LoopShape, split: SplitShape, precision: str, rows: tuple[int, int], gpu: Gpu) -> Iterator[Candidate]:
    at_once = False  # whether all rows run at the same time with the matrices on chip
    for units in UNITS:
        parts = split.parts(units)
        for n in ROWS:
            if parts > gpu.multiprocessors:
                continue
            turns = math.ceil(rows[0] * math.ceil(rows[1] / n) / (gpu.multiprocessors // parts))
            if split.on_chip(n, units, precision) <= gpu.on_chip:
                # As measured, 8 units are worth it where 16 do not fit, and 64 in half precision.
                fewest = units < 16 and split.on_chip(n, 16, precision) <= gpu.on_chip
                if fewest or (units > 32 and BYTES[precision] >= 4):
                    continue
                at_once |= turns == 1
                yield Candidate(turns * _on_chip(loop, split, n, units), LaunchSettings(n, 4, None, 0, units))
            elif split.in_chunks(n, units) <= gpu.on_chip:
                # Half precision is rounded from float32 after it was loaded.
                entry = (1.25e-4 + 1.2e-3 / n) * (1.15 if BYTES[precision] < 4 else 1)
                step = 0.3 + 1.3 * split.exchanges + entry * (n * split.read + split.entries(units))
                yield Candidate(turns * step, LaunchSettings(n, 8, CHUNK, 0, units))
    if split.products and not at_once:
        yield from _summed(split, precision, rows, gpu)


def _summed(split: SplitShape, precision: str, rows: tuple[int, int], gpu: Gpu) -> Iterator[Candidate]:
    parts = split.parts(SUMMED_UNITS, summed=True)
    for n in SUMMED_ROWS:
        if parts <= gpu.multiprocessors and split.summing(n, precision) <= gpu.on_chip:
            turns = math.ceil(rows[0] * math.ceil(rows[1] / n) / (gpu.multiprocessors // parts))
            step = 0.3 + 1.3 * (split.exchanges + len(split.products)) + 4e-5 * split.summed_bytes(n, precision)
            yield Candidate(turns * step, LaunchSettings(n, 8, None, 0, SUMMED_UNITS, summed=True))


def _on_chip(loop: LoopShape, split: SplitShape, rows: int, units: int) -> float:
    """The estimated time of a step with all matrices on chip."""
    # Values beyond the registers of a thread are stored in memory.
    tiles, narrow, values = rows / 16, 6e-4 * split.narrow(units), loop.operations * rows * units / 128
    if loop.name == "back":
        step = 0.25 + 1.2 * split.exchanges + split.read * (0.0015 + 0.0016 * tiles + narrow)
        step += 0.13 * len(split.matrices) + 0.0044 * values + 0.12 * max(values - 280, 0)
        return step * (RAGGED if rows == 64 and split.longest % TILE else 1)
    parts = split.parts(units)
    step = 0.14 + (0.95 + 0.013 * parts) * split.exchanges + split.read * (0.0013 + 0.0009 * tiles + narrow)
    return step + 0.2 * len(split.matrices) + 0.008 * values + 0.055 * max(values - 350, 0)


def refused(loops: Sequence[LoopShape], largest: int) -> str | None:
    """The reason why no program can have all units; None if it can. `largest` is the size of the largest block."""
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
