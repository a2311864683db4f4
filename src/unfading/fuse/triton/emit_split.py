"""Triton source of the loop over time with the units divided among the programs of a cooperative grid.

Each program keeps its columns of every matrix on chip for all of time, loads them in chunks at every step, or keeps some rows
of the columns of several programs (`summed_tiles.py`). Its units of the state are in registers. What other programs have
computed it reads from the L2 cache (`stages.py`). The programs of the same rows wait for each other at every exchange: each
adds one to a counter, and waits until all have done so. What nobody waits for stands between the two: stores of the outputs,
and loads for the next step.

A program waits for a limited number of rounds. Then it reports trouble, and goes on without waiting to its end.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unfading.fuse.ir.passes import dots_side_by_side, states_as_stored
from unfading.fuse.ir.program import Program, Store, TensorKind, Value
from unfading.fuse.plan import TensorNames
from unfading.fuse.triton.emit import DOWN, PLACED, Around, TritonFunction, around_backward, around_forward, function, summary
from unfading.fuse.triton.frame import indented
from unfading.fuse.triton.launch_settings import Matrices, SplitShape
from unfading.fuse.triton.split_frame import SplitFrame
from unfading.fuse.triton.split_tiles import exchange_store, joined_factors, turns_of
from unfading.fuse.triton.stages import short_vectors
from unfading.fuse.triton.summed_tiles import SummedTiles
from unfading.fuse.triton.tile_shapes import wide

SHORT_MATRICES = 1 << 15  # entries of the matrices of dots that every program computes
ROUNDS = 1 << 24  # of waiting, some seconds

BARRIER = f"""
PATIENCE = tl.constexpr({ROUNDS})


@triton.jit
def peek(counter):
    load: tl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    return tl.inline_asm_elementwise(load, "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def arrive(counter):
    # All threads of the program have stored their values before one of them counts it.
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait(counter, met, patience):
    # Until `met` programs have arrived, and at most for `patience` rounds; 0 when that was not enough.
    left = patience
    while (peek(counter) - met < 0) & (left > 0):  # right also where both have passed the largest number
        left -= 1
    tl.debug_barrier()
    return tl.where(left > 0, patience, 0)
"""
WAIT = ["met += tl.num_programs(0)", "patience = wait(counter, met, patience)"]


class SplitFunction(NamedTuple):
    """A kernel, and what its launch depends on."""

    kernel: TritonFunction
    shape: SplitShape
    exchange: int  # entries of a line
    partial: int  # and further ones for each program
    for_dots: bool  # whether only dots read it
    summed: int  # columns of the products that are summed, for each unit of a program and each row


def emit_split_forward(name: str, program: Program, names: TensorNames, matrices: Matrices) -> SplitFunction:
    """The loop of a forward program."""
    frame = SplitFrame(_rearranged(program), names, matrices, backward=False)
    around = around_forward(frame, names)
    stages = frame.tiles.stages
    start = []
    for leaf_id, carrier in stages.carriers.items():
        text = frame.tiles.parts[leaf_id].text
        start.append(exchange_store(stages.places[carrier.id], "unit", carrier.size, text, step="1"))
    if start:
        start += ["arrive(counter)", *WAIT]
    body = _body(frame, around, TensorKind.NEXT, [*frame.program.stores])
    loop = ["for step in range(steps):", *indented([PLACED, *frame.on, *body, *around.moved])]
    return _split(
        frame, function(name, summary(program), frame, [*around.before, *start, *loop, *around.after, *_report(frame)])
    )


def emit_split_backward(name: str, program: Program, names: TensorNames, matrices: Matrices) -> SplitFunction:
    """The loop of a reverse program, from each row's last step to its first."""
    frame = SplitFrame(_rearranged(program), names, matrices, backward=True)
    around = around_backward(frame, names)
    stores = [store for store in frame.program.stores if store.kind != TensorKind.D_STATE]
    body = _body(frame, around, TensorKind.D_STATE, stores)
    loop = ["for count in range(steps):", *indented([DOWN, PLACED, *frame.on, *body, *around.moved])]
    after = [*around.after, *frame.summed, *_report(frame)]
    return _split(frame, function(name, "backward", frame, [*around.before, *frame.sums, *loop, *after]))


def _rearranged(program: Program) -> Program:
    """The program as it is divided.

    Dots of short vectors are slices of a long one where their matrices take too much room to be in every program. The long one
    is divided, which costs an exchange.
    """
    short = short_vectors(program)

    def is_large(dots: Sequence[Value]) -> bool:
        length = sum(wide(block.length) for block in dots[0].blocks)
        return all(dot.size <= short for dot in dots) and length * sum(wide(dot.size) for dot in dots) > SHORT_MATRICES

    return states_as_stored(dots_side_by_side(program, is_large))


def _split(frame: SplitFrame, kernel: TritonFunction) -> SplitFunction:
    tiles, stages = frame.tiles, frame.tiles.stages
    products = [
        (sum(v.size for v, _ in joined_factors(dots) if stages.is_divided(v)), turns_of(dots))
        for dots in tiles.joined_products()
    ]
    shape = SplitShape(tuple(tiles.matrix_sizes), tiles.read, stages.exchanges, stages.longest, tuple(products))
    summed = tiles.columns if isinstance(tiles, SummedTiles) else 0
    return SplitFunction(kernel, shape, stages.width, tiles.partial, stages.for_dots, summed)


def _body(frame: SplitFrame, around: Around, carried: TensorKind, stores: list[Store]) -> list[str]:
    """The stages of a step, with what nobody waits for between arriving and waiting."""
    tiles, lines, ahead, waiting = frame.tiles, [*around.add], around.ahead, stores
    for stage in range(tiles.stages.count):
        lines += tiles.write_stage(stage)
        exchange = tiles.write_exchange(stage)
        if exchange:
            ready = [store for store in waiting if tiles.stages.of[store.value.id] <= stage]
            waiting = [store for store in waiting if store not in ready]
            lines += [*exchange, "arrive(counter)", *_stores(frame, ready), *ahead, *WAIT]
            ahead = []
    lines += [*_stores(frame, waiting), *ahead]
    return lines + _after_tiles(frame, lambda: frame.carried_on(around.carried, carried))


def _stores(frame: SplitFrame, stores: list[Store]) -> list[str]:
    return _after_tiles(frame, lambda: [frame.store(store) for store in stores])


def _after_tiles(frame: SplitFrame, write: Callable[[], list[str]]) -> list[str]:
    """Some lines, after those of the tiles that they need."""
    frame.tiles.lines = []
    texts = write()
    return [*frame.tiles.lines, *texts]


def _report(frame: SplitFrame) -> list[str]:
    return ["if patience == 0:", "    tl.store(trouble, 1)"] if frame.tiles.stages.exchanges else []
