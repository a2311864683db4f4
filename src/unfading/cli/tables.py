"""Tables that the commands print. They are as wide as the terminal, or 80 columns where there is none."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def plain_table(title: str, caption: str) -> "Table":
    """An empty table without lines."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline", title=title, caption=caption)


def print_table(table: "Table") -> None:
    """Print a table on stdout."""
    from rich.console import Console

    Console().print(table)
