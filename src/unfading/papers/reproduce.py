"""Reproduce tables and figures: train their rows, store the results, draw them, list the verdicts.

A row is trained in three stages: one run per setting that is open, of which validation chooses one, then all seeds at that
setting, then two more where three seeds differ by more than a point. Rows of one shape are trained together (`compare` packs
their runs into passes on a GPU and into processes on a CPU), shapes one after the other in the order of the rows; if several
passes share a GPU, all shapes at once. Runs live in `ReproduceOptions.runs`: finished runs are not trained again, stopped ones
are resumed.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch

from unfading import machine
from unfading.papers import budget as budgets
from unfading.papers import ledger, registry
from unfading.papers.item import Item, make_folder
from unfading.papers.ledger import Line
from unfading.papers.row import Curves, Row
from unfading.report import fidelity, verdicts
from unfading.report.verdicts import Outcome, judge, measurement, paper_score, seeds_needed
from unfading.training import weights
from unfading.training.compare import badness, by_last, compare, shape
from unfading.training.options import Listener
from unfading.training.record import sizes
from unfading.training.run import Run
from unfading.training.run_dir import finished

# Where the seeds are trained anew after the choice, a setting is chosen on epochs / CHOICE_EPOCHS_DIVISOR, if these are at
# least CHOICE_EPOCHS_LEAST.
CHOICE_EPOCHS_DIVISOR = 3
CHOICE_EPOCHS_LEAST = 10
# Log rows that the ledger stores of a run, in addition to those with a validation score.
LOG_ROWS = 60

# Shows the progress of some runs. On entry it gives a listener for their updates and a function that prints a sentence.
Progress = Callable[[Sequence[Run]], AbstractContextManager[tuple[Listener | None, Callable[[str], None]]]]


@dataclass(frozen=True)
class ReproduceOptions:
    """How items are reproduced.

    Args:
        output: Folder for figures and for the results ledger.
        runs: Folder of the runs.
        budget: See `papers/budget.py`.
        device: Where runs are trained.
        rows: Only rows whose name contains one of these strings; empty for all rows.
        processes: Number of processes; None for two on a CPU and one on a GPU.
        together: Largest number of runs in one pass on a GPU.
        storage: Address of the storage through which the runs are given to workers; None trains them here.
        command: The command as typed, for the records.
    """

    output: Path
    runs: Path
    budget: budgets.Budget = "paper"
    device: Literal["cpu", "cuda"] = "cpu"
    rows: tuple[str, ...] = ()
    processes: int | None = None
    together: int = 16
    storage: str | None = None
    command: str = ""

    @property
    def run_fields(self) -> dict[str, Any]:
        """Fields of every run. On a GPU products are computed in tf32, in less than half the time."""
        return {"device": self.device, "dtype": "tf32" if self.device == "cuda" else "float32"}

    @property
    def ledger(self) -> Path:
        """The results ledger of this machine."""
        return ledger.file(self.output, self.device)


def train_items(items: Sequence[str], options: ReproduceOptions, progress: Progress) -> None:
    """Train the rows of these items whose data are present, and store the results in the ledger.

    Results are stored even if a row fails or training is stopped.
    """
    rows = [row for name in items for row in select_rows(name, options)]  # before anything is written: it may raise
    make_folder(options.output)
    try:
        train_rows(rows, options, progress)
    finally:
        store_results(items, options)


def select_rows(name: str, options: ReproduceOptions) -> list[Row]:
    """The rows of an item that `options.rows` selects, at the budget."""
    rows = registry.rows(registry.item(name))
    selected = [row for row in rows if not options.rows or any(part in row.name for part in options.rows)]
    if rows and not selected:
        raise ValueError(f"no row of {name} has {' or '.join(map(repr, options.rows))} in its name, e.g. {rows[0].name!r}.")
    return budgets.within(selected, options.budget)


def train_rows(rows: Sequence[Row], options: ReproduceOptions, progress: Progress) -> None:
    """Train the rows that can be trained; `results` gives their records."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if not row.counted and row.available:
            groups.setdefault(shape(row.run), []).append(row)
    if options.device == "cuda" and (options.processes or 1) > 1:
        groups = {"all": [row for group in groups.values() for row in group]}
    errors: list[ValueError] = []
    for group in groups.values():
        # The second call of final_runs adds the seeds that a wide spread of the first three asks for.
        for stage in (choice_runs, final_runs, final_runs):
            try:
                _train([run for row in group for run in stage(row, options)], options, progress)
            except ValueError as error:  # some rows failed; the others go on
                errors.append(error)
    if errors:
        raise ValueError(" ".join(dict.fromkeys(map(str, errors))))


def _train(runs: Sequence[Run], options: ReproduceOptions, progress: Progress) -> None:
    """Train the runs that are not finished; rows may share a run."""
    unfinished = [run for run in {run.key: run for run in runs}.values() if finished(options.runs, run) is None]
    if unfinished:
        with progress(unfinished) as (listen, say):
            compare(
                unfinished, options.runs, resume=True, processes=options.processes, together=options.together,
                storage=options.storage, listen=listen, say=say, command=options.command,
            )  # fmt: skip


