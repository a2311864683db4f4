"""`Row`: a line of a published table or figure, with the run that reproduces it. `Curves`: a figure drawn from such rows.
`Order` and `Ranking`: published claims about several rows.

A table is a function that returns rows, `def table1() -> list[Row]`; a figure of curves is one that returns `Curves`. Calling
it trains nothing: `papers/reproduce.py` trains rows, `report/verdicts.py` judges the results.

The tolerance is two standard errors of the published score on a test set of n rows, each right with probability p:

    tolerance = 2 * 100 * sqrt(p (1 - p) / n)       in per cent
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from unfading.data import store
from unfading.training.run import Run

# The unit of a row whose parameters are counted and which is not trained.
COUNTED = "thousand parameters"


@dataclass(frozen=True)
class Row:
    """A published number and the run that reproduces it.

    Args:
        run: The run at the paper's setting, or at ours where the paper states none.
        published: The published number, in `unit`; None for a row that the paper does not have.
        tolerance: How far below the published number (above it, if lower is better) a result still counts as held.
        note: What a reader must know, e.g. a setting that is ours, or a misprint.
        name: Name of the row in its item.
        unit: "%", "perplexity", "bits", "error" or "thousand parameters".
        printed: What else the paper prints for the row: size and time.
        parameters: Expected number of parameters of the recurrent stack, without encoder and head; with `whole`, of the model.
        whole: See `parameters`.
        rates: Learning rates to choose from by validation; if empty, the run's own rate is used.
        choices: Other fields of the run to choose from by validation, each combined with every rate.
        judges: Fields of the runs that judge a setting, e.g. seeds or folds. A setting is trained with each of them, and the
            mean of their validation scores counts.
        seeds: Number of seeds. Three become five if they differ by more than a point (`report/verdicts.py`).
        retrain: After the choice, train on the training and validation rows together and test the last weights.
        share: The claim is that this share of the seeds comes within the tolerance; None for a claim about the mean.
        fails: The claim is failure: the model does not train (chance, or NaN), or fewer seeds than `share` solve the task.
        changed_after_test: What changed in the row's setting or choices after a test score of it was known; empty if nothing.
        log: Validation scores of the authors' own run by epoch, counted from 1, in `unit`; empty if they released none.
    """

    run: Run
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
    judges: tuple[Mapping[str, Any], ...] = ({"seed": 0},)
    seeds: int = 3
    retrain: bool = False
    share: float | None = None
    fails: bool = False
    changed_after_test: str = ""
    log: Mapping[int, float] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The task and its length, e.g. "adding 200"."""
        length = self.run.task_options.get("T")
        return " ".join([self.run.task.replace("_", " "), *([] if length is None else [str(length)])])

    @property
    def counted(self) -> bool:
        """Whether the row is about a number of parameters, so that nothing is trained."""
        return self.unit == COUNTED

    @property
    def dataset(self) -> str | None:
        """Name of the dataset it needs, as in `unfading data list`; None if the data are generated."""
        return None if self.counted else type(self.run.make_task()).dataset

    @property
    def available(self) -> bool:
        """Whether the row can be run with the datasets that are present."""
        return self.dataset is None or store.present(self.dataset)

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings to choose from by validation, as fields of the run: every choice with every rate."""
        rates = [{"rate": rate} for rate in self.rates] or [{}]
        return [{**choice, **rate} for choice in self.choices for rate in rates]

    def judge_runs(self, **fields: Any) -> list[Run]:
        """The runs with these fields that judge a setting, one per judge, whose task options are added to those of the run."""
        run = replace(self.run, **fields)
        return [
            replace(run, **{**judge, "task_options": {**run.task_options, **judge.get("task_options", {})}})
            for judge in self.judges
        ]

    def final_run(self, **fields: Any) -> Run:
        """The run with these fields, as it is trained once its setting is chosen."""
        run = replace(self.run, **fields)
        return run.on_all_rows() if self.retrain else run

    def possible_runs(self) -> list[Run]:
        """The runs that may answer the row, one per setting; none if it is counted."""
        return [] if self.counted else [self.final_run(**setting) for setting in self.settings]


@dataclass(frozen=True)
class Order:
    """A published claim that rows of an item score better, learn in fewer steps or train in less time than others.

    Args:
        claim: The claim, as a sentence, and where it stands in the paper.
        first: Names of the rows that are claimed to be ahead.
        then: Names of the rows behind: each of `first` is ahead of each of these.
        by: What is compared: test scores, training steps until the task is solved, or seconds of training.
        factor: How many times fewer steps or less time.
        bound: A bound that the rows in `first` reach: a score, or a number of steps or seconds.
    """

    claim: str
    first: tuple[str, ...]
    then: tuple[str, ...]
    _: KW_ONLY
    by: Literal["score", "steps", "seconds"] = "score"
    factor: float = 1.0
    bound: float | None = None


@dataclass(frozen=True)
class Ranking:
    """A published count of the tasks in which each cell is the best, or among the best two.

    Args:
        claim: The claim, as a sentence, and where it stands in the paper.
        leader: The cell that leads the ranking.
        tasks: For each task the names of the rows of the cells, by cell.
        published: How often a cell is the best, and among the best two.
    """

    claim: str
    leader: str
    tasks: Mapping[str, Mapping[str, str]]
    published: Mapping[str, tuple[int, int]]


class Curves(NamedTuple):
    """A figure drawn from the records of its rows alone."""

    title: str
    caption: str
    rows: list[Row]
    draw: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]  # records to Vega-Lite; see report/figures/curve_figures.py


def two_sigma(published: float, rows: int) -> float:
    """Two standard errors of a score in per cent on a test set with this number of rows."""
    p = min(max(published / 100, 0.0), 1.0)
    return round(200 * math.sqrt(p * (1 - p) / rows), 3)
