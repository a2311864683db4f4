"""The verb `unfading reproduce`: a table or figure of a paper, made again, and the page that holds all of them."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from unfading.errors import check_count, check_positive

# In the root of the repository.
RESULTS, PAGE = Path("benchmarks/results"), Path("docs/papers/fidelity.md")
# A file of weights that is to be committed is smaller than this.
LARGEST = 1_000_000


def _short(flag: str) -> Any:
    from tyro.conf import arg

    return arg(aliases=[flag])


# The annotation in quotes is read when the command line is: `import unfading` shall not import tyro.
def reproduce(
    item: tuple[str, ...] = (),
    /,
    output: "Annotated[Path, _short('-o')]" = Path("reproduced"),
    list: bool = False,
    budget: Literal["smoke", "short", "paper"] = "paper",
    rows: tuple[str, ...] = (),
    device: Literal["cpu", "cuda"] = "cpu",
    minutes: float | None = None,
    runs: Path = Path("runs/papers"),
    processes: int | None = None,
    together: int = 16,
    weights: Path | None = None,
    draw: bool = False,
    page: bool = False,
    json: bool = False,
) -> None:
    """Make tables and figures of the papers again. What is done is not done again; what was stopped goes on.

    Args:
        item: which, as PAPER/ITEM: incremental/table1.
        output: folder for pictures, numbers, and the records of runs (papers-MACHINE.jsonl).
        list: name all items instead, with the data that each needs.
        budget: smoke checks that it runs, in seconds; short has a tenth of the paper's steps; paper all.
        rows: only rows in whose name one of these stands: "pixel iRNN K=1".
        device: where to train.
        minutes: stop after so many, with checkpoints; the same command goes on.
        runs: folder of the runs.
        processes: so many at a time: two on a CPU if not said, one on a GPU.
        together: at most so many runs in one pass on a GPU.
        weights: write the weights of each row's first seed into this folder.
        draw: draw figures of curves from the records in --output alone; nothing is trained.
        page: write docs/papers/fidelity.md from the records in benchmarks/results instead.
        json: with --list, print rows as JSON lines.
    """
    from unfading.papers import registry

    if page:
        _page()
        return
    if list:
        names = tuple(registry.items())
        print("\n".join(map(dumps, registry.published(names)) if json else map(registry.describe, names)))
        return
    if not item:
        raise ValueError("name an item, e.g. unfading reproduce incremental/fig6; --list names all.")
    if processes is not None:
        check_count("--processes", processes)
    check_count("--together", together)
    if minutes is not None:
        check_positive("--minutes", minutes)
    from unfading.papers.reproduce import ReproduceOptions, draw_items, save_weights, train_items

    for name in item:
        registry.item(name)  # an unknown item is an error before anything is trained
    options = ReproduceOptions(
        output, runs, budget, device, rows, processes if budget != "smoke" else 1, together,
        command=shlex.join(["unfading", *sys.argv[1:]]),
    )  # fmt: skip
    with ExitStack() as stack:
        if minutes is not None:
            from unfading.training.stopping import time_limit

            stack.enter_context(time_limit(60 * minutes))
        if not draw:
            with _exit_when_stopped(runs):
                train_items(item, options, _progress)
        print("\n\n".join(draw_items(item, options, trained=not draw)))
    if weights is not None:
        print("\n".join(save_weights(item, options, weights, LARGEST)))


def _page() -> None:
    """The table of rows brought up to date, then the page from the lines alone."""
    from unfading.files import write_atomically
    from unfading.papers import ledger, registry
    from unfading.report import fidelity
    from unfading.report.figures import charts as figures
    from unfading.report.figures import overview

    if not RESULTS.is_dir() or not PAGE.parent.is_dir():
        raise ValueError(f"--page reads {RESULTS} and writes {PAGE}: run it in the root of a checkout of unfading.")
    ledger.write(RESULTS / fidelity.ROWS, registry.published(tuple(registry.items())))
    lines = fidelity.read(RESULTS)
    rows = overview.gaps(fidelity.answers(lines))
    if rows:
        write_atomically(PAGE.with_name(fidelity.OVERVIEW), figures.svg(overview.overview(rows)))
    write_atomically(PAGE, fidelity.page(lines, [path.name for path in PAGE.parent.iterdir()]).encode())
    print(f"wrote {PAGE}")


@contextmanager
def _progress(runs: Sequence[Any]) -> Iterator[tuple[Any, Callable[[str], None]]]:
    """Progress bars of runs that are being trained."""
    from rich.console import Console

    from unfading.training.progress import Display

    with Display(runs, Console(stderr=True)) as display:
        yield display.listen, display.say


@contextmanager
def _exit_when_stopped(runs: Path) -> Iterator[None]:
    """Leave with the exit code of the signal when training is asked to stop, and say that the command can be repeated."""
    from unfading.training.stopping import Stopped

    try:
        yield
    except Stopped as stopped:
        print(f"unfading: {stopped}; all is in {runs}. The same command goes on.", file=sys.stderr)
        sys.exit(128 + stopped.signal)
