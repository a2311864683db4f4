"""`Item`: a table or figure of a paper, reproduced."""

import json
import math
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from unfading.files import write_atomically
from unfading.report.figures.charts import needed, svg, vega_lite_version


class Item(NamedTuple):
    """A reproduced figure.

    Each paper has a folder in `papers/`. Every public function there that returns an `Item` is a figure, named PAPER/FUNCTION.
    """

    title: str
    caption: str  # explains the figure without the paper at hand
    chart: dict[str, Any]  # Vega-Lite
    rows: list[dict[str, Any]]  # every number of the figure, as JSON values
    findings: list[str]  # the results, in sentences with numbers

    def save(self, name: str, folder: Path) -> list[Path]:
        """Write the figure as PNG and SVG and its numbers and sentences as JSON: folder/incremental-fig2.png and so on."""
        convert = needed("vl_convert")
        make_folder(folder)
        chart = {**self.chart, "background": "white"}
        text: dict[str, Any] = {"item": name, **self._asdict()}
        del text["chart"]
        content = {
            ".png": convert.vegalite_to_png(chart, vl_version=vega_lite_version(), scale=1.5),
            ".svg": svg(self.chart),
            ".json": (json.dumps(_finite(text), indent=1, allow_nan=False) + "\n").encode(),
        }
        paths = {suffix: folder / f"{name.replace('/', '-')}{suffix}" for suffix in content}
        for suffix, path in paths.items():
            write_atomically(path, bytes(content[suffix]))
        return list(paths.values())

    def text(self, width: int = 100) -> str:
        """Title, caption and findings as plain text."""
        findings = [textwrap.fill(f"- {each}", width, subsequent_indent="  ") for each in self.findings]
        return "\n".join([self.title, "", textwrap.fill(self.caption, width), "", *findings])


def _finite(value: Any) -> Any:
    """The same JSON value with null for numbers that are not finite: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_folder(folder: Path) -> None:
    """Create the output folder and its parents where they are missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {folder} cannot be created: {error.strerror}. Name another folder.") from error
