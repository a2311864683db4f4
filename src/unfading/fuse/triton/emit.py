"""Triton source of the whole loop over time, forward and backward, each as one kernel.

One program of the grid runs a block of ROWS batch rows of one model through all steps. The first RESIDENT matrices are loaded
once and stay on chip, the state stays in registers, and the inputs of the next step are loaded while a step computes. T and B
are ordinary arguments, and so are the strides of the model axis, which are 0 where models share a tensor. `frame.py` writes
loads and stores, `tiles.py` the step itself.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from unfading.fuse.ir.program import Program, TensorId, TensorKind
from unfading.fuse.plan import TensorNames
from unfading.fuse.triton.frame import Frame, RowSlice, indented
from unfading.fuse.triton.language import PRELUDE

PLACE = """

@triton.jit
def place(step, length, wide, first, REVERSE: tl.constexpr):
    # The line of a step in a tensor [T, B, ...], for the first row of a block; for each row where lengths differ.
    if REVERSE:
        at = (length - 1 - step) * wide + first
    else:
        at = step * wide + first
    return at
"""
PLACED = "at = place(step, length, wide, first, REVERSE)"
DOWN = "step = steps - 1 - count"
COUNTS = ("T", "B", "blocks", "first_block", "parts", "chunk_steps")  # arguments that are small numbers
COLUMNS = re.compile(r"\bcol\d+\b")


class TritonFunction(NamedTuple):
    """A kernel: its source, and its arguments before lengths, T and B."""

    name: str
    source: str
    pointers: tuple[TensorId, ...]  # tensors by lines, vectors of weights among them
    matrices: tuple[tuple[int, bool], ...]  # (weight, whether it is transposed)
    sizes: tuple[int, ...]  # of each block of the matrices in entries, padded


def source(functions: Sequence[TritonFunction], prelude: str = PRELUDE) -> str:
    """The source of a whole module."""
    return prelude + PLACE + "".join(function.source for function in functions)


class Around(NamedTuple):
    """The lines around a step."""

    carried: dict[int, list[RowSlice]]  # the variables that hold the states, or their gradients, from step to step
    before: list[str]  # the loop
    ahead: list[str]  # loads for the next step
    add: list[str]  # what arrives from outside at a step, before it is computed
    moved: list[str]  # at the end of a step: what was loaded ahead takes its place
    after: list[str]  # the loop


def emit_forward(name: str, program: Program, names: TensorNames) -> TritonFunction:
    """The loop of a forward program."""
    frame = Frame(program, names, backward=False)
    around = around_forward(frame, names)
    frame.tiles.write()
    body = [*frame.tiles.lines, *(frame.store(store) for store in program.stores)]
    body += frame.carried_on(around.carried, TensorKind.NEXT)
    loop = ["for step in range(steps):", *indented([PLACED, *frame.on, *around.ahead, *body, *around.moved])]
    return function(name, summary(program), frame, [*around.before, *loop, *around.after])


def emit_backward(name: str, program: Program, names: TensorNames) -> TritonFunction:
    """The loop of a reverse program, from each row's last step to its first."""
    frame = Frame(program, names, backward=True)
    around = around_backward(frame, names)
    frame.tiles.write()
    stores = [frame.store(store) for store in program.stores if store.kind != TensorKind.D_STATE]
    body = [*around.add, *frame.tiles.lines, *stores, *frame.carried_on(around.carried, TensorKind.D_STATE)]
    loop = ["for count in range(steps):", *indented([DOWN, PLACED, *frame.on, *around.ahead, *body, *around.moved])]
    return function(name, "backward", frame, [*around.before, *frame.sums, *loop, *around.after, *frame.summed])


def summary(program: Program) -> str:
    """What a forward loop does, in a few words."""
    return "forward, with what the gradient needs in saved0" if (TensorKind.SAVED, 0) in program.widths else "forward"


def around_forward(frame: Frame, names: TensorNames) -> Around:
    """The lines around a step of a forward program; gives the frame's leaves their tiles."""
    carried = frame.carry(TensorKind.NEXT, names.states)
    for i, slices in carried.items():
        frame.read_carried(TensorKind.STATE, i, slices)
    loads = frame.read_loads()
    initial = [f"{part.name} = {frame.load(TensorKind.INITIAL, i, part, 'first', 'inside')}" for i, part in each(carried)]
    final = [frame.write(TensorKind.FINAL, i, part, part.name, "first", "inside") for i, part in each(carried)]
    first = [f"{load.name} = {frame.read(load, '0')}" for load in loads]
    ahead = [f"{load.name}_ahead = {frame.read(load, 'step + 1')}" for load in loads]
    moved = [f"{load.name} = {load.name}_ahead" for load in loads]
    return Around(carried, [*initial, *first], ahead, [], moved, final)


