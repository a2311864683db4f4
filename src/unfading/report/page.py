"""The report of runs: one HTML page with what was run, the best setting, curves, tables, failures and machines.

Equal records give equal bytes, so a page can be under version control.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unfading.files import write_atomically
from unfading.report import html, metric_tables
from unfading.report.figures import charts as task_figures
from unfading.report.figures import confusion_figure, watch_figures
from unfading.report.groups import Summary, TaskGroup, flat_settings, group_by_task, varying
from unfading.report.html import PlacedFigure
from unfading.report.records import Record
from unfading.report.summary import COLUMNS, NOTE, cells, failures, metric_name, score, seed_list, spread

CAPTIONS = {
    "curves": "Validation over steps",
    "loss": "Training loss over steps",
    "test": "Test score: a dot a seed, a bar at the mean",
    "seconds": "Time: a dot a seed, a bar at the median",
    "gradients": "Gradient of each layer's parameters over training",
    "confusion": "Confusion matrices: counts over all seeds, colour by the share of a row; the best settings by validation",
    "through_time": "Gradient of the loss at the top layer's state, from the first step of the sequence to the last",
}
# Charts by task and by name.
Charts = dict[str, dict[str, task_figures.Spec]]


class RunRow(NamedTuple):
    """A run in the table of all runs."""

    cell: str
    values: list[str]
    folder: str


class Section(NamedTuple):
    """The part of the page about one task."""

    task: TaskGroup
    opening: str
    best: Summary
    metric: str
    figures: list[PlacedFigure]
    settings: list[tuple[str, list[str]]]
    metric_columns: dict[str, str]  # of the metrics that the user asked for
    metrics: list[tuple[str, list[str]]]
    failures: list[tuple[str, str]]
    run_columns: list[str]
    runs: list[RunRow]
    equal: dict[str, str]


class Origin(NamedTuple):
    """Machine, versions and commands of runs that share them."""

    terms: dict[str, str]
    commands: list[str]


def build(records: Sequence[Record]) -> str:
    """The page as text."""
    tasks = group_by_task(records)
    return _page(tasks, _charts(tasks))


def write(records: Sequence[Record], output: Path, *, png: bool = False) -> list[Path]:
    """Write the page and return the paths written, the page first.

    With `png` its figures are written beside it as NAME-curves.png and so on. Every file is written atomically.
    """
    html.check(output)
    tasks = group_by_task(records)
    charts = _charts(tasks)
    files = {output: _page(tasks, charts).encode(errors="replace")}
    if png:
        for name, picture in _pictures(charts):
            files[output.with_name(f"{output.stem}-{name}.png")] = picture
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _charts(tasks: Sequence[TaskGroup]) -> Charts:
    return {
        task.name: {**task_figures.figures(task), **watch_figures.figures(task), **confusion_figure.figures(task)}
        for task in tasks
    }


def _pictures(charts: Charts) -> Iterator[tuple[str, bytes]]:
    """Each chart as PNG, with a name that is unique among those of the page."""
    names: list[str] = []
    for task, by_kind in charts.items():
        name = re.sub(r"[^A-Za-z0-9._]+", "-", task).strip("-.") or "task"
        names.append(name)
        if names.count(name) > 1:
            name = f"{name}-{names.count(name)}"
        for kind, chart in by_kind.items():
            yield (kind if len(charts) == 1 else f"{name}-{kind}"), task_figures.png(chart)


def _page(tasks: Sequence[TaskGroup], charts: Charts) -> str:
    records = [record for task in tasks for record in task.records]
    sections: list[Section] = []
    specs: list[task_figures.Spec] = []
    for task in tasks:
        own = charts[task.name]
        placed = [PlacedFigure(number, CAPTIONS[kind]) for number, kind in enumerate(own, start=len(specs) + 1)]
        specs += own.values()
        sections.append(_section(task, placed))
    return html.render(
        "report.html",
        f"{_enumeration([task.name for task in tasks])}: {_plural(len(records), 'run')}",
        specs,
        dates=_dates(records),
        sections=sections,
        summary_columns=COLUMNS,
        origins=_origins(records),
        note="A run trained when it did not diverge and its test score, or its validation score if there are no test rows, is "
        f"a tenth better than a guess. {NOTE}",
        score=score,
        spread=spread,
        plural=_plural,
    )


def _section(task: TaskGroup, figures: list[PlacedFigure]) -> Section:
    runs = [record.run for record in task.records]
    different = varying(runs)
    names = [name for name in different if name not in ("cell", "seed")]
    return Section(
        task=task,
        opening=_opening(task),
        best=task.settings[0].summary,
        metric=metric_name(task),
        figures=figures,
        settings=[(setting.label, cells(setting.summary)) for setting in task.settings],
        metric_columns={"setting": "", **dict.fromkeys(metric_tables.names(task), "mean over seeds")},
        metrics=metric_tables.rows(task) if metric_tables.names(task) else [],
        failures=failures(task),
        run_columns=["cell", *names, "seed", "status", "steps", "validation", "test", "folder"],
        runs=[_run_row(record, names) for record in task.records],
        equal={
            name: value for name, value in flat_settings(runs[0]).items() if name not in (*different, "cell", "seed")
        },
    )  # fmt: skip


def _run_row(record: Record, names: Sequence[str]) -> RunRow:
    settings = flat_settings(record.run)
    values = [settings.get(name, "-") for name in names]
    values += [str(record.seed), record.status, f"{record.steps:,}", score(record.valid), score(record.test)]
    folder = record.where.removesuffix("record.json").rstrip("/") or record.key
    return RunRow(str(record.run["cell"]), values, folder)


def _opening(task: TaskGroup) -> str:
    """What was run, in one sentence."""
    records = task.records
    seeds = sorted({record.seed for record in records})
    states = [record.status for record in records]
    layers = _enumeration(list(dict.fromkeys(str(record.run["cell"]) for record in records)))
    outcomes = [f"{states.count(state)} {state}" for state in ("finished", "diverged", "unfinished") if state in states]
    return (
        f"{_plural(len(task.settings), 'setting')} of {layers}, {'seeds' if len(seeds) > 1 else 'seed'} {seed_list(seeds)}, "
        f"up to {max(record.steps for record in records):,} steps: {_plural(len(records), 'run')}, {_enumeration(outcomes)}."
    )


def _origins(records: Sequence[Record]) -> list[Origin]:
    """Machine, versions, commit, dates and commands; runs for which the first three are equal are listed once."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.about is not None:
            same = {name: record.about.get(name) for name in ("machine", "versions", "commit")}
            groups.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    origins = []
    for group in groups.values():
        about = group[0].about or {}
        terms = {"runs": str(len(group)), "machine": _pairs(about.get("machine")), "versions": _pairs(about.get("versions"))}
        terms |= {"commit": str(about.get("commit") or "unknown"), "date": _dates(group)}
        commands = {str(record.about["command"]) for record in group if record.about and record.about.get("command")}
        origins.append(Origin(terms, sorted(commands)))
    return origins


def _pairs(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "unknown" if value is None else str(value)
    return ", ".join(f"{name} {inner}" for name, inner in value.items() if inner is not None)


def _dates(records: Iterable[Record]) -> str:
    dates = sorted({str(record.about["date"])[:10] for record in records if record.about and record.about.get("date")})
    return "" if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _enumeration(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
