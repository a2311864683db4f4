"""A benchmark session: measure case after case, write each result at once, and print tables at the end."""

import json as jsonlines
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from unfading import machine
from unfading.bench import cases, gpu, gpu_cases
from unfading.bench.cases import Case
from unfading.bench.cpu import measure
from unfading.bench.display import tables
from unfading.bench.results import Result, case_fields
from unfading.bench.speed_figure import svg
from unfading.source_lines import first_line

Measure = Callable[[Case], Result]

INTERRUPTED = 130  # exit code after Ctrl-C


def on_cpu(
    cells: Sequence[str],
    all: bool,
    threads: Sequence[int],
    rounds: int | None,
    *,
    loops: bool,
    json: bool,
    save: Path | None,
    figure: Path | None,
    command: str,
) -> int:
    """Measure the CPU with each number of threads; returns the exit code (see `_run`)."""
    if max(threads) > machine.cores():
        raise ValueError(
            f"--threads must be at most the {machine.cores()} cores that this process may use; got {max(threads)}."
        )
    if figure is not None and len(threads) > 1:
        raise ValueError(
            f"--figure shows one number of threads; got --threads {' '.join(map(str, threads))}. Name one of them."
        )
    planned = cases.everything(cells) if all else cases.headline(cells)
    file, code = _file(save, f"cpu-{machine.slug()}"), 0
    for count in threads:
        measure_case = partial(measure, threads=count, rounds=rounds or 15, loops=loops)
        code = max(code, _run(planned, measure_case, json, file, figure, command))
        if code == INTERRUPTED:
            break
    return code


def on_gpu(
    cells: Sequence[str],
    all: bool,
    rounds: int | None,
    *,
    loops: bool,
    json: bool,
    save: Path | None,
    command: str,
) -> int:
    """Measure the current GPU; returns the exit code (see `_run`)."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda needs an NVIDIA GPU, and torch {torch.__version__} finds none; --device cpu measures the CPU."
        )
    planned = gpu_cases.everything(cells) if all else gpu_cases.headline(cells)
    torch.cuda.init()  # so that the records name the GPU
    measure_case = partial(gpu.measure, rounds=rounds or 50, loops=loops)
    return _run(planned, measure_case, json, _file(save, f"cuda-{machine.gpu_slug()}"), None, command)


def _file(save: Path | None, name: str) -> Path | None:
    return save / f"{name}.jsonl" if save is not None and save.is_dir() else save


def _run(
    planned: Sequence[Case], measure_case: Measure, json: bool, save: Path | None, figure: Path | None, command: str
) -> int:
    """Measure, write and print. Returns 0, 1 if a result is wrong or a case failed, 130 if interrupted."""
    about = machine.about(command)
    # A file that cannot be written is reported before minutes are spent.
    for flag, path in (("--save", save), ("--figure", figure)):
        if path is not None:
            _check_writable(flag, path)
    results: list[Result] = []
    interrupted = False
    try:
        with nullcontext() if save is None else open(save, "a", encoding="utf-8") as file:
            for result in _measured(planned, measure_case):
                results.append(result)
                line = jsonlines.dumps(result.record(about))
                if json:
                    print(line, flush=True)
                if file is not None:
                    print(line, file=file, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    if results and not json:
        Console().print(tables(results, about))
    if figure is not None and any(result.status == "measured" and result.kind == "layer" for result in results):
        figure.write_text(svg(results, about), encoding="utf-8")
    if interrupted:
        print(f"unfading: stopped after {len(results)} of {len(planned)} cases.", file=sys.stderr)
        return INTERRUPTED
    return 1 if any(result.status in ("wrong", "failed") for result in results) else 0


def _measured(planned: Sequence[Case], measure_case: Measure) -> Iterator[Result]:
    """The results, one after the other, with progress on stderr."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=False) as progress:
        bar = progress.add_task("", total=len(planned))
        for number, case in enumerate(planned, 1):
            # Refreshed between measurements: a thread that refreshes would disturb the times.
            progress.update(bar, description=case.title, refresh=True)
            result = _or_failed(case, measure_case)
            yield result
            progress.advance(bar)
            if not console.is_terminal:
                line = f"[{number}/{len(planned)}, {time.monotonic() - began:.0f} s] {case.title}: {result.status}"
                print(line if result.both is None else f"{line}, {result.both.ms:.3g} ms", file=sys.stderr, flush=True)


def _or_failed(case: Case, measure_case: Measure) -> Result:
    """The result of a case. An exception becomes a result with the reason, so that the other cases are still measured."""
    try:
        return measure_case(case)
    except Exception as error:
        return Result(**case_fields(case), status="failed", reason=f"{type(error).__name__}: {first_line(error)}")
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _check_writable(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}; create it, or name another.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written; name another file.")
