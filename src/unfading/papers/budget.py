"""What a budget changes, all of it in one place: steps, seeds, rows, and the numbers of a figure that looks into models.

smoke   a check that an item runs: two steps of a few rows of it, one seed; what comes out means nothing
short   a tenth of the paper's steps, one seed, the rate as it stands
paper   as the paper has it
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from unfading.papers.row import COUNTED, Row
from unfading.training.run import Run

Budget = Literal["smoke", "short", "paper"]

SMOKE_ROWS = 3
# Numbers of a figure's function, by name, in a smoke.
SMALL = {"steps": 6, "seeds": 1, "draws": 4, "windows": 2}


def within(rows: Sequence[Row], budget: Budget) -> list[Row]:
    """The rows as that budget has them."""
    if budget == "paper":
        return list(rows)
    if budget == "short":
        return [_with(row, _a_tenth) for row in rows]
    # First, middle and last: the kinds of a table stand apart in it.
    places = sorted({round(i * (len(rows) - 1) / (SMOKE_ROWS - 1)) for i in range(SMOKE_ROWS)}) if rows else []
    return [rows[place] if rows[place].unit == COUNTED else _with(rows[place], _two_steps) for place in places]


def numbers(make: Callable[..., Any], budget: Budget) -> dict[str, int]:
    """Arguments for a figure's function: those of a paper are its defaults."""
    if budget == "paper":
        return {}
    given = {name: each.default for name, each in inspect.signature(make).parameters.items() if name in SMALL}
    return {name: SMALL[name] if budget == "smoke" else max(SMALL[name], value // 10) for name, value in given.items()}


def _with(row: Row, shorter: Callable[[Run], Run]) -> Row:
    return replace(row, run=None if row.run is None else shorter(row.run), seeds=1, rates=(), choices=({},))


def _a_tenth(run: Run) -> Run:
    if run.epochs is not None:
        return replace(run, epochs=max(1, run.epochs // 10))
    return replace(run, steps=max(1, (run.steps or 0) // 10))


def _two_steps(run: Run) -> Run:
    return replace(run, epochs=None, steps=2, batch=4, valid_every=2, valid_batches=1, stop_at=None)
