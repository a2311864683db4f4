"""The command line: one function per verb, flags from its signature."""

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from json import dumps
from typing import Annotated, Any

from unfading import catalogue, cli_data
from unfading.errors import check_count


def cells(
    input_size: int = 1,
    hidden_size: int = 128,
    length: int = 784,
    json: bool = False,
) -> None:
    """List every cell: state sizes, recurrent matrices per step, parameters, multiply-adds, paper.

    Args:
        input_size: features of the input.
        hidden_size: hidden size at which the cells are measured.
        length: steps of a sequence.
        json: print JSON instead of a table.
    """
    check_count("--input-size", input_size)
    check_count("--hidden-size", hidden_size)
    check_count("--length", length)
    entries = [
        catalogue.entry(cell, input_size=input_size, hidden_size=hidden_size, length=length) for cell in catalogue.cells()
    ]
    if json:
        print(dumps([entry._asdict() for entry in entries], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="underline",
        title=f"{len(entries)} cells at input size {input_size}, hidden size {hidden_size}, {length} steps, default options",
        caption="mats: products inside a step, in units of one hidden x hidden matrix. MAC: multiply-adds of all matrix "
        "products, the input's projection included.",
    )
    table.add_column("cell", style="bold", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("mats", "params", "MAC/step", "MAC/seq."):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("paper")
    for entry in entries:
        table.add_row(
            entry.name,
            " ".join(f"{name}:{size}" for name, size in entry.state.items()),
            f"{entry.recurrent_matrices:.3g}",
            f"{entry.parameters:,}",
            f"{entry.multiply_adds_per_step:,}",
            f"{entry.multiply_adds_per_sequence / 1e6:,.1f} M",
            entry.paper,
        )
    Console().print(table)


def tasks(json: bool = False) -> None:
    """List every task: what it asks, options, the score of a guess, its dataset and paper.

    Args:
        json: print JSON instead of a table.
    """
    entries = [catalogue.task_entry(name, task) for name, task in catalogue.tasks().items()]
    if json:
        print(dumps([entry._asdict() for entry in entries], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="underline",
        title=f"{len(entries)} tasks at their default options",
        caption="guess: what a guesser without memory scores; for a dataset, how often its commonest class is right.",
    )
    table.add_column("task", style="bold", no_wrap=True)
    table.add_column("what")
    table.add_column("guess", no_wrap=True)
    table.add_column("dataset")
    for entry in entries:
        what = f"{entry.what.split(' (')[0].rstrip('.')}. {entry.paper}"
        guess = entry.measure if entry.guess is None else f"{entry.guess:.4f} {entry.measure}"
        dataset = "generated" if entry.dataset is None else f"{entry.dataset}, {'found' if entry.found else 'not here'}"
        table.add_row(entry.name, what, guess, dataset)
    Console().print(table)


def main() -> None:
    """Entry point of the `unfading` command; a wrong argument is one sentence and exit code 2."""
    import tyro
    from tyro.conf import subcommand

    # tyro reads a choice of functions from a union; mypy has no word for a type that is made here.
    choice: Any = (
        Annotated[Any, subcommand("list", constructor=_later(cli_data.list_datasets))]
        | Annotated[Any, subcommand("fetch", constructor=_later(cli_data.fetch))]
        | Annotated[Any, subcommand("verify", constructor=_later(cli_data.verify))]
    )

    def data(verb: choice) -> Any:
        """Datasets: list them, fetch one, verify those that are here."""
        return verb

    verbs = {"cells": _later(cells), "tasks": _later(tasks), "data": data}
    config = [tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes]
    act = tyro.extras.subcommand_cli_from_dict(verbs, prog="unfading", config=config)
    try:
        act()
    except BrokenPipeError:
        # The reader has gone (`unfading cells | head`); nothing is left to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError, OSError) as error:
        print(f"unfading: {error}", file=sys.stderr)
        sys.exit(2)


def _later(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The verb, put off until tyro is done: an error of its own inside tyro would be told as one of parsing."""

    @wraps(verb)
    def put_off(*arguments: Any, **options: Any) -> Callable[[], None]:
        return partial(verb, *arguments, **options)

    return put_off
