"""Which items exist, found by walking this folder, and their files.

An item is a public function of a module here that can be called without arguments. Its name is PAPER/FUNCTION, where the paper
is the folder: `papers/incremental/tables.py` holds `table1`, which is incremental/table1. What it returns says what it
is: `list[Row]` a table, `Curves` a figure from records of runs, `Item` a figure that is made when it is called.
"""

import importlib
import inspect
import json
import pkgutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import unfading.papers
from unfading.data import store
from unfading.data.datasets import DATASETS
from unfading.errors import unknown
from unfading.papers.item import Item
from unfading.papers.row import Curves, Row
from unfading.papers.train_rows import available, settings
from unfading.report.figures.charts import language, needed, svg
from unfading.training.checkpoint import write

KINDS = (Item, Curves, list[Row])
# Items of `Item` that read a dataset.
READS = {"incremental/fig7": "har", "incremental/fig8": "har", "star/fig3": "mnist"}


def items() -> dict[str, Callable[..., Any]]:
    """Every item under its name, in the order of papers, tables and numbers."""
    found: dict[str, Callable[..., Any]] = {}
    for info in pkgutil.walk_packages(unfading.papers.__path__, f"{unfading.papers.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
            if own and _makes(value):
                found[f"{info.name.split('.')[2]}/{name}"] = value
    return dict(sorted(found.items(), key=lambda pair: _order(pair[0])))


def _makes(function: Callable[..., Any]) -> bool:
    """Whether it returns an item and can be called without anything."""
    signature = inspect.signature(function)
    free = all(each.default is not each.empty for each in signature.parameters.values())
    return free and signature.return_annotation in KINDS


def item(name: str) -> Callable[..., Any]:
    """The function of that name, or a sentence with the nearest."""
    known = items()
    if name not in known:
        raise ValueError(f"{unknown('item', name, known)} `unfading reproduce --list` names all.")
    return known[name]


def kind(make: Callable[..., Any]) -> Any:
    """`Item`, `Curves` or `list[Row]`."""
    return inspect.signature(make).return_annotation


def rows(make: Callable[..., Any]) -> list[Row]:
    """The rows of a table or of a figure of curves; none of another figure."""
    made = [] if kind(make) is Item else make()
    return list(made.rows) if isinstance(made, Curves) else made


def title(make: Callable[..., Any]) -> str:
    """What it is, in a line."""
    return (inspect.getdoc(make) or "").splitlines()[0]


def listed(name: str, make: Callable[..., Any]) -> str:
    """A line for people: what it is, and which data it needs and has."""
    needs = sorted({row.dataset for row in rows(make) if row.dataset} | ({READS[name]} if name in READS else set()))
    told = [f"{each} {'found' if _present(each) else 'not here'}" for each in needs]
    return f"{name:30} {title(make)} [{', '.join(told) or 'no data needed'}]"


def lines(chosen: Sequence[str]) -> list[dict[str, Any]]:
    """What is published, as lines for `report/fidelity.py`: one for each row, one for each other figure."""
    found: list[dict[str, Any]] = []
    for name in chosen:
        make = item(name)
        if kind(make) is Item:
            found.append({"kind": "figure", "item": name, "title": title(make)})
        for row in rows(make):
            about = {"title": title(make), "here": available(row), "printed": row.printed}
            found.append({"kind": "row", "item": name, **about, **claim(row)})
    return found


def claim(row: Row) -> dict[str, Any]:
    """What `report/verdicts.py` judges by."""
    parts = ("published", "tolerance", "unit", "seeds", "share", "chance", "missing", "note", "dataset")
    return {"row": row.name, **{part: getattr(row, part) for part in parts}, "settings": settings(row)}


def save(name: str, made: Item, folder: Path) -> list[Path]:
    """Write the picture as PNG and SVG, and numbers and words as JSON: folder/incremental-fig2.png and so on."""
    convert = needed("vl_convert")
    make_folder(folder)
    chart = {**made.chart, "background": "white"}
    stem = folder / name.replace("/", "-")
    words: dict[str, Any] = {"item": name, **made._asdict()}
    del words["chart"]
    content = {
        ".png": convert.vegalite_to_png(chart, vl_version=language(), scale=1.5),
        ".svg": svg(made.chart),
        ".json": (json.dumps(words, indent=1) + "\n").encode(),
    }
    for ending, content_ in content.items():
        write(stem.with_name(stem.name + ending), bytes(content_))
    return [stem.with_name(stem.name + ending) for ending in content]


def make_folder(folder: Path) -> None:
    """The folder for what is written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be made: {error.strerror}. Name another folder.") from error


def told(made: Item, width: int = 100) -> str:
    """Title, caption and findings, as text."""
    findings = [textwrap.fill(f"- {each}", width, subsequent_indent="  ") for each in made.findings]
    return "\n".join([made.title, "", textwrap.fill(made.caption, width), "", *findings])


def _order(name: str) -> tuple[str, int, int, str]:
    """Papers by name; in each tables, then figures, each by number, then the rest."""
    paper, _, own = name.partition("/")
    digits = "".join(letter for letter in own if letter.isdigit())
    group = 0 if own.startswith("table") else 1 if own.startswith("fig") else 2
    return paper, group, int(digits) if group < 2 and digits else 0, own


def _present(name: str) -> bool:
    return name in DATASETS and store.present(name)
