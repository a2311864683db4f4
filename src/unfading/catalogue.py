"""What exists, found by walking the folders of cells and tasks: there is no registry to keep in step."""

import importlib
import inspect
import pkgutil
import re
from dataclasses import fields
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

import unfading.cells
import unfading.tasks
from unfading.cells.base import Cell
from unfading.data import store
from unfading.fuse.ir.differentiate import differentiate
from unfading.fuse.ir.program import InputKind, TensorKind
from unfading.fuse.plan import PROGRAMS, plan
from unfading.fuse.refusal import Refusal
from unfading.tasks.base import Task

Kind = TypeVar("Kind")


def cells() -> list[type[Cell]]:
    """Every cell of the library that is built from an input size and a hidden size (wrappers take a cell), by name."""
    found = _concrete(unfading.cells, Cell)  # type: ignore[type-abstract]
    return [cell for cell in found if list(inspect.signature(cell).parameters)[:2] == ["input_size", "hidden_size"]]


def tasks() -> dict[str, type[Task]]:
    """Every task of the library under its name in runs and on the command line: that of its class in snake_case."""
    boundary = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
    found = _concrete(unfading.tasks, Task)  # type: ignore[type-abstract]
    return {boundary.sub("_", task.__name__).lower(): task for task in found}


def _concrete(folder: ModuleType, kind: type[Kind]) -> list[type[Kind]]:
    """The classes of that kind which the modules of a folder define and which are whole, by name."""
    found = set()
    for module_info in pkgutil.iter_modules(folder.__path__):
        module = importlib.import_module(f"{folder.__name__}.{module_info.name}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, kind) and value.__module__ == module.__name__:
                found.add(value)
    return sorted((each for each in found if not inspect.isabstract(each)), key=lambda each: each.__name__.lower())


class Entry(NamedTuple):
    """A cell in numbers, at one input size, hidden size and length."""

    name: str  # of its layer class
    state: dict[str, int]  # size of each part of the state
    recurrent_matrices: float  # products inside the step, in units of one hidden x hidden matrix
    parameters: int  # without head
    multiply_adds_per_step: int  # of matrix products, projection of the input and output included
    multiply_adds_per_sequence: int  # the same for all steps, and the building of the weights once
    bytes_kept_per_step: int | None  # for the backward pass, of one row, fused in float32; None where it does not run fused
    paper: str


def _kept(cell: Cell) -> int | None:
    found = plan(cell)
    if isinstance(found, Refusal):
        return None
    forward = differentiate(PROGRAMS[found.key]).forward
    inputs = sum(n for n, kind in zip(found.signature.inputs, found.signature.kinds, strict=True) if kind == InputKind.SEQUENCE)
    return 4 * (inputs + sum(found.signature.states) + forward.widths.get((TensorKind.SAVED, 0), 0))


def entry(cell: type[Cell], *, input_size: int, hidden_size: int, length: int) -> Entry:
    """Measure a cell at its default options: the products are counted while it runs, not read off a formula."""
    made = cell(input_size, hidden_size)
    state = made.initial_state(1)
    with torch.no_grad(), FlopCounterMode(display=False) as building:
        weights = made.weights()
    with torch.no_grad(), FlopCounterMode(display=False) as projecting:
        inputs = made.project(torch.ones(1, 1, input_size))
    with torch.no_grad(), FlopCounterMode(display=False) as answering:
        made.output(state)
    with torch.no_grad(), FlopCounterMode(display=False) as stepping:
        made.step(type(inputs)(*(field[0] for field in inputs)), state, weights)
    # The counter counts a multiply-add as two operations.
    counters = (building, projecting, stepping, answering)
    build, project, step, answer = (counter.get_total_flops() // 2 for counter in counters)
    per_step = project + step + answer
    return Entry(
        name=cell.__name__.removesuffix("Cell"),
        state={name: part.shape[1] for name, part in zip(state._fields, state, strict=True)},
        recurrent_matrices=step / hidden_size**2,
        parameters=sum(parameter.numel() for parameter in made.parameters()),
        multiply_adds_per_step=per_step,
        multiply_adds_per_sequence=build + length * per_step,
        bytes_kept_per_step=_kept(made),
        paper=cell.paper,
    )


class TaskEntry(NamedTuple):
    """A task in words, at its default options."""

    name: str
    what: str
    options: dict[str, Any]  # with their defaults
    measure: str
    guess: float | None  # None where it is a frequency in a dataset, which would have to be read
    dataset: str | None
    found: bool | None  # whether the dataset is in the data folder; None where none is needed
    paper: str


def task_entry(name: str, task: type[Task]) -> TaskEntry:
    """What can be said of a task without reading its data."""
    made = task()
    return TaskEntry(
        name=name,
        what=(inspect.getdoc(task) or "").split("\n")[0],
        options={field.name: getattr(made, field.name) for field in fields(made)},  # type: ignore[arg-type]
        measure=task.metric,
        guess=made.guess if task.dataset is None else None,
        dataset=task.dataset,
        found=None if task.dataset is None else store.present(task.dataset),
        paper=task.paper,
    )
