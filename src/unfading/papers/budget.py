"""Budgets: everything that a budget changes about an item.

smoke   checks that an item runs: two steps of a few of its rows, one seed; the results mean nothing
short   a tenth of the paper's steps, one seed, the run's own learning rate
paper   the paper's setting
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from unfading.papers.row import Row
from unfading.training.run import Run

Budget = Literal["smoke", "short", "paper"]

SMOKE_ROWS = 3
# Arguments of a figure's function at budget smoke, by name.
SMALL = {"steps": 6, "seeds": 1, "draws": 4, "windows": 2}
# Options of tasks that count training batches.
BATCHES = ("warmup_batches", "growth_batches")


def within(rows: Sequence[Row], budget: Budget) -> list[Row]:
    """The rows as they are run at this budget."""
    if budget == "paper":
        return list(rows)
    if budget == "short":
        return [_shortened(row, _tenth) for row in rows]
    # The first, middle and last row: neighbours in a table are often of the same kind.
    places = sorted({round(i * (len(rows) - 1) / (SMOKE_ROWS - 1)) for i in range(SMOKE_ROWS)}) if rows else []
    return [rows[place] if rows[place].counted else _shortened(rows[place], _two_steps) for place in places]


def arguments(figure: Callable[..., Any], budget: Budget) -> dict[str, int]:
    """Arguments for a figure's function at this budget; its defaults are the paper's."""
    if budget == "paper":
        return {}
    defaults = {name: each.default for name, each in inspect.signature(figure).parameters.items() if name in SMALL}
    if budget == "smoke":
        return {name: SMALL[name] for name in defaults}
    return {name: max(SMALL[name], value // 10) for name, value in defaults.items()}


def _shortened(row: Row, shorten: Callable[[Run], Run]) -> Row:
    return replace(row, run=shorten(row.run), seeds=1, rates=(), choices=({},))


def _tenth(run: Run) -> Run:
    run = _with_batches(run, lambda count: -(-count // 10))
    if run.epochs is not None:
        return replace(run, epochs=max(1, run.epochs // 10))
    return replace(run, steps=max(1, (run.steps or 0) // 10))


def _two_steps(run: Run) -> Run:
    run = _with_batches(run, lambda count: min(count, 1))
    return replace(run, epochs=None, steps=2, batch=4, valid_every=2, valid_batches=1, stop_at=None)


def _with_batches(run: Run, change: Callable[[int], int]) -> Run:
    """The run with other numbers of training batches that are shorter than T steps."""
    counts = {name: change(run.task_options[name]) for name in BATCHES if name in run.task_options}
    if counts.get("growth_batches") == 1 and not counts.get("warmup_batches"):
        counts["growth_batches"] = 2  # without a warm-up, a growth of one batch is none, and the task refuses it
    return replace(run, task_options={**run.task_options, **counts}) if counts else run
