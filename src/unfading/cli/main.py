"""The `unfading` command: parse the command line, run the command, and report errors in one sentence.

Building the help must be fast, so the modules of the commands import torch and everything that needs it only when a
command runs.
"""

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple, Union

Command = Callable[..., None]


def main() -> None:
    """Entry point of the `unfading` command. Every error is one sentence on stderr, with exit code 2.

    With UNFADING_TRACEBACK=1 in the environment an error also prints its traceback.
    """
    from unfading.cli.old_forms import current_form

    if isinstance(sys.stdout, TextIOWrapper):  # a name that the terminal cannot show must not end the command
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command = _parse(current_form(sys.argv[1:]))
        command()
    except BrokenPipeError:
        # The reader closed the pipe (`unfading cells list | head`). Writing to stdout would fail again at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("unfading: stopped.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if os.environ.get("UNFADING_TRACEBACK"):
            traceback.print_exc()
        print(f"unfading: {_sentence(error)}", file=sys.stderr)
        sys.exit(2)


def _sentence(error: Exception) -> str:
    """The message of an error. One that is not written for users gets its type and the line that raised it."""
    if isinstance(error, ValueError | TypeError | OSError):
        return str(error)
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
        return "there is not enough memory. Use a smaller batch, hidden size, number of layers or sequence length."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = (str(error) or "no message").splitlines()[0]
    return (
        f"{type(error).__name__}: {message} ({frame.filename}, line {frame.lineno}). UNFADING_TRACEBACK=1 shows the traceback."
    )


class CommandGroup(NamedTuple):
    """Commands that share their first word, as in `unfading data list`."""

    description: str
    commands: dict[str, Command]


def commands() -> dict[str, Command | CommandGroup]:
    """Every command of the command line by its name."""
    from unfading.cli import data_command, listing, reproduce_command
    from unfading.cli.bench_command import bench
    from unfading.cli.diagnose_command import diagnose
    from unfading.cli.export_command import export
    from unfading.cli.predict_command import predict
    from unfading.cli.report_command import report
    from unfading.cli.train_command import compare, train

    cells: dict[str, Command] = {
        "list": listing.list_cells,
        "show": listing.show_cell,
        "explain": listing.explain_cells,
        "program": listing.print_program,
    }
    data: dict[str, Command] = {"list": data_command.list_datasets, "fetch": data_command.fetch, "verify": data_command.verify}
    reproduce: dict[str, Command] = {
        "list": reproduce_command.list_items,
        "run": reproduce_command.run_items,
        "draw": reproduce_command.draw_items,
        "page": reproduce_command.write_page,
    }
    return {
        "cells": CommandGroup("Cells: list them, show one, explain how they run, print a compiled program.", cells),
        "tasks": listing.tasks,
        "data": CommandGroup("Datasets: list them, fetch one, verify checksums.", data),
        "train": train,
        "compare": compare,
        "predict": predict,
        "report": report,
        "diagnose": diagnose,
        "reproduce": CommandGroup("Tables and figures of the papers: list, run or draw them; write the page.", reproduce),
        "export": export,
        "bench": bench,
        "doctor": listing.doctor,
    }


def _parse(arguments: list[str]) -> Callable[[], None]:
    """The command that the arguments name, ready to be called."""
    import tyro

    constructors = {
        name: _group(each) if isinstance(each, CommandGroup) else _deferred(each) for name, each in commands().items()
    }
    config = [tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes]
    description = "Recurrent networks for long sequences: train them, compare them, and see where their gradients go."
    return tyro.extras.subcommand_cli_from_dict(
        constructors, prog="unfading", description=description, args=arguments, config=config
    )


def _group(group: CommandGroup) -> Callable[..., Any]:
    """A function whose argument chooses one of the commands."""
    from tyro.conf import subcommand

    # tyro reads a choice of functions from a union type, which cannot be written statically here.
    options = [Annotated[Any, subcommand(name, constructor=_deferred(each))] for name, each in group.commands.items()]
    choice: Any = Union[tuple(options)]  # noqa: UP007

    def choose(command: choice) -> Any:
        return command

    choose.__doc__ = group.description
    return choose


def _deferred(command: Command) -> Callable[..., Callable[[], None]]:
    """The same signature, but the call happens after parsing: tyro reports an error raised inside it as a parsing error."""

    @wraps(command)
    def bind(*arguments: Any, **options: Any) -> Callable[[], None]:
        return partial(command, *arguments, **options)

    return bind
