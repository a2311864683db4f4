"""A line of a published table, or of a published figure, as what we train and hold against it: a small frozen value.

A table is a function that returns rows, `def table1() -> list[Row]`; a figure of curves one that returns `Curves`. Nothing is
trained by calling it. `papers/trained_rows.py` trains rows, `report/verdicts.py` judges what came of them.

tolerance is two standard errors of the published score on a test set of n rows, each right with probability p:

    tolerance = 2 * 100 * sqrt(p (1 - p) / n)       in per cent
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from unfading.training.run import Run

# The unit of a row that is counted, not trained.
COUNTED = "thousand parameters"


@dataclass(frozen=True)
class Row:
    """What the paper prints, and the run that answers it.

    Args:
        run: at the paper's setting, or at ours where it says none; None where nothing here can be trained.
        published: the number, in `unit`; None for a row that is ours alone.
        tolerance: how far below it (above, where less is better) still holds.
        note: what a reader must know: a setting that is ours, a misprint.
        name: of the row in its item.
        unit: "%", "perplexity", "bits", "error" or "thousand parameters".
        printed: what else the paper prints of the row: size and time.
        parameters: what the recurrent stack must have, without encoder and head; with `whole`, the model.
        whole: see `parameters`.
        rates: of learning, to choose from by validation; empty keeps the run's.
        choices: other fields of the run, to choose from by validation, each with every rate.
        seeds: so many.
        retrain: after the choice, train on training and validation rows together, and test the last weights.
        share: the claim is that this share of the seeds comes within the tolerance; None for one about the mean.
        chance: the claim is that it does no better than a guess.
        missing: data that no dataset of the library is; the row cannot be run.
    """

    run: Run | None
    published: float | None
    tolerance: float
    note: str = ""
    _: KW_ONLY
    name: str
    unit: str = "%"
    printed: str = ""
    parameters: int | None = None
    whole: bool = False
    rates: tuple[float, ...] = ()
    choices: tuple[Mapping[str, Any], ...] = ({},)
    seeds: int = 3
    retrain: bool = False
    share: float | None = None
    chance: bool = False
    missing: str = ""

    @property
    def dataset(self) -> str | None:
        """What it needs, by the name under which `unfading data list` has it; None where data are generated."""
        if self.run is None or self.unit == COUNTED:
            return self.missing or None
        return type(self.run.make_task()).dataset


class Curves(NamedTuple):
    """A figure that is drawn from the records of its rows alone."""

    title: str
    caption: str
    rows: list[Row]
    draw: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]  # lines of records to Vega-Lite; see report/curves.py


def two_sigma(published: float, rows: int) -> float:
    """Two standard errors of a score in per cent on a test set of so many rows."""
    p = min(max(published / 100, 0.0), 1.0)
    return round(200 * math.sqrt(p * (1 - p) / rows), 3)
