"""A table of numbers with explained headings, as the pages of a diagnosis, backtest, sweep and export show them."""

from typing import NamedTuple


class NumberTable(NamedTuple):
    """A table of a page: explanations by heading, and for each row its label and the other cells."""

    columns: dict[str, str]
    rows: list[tuple[str, list[str]]]
