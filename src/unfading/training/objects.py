"""Tasks and cells that are given to a run as objects, `Run(task=MyTask(), cell=MyCell)`, in the place of names.

A run consists of JSON values, so an object becomes its name, its options and the source of its class:

    a task or cell of the library     its name; nothing else is needed to build it again
    a task over a user's data         its name and fields, and the object itself, which has the data
    a user's own class                my_package.cells:MyCell, my.py:MyCell or, in a notebook, __main__:MyCell, with the
                                      source of the module, or of the class alone; the class itself is what runs
"""

import ast
import linecache
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple

from unfading import catalogue
from unfading.cells.base import Cell
from unfading.layers.factory import Layer
from unfading.own_data.own_task import OwnTask
from unfading.own_data.task_names import OWN_TASKS
from unfading.tasks.base import Task
from unfading.training.user_code import NOTEBOOK, UserCode, read_code


class Given(NamedTuple):
    """A task, or the class of a cell, that a user has given as an object."""

    value: Any
    digest: str | None = None  # of its source; None if it stands for any source


class Named(NamedTuple):
    """The fields of a run that describe its task and its cell."""

    task: Any
    task_options: Any
    cell: Any
    code: Any
    objects: dict[str, Given]


def named_objects(task: Any, task_options: Any, cell: Any, code: Any, objects: Mapping[str, Given]) -> Named:
    """The same fields with objects replaced by their names. Fields that hold no object are returned as they are."""
    objects = dict(objects)
    if isinstance(cell, type) and issubclass(cell, Layer):
        cell = cell.cell
    if isinstance(task, Task):
        if task_options:
            raise ValueError(f"the task {type(task).__name__} is an object with its own fields; leave task_options out.")
        task_options = _options(task)
        task, code = _name(task, type(task), "task", code, objects)
    if isinstance(cell, type) and issubclass(cell, Cell):
        cell, code = _name(cell, cell, "cell", code, objects)
    for role, name in (("task", task), ("cell", cell)):
        if role in objects and not _current(objects[role], name, task_options, code):
            del objects[role]
    return Named(task, task_options, cell, code, objects)


def _name(value: Any, kind: type, role: str, code: Any, objects: dict[str, Given]) -> tuple[str, Any]:
    """The name of an object and the sources of the run; what the name alone does not give back is added to `objects`."""
    library = {**OWN_TASKS, **catalogue.tasks()} if role == "task" else _library_cells()
    name = next((name for name, each in library.items() if each is kind), None)
    if name is not None:
        if isinstance(value, OwnTask):
            objects[role] = Given(value, None)
        return name, code
    name, source = _source(kind)
    objects[role] = Given(value, source.digest)
    return name, {**code, source.place: source}


def _library_cells() -> dict[str, type]:
    cells: list[type] = [*catalogue.cells(), *catalogue.convolutional_cells()]
    return {cell.__name__.removesuffix("Cell"): cell for cell in cells}


def _options(task: Task) -> dict[str, Any]:
    """The fields of a task that are not at their default."""
    if not is_dataclass(task):
        raise TypeError(f"{type(task).__name__} must be a frozen dataclass, whose fields are its options.")
    options = {}
    for each in fields(task):
        value = getattr(task, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.init and (default is MISSING or value != default):
            options[each.name] = value
    return options


def _current(given: Given, name: Any, options: Any, code: Any) -> bool:
    """Whether an object still stands for the name, the options and the source of a run, of which `replace` may change some."""
    if isinstance(given.value, OwnTask):
        same = OWN_TASKS.get(name) is type(given.value)
        return same and type(given.value)(**options) == given.value
    place = str(name).rpartition(":")[0]
    return place in code and given.digest in (None, code[place].digest)


def _source(kind: type) -> tuple[str, UserCode]:
    """The name and the source of a user's class."""
    if "<locals>" in kind.__qualname__ or "." in kind.__qualname__:
        raise ValueError(f"{kind.__qualname__} is defined inside a function or a class. Define it at the top of its module.")
    if kind.__module__ != NOTEBOOK:
        name = f"{kind.__module__}:{kind.__name__}"
        return name, read_code(name)
    file = getattr(sys.modules[NOTEBOOK], "__file__", None)
    if file is not None and os.path.exists(file):
        name = f"{os.path.relpath(file)}:{kind.__name__}"
        return name, read_code(name)
    # Base classes of the notebook decide the result too.
    texts = [_notebook_source(each) for each in reversed(kind.__mro__) if each.__module__ == NOTEBOOK]
    return f"{NOTEBOOK}:{kind.__name__}", UserCode(NOTEBOOK, os.getcwd(), {f"{NOTEBOOK}.py": "\n\n".join(texts).encode()})


def _notebook_source(kind: type) -> str:
    """The text of a class that was defined in a notebook, found by one of its methods: `inspect` needs a file for classes."""
    for value in vars(kind).values():
        code = getattr(value, "__code__", None)
        lines = [] if code is None else linecache.getlines(code.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                return ast.get_source_segment("".join(lines), node) or ""
    raise ValueError(f"the source of {kind.__name__} cannot be read. Write the class to a file, my.py.")
