"""`unfading reproduce list|run|draw|page`: the papers' tables and figures, and the page that compares them with ours."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from unfading.cli.flags import typed_command
from unfading.cli.tables import plain_table, print_table
from unfading.errors import check_count, check_positive
from unfading.training.stopping import Stopped, time_limit

# Relative to the root of a checkout.
RESULTS, PAGE = Path("benchmarks/results"), Path("docs/papers/fidelity.md")
# Weights are committed only in files smaller than this, in bytes.
LARGEST = 1_000_000

Budget = Literal["smoke", "short", "paper"]
Device = Literal["cpu", "cuda"]
Items = Annotated[tuple[str, ...], arg(metavar="ITEM ...", help_behavior_hint="")]
Rows = Annotated[tuple[str, ...], arg(metavar="TEXT ...", help_behavior_hint="(default: all rows)")]
Output = Annotated[Path, arg(aliases=["-o"])]


def list_items(json: bool = False) -> None:
    """List every table and figure of the papers, the datasets it needs, and whether they are present.

    Args:
        json: Print the rows of all items as JSON lines.
    """
    from unfading.papers import registry

    items = registry.items()
    if json:
        print("\n".join(map(dumps, registry.published(tuple(items)))))
        return
    print_items(tuple(items), f"{len(items)} tables and figures", "Train an item with `unfading reproduce run ITEM`.")


def run_items(
    items: Items = (),
    /,
    output: Output = Path("reproduced"),
    budget: Budget = "paper",
    rows: Rows = (),
    device: Device = "cpu",
    minutes: Annotated[float | None, arg(help_behavior_hint="(default: no limit)")] = None,
    runs: Path = Path("runs/papers"),
    processes: Annotated[int | None, arg(help_behavior_hint="(default: 2 on a CPU, 1 on a GPU)")] = None,
    together: int = 16,
    storage: str | None = None,
    weights: Path | None = None,
) -> None:
    """Reproduce tables and figures of the papers. Finished runs are not repeated, and stopped runs continue.

    Args:
        items: Names of tables and figures, as PAPER/ITEM: incremental/table1.
        output: Folder for figures, numbers and results (papers-MACHINE.jsonl).
        budget: Training budget. smoke: seconds, to check that it runs; short: a tenth of the paper's steps; paper: all of them.
        rows: Only rows whose name contains one of these texts: "pixel iRNN K=1".
        device: Device to train on.
        minutes: Time limit in minutes. Runs stop with a checkpoint, and the same command continues them.
        runs: Folder of the runs.
        processes: Number of processes.
        together: Largest number of runs that are trained in one pass on a GPU.
        storage: Give the runs to workers through this storage; `unfading sweep work` starts workers on any machine that sees
            --runs, and --processes of them are started here (0: none).
        weights: Folder for the weights of each row's first seed.
    """
    from unfading import machine
    from unfading.papers import reproduce

    if processes is not None:
        check_count("--processes", processes, least=1 if storage is None else 0)
    check_count("--together", together)
    if minutes is not None:
        check_positive("--minutes", minutes)
    _check_items(items, "run")
    if budget == "paper" and (machine.commit() or "").endswith("-dirty"):
        print("unfading: the package has uncommitted changes; results will be marked. Commit them first.", file=sys.stderr)
    options = reproduce.ReproduceOptions(
        output,
        runs,
        budget,
        device,
        rows,
        processes if budget != "smoke" or storage else 1,
        together,
        storage,
        command=typed_command(),
    )
    with ExitStack() as stack:
        if minutes is not None:
            stack.enter_context(time_limit(60 * minutes))
        with _exit_when_stopped(runs):
            reproduce.train_items(items, options, _progress)
        print("\n\n".join(reproduce.draw_items(items, options, trained=True)))
    if weights is not None:
        print("\n".join(reproduce.save_weights(items, options, weights, LARGEST)))


def draw_items(
    items: Items = (),
    /,
    output: Output = Path("reproduced"),
    budget: Budget = "paper",
    rows: Rows = (),
    device: Device = "cpu",
) -> None:
    """Print tables and draw figures from the results in --output. Nothing is trained.

    Args:
        items: Names of tables and figures, as PAPER/ITEM: incremental/fig4.
        output: Folder of the results (papers-*.jsonl), to which the figures are written.
        budget: Training budget of the results to use.
        rows: Only print rows whose name contains one of these texts.
        device: Device for figures that are computed and not trained.
    """
    from unfading.papers import reproduce

    _check_items(items, "draw")
    options = reproduce.ReproduceOptions(output, Path("runs/papers"), budget, device, rows, command=typed_command())
    print("\n\n".join(reproduce.draw_items(items, options, trained=False)))


def write_page() -> None:
    """Write docs/papers/fidelity.md, our results beside the published ones, from the files in benchmarks/results."""
    from unfading.files import write_atomically
    from unfading.report import fidelity
    from unfading.report.figures import charts, overview

    if not RESULTS.is_dir() or not PAGE.parent.is_dir():
        raise ValueError(
            f"`unfading reproduce page` reads {RESULTS} and writes {PAGE}: run it in the root of a checkout of unfading."
        )
    lines = current_lines()
    gaps = overview.gaps(fidelity.answers(lines))
    if gaps:
        write_atomically(PAGE.with_name(fidelity.OVERVIEW), charts.svg(overview.overview(gaps)))
    write_atomically(PAGE, fidelity.page(lines, [path.name for path in PAGE.parent.iterdir()]).encode())
    print(f"wrote {PAGE}")


def print_items(names: Sequence[str], title: str, caption: str) -> None:
    """Print a table of items: their titles, the datasets they need, and whether these are present."""
    from unfading.papers import registry

    table = plain_table(title, caption)
    table.add_column("item", style="bold", no_wrap=True)
    table.add_column("title")
    table.add_column("data", min_width=16)
    for name in names:
        states = [f"{dataset} {'present' if present else 'missing'}" for dataset, present in registry.datasets(name).items()]
        table.add_row(name, registry.title(registry.item(name)), "\n".join(states) or "none needed")
    print_table(table)


def current_lines() -> list[dict[str, Any]]:
    """All lines in benchmarks/results, after those of the rows were brought up to date."""
    from unfading.papers import ledger, registry
    from unfading.report import fidelity

    ledger.write(RESULTS / fidelity.ROWS, registry.published(tuple(registry.items())))
    return fidelity.read(RESULTS)


def _check_items(items: Sequence[str], verb: str) -> None:
    """Raise for an unknown item before anything is trained or written."""
    from unfading.papers import registry

    if not items:
        raise ValueError(
            f"name an item, e.g. unfading reproduce {verb} incremental/fig6; `unfading reproduce list` names all of them."
        )
    for name in items:
        registry.item(name)


@contextmanager
def _progress(runs: Sequence[Any]) -> Iterator[tuple[Any, Callable[[str], None]]]:
    """Progress bars of runs that are being trained."""
    from rich.console import Console

    from unfading.training.progress import Display

    with Display(runs, Console(stderr=True)) as display:
        yield display.listen, display.say


@contextmanager
def _exit_when_stopped(runs: Path) -> Iterator[None]:
    """If training is stopped, say that the same command continues, and exit with the code of the signal."""
    try:
        yield
    except Stopped as stopped:
        print(f"unfading: {stopped}; everything is in {runs}. The same command continues.", file=sys.stderr)
        sys.exit(128 + stopped.signal)
