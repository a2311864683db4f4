"""The registry of items: every table and figure of the papers, found by walking the folders of this package.

An item is a public function that can be called without arguments. Its name is PAPER/FUNCTION, where PAPER is the folder:
`table1` in `papers/incremental/tables.py` is incremental/table1. The return type tells what the item is:

    list[Row]   a table: rows to train and to compare with the published numbers
    Curves      a figure drawn from the records of its rows
    Item        a figure computed when the function is called

Claims about several rows of an item stand in a function of the same name in `papers/PAPER/orders.py`, which returns
list[Order | Ranking].
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from types import ModuleType
from typing import Any

import unfading.papers
from unfading.data import store
from unfading.data.datasets import DATASETS
from unfading.errors import unknown
from unfading.papers.item import Item
from unfading.papers.row import Curves, Order, Ranking, Row
from unfading.report.verdicts import setting

KINDS = (Item, Curves, list[Row])
CLAIMS = (list[Order | Ranking],)
# Datasets of figures that have no rows.
READS = {"incremental/fig7": "har", "incremental/fig8": "har", "incremental/step_sizes": "mnist", "star/fig3": "mnist"}


def items() -> dict[str, Callable[..., Any]]:
    """Every item by name: papers in alphabetical order, and within a paper tables, figures, then the rest."""
    return _functions(KINDS)


def claims(name: str) -> list[Order | Ranking]:
    """The claims about several rows of an item."""
    function = _functions(CLAIMS).get(name)
    return [] if function is None else function()


@cache  # walking the folders takes longer than most items
def _modules() -> list[ModuleType]:
    infos = pkgutil.walk_packages(unfading.papers.__path__, f"{unfading.papers.__name__}.")
    return [importlib.import_module(info.name) for info in infos]


def _functions(kinds: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """The public functions of the papers' modules that can be called without arguments and return one of these types."""
    functions: dict[str, Callable[..., Any]] = {}
    for module in _modules():
        for name, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
            if own and _returns(value, kinds):
                functions[f"{module.__name__.split('.')[2]}/{name}"] = value
    return dict(sorted(functions.items(), key=lambda pair: _order(pair[0])))


def _returns(function: Callable[..., Any], kinds: Sequence[Any]) -> bool:
    signature = inspect.signature(function)
    optional = all(each.default is not each.empty for each in signature.parameters.values())
    return optional and signature.return_annotation in kinds


def item(name: str) -> Callable[..., Any]:
    """The function of an item; a ValueError suggests the nearest name if there is none."""
    known = items()
    if name not in known:
        raise ValueError(f"{unknown('item', name, known)} `unfading reproduce list` names all.")
    return known[name]


def kind(function: Callable[..., Any]) -> Any:
    """`Item`, `Curves` or `list[Row]`."""
    return inspect.signature(function).return_annotation


def rows(function: Callable[..., Any]) -> list[Row]:
    """The rows of a table or of a figure of curves; none for other figures."""
    return [] if kind(function) is Item else list(_rows(function))


@cache  # some tables build their models to count parameters
def _rows(function: Callable[..., Any]) -> Sequence[Row]:
    table: Curves | list[Row] = function()
    return table.rows if isinstance(table, Curves) else table


def title(function: Callable[..., Any]) -> str:
    """The first line of the item's docstring."""
    return (inspect.getdoc(function) or "").splitlines()[0]


def datasets(name: str) -> dict[str, bool]:
    """The datasets that an item needs, and whether each is present."""
    function = item(name)
    needed = sorted({row.dataset for row in rows(function) if row.dataset} | ({READS[name]} if name in READS else set()))
    return {dataset: _present(dataset) for dataset in needed}


def published(names: Sequence[str]) -> list[dict[str, Any]]:
    """The published side of these items as lines for `report/fidelity.py`: rows, claims, and figures without rows."""
    lines: list[dict[str, Any]] = []
    for name in names:
        function = item(name)
        if kind(function) is Item:
            lines.append({"kind": "figure", "item": name, "title": title(function)})
        for row in rows(function):
            about = {"title": title(function), "here": row.available, "printed": row.printed}
            model = {"place": row.place, "cell": row.run.cell, "log": {str(epoch): score for epoch, score in row.log.items()}}
            lines.append({"kind": "row", "item": name, **about, **model, **claim(row)})
        for each in claims(name):
            lines.append({"kind": type(each).__name__.lower(), "item": name, **asdict(each)})
    return lines


def claim(row: Row) -> dict[str, Any]:
    """The fields of a row by which `report/verdicts.py` judges its results."""
    names = ("published", "tolerance", "unit", "seeds", "share", "fails", "note", "dataset", "changed_after_test")
    settings = [setting(run.to_json()) for run in row.possible_runs()]
    return {"row": row.name, **{name: getattr(row, name) for name in names}, "settings": settings}


def _order(name: str) -> tuple[str, int, int, str]:
    paper, _, function = name.partition("/")
    digits = "".join(letter for letter in function if letter.isdigit())
    group = 0 if function.startswith("table") else 1 if function.startswith("fig") else 2
    return paper, group, int(digits) if group < 2 and digits else 0, function


def _present(name: str) -> bool:
    return name in DATASETS and store.present(name)
