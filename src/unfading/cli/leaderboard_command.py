"""`unfading leaderboard list|run|page`: cells on tasks that need long memory, at equal numbers of parameters."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from unfading.cli.reproduce_command import RESULTS, Budget, Device, Output, Rows, current_lines, print_items, run_items
from unfading.cli.tables import plain_table, print_table
from unfading.errors import unknown

PAGE = Path("docs/leaderboard.md")

Tasks = Annotated[tuple[str, ...], arg(metavar="TASK ...", help_behavior_hint="(default: all tasks)")]
Cells = Annotated[tuple[str, ...], arg(metavar="CELL ...", help_behavior_hint="(default: all cells)")]


def list_entries() -> None:
    """List the tasks of the leaderboard, the data they need, and the units of each cell."""
    from unfading.papers import registry
    from unfading.papers.leaderboard.tables import CELLS, SIZES

    items = _items()
    print_items(tuple(items.values()), f"{len(items)} tasks", "Train entries with `unfading leaderboard run --tasks TASK`.")
    sizes = " and ".join(SIZES)
    table = plain_table(f"\nUnits of each cell at about {sizes} parameters", "3x: three layers of so many units.")
    table.add_column("cell", style="bold", no_wrap=True)
    units: dict[str, list[str]] = {cell: [] for cell in CELLS}
    for task, item in items.items():
        table.add_column(task.replace("_", "\n"), justify="right", no_wrap=True)
        rows = registry.rows(registry.item(item))
        for cell in CELLS:
            runs = [row.run for row in rows if row.run.cell == cell]
            layers = f"{runs[0].layers}x " if runs[0].layers > 1 else ""
            units[cell].append(layers + ",".join(str(run.hidden) for run in runs))
    for cell, numbers in units.items():
        table.add_row(cell, *numbers)
    print_table(table)


def run_entries(
    tasks: Tasks = (),
    cells: Cells = (),
    rows: Rows = (),
    output: Output = Path("reproduced"),
    budget: Budget = "paper",
    device: Device = "cpu",
    minutes: Annotated[float | None, arg(help_behavior_hint="(default: no limit)")] = None,
    runs: Path = Path("runs/papers"),
    processes: Annotated[int | None, arg(help_behavior_hint="(default: 2 on a CPU, 1 on a GPU)")] = None,
    together: int = 16,
) -> None:
    """Train entries of the leaderboard. Finished runs are not repeated, and stopped runs continue.

    Args:
        tasks: Only these tasks: permuted_mnist.
        cells: Only these cells: LEM.
        rows: Only rows whose name contains one of these texts: "10k".
        output: Folder for the results (papers-MACHINE.jsonl).
        budget: Training budget. smoke: seconds, to check that it runs; short: a tenth of the steps; paper: all of them.
        device: Device to train on.
        minutes: Time limit in minutes. Runs stop with a checkpoint, and the same command continues them.
        runs: Folder of the runs.
        processes: Number of processes.
        together: Largest number of runs that are trained in one pass on a GPU.
    """
    items = select_entries(tasks, cells, rows)
    names = tuple(name for names in items.values() for name in names)
    run_items(
        tuple(items), output=output, budget=budget, rows=names, device=device, minutes=minutes, runs=runs, processes=processes,
        together=together,
    )  # fmt: skip


def write_page() -> None:
    """Write docs/leaderboard.md from the files in benchmarks/results."""
    from unfading.files import write_atomically
    from unfading.report import leaderboard_page

    if not RESULTS.is_dir() or not PAGE.parent.is_dir():
        raise ValueError(
            f"`unfading leaderboard page` reads {RESULTS} and writes {PAGE}: run it in the root of a checkout of unfading."
        )
    write_atomically(PAGE, leaderboard_page.page(current_lines()).encode())
    print(f"wrote {PAGE}")


def select_entries(tasks: tuple[str, ...], cells: tuple[str, ...], texts: tuple[str, ...]) -> dict[str, list[str]]:
    """The names of the rows of these tasks and cells whose name contains one of the texts, by item; empty selects all."""
    from unfading.papers import registry
    from unfading.papers.leaderboard.tables import CELLS

    items = _items()
    for kind, given, known in (("task", tasks, items), ("cell", cells, CELLS)):
        for name in given:
            if name not in known:
                raise ValueError(f"{unknown(f'{kind} of the leaderboard', name, known)} `unfading leaderboard list` names all.")
    selected = {
        item: [
            row.name
            for row in registry.rows(registry.item(item))
            if (not cells or row.run.cell in cells) and (not texts or any(text in row.name for text in texts))
        ]
        for task, item in items.items()
        if not tasks or task in tasks
    }
    if not any(selected.values()):
        raise ValueError(f"no row has {' or '.join(map(repr, texts))} in its name. `unfading leaderboard list` names all.")
    return {item: names for item, names in selected.items() if names}


def _items() -> dict[str, str]:
    """The items of the leaderboard by task."""
    from unfading.papers import registry
    from unfading.report.fidelity import LEADERBOARD

    return {name.removeprefix(LEADERBOARD): name for name in registry.items() if name.startswith(LEADERBOARD)}
