"""The command line: one function per verb, flags from its signature."""

import os
import shlex
import sys
from json import dumps
from pathlib import Path

from unfading import catalogue
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


def bench(
    cells: tuple[str, ...] = (),
    all: bool = False,
    threads: int = 1,
    rounds: int = 15,
    json: bool = False,
    save: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Time cells against the reference loop, torch.nn's nearest and their own matrix products, after checking agreement.

    A cell whose results differ from the reference is not timed; the exit code is then 1.

    Args:
        cells: which cells, by the names that `unfading cells` prints; without any, a few well-known ones.
        all: the whole table of `benchmarks/bars.py`: every cell, all sizes; 10 to 20 minutes.
        threads: torch threads; with more than one, lines whose control is more than 10 % off are left out.
        rounds: at most so many rounds a line; slow ones get fewer.
        json: print JSON lines instead of tables.
        save: append JSON lines to this file, or to cpu-MACHINE.jsonl in this folder.
        figure: write a bar chart to this SVG file.
    """
    from unfading.bench import command

    check_count("--threads", threads)
    check_count("--rounds", rounds)
    typed = shlex.join(["unfading", *sys.argv[1:]])
    sys.exit(command.run(cells, all, threads, rounds, json=json, save=save, figure=figure, typed=typed))


def main() -> None:
    """Entry point of the `unfading` command; a wrong argument is one sentence and exit code 2."""
    import tyro

    try:
        tyro.extras.subcommand_cli_from_dict(
            {"cells": cells, "bench": bench}, prog="unfading", config=[tyro.conf.FlagCreatePairsOff]
        )
    except (ValueError, TypeError) as error:
        print(f"unfading: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader has gone (`unfading cells | head`); nothing is left to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
