"""The `unfading` command: parse the command line, run the command, and report errors in one sentence.

Building the help must be fast. The modules of the commands import torch and everything that needs it only when a command runs,
and only the flags of the command that is named are read; of the others the help needs one sentence.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import getdoc
from io import TextIOWrapper
from textwrap import wrap
from types import ModuleType
from typing import Any, NamedTuple

from unfading.errors import unknown

Command = Callable[..., None]
HELP = ("-h", "--help")
WIDTH = 80
# What commands do before their first output: importing torch alone takes seconds.
SLOW_STARTS = {
    "train": "loading torch and the data, and compiling the cell if it is new",
    "compare": "loading torch and the data, and compiling the cells that are new",
    "diagnose": "loading torch, and measuring gradients",
    "reproduce": "loading torch and the results",
    "leaderboard": "loading torch and the results",
    "bench": "loading torch, and compiling what is timed",
    "export": "loading torch and the model",
    "predict": "loading torch, the model and the data",
}
# Commands that train in this process. Others may not need torch, whose import takes seconds.
TRAINING = ("train", "compare", "reproduce run", "leaderboard run", "sweep run", "sweep work")
ABOUT = "Recurrent networks for long sequences: train them, compare them, and see where their gradients go."


def main() -> None:
    """Entry point of the `unfading` command. Every error is one sentence on stderr, with exit code 2.

    With UNFADING_TRACEBACK=1 in the environment an error also prints its traceback.
    """
    from unfading.cli.old_forms import current_form

    if isinstance(sys.stdout, TextIOWrapper):  # a name that the terminal cannot show must not end the command
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["--version"]:
            print(_versions())
            return
        words = current_form(arguments)
        command = _parse(words)
        _announce(arguments)
        if {words[0], " ".join(words[:2])} & set(TRAINING):
            from unfading.training.freed_memory import keep_freed_memory

            keep_freed_memory()
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


def _announce(arguments: list[str]) -> None:
    """On a terminal, say what a command does in its first seconds, before it shows anything itself."""
    if sys.stderr.isatty() and arguments[0] in SLOW_STARTS and not {"--quiet", "--json", *HELP} & set(arguments):
        print(f"unfading: {SLOW_STARTS[arguments[0]]} ...", file=sys.stderr, flush=True)


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
    from unfading.cli import data_command, leaderboard_command, listing, reproduce_command, sweep_command
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
    leaderboard: dict[str, Command] = {
        "list": leaderboard_command.list_entries,
        "run": leaderboard_command.run_entries,
        "page": leaderboard_command.write_page,
    }
    sweep: dict[str, Command] = {
        "run": sweep_command.run_sweep,
        "work": sweep_command.work,
        "list": sweep_command.list_studies,
        "report": sweep_command.report,
    }
    return {
        "cells": CommandGroup("Cells: list them, show one, explain how they run, print a compiled program.", cells),
        "tasks": listing.tasks,
        "data": CommandGroup("Datasets: list them, fetch one, verify checksums.", data),
        "train": train,
        "compare": compare,
        "sweep": CommandGroup("Search settings with workers on any number of machines: run, work, list, report.", sweep),
        "predict": predict,
        "report": report,
        "diagnose": diagnose,
        "reproduce": CommandGroup("Tables and figures of the papers: list, run or draw them; write the page.", reproduce),
        "leaderboard": CommandGroup("Cells on tasks that need long memory: list, run, write the page.", leaderboard),
        "export": export,
        "bench": bench,
        "doctor": listing.doctor,
    }


def _parse(arguments: list[str]) -> Callable[[], None]:
    """The command that the arguments name, ready to be called."""
    about, known = ABOUT, commands()
    program, arguments = ["unfading"], _named_cell(arguments)
    while True:
        name = arguments[0] if arguments else ""
        if name in HELP:
            return partial(print, _help(program, about, known))
        if name not in known:
            raise ValueError(_no_command(program, name, known))
        program, arguments, command = [*program, name], arguments[1:], known[name]
        if not isinstance(command, CommandGroup):
            return _flags(command, program, arguments)
        about, known = command.description, dict(command.commands)


def _flags(command: Command, program: list[str], arguments: list[str]) -> Callable[[], None]:
    import tyro

    config = [tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes]
    return tyro.cli(_deferred(command), prog=" ".join(program), args=arguments, config=config)


def _help(program: list[str], about: str, known: Mapping[str, Command | CommandGroup]) -> str:
    """The commands, each with its first paragraph. tyro would read the flags of all commands to write this."""
    lines = [f"usage: {' '.join(program)} [-h] COMMAND ...", "", *wrap(about, WIDTH), "", "commands:"]
    column = max(map(len, known)) + 4
    for name, command in known.items():
        text = command.description if isinstance(command, CommandGroup) else getdoc(command) or ""
        lines += wrap(
            text.partition("\n\n")[0], WIDTH, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column
        )
    lines += ["", *wrap(f"`{' '.join(program)} COMMAND --help` shows the flags of a command.", WIDTH)]
    if not program[1:]:
        lines.append("`unfading --version` shows the versions of unfading, torch and Python.")
    return "\n".join(lines)


def _no_command(program: list[str], name: str, known: Mapping[str, object]) -> str:
    words = " ".join(program)
    if name and not name.startswith("-"):
        return f"{unknown(f'command of {words}', name, known)} `{words} --help` describes them."
    return f"{words} needs a command: {', '.join(known)}. `{words} --help` describes them."


def _deferred(command: Command) -> Callable[..., Callable[[], None]]:
    """The same signature, but the call happens after parsing: tyro reports an error raised inside it as a parsing error."""

    @wraps(command)
    def bind(*arguments: Any, **options: Any) -> Callable[[], None]:
        return partial(command, *arguments, **options)

    return bind


def _package() -> ModuleType:
    """The package, which Python loads before any module in it."""
    return sys.modules[__name__.partition(".")[0]]


def _named_cell(arguments: list[str]) -> list[str]:
    """`cells NAME` is short for `cells show NAME`. A word in lower case that names no cell is a verb, perhaps misspelt."""
    if arguments[:1] != ["cells"] or arguments[1:2] == [] or arguments[1].startswith("-"):
        return arguments
    word = arguments[1]
    names_a_cell = word.lower() in map(str.lower, _package().__all__) or word != word.lower() or ":" in word
    return ["cells", "show", *arguments[1:]] if names_a_cell else arguments


def _versions() -> str:
    """The versions that a report of a problem needs. Nothing is imported for them."""
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "missing"
    return f"unfading {_package().__version__}, torch {torch}, Python {python_version()}"