def choice_runs(row: Row, options: ReproduceOptions) -> list[Run]:
    """The runs that choose the setting of a row by validation, one per setting and judge; none if it has one setting.

    If the seeds are trained anew afterwards, on more rows, these runs take a third of the epochs, unless the number of epochs
    is itself to be chosen.
    """
    settings = row.settings
    if len(settings) == 1:
        return []
    fewer = (row.run.epochs or 0) // CHOICE_EPOCHS_DIVISOR
    shorten = row.retrain and fewer >= CHOICE_EPOCHS_LEAST and not any("epochs" in setting for setting in settings)
    epochs: dict[str, Any] = {"epochs": fewer} if shorten else {}
    return [run for setting in settings for run in row.judge_runs(**{**options.run_fields, **setting, **epochs})]


def final_runs(row: Row, options: ReproduceOptions) -> list[Run]:
    """The runs of a row that count, one per seed; none until its setting is chosen.

    If all seeds are finished and the row needs more, these are added.
    """
    setting = chosen_setting(row, options)
    if setting is None:
        return []

    def runs(seeds: Iterable[int]) -> list[Run]:
        return [row.final_run(**{**setting, **options.run_fields, "seed": seed}) for seed in seeds]

    first = runs(range(row.seeds))
    records = [record for run in first if (record := finished(options.runs, run)) is not None]
    if len(records) < row.seeds or row.published is None or row.fails:  # more seeds are for claims about a mean
        return first
    needed = seeds_needed(row.seeds, row.unit, [paper_score(row.unit, record) for record in records])
    return [*first, *runs(range(row.seeds, needed))]


def chosen_setting(row: Row, options: ReproduceOptions) -> dict[str, Any] | None:
    """The setting of a row that is best on validation; None until all of them have been tried."""
    if len(row.settings) == 1:
        return row.settings[0]
    records, judges = [record for _, record in _choice_records(row, options)], len(row.judges)
    if len(records) < len(row.settings) * judges:
        return None
    judged = [records[i : i + judges] for i in range(0, len(records), judges)]
    return min(zip(row.settings, judged, strict=True), key=lambda pair: badness(pair[1]))[0]


def _choice_records(row: Row, options: ReproduceOptions) -> list[tuple[dict[str, Any], Line]]:
    """The settings to choose from whose runs are finished, with the records by which they are judged."""
    settings = [setting for setting in row.settings for _ in row.judges]
    records = [
        (setting, record)
        for setting, run in zip(settings, choice_runs(row, options), strict=False)  # no runs if there is one setting
        if (record := finished(options.runs, run)) is not None
    ]
    return [(setting, by_last(record) if row.retrain else record) for setting, record in records]


def finished_runs(row: Row, options: ReproduceOptions) -> Iterator[tuple[Run, Line]]:
    """The finished runs of a row with their records, seed 0 first."""
    for run in final_runs(row, options) if row.available else []:
        record = finished(options.runs, run)
        if record is not None:
            yield run, record


def store_results(items: Sequence[str], options: ReproduceOptions) -> None:
    """Add the results of these items to the ledger."""
    make_folder(options.output)
    lines = [line for name in items for row in select_rows(name, options) for line in results(name, row, options)]
    ledger.add(options.ledger, lines)


def results(item: str, row: Row, options: ReproduceOptions) -> list[Line]:
    """The ledger lines of a row: one per finished run and per candidate, or one with the number of parameters."""
    about: Line = {"item": item, "row": row.name, "budget": options.budget}
    if row.counted:
        with torch.device("meta"):  # counting needs no values
            count = sizes(row.run.make_model())
        return [{"kind": "count", **about, **count, "about": machine.about(options.command)}]
    if not row.available:
        return []
    records = [record for _, record in finished_runs(row, options)]
    runs: list[Line] = [{"kind": "run", **about, "place": row.place, **_thinned(record)} for record in records]
    return [*({"kind": "candidate", **about, **each} for each in candidates(row, options)), *runs]


def candidates(row: Row, options: ReproduceOptions) -> list[Line]:
    """The runs that chose a row's setting, without their curves, so that the choice can be checked."""
    setting = chosen_setting(row, options)
    chosen = None if setting is None else verdicts.setting(row.final_run(**setting).to_json())
    return [
        {
            "key": record["key"],
            "setting": tried,
            "chosen": chosen,
            "measure": record["measure"],
            "valid": record["best"] and record["best"]["valid"],
            **{name: record[name] for name in ("status", "steps", "seconds")},
            "seed": record["run"]["seed"],
            "commit": record["about"]["commit"],
        }
        for tried, record in _choice_records(row, options)
    ]


