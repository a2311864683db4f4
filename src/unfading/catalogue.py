"""All cells and tasks of the library, found by reading their folders, so that there is no registry to maintain."""

import importlib
import inspect
import math
import pkgutil
import re
from dataclasses import fields
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

import unfading.cells
import unfading.tasks
from unfading.cells.base import Cell, in_frame
from unfading.cells.convolution import ConvolutionalCell
from unfading.data import store
from unfading.fuse.frames.frame_kernels import frame_kernels
from unfading.fuse.ir.differentiate import differentiate
from unfading.fuse.ir.program import InputKind, TensorKind
from unfading.fuse.ir.recurrence import recurrence
from unfading.fuse.plan import PROGRAMS, FramePlan, Plan, plan
from unfading.fuse.refusal import Refusal
from unfading.tasks.base import Task

Kind = TypeVar("Kind")


def cells() -> list[type[Cell]]:
    """Every cell of the library over feature vectors, in the order of names, without wrappers of another cell."""
    return list(_cells())


def convolutional_cells() -> list[type[ConvolutionalCell]]:
    """Every cell of the library over frames, in the order of names."""
    return list(_convolutional_cells())


@cache  # every run asks
def _cells() -> list[type[Cell]]:
    classes = _concrete(unfading.cells, Cell)  # type: ignore[type-abstract]
    return [cell for cell in classes if list(inspect.signature(cell).parameters)[:2] == ["input_size", "hidden_size"]]


@cache
def _convolutional_cells() -> list[type[ConvolutionalCell]]:
    return _concrete(unfading.cells, ConvolutionalCell)  # type: ignore[type-abstract]


def tasks() -> dict[str, type[Task]]:
    """Every task of the library by its name in runs and on the command line: the name of its class in snake_case."""
    return dict(_tasks())


@cache
def _tasks() -> dict[str, type[Task]]:
    boundary = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
    classes = _concrete(unfading.tasks, Task)  # type: ignore[type-abstract]
    return {boundary.sub("_", task.__name__).lower(): task for task in classes}


def _concrete(folder: ModuleType, kind: type[Kind]) -> list[type[Kind]]:
    """The concrete subclasses of `kind` that the modules of a folder define, in the order of names."""
    classes = set()
    for module_info in pkgutil.iter_modules(folder.__path__):
        module = importlib.import_module(f"{folder.__name__}.{module_info.name}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, kind) and value.__module__ == module.__name__:
                classes.add(value)
    return sorted((each for each in classes if not inspect.isabstract(each)), key=lambda each: each.__name__.lower())


class Entry(NamedTuple):
    """The size and cost of a cell, at one input size, hidden size, length and, for a convolutional cell, frame."""

    name: str  # of its layer class
    state: dict[str, int]  # features or channels of each part of the state
    recurrent_matrices: float  # products inside the step, in units of one hidden x hidden matrix or convolution
    parameters: int  # without a head
    multiply_adds_per_step: int  # in matrix products, including the projection of the input and the output
    multiply_adds_per_sequence: int  # of all steps, and of building the weights once
    bytes_kept_per_step: int | None  # stored per row for the backward pass, fused in float32; None if it does not run fused
    recurrence: str | None  # dense, block, diagonal or linear, as in `fuse/ir/recurrence.py`; None if it is not compiled
    paper: str


def _recurrence(cell: Cell) -> str | None:
    cell_plan = plan(cell)
    return str(recurrence(PROGRAMS[cell_plan.key])) if isinstance(cell_plan, Plan) else None


def _stored_bytes(cell: Cell, frame: tuple[int, ...]) -> int | None:
    cell_plan = plan(cell)
    if isinstance(cell_plan, Refusal):
        return None
    if isinstance(cell_plan, FramePlan):
        return 4 * math.prod(frame) * frame_kernels(cell_plan.key, cell_plan.dtype, cell_plan.target).stored_channels()
    forward, signature = differentiate(PROGRAMS[cell_plan.key]).forward, cell_plan.signature
    inputs = sum(n for n, kind in zip(signature.inputs, signature.kinds, strict=True) if kind == InputKind.SEQUENCE)
    return 4 * (inputs + sum(signature.states) + forward.widths.get((TensorKind.SAVED, 0), 0))


def entry(kind: type[Cell], *, input_size: int, hidden_size: int, length: int, frame: tuple[int, ...] = ()) -> Entry:
    """Measure a cell with its default options. Products are counted while it runs, not computed from a formula.

    Args:
        kind: the class of the cell.
        input_size: features of the input, or channels.
        hidden_size: of the cell, or its channels.
        length: steps of a sequence.
        frame: height and width of the input of a convolutional cell.
    """
    cell = kind(input_size, hidden_size)
    state = in_frame(cell.initial_state(1), cell.state_frame(frame))
    with torch.no_grad(), FlopCounterMode(display=False) as weights_counter:
        weights = cell.weights()
    with torch.no_grad(), FlopCounterMode(display=False) as project_counter:
        inputs = cell.project(torch.ones(1, 1, input_size, *frame))
    with torch.no_grad(), FlopCounterMode(display=False) as output_counter:
        cell.output(state)
    with torch.no_grad(), FlopCounterMode(display=False) as step_counter:
        cell.step(type(inputs)(*(field[0] for field in inputs)), state, weights)
    # The counter counts a multiply-add as two operations.
    counters = (weights_counter, project_counter, step_counter, output_counter)
    build, project, step, output = (counter.get_total_flops() // 2 for counter in counters)
    per_step = project + step + output
    # The multiply-adds of one recurrent matrix, or of one convolution of the state.
    of_one = hidden_size**2
    if isinstance(cell, ConvolutionalCell):
        of_one *= math.prod((*cell.kernel_size, *cell.state_frame(frame)))
    return Entry(
        name=kind.__name__.removesuffix("Cell"),
        state={name: part.shape[1] for name, part in zip(state._fields, state, strict=True)},
        recurrent_matrices=step / of_one,
        parameters=sum(parameter.numel() for parameter in cell.parameters()),
        multiply_adds_per_step=per_step,
        multiply_adds_per_sequence=build + length * per_step,
        bytes_kept_per_step=_stored_bytes(cell, cell.state_frame(frame)),
        recurrence=_recurrence(cell),
        paper=kind.paper,
    )


class TaskEntry(NamedTuple):
    """The description of a task with its default options."""

    name: str
    what: str
    options: dict[str, Any]  # with their defaults
    measure: str
    guess: float | None  # None where it depends on a dataset, which would have to be read
    dataset: str | None
    found: bool | None  # whether the dataset is in the data folder; None where none is needed
    paper: str


def task_entry(name: str, task: type[Task]) -> TaskEntry:
    """Describe a task without reading its data."""
    default = task()
    return TaskEntry(
        name=name,
        what=(inspect.getdoc(task) or "").split("\n")[0],
        options={field.name: getattr(default, field.name) for field in fields(default)},  # type: ignore[arg-type]
        measure=task.metric,
        guess=default.guess if task.dataset is None else None,
        dataset=task.dataset,
        found=None if task.dataset is None else store.present(task.dataset),
        paper=task.paper,
    )
