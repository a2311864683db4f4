"""Which items exist, found by walking this folder, and their files."""

import importlib
import inspect
import json
import pkgutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import unfading.papers
from unfading.checkpoint import write
from unfading.errors import unknown
from unfading.papers.item import Item
from unfading.report.figures import language, needed


def items() -> dict[str, Callable[[], Item]]:
    """Every item under its name, incremental/fig2: the public functions of this folder's modules that return one."""
    found: dict[str, Callable[[], Item]] = {}
    for info in pkgutil.iter_modules(unfading.papers.__path__):
        module = importlib.import_module(f"{unfading.papers.__name__}.{info.name}")
        for name, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
            if own and inspect.signature(value).return_annotation is Item:
                found[f"{info.name}/{name}"] = value
    return dict(sorted(found.items()))


def item(name: str) -> Callable[[], Item]:
    """The function of that name, or a sentence with the nearest."""
    known = items()
    if name not in known:
        raise ValueError(f"{unknown('item', name, known)} `unfading reproduce --list` names all.")
    return known[name]


def save(name: str, made: Item, folder: Path) -> list[Path]:
    """Write the picture as PNG and SVG, and numbers and words as JSON: folder/incremental-fig2.png and so on."""
    convert = needed("vl_convert")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be made: {error.strerror}. Name another folder.") from error
    chart = {**made.chart, "background": "white"}
    stem = folder / name.replace("/", "-")
    words: dict[str, Any] = {"item": name, **made._asdict()}
    del words["chart"]
    content = {
        ".png": convert.vegalite_to_png(chart, vl_version=language(), scale=1.5),
        ".svg": convert.vegalite_to_svg(chart, vl_version=language()).encode(),
        ".json": (json.dumps(words, indent=1) + "\n").encode(),
    }
    for ending, data in content.items():
        write(stem.with_name(stem.name + ending), bytes(data))
    return [stem.with_name(stem.name + ending) for ending in content]


def told(made: Item, width: int = 100) -> str:
    """Title, caption and findings, as text."""
    findings = [textwrap.fill(f"- {each}", width, subsequent_indent="  ") for each in made.findings]
    return "\n".join([made.title, "", textwrap.fill(made.caption, width), "", *findings])