def _thinned(record: Line) -> Line:
    """The record with fewer log rows, since the ledger is under version control."""
    every = max(1, len(record["curve"]) // LOG_ROWS)
    curve = [log_row for i, log_row in enumerate(record["curve"]) if i % every == 0 or "valid" in log_row]
    return {**record, "curve": curve}


def draw_items(items: Sequence[str], options: ReproduceOptions, *, trained: bool) -> list[str]:
    """Draw the figures among these items and return a text about each item.

    With `trained` the rows are those in this machine's ledger, otherwise those in all ledgers of the output folder.
    """
    texts = []
    for name in items:
        function = registry.item(name)
        if registry.kind(function) is Item:
            texts.append(_draw_figure(name, function, options))
        else:
            texts.append(_draw_rows(name, function, options, trained))
    return texts


def _draw_figure(name: str, function: Callable[..., Item], options: ReproduceOptions) -> str:
    """Compute, save and describe a figure without rows."""
    device = {"device": options.device} if "device" in signature(function).parameters else {}
    figure = function(**budgets.arguments(function, options.budget), **device)
    paths = figure.save(name, options.output)
    line = {"kind": "drawn", "item": name, "title": figure.title, "budget": options.budget, "findings": figure.findings}
    ledger.add(options.ledger, [{**line, "about": machine.about(options.command)}])
    return f"{figure.text()}\n\nwrote {', '.join(map(str, paths))}"


def _draw_rows(name: str, function: Callable[..., Any], options: ReproduceOptions, trained: bool) -> str:
    """List the rows with published number, result and verdict; for a figure of curves draw it too."""
    paths = [options.ledger] if trained else sorted(options.output.glob("papers-*.jsonl"))
    lines = [
        line
        for path in paths
        for line in ledger.read(path)
        if line["item"] == name and line["kind"] in ("run", "count") and line["budget"] == options.budget
    ]
    if options.budget == "smoke":  # has no verdict; its lines are shown as those of a short run
        lines = [{**line, "budget": "short"} for line in lines]
    text, drawn = [f"{name}: {registry.title(function)}"], []
    selected = {row.name: row for row in select_rows(name, options)}
    # A figure has all rows, whichever are selected; at budget smoke these are three, which may not be the selected ones.
    for row in ({row.name: row for row in select_rows(name, replace(options, rows=()))} | selected).values():
        own = [line for line in lines if line.get("row") == row.name]
        outcome = judge(registry.claim(row), own)
        if row.name in selected:
            text.append(f"  {row.name}: {_result(row, outcome, options.budget)}")
        if not row.counted:
            drawn += [{**line, "asked": outcome.asked} for line in measurement(registry.claim(row), own)]
    table = function()
    if isinstance(table, Curves):
        text.append(_draw_curves(name, table, drawn, options.output))
    return "\n".join(text)


def _result(row: Row, outcome: Outcome, budget: budgets.Budget) -> str:
    """Published number, result and verdict of a row, in one line."""
    if not row.available:
        return f"data not available: {row.dataset}"
    if outcome.mean is None:
        return outcome.verdict
    published = "-" if row.published is None else fidelity.number(row.published, row.unit)
    verdict = "ran" if budget == "smoke" else outcome.verdict
    return f"published {published}, ours {fidelity.number(outcome.mean, row.unit)} over {outcome.seed_count}: {verdict}"


def _draw_curves(name: str, curves: Curves, lines: Sequence[Mapping[str, Any]], output: Path) -> str:
    if not lines:
        return "nothing to draw: none of its rows has been run"
    try:
        figure = Item(curves.title, curves.caption, curves.draw(lines), [], [])
        return f"wrote {', '.join(map(str, figure.save(name, output)))}"
    except ValueError as error:
        # The records are stored, so the figure can be drawn on another machine.
        return f"not drawn: {error}"


def save_weights(items: Sequence[str], options: ReproduceOptions, folder: Path, largest: int) -> list[str]:
    """Write the weights of the first finished seed of each row, and return a sentence about each; larger files are removed.

    Args:
        items: Names of items.
        options: As for `train_items`.
        folder: Folder for the files.
        largest: Largest size of a file in bytes.
    """
    sentences = []
    for name in items:
        for row in select_rows(name, options):
            run, _ = next(finished_runs(row, options), (None, None))
            if run is None:
                continue
            stem = re.sub(r"[^a-z0-9]+", "-", f"{name} {row.name}".lower()).strip("-")
            try:
                path = weights.save(options.runs / run.key, folder / f"{stem}.safetensors")
            except ValueError as error:  # a run folder copied from another machine may hold its record alone
                sentences.append(f"no weights of {row.name}: {error}")
                continue
            size = path.stat().st_size
            if size > largest:
                path.unlink()
                sentences.append(f"{path.name} would have {size / 1e6:.1f} MB, and is not kept")
            else:
                sentences.append(f"wrote {path} ({size / 1e3:.0f} kB)")
    return sentences or ["no row has been run: there are no weights yet"]
