"""HTML pages from the templates in `templates/`: one file that works offline.

The page contains Vega once; the reader's browser draws the figures. Jinja2 escapes all text, and nothing in a figure can end
its script. Equal content gives equal bytes.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unfading.files import write_atomically
from unfading.report.figures.charts import Figure, Spec, needed, png, vega_lite_version


class PlacedFigure(NamedTuple):
    """The place of a figure on a page; `number` is that of its chart, counted from 1."""

    number: int
    caption: str
    note: str = ""


def render(template: str, title: str, charts: Sequence[Spec], **content: Any) -> str:
    """The page as text.

    Args:
        template: Name of a file in `templates/`.
        title: Title of the page.
        charts: The charts to which the numbers of the page's `PlacedFigure`s refer, in order.
        content: The template's other variables.
    """
    jinja2 = needed("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("unfading.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    vega = _inline(needed("vl_convert").javascript_bundle(vl_version=vega_lite_version()))
    return str(environment.get_template(template).render(title=title, charts=charts, vega=vega, **content))


def check(output: Path) -> None:
    """Raise if a page cannot be written to this path."""
    if output.is_dir():
        raise ValueError(f"the page needs a file name; {output} is a folder. Nearest: {output / 'report.html'}")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"cannot write {output}: there is no folder {output.parent}. Create it first.")


def write(output: Path, page: str, figures: Mapping[str, Figure]) -> list[Path]:
    """Write a page, and figures beside it as NAME-figure.png; the paths written, the page first."""
    files = {output: page.encode()}
    for name, figure in figures.items():
        files[output.with_name(f"{output.stem}-{name}.png")] = png(figure.chart)
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _inline(script: str) -> str:
    """The same script, without the character sequences that would end it in HTML."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
