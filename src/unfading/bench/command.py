"""A run of the benchmark from the command line: cases in, rows measured one after the other, what people see of it."""

import json as jsonlines
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from unfading import machine
from unfading.bench import cases
from unfading.bench.cases import Case
from unfading.bench.figure import svg
from unfading.bench.measure import measure
from unfading.bench.rows import Row
from unfading.bench.table import tables


def run(
    cells: Sequence[str],
    all: bool,
    threads: int,
    rounds: int,
    *,
    json: bool,
    save: Path | None,
    figure: Path | None,
    typed: str,
) -> int:
    """Measure and show; the exit code: 0, 1 where a cell computed something wrong, 130 where the run was stopped."""
    if threads > machine.cores():
        raise ValueError(f"--threads must be at most the {machine.cores()} cores that this process may use; got {threads}.")
    planned = cases.everything(cells) if all else cases.headline(cells)
    about = machine.about(typed)
    if save is not None and save.is_dir():
        save = save / f"cpu-{machine.slug()}.jsonl"
    # What cannot be written is said before minutes are spent.
    for flag, path in (("--save", save), ("--figure", figure)):
        if path is not None:
            _check_writable(flag, path)
    rows: list[Row] = []
    stopped = False
    try:
        with nullcontext() if save is None else open(save, "a", encoding="utf-8") as file:
            for row in _measured(planned, threads, rounds):
                rows.append(row)
                line = jsonlines.dumps(row.record(about))
                if json:
                    print(line, flush=True)
                if file is not None:
                    print(line, file=file, flush=True)
    except KeyboardInterrupt:
        stopped = True
    if rows and not json:
        Console().print(tables(rows, about))
    if figure is not None and any(row.status == "measured" and row.kind == "layer" for row in rows):
        figure.write_text(svg(rows, about), encoding="utf-8")
    if stopped:
        print(f"unfading: stopped after {len(rows)} of {len(planned)} lines.", file=sys.stderr)
        return 130
    return 1 if any(row.status == "wrong" for row in rows) else 0


def _measured(planned: Sequence[Case], threads: int, rounds: int) -> Iterator[Row]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=False) as progress:
        bar = progress.add_task("", total=len(planned))
        for case in planned:
            # Drawn between measurements: a thread that draws would be measured too.
            progress.update(bar, description=f"{case.variant.name} T={case.T} B={case.B} H={case.H}", refresh=True)
            yield measure(case, threads=threads, rounds=rounds)
            progress.advance(bar)


def _check_writable(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}; make it, or name another.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written; name another file.")