def around_backward(frame: Frame, names: TensorNames) -> Around:
    """The same for a reverse program."""
    carried = frame.carry(TensorKind.D_STATE, [f"d_{name}" for name in names.states])
    join: list[str] = []
    add: list[str] = []
    initial: list[str] = []
    first: list[str] = []
    ahead: list[str] = []
    moved: list[str] = []
    for i, part in each(carried):
        tile, here = f"(ROWS, {frame.entries(part.shape)})", f"{part.name}_here"
        d_final = frame.load(TensorKind.D_FINAL, i, part, "first", "inside")
        join += if_given(f"dfinal{i}", f"{part.name} = {d_final}", f"{part.name} = tl.zeros({tile}, tl.float32)")
        for step, target, to in (("steps - 1", first, here), ("step - 1", ahead, f"{here}_ahead")):
            target += if_given(f"dnext{i}", f"{to} = {frame.load(TensorKind.D_NEXT, i, part, *frame.at(step))}", f"{to} = 0.0")
        moved.append(f"{here} = {here}_ahead")
        add += if_given(f"dnext{i}", f"{part.name}_now = {part.name} + {here}", f"{part.name}_now = {part.name}")
        initial.append(frame.write(TensorKind.D_INITIAL, i, part, part.name, "first", "inside"))
    for i, slices in carried.items():
        frame.read_carried(TensorKind.CARRY, i, [part._replace(name=f"{part.name}_now") for part in slices])
    loads = frame.read_loads()
    before = {load.leaf[1:]: load.name for load in loads if load.leaf.kind == TensorKind.STATE}
    for load in sorted(loads, key=lambda load: load.leaf.kind):  # next before state
        first.append(f"{load.name} = {frame.read(load, 'steps - 1')}")
        if (
            load.leaf.kind == TensorKind.NEXT and load.leaf[1:] in before
        ):  # the state after the previous step is the state before this one
            moved.append(f"{load.name} = {before[load.leaf[1:]]}")
        else:
            ahead.append(f"{load.name}_ahead = {frame.read(load, 'step - 1')}")
            moved.append(f"{load.name} = {load.name}_ahead")
    return Around(carried, [*join, *first], ahead, add, moved, initial)


def function(name: str, summary: str, frame: Frame, lines: list[str]) -> TritonFunction:
    """A kernel of these lines, in its frame."""
    pointers, matrices = tuple(frame.pointers), tuple(frame.matrices)
    named = [f"{kind}{index}" for kind, index in pointers] + [_matrix(i, turned) for i, turned in matrices]
    taken = [
        *(part for name in named for part in (name, f"{name}_model")),
        "lengths",
        "lengths_model",
        "T",
        "B",
        *frame.arguments,
    ]
    known = [*(f"{name}_ROW" for name in named), *frame.constants]
    varying = [name for name in taken if name.endswith("_model") or name in COUNTS]
    head = [
        *frame.head,
        "inside = first + row < B",
        "if lengths is not None:",
        "    length = tl.load(lengths + model * lengths_model + first + row, mask=inside, other=0)",
        "    length = tl.minimum(tl.maximum(length, 0), T).to(tl.int32)",
        "    steps = tl.max(length)",
        "else:",
        "    length = T",
        "    steps = T",
    ]
    # Rows of a tensor that do not all start at a multiple of 16 bytes gain nothing from an aligned first row: one kernel for
    # both.
    widths = frame.program.widths
    narrow = [f"{kind}{i}" for kind, i in pointers if widths.get((kind, i), widths.get((TensorKind.NEXT, i), 0)) % 4]
    typed = [f"{name}: tl.{'int64' if name.endswith('_model') else 'int32'}" if name in varying else name for name in taken]
    arguments = ", ".join([*typed, *(f"{name}: tl.constexpr" for name in known)])
    body = [*frame.before, *frame.tiles.before, *frame.resident_loads(), *lines]
    columns = [f"{name} = tl.arange(0, {name[3:]})[None, :]" for name in sorted(set(COLUMNS.findall("\n".join(body))))]
    lines_text = "\n".join(indented([*head, *columns, *body]))
    legend = "".join(f"#   {line}\n" for line in frame.legend())
    fixed = f"do_not_specialize={varying!r}, do_not_specialize_on_alignment={narrow!r}"
    text = f"\n\n# {name}: {summary}.\n{legend}@triton.jit({fixed})\ndef {name}({arguments}):\n{lines_text}\n"
    return TritonFunction(name, text, pointers, matrices, frame.matrix_sizes())


def _matrix(weight: int, turned: bool) -> str:
    return f"W{weight}_t" if turned else f"W{weight}"


def each(carried: dict[int, list[RowSlice]]) -> list[tuple[int, RowSlice]]:
    return [(i, part) for i, slices in carried.items() for part in slices]


def if_given(pointer: str, given: str, absent: str) -> list[str]:
    """One line where a tensor is given, and another where it is not."""
    return [f"if {pointer} is not None:", f"    {given}", "else:", f"    {absent}"]
