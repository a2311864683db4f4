"""Names of cells and tasks, with options, as runs and the command line write them.

adding,T=200                      a name of the library, with options; their values are JSON, or else text
my.py:LeakyCell,slope=0.1         a class in a user's file
my_package.cells:LeakyCell        a class in a module that can be imported
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from unfading import catalogue
from unfading.cells.base import Cell
from unfading.errors import unknown
from unfading.layers.factory import Layer, layer
from unfading.own_data.task_names import OWN_TASKS
from unfading.tasks.base import Task
from unfading.training.check_task import blame
from unfading.training.user_code import UserCode, read_code

Kind = TypeVar("Kind")

# A comma before another option. Commas inside a list of numbers have no `name=` behind them.
_NEXT = re.compile(r",(?=[A-Za-z_]\w*=)")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of `NAME,option=value,...`."""
    name, *parts = _NEXT.split(text)
    if not name or "," in name or "=" in name:
        raise ValueError(f"expected NAME or NAME,option=value,...; got {text!r}, e.g. adding,T=200.")
    return name, _options(text, parts)


def parse_options(text: str, example: str) -> dict[str, Any]:
    """The options of `option=value,...`."""
    parts = _NEXT.split(text)
    if not all("=" in part.strip("=") for part in parts):
        raise ValueError(f"expected option=value,...; got {text!r}, e.g. {example}.")
    return _options(text, parts)


def _options(text: str, parts: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in parts:
        option, _, value = part.partition("=")
        if option in options:
            raise ValueError(f"{text!r} gives {option} twice. Leave one out.")
        options[option] = parse_value(value)
    return options


def parse_value(text: str) -> Any:
    """The value of an option: JSON, one of Python's constants, or else text."""
    try:
        return json.loads(text, parse_constant=lambda word: word)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def task_class(name: str, code: UserCode | None = None) -> type[Task]:
    """The task of that name: one of the library, or a user's class, from `code` or else from its file."""
    known = catalogue.tasks()
    if place_of(name):
        return _user_class(name, code, Task, "task")  # type: ignore[type-abstract]
    if name in OWN_TASKS:
        return OWN_TASKS[name]
    if name not in known:
        raise ValueError(unknown("task", name, known))
    return known[name]


def layer_class(name: str, code: UserCode | None = None) -> type[Layer]:
    """The layer of that name (STAR, LSTM, ...), or the layer of a user's cell, from `code` or else from its file."""
    if place_of(name):
        return layer(_user_class(name, code, Cell, "cell"))  # type: ignore[type-abstract]
    known = {cell.__name__.removesuffix("Cell"): cell for cell in (*catalogue.cells(), *catalogue.convolutional_cells())}
    if name not in known:
        raise ValueError(unknown("cell", name, known))
    return layer(known[name])


def sizes(kind: type[Layer], input_size: int, hidden: int, layers: int) -> dict[str, int]:
    """The sizes of a layer under the names of its arguments: features and units, or channels."""
    size, units, *_ = inspect.signature(kind).parameters
    return {size: input_size, units: hidden, "num_layers": layers}


def check_options(what: str, name: str, kind: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise for an option that `kind` does not take."""
    known = inspect.signature(kind).parameters
    for option in options:
        if option not in known:
            raise ValueError(unknown(f"option of {what} {name}", option, known))


def build(what: str, name: str, kind: Callable[..., Kind], options: Mapping[str, Any]) -> Kind:
    """`kind(**options)`; a wrong option raises a ValueError of one sentence, e.g. "task adding: T must be at least 2"."""
    check_options(what, name, kind, options)
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} {name}: {error}") from error
    except Exception as error:
        blame(error, f"the constructor of {what} {name}")


def user_object(name: str) -> Any:
    """The object of that name in a user's file or module, e.g. my.py:build."""
    place, _, wanted = name.rpartition(":")
    if not place:
        raise ValueError(f"expected the name of an object in a file, e.g. my.py:build; got {name!r}.")
    module = read_code(name).module()
    if not hasattr(module, wanted):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ValueError(f"{place} has no such name: {unknown('name', wanted, known)}")
    return getattr(module, wanted)


def place_of(name: str) -> str:
    """The file or module of a user's class, e.g. my.py for my.py:MyCell; empty for a name of the library."""
    return name.rpartition(":")[0]


def _user_class(name: str, code: UserCode | None, kind: type[Kind], what: str) -> type[Kind]:
    place, _, wanted = name.rpartition(":")
    module = (read_code(name) if code is None else code).module()

    def fits(value: Any) -> bool:
        return inspect.isclass(value) and issubclass(value, kind) and not inspect.isabstract(value)

    value: Any = getattr(module, wanted, None)
    if inspect.isclass(value) and issubclass(value, kind) and inspect.isabstract(value):
        methods = ", ".join(sorted(getattr(value, "__abstractmethods__", ())))
        raise ValueError(f"{name} does not define what a {what} must: {methods}.")
    if not fits(value):
        known = [each for each, other in vars(module).items() if fits(other)]
        raise ValueError(f"{place} has no {what} of that name: {unknown(what, wanted, known)}")
    user_class: type[Kind] = value
    return user_class
