"""A page as one file that needs no network: Vega is in it once, and the reader's browser draws the figures.

All text is escaped by who puts it in; what is in a figure cannot end its script. Equal content makes equal bytes.
"""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from unfading.report.figures.charts import Spec, language, needed
from unfading.report.style import DRAW, POLICY, STYLE


def html(title: str, body: Sequence[str], charts: Sequence[Spec]) -> str:
    """The whole page: lines of HTML, and the charts that `figure` left a place for."""
    bundle = needed("vl_convert").javascript_bundle(vl_version=language())
    head = [
        "<meta charset='utf-8'>", f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
    ]  # fmt: skip
    # `<` as JavaScript's own escape: no text of a record can end the script.
    texts = [json.dumps(chart, sort_keys=True, ensure_ascii=True).replace("<", "\\u003c") for chart in charts]
    specs = [f"<script type='application/json' id='figure-{i}'>{text}</script>" for i, text in enumerate(texts, 1)]
    scripts = [*specs, f"<script>{_inline(bundle)}</script>", f"<script>{DRAW}</script>"]
    return "\n".join(
        ["<!doctype html>", "<html lang='en'>", "<head>", *head, "</head>", "<body>", *body, *scripts, "</body>", "</html>", ""]
    )


def figure(caption: str, number: int, note: str = "") -> str:
    """The place of a chart, counted from 1, with a caption above and, where there is one, a note below."""
    said = f"<p class='dim'>{escape(note)}</p>" if note else ""
    plot = f"<div class='plot' data-figure='figure-{number}'></div>"
    return f"<figure><figcaption>{escape(caption)}</figcaption>{plot}{said}</figure>"


def check(output: Path) -> None:
    """Raise where no page can be written."""
    if output.is_dir():
        raise ValueError(f"the page needs a file's name; {output} is a folder. Nearest: {output / 'report.html'}")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"cannot write {output}: there is no folder {output.parent}. Make it first.")


def _inline(script: str) -> str:
    """The same script with nothing in it that HTML would take for its end."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
