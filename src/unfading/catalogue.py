"""What exists, found by walking the folder of cells: there is no registry to keep in step."""

import importlib
import inspect
import pkgutil
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

import unfading.cells
from unfading.cells.base import Cell


def cells() -> list[type[Cell]]:
    """Every cell of the library that is built from an input size and a hidden size (wrappers take a cell), by name."""
    found = set()
    for module_info in pkgutil.iter_modules(unfading.cells.__path__):
        module = importlib.import_module(f"unfading.cells.{module_info.name}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, Cell) and value.__module__ == module.__name__:
                found.add(value)
    by_sizes = [cell for cell in found if list(inspect.signature(cell).parameters)[:2] == ["input_size", "hidden_size"]]
    return sorted((cell for cell in by_sizes if not inspect.isabstract(cell)), key=lambda cell: cell.__name__.lower())


class Entry(NamedTuple):
    """A cell in numbers, at one input size, hidden size and length."""

    name: str  # of its layer class
    state: dict[str, int]  # size of each part of the state
    recurrent_matrices: float  # products inside the step, in units of one hidden x hidden matrix
    parameters: int  # without head
    multiply_adds_per_step: int  # of matrix products, projection of the input and output included
    multiply_adds_per_sequence: int  # the same for all steps, and the building of the weights once
    paper: str


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
        paper=cell.paper,
    )
