"""Metrics that the user asked for, beside the task's own: as lines, as a table of settings, and the confusion matrix."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unfading.report.groups import Setting, TaskGroup
from unfading.report.summary import score, spread

if TYPE_CHECKING:
    from rich.table import Table

# More classes than these do not fit in a terminal; the page and the record have the matrix.
MOST_ON_TERMINAL = 12


def further_scores(record: Mapping[str, Any]) -> dict[str, tuple[str, float | None]]:
    """The metrics that were asked for, by name: split and value; of the test, or else of validation.

    Args:
        record: a dict, as `record.json` holds it.
    """
    split, scores = (
        ("test", record["test"]) if record["test"] is not None else ("validation", (record["best"] or {}).get("valid"))
    )
    names = [name for name in record.get("metrics", ()) if name != record["measure"] or split != "test"]
    return {name: (split, scores[name]) for name in names if scores is not None and name in scores}


def confusion_lines(matrix: Mapping[str, Any]) -> list[str]:
    """A confusion matrix as lines of text, with the true class on the left."""
    classes, counts = [str(name) for name in matrix["classes"]], matrix["counts"]
    split = "validation" if matrix["split"] == "valid" else matrix["split"]
    if len(classes) > MOST_ON_TERMINAL:
        return [f"confusion matrix of {len(classes)} classes ({split}): in the record, and on the page of `unfading report`"]
    names = [name if len(name) <= 12 else f"{name[:11]}." for name in classes]
    width = max(map(len, names)) + 1
    cell = max(len(str(count)) for row in counts for count in row)
    columns = [max(cell, min(len(name), 5)) + 2 for name in names]
    head = "".join(name[: size - 2].rjust(size) for name, size in zip(names, columns, strict=True))
    lines = [f"confusion matrix ({split}): rows are true classes, columns predicted ones", f"{'':{width}}{head}"]
    for name, row in zip(names, counts, strict=True):
        lines.append(f"{name:{width}}" + "".join(str(count).rjust(size) for count, size in zip(row, columns, strict=True)))
    return lines


def names(task: TaskGroup) -> list[str]:
    """The metrics that a run of the task was asked for, in order."""
    return list(dict.fromkeys(name for record in task.records for name in record.further))


def rows(task: TaskGroup) -> list[tuple[str, list[str]]]:
    """Each setting with its scores in these metrics: the mean over seeds, and the sample standard deviation."""
    return [(setting.label, [_mean(setting, name) for name in names(task)]) for setting in task.settings]


def _mean(setting: Setting, name: str) -> str:
    values = [value for record in setting.records if (value := record.further.get(name)) is not None]
    if not values:
        return "-"
    return score(statistics.fmean(values)) + (f" ± {spread(statistics.stdev(values))}" if len(values) > 1 else "")


def terminal(task: TaskGroup) -> "Table | None":
    """The table of these metrics for the terminal; None if none was asked for."""
    from rich.table import Table
    from rich.text import Text

    if not names(task):
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
    table.add_column("setting", style="bold", min_width=14, overflow="fold")
    for name in names(task):
        table.add_column(name, justify="right", overflow="fold")
    for label, cells in rows(task):
        table.add_row(Text(label), *cells)
    return table


def matrices(task: TaskGroup) -> dict[str, Mapping[str, Any]]:
    """The confusion matrix of each setting that has one, summed over its seeds."""
    by_setting: dict[str, Mapping[str, Any]] = {}
    for setting in task.settings:
        own = [record.confusion for record in setting.records if record.confusion is not None]
        if own:
            by_setting[setting.label] = {**own[0], "counts": _sum([matrix["counts"] for matrix in own])}
    return by_setting


def _sum(matrices: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    return [[sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
