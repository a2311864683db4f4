"""The command line: one function per verb, flags from its signature."""

import os
import shlex
import sys
from collections.abc import Callable
from functools import partial, wraps
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from unfading import catalogue
from unfading import doctor as _doctor
from unfading.cli import data_command as cli_data
from unfading.cli import report_command as cli_report
from unfading.cli import reproduce_command as cli_reproduce
from unfading.errors import check_count
from unfading.fuse.c import cache


def cells(
    input_size: int = 1,
    hidden_size: int = 128,
    length: int = 784,
    json: bool = False,
    explain: bool = False,
    program: str | None = None,
) -> None:
    """List every cell: state sizes, recurrent matrices per step, parameters, multiply-adds, paper.

    Args:
        input_size: features of the input.
        hidden_size: hidden size at which the cells are measured.
        length: steps of a sequence.
        json: print JSON instead of a table.
        explain: say of every cell how it runs on the CPU, and why it does not run fused where it does not.
        program: print what the compiler makes of this cell's step, forward and backward.
    """
    check_count("--input-size", input_size)
    check_count("--hidden-size", hidden_size)
    check_count("--length", length)
    if program is not None:
        print(_doctor.programs(program, input_size=input_size, hidden_size=hidden_size))
        return
    if explain:
        _explain(json)
        return
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
        "products, the input's projection included. kept/step: bytes that one step of one row keeps for the backward pass, "
        "fused, in float32.",
    )
    table.add_column("cell", style="bold", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("mats", "params", "MAC/step", "MAC/seq.", "kept/step"):
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
            "-" if entry.bytes_kept_per_step is None else f"{entry.bytes_kept_per_step:,}",
            entry.paper,
        )
    Console().print(table)


def _explain(json: bool) -> None:
    found = _doctor.explanations()
    if json:
        print(dumps([line._asdict() for line in found], indent=2))
        return
    for line in found:
        print(f"{line.name:24} {'fused' if line.fused else 'reference'}: {line.reason}")


def doctor(clear_cache: bool = False, hidden_size: int = 128, json: bool = False) -> None:
    """Tell what of the fast paths works on this machine, and why the rest does not.

    Args:
        clear_cache: remove the compiled kernels; they are made again when next needed.
        hidden_size: at which to tell how cells run on a GPU, where there is one.
        json: print JSON instead of text.
    """
    check_count("--hidden-size", hidden_size)
    if clear_cache:
        kernels, size = cache.clear()
        print(f"removed {kernels} kernels, {size / 1e6:.1f} MB, from {cache.folder()}")
        return
    lines, cells, on_gpu = _doctor.findings(), _doctor.explanations(), _doctor.explanations_on_gpu(hidden_size)
    if json:
        said: dict[str, list[Any]] = {"machine": lines, "cells": cells, "on_gpu": on_gpu}
        print(dumps({part: [line._asdict() for line in listed] for part, listed in said.items()}, indent=2))
        return
    for finding in lines:
        print(f"{'ok ' if finding.good else 'BAD'} {finding.name:10} {finding.value}")
    works = all(finding.good for finding in lines if finding.name == "compiling")
    fused = [cell for cell in cells if cell.fused] if works else []
    print(f"{'ok ' if works else 'BAD'} cells      {len(fused)} of {len(cells)} can run fused on the CPU")
    for cell in cells:
        if not cell.fused:
            print(f"    {cell.name} runs by the reference loop: {cell.reason}")
    if on_gpu:
        _print_on_gpu(on_gpu, hidden_size)


def _print_on_gpu(cells: "list[_doctor.OnGPU]", hidden_size: int) -> None:
    ways = {"fused": "can run fused", "graph": "as CUDA graphs", "reference": "by the reference loop", "none": "not at all"}
    numbers = {way: sum(cell.backend == way for cell in cells) for way in ways}
    counts = [f"{number} {ways[way]}" for way, number in numbers.items() if number]
    print(f"ok  on the GPU {', '.join(counts)}, with {hidden_size} units in float32")
    for cell in cells:
        if cell.backend != "fused":
            print(f"    {cell.name} runs {ways[cell.backend]}: {cell.reason}")


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


def bench(
    cells: tuple[str, ...] = (),
    all: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int = 1,
    rounds: int | None = None,
    json: bool = False,
    save: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Time cells against the reference loop, torch.nn's nearest and their own matrix products, after checking agreement.

    A cell whose results differ from the reference is not timed; the exit code is then 1. On a GPU the peers are cuDNN, the
    eager and the graphed loop, and FlashRNN's and TorchRL's kernels where they are installed.

    Args:
        cells: which cells, by the names that `unfading cells` prints; without any, a few well-known ones.
        all: the whole table of `benchmarks/bars.py`: every cell, all sizes; 10 to 20 minutes.
        device: what is measured; the GPU takes some minutes, most of them for compiling and for the eager loop.
        threads: torch threads; with more than one, lines whose control is more than 10 % off are left out.
        rounds: at most so many rounds a line, 15 on a CPU and 50 on a GPU; slow ones get fewer.
        json: print JSON lines instead of tables.
        save: append JSON lines to this file, or to cpu-MACHINE.jsonl or cuda-MACHINE.jsonl in this folder.
        figure: write a bar chart of the CPU's lines to this SVG file.
    """
    from unfading.cli import bench_command as command

    check_count("--threads", threads)
    if rounds is not None:
        check_count("--rounds", rounds)
    typed = shlex.join(["unfading", *sys.argv[1:]])
    if device == "cpu":
        sys.exit(command.on_cpu(cells, all, threads, rounds, json=json, save=save, figure=figure, typed=typed))
    if threads != 1 or figure is not None:
        raise ValueError("--threads and --figure are for --device cpu; leave them out with --device cuda.")
    sys.exit(command.on_gpu(cells, all, rounds, json=json, save=save, typed=typed))


def main() -> None:
    """Entry point of the `unfading` command; a wrong argument is one sentence and exit code 2."""
    import tyro
    from tyro.conf import subcommand

    from unfading.cli import diagnose_command as cli_diagnose
    from unfading.cli import train_command as cli_train

    # tyro reads a choice of functions from a union; mypy has no word for a type that is made here.
    choice: Any = (
        Annotated[Any, subcommand("list", constructor=_later(cli_data.list_datasets))]
        | Annotated[Any, subcommand("fetch", constructor=_later(cli_data.fetch))]
        | Annotated[Any, subcommand("verify", constructor=_later(cli_data.verify))]
    )

    def data(verb: choice) -> Any:
        """Datasets: list them, fetch one, verify those that are here."""
        return verb

    verbs = {
        "cells": _later(cells),
        "doctor": _later(doctor),
        "bench": _later(bench),
        "tasks": _later(tasks),
        "data": data,
        "train": _later(cli_train.train),
        "compare": _later(cli_train.compare),
        "report": _later(cli_report.report),
        "diagnose": _later(cli_diagnose.diagnose),
        "reproduce": _later(cli_reproduce.reproduce),
    }
    config = [tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes]
    act = tyro.extras.subcommand_cli_from_dict(verbs, prog="unfading", config=config)
    try:
        act()
    except BrokenPipeError:
        # The reader has gone (`unfading cells | head`); nothing is left to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("unfading: stopped.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, TypeError, OSError) as error:
        print(f"unfading: {error}", file=sys.stderr)
        sys.exit(2)


def _later(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The verb, put off until tyro is done: an error of its own inside tyro would be told as one of parsing."""

    @wraps(verb)
    def put_off(*arguments: Any, **options: Any) -> Callable[[], None]:
        return partial(verb, *arguments, **options)

    return put_off
