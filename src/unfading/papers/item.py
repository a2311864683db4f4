"""What a table or a figure of a paper is once it has been made here: a small frozen value."""

from typing import Any, NamedTuple


class Item(NamedTuple):
    """A reproduced figure or table.

    `papers` holds one module a paper; each of its public functions that returns an `Item` is an item, named PAPER/FUNCTION.
    """

    title: str
    caption: str  # explains the picture without the paper at hand
    chart: dict[str, Any]  # Vega-Lite
    rows: list[dict[str, Any]]  # every number in it, of JSON values
    findings: list[str]  # what was found, in words with numbers
