"""Rows, trained: what is open in a setting chosen by validation, then all seeds, and a line for every run that is done.

Rows of one shape are trained together (`compare` packs them into passes on a GPU, and into processes on a CPU), shapes one
after the other in the order of the rows; where several passes share a GPU, all at once. Everything lies in the runs' folders:
what is done is not done again, what was stopped goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from unfading import machine
from unfading.data import store
from unfading.papers.budget import Budget
from unfading.papers.row import COUNTED, Row
from unfading.report.verdicts import setting
from unfading.training.compare import badness, by_last, compare, shape
from unfading.training.loop import Listener
from unfading.training.record import sizes
from unfading.training.run import Run
from unfading.training.run_dir import finished

CHOOSING = 3  # a rate is chosen on epochs / CHOOSING, where the seeds are trained anew,
ENOUGH = 10  # and that is so many epochs at least
POINTS = 60  # of a curve, beside those with a validation score, that a line keeps

Line = dict[str, Any]
# What shows the progress of some runs: entered, it gives a listener and a place for sentences.
Shown = Callable[[Sequence[Run]], AbstractContextManager[tuple[Listener | None, Callable[[str], None]]]]


class Wanted(NamedTuple):
    """A row of an item."""

    item: str
    row: Row


class Way(NamedTuple):
    """How rows are trained: where, and on what."""

    where: Path
    device: Literal["cpu", "cuda"]
    processes: int | None
    together: int
    command: str

    @property
    def numbers(self) -> dict[str, Any]:
        """Of a run: on a GPU products are made in tf32, which takes less than half the time."""
        return {"device": self.device, "dtype": "tf32" if self.device == "cuda" else "float32"}


def available(row: Row) -> bool:
    """Whether the row can be run with the data that are here."""
    return row.run is not None and (row.dataset is None or store.present(row.dataset))


def train_rows(wanted: Sequence[Wanted], way: Way, shown: Shown) -> None:
    """Train what can be; `lines` tells what came of it."""
    groups: dict[str, list[Row]] = {}
    for _, row in wanted:
        if row.run is not None and row.unit != COUNTED and available(row):
            groups.setdefault(shape(row.run), []).append(row)
    if way.device == "cuda" and (way.processes or 1) > 1:
        groups = {"all": [row for rows in groups.values() for row in rows]}
    failed: list[ValueError] = []
    for rows in groups.values():
        for runs_of in (_candidates, _seeds):
            try:
                _compare([run for row in rows for run in runs_of(row, way)], way, shown)
            except ValueError as error:  # of some rows: those whose rate is known go on
                failed.append(error)
    if failed:
        raise ValueError(" ".join(dict.fromkeys(map(str, failed))))


def lines(wanted: Sequence[Wanted], budget: Budget, way: Way) -> list[Line]:
    """A line for each run that is done, and for each count."""
    found: list[Line] = []
    for item, row in wanted:
        about: Line = {"item": item, "row": row.name, "budget": budget}
        if row.run is not None and row.unit == COUNTED:
            with torch.device("meta"):  # a size needs no numbers
                counted = sizes(row.run.make_model())
            found.append({"kind": "count", **about, **counted, "about": machine.about(way.command)})
        elif available(row):
            records = [record for run in _seeds(row, way) if (record := finished(way.where, run)) is not None]
            found += [{"kind": "run", **about, "place": place(row), **_slim(record)} for record in records]
    return found


def settings(row: Row) -> list[str]:
    """What the runs that count may be set to, in the short form in which `report/verdicts.py` compares."""
    if row.run is None or row.unit == COUNTED:
        return []
    return [setting(_final(row, each).to_json()) for each in _open(row)]


def final_runs(row: Row, way: Way) -> Iterator[Run]:
    """The runs of a row that are done, seed 0 first."""
    return (run for run in _seeds(row, way) if finished(way.where, run) is not None)


def place(row: Row) -> str:
    """The panel of a figure that a row belongs to."""
    assert row.run is not None
    length = row.run.task_options.get("T")
    return " ".join([row.run.task.replace("_", " "), *([] if length is None else [str(length)])])


def _candidates(row: Row, way: Way) -> list[Run]:
    """One run for each setting, with the first seed, scored on validation rows; none where there is nothing to choose.

    Where the seeds are trained anew afterwards, on more rows, a third of the epochs is enough to choose by, unless their number
    is to be chosen too.
    """
    assert row.run is not None
    found = _open(row)
    if len(found) == 1:
        return []
    third = (row.run.epochs or 0) // CHOOSING
    open_epochs = any("epochs" in each for each in found)
    shorter: dict[str, Any] = {"epochs": third} if row.retrain and third >= ENOUGH and not open_epochs else {}
    return [replace(row.run, seed=0, **way.numbers, **each, **shorter) for each in found]


def _open(row: Row) -> list[dict[str, Any]]:
    """What there is to choose from: fields of the run."""
    rates = [{"rate": rate} for rate in row.rates] or [{}]
    return [{**choice, **rate} for choice in row.choices for rate in rates]


def _seeds(row: Row, way: Way) -> list[Run]:
    """The runs that count; none as long as the choice of their setting is open."""
    assert row.run is not None
    chosen, *others = _open(row)
    if others:
        records = [finished(way.where, run) for run in _candidates(row, way)]
        done = [record for record in records if record is not None]
        if len(done) < len(records):
            return []
        if row.retrain:
            done = [by_last(record) for record in done]
        chosen = min(zip(_open(row), done, strict=True), key=lambda pair: badness([pair[1]]))[0]
    return [_final(row, {**chosen, **way.numbers, "seed": seed}) for seed in range(row.seeds)]


def _final(row: Row, fields: Mapping[str, Any]) -> Run:
    """A run that counts, with these fields."""
    assert row.run is not None
    run = replace(row.run, **fields)
    return run.on_all_rows() if row.retrain else run


def _compare(runs: Sequence[Run], way: Way, shown: Shown) -> None:
    """Train those that are not done; rows of several items may share a run."""
    once = {run.key: run for run in runs}
    left = [run for run in once.values() if finished(way.where, run) is None]
    if left:
        with shown(left) as (listen, say):
            compare(
                left, way.where, resume=True, processes=way.processes, together=way.together, listen=listen, say=say,
                command=way.command,
            )  # fmt: skip


def _slim(record: Line) -> Line:
    """The record with fewer points of its curve: it is kept for good."""
    every = max(1, len(record["curve"]) // POINTS)
    curve = [point for i, point in enumerate(record["curve"]) if i % every == 0 or "valid" in point]
    return {**record, "curve": curve}
