"""`fit`: train a cell on arrays, and return the trained model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfading.allocation import one_sentence
from unfading.cells.base import Cell
from unfading.errors import check_share, unknown
from unfading.own_data.array_task import (
    OWN_TASKS,
    ArrayData,
    ArrayTask,
    Readout,
    Rows,
    classification,
    hold_out,
    regression,
)
from unfading.own_data.sequences import Sequences, read_sequences
from unfading.own_data.targets import Labels, check_rows, class_weights, read_labels, read_numbers
from unfading.training.loop import train_model
from unfading.training.options import Listener, TrainOptions
from unfading.training.run import Run
from unfading.training.train import train
from unfading.training.trained_model import TrainedModel
from unfading.training.weights import load

TaskType = Literal["classification", "regression"]
# Settings of a run on a user's own data, unless others are given.
DEFAULTS: dict[str, Any] = {"hidden": 64, "rate": 5e-3, "epochs": 100, "patience": 20, "select_by": "loss"}
# Labels of more classes than this, in numbers, are taken for a quantity.
MOST_CLASSES = 50


class Preparation(NamedTuple):
    """How arrays become the data of a task.

    Args:
        task: "classification" or "regression"; None infers it from the targets.
        validation: share of the rows that chooses the weights and ends training early; 0 for none.
        test: share of the rows that is scored at the end; 0 for none.
        scale: standardise channels, and numbers as targets, by mean and standard deviation of the training rows.
        class_weight: "balanced", a dict of weights by label, or None.
        readout: what the head reads: "last" step of each sequence, or the "mean" over time.
    """

    task: TaskType | None = None
    validation: float = 0.2
    test: float = 0.0
    scale: bool = True
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None
    readout: Readout = "last"

    def make_task(self, X: Any, y: Any, seed: int, **fields: Any) -> ArrayTask:
        """The task of these arrays, split with this seed."""
        sequences, kind = read_sequences(X), self.task_type(y)
        labels = read_labels(y) if kind == "classification" else None
        target: NDArray[Any] = read_numbers(y) if labels is None else labels.rows
        check_rows(len(sequences), target)
        data = self._split(sequences, target, seed, labelled=labels is not None)
        fields = {"readout": self.readout, **fields}
        if labels is None:
            if self.class_weight is not None:
                raise ValueError(f"class_weight={self.class_weight!r} is for classification, and this is a regression.")
            return regression(data, scale=self.scale, **fields)
        weights = class_weights(self.class_weight, Labels(labels.classes, data.training().target))
        return classification(data, labels, scale=self.scale, weights=weights, **fields)

    def task_type(self, y: Any) -> str:
        """The type that is given, or else that of the targets: text, truth values and few whole numbers are labels."""
        if self.task is not None:
            if self.task not in OWN_TASKS:
                raise ValueError(unknown("task", self.task, OWN_TASKS))
            return self.task
        values = np.asarray(y.detach().cpu() if hasattr(y, "detach") else y)
        if values.dtype.kind not in "iuf":
            return "classification"
        whole = values.ndim == 1 and bool(np.all(np.isfinite(values))) and bool(np.all(values == np.round(values)))
        return "classification" if whole and len(np.unique(values)) <= MOST_CLASSES else "regression"

    def _split(self, sequences: Sequences, target: NDArray[Any], seed: int, *, labelled: bool) -> ArrayData:
        check_share("validation", self.validation)
        check_share("test", self.test)
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation={self.validation} and test={self.test} leave no row to train on. Their sum must be below 1."
            )
        draw = np.random.default_rng(seed)
        tested = hold_out(target, self.test, draw, labelled=labelled)
        rest = np.setdiff1d(np.arange(len(target)), tested)
        held_out = hold_out(target[rest], self.validation / (1 - self.test), draw, labelled=labelled)
        whole = Rows(sequences, target)
        return ArrayData(whole.take(rest), held_out, whole.take(tested) if len(tested) else None)


def fit(
    X: Any,
    y: Any,
    cell: str | type[Cell] = "STAR",
    *,
    task: TaskType | None = None,
    validation: float = 0.2,
    test: float = 0.0,
    scale: bool = True,
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
    readout: Readout = "last",
    where: Path | str | None = None,
    listen: Listener | None = None,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> TrainedModel:
    """Train a cell on your own sequences and return the trained model, which has `predict` and `record`.

    Args:
        X: sequences: [N, T, I], [N, T] for one channel, or a list of arrays [T_n, I] of any lengths; NumPy, pandas, polars or
            torch. Values must be finite.
        y: one label or one number per sequence, or [N, outputs] numbers.
        cell: name of a layer (STAR, LSTM, ...), or a class of your own.
        task: "classification" or "regression"; None infers it from y: text and few whole numbers are labels.
        validation: share of the rows that chooses the weights and ends training early; 0 trains on all rows.
        test: share of the rows that is scored at the end.
        scale: standardise channels, and numbers as targets, by mean and standard deviation of the training rows. Predictions
            are in the units of y.
        class_weight: "balanced", a dict of weights by label, or None.
        readout: what the head reads: the "last" step of each sequence, or the "mean" over time.
        where: parent of the run's folder, e.g. runs/mine, which `unfading report` and `load` read; None writes nothing.
        listen: called with a `ProgressUpdate` as training goes.
        say: called with messages for the user.
        settings: settings of the `Run`: hidden, layers, rate, batch, epochs, patience, seed, cell_options, ... The defaults
            here are hidden=64, rate=0.005, epochs=100, patience=20 and select_by="loss".
    """
    preparation = Preparation(task, validation, test, scale, class_weight, readout)
    own = preparation.make_task(X, y, settings.get("seed", 0))
    return fit_run(make_run(own, cell, settings), where, listen=listen, say=say)


def make_run(task: ArrayTask, cell: str | type[Cell], settings: Mapping[str, Any]) -> Run:
    """The run of a task over a user's data, with the default settings for what is left out."""
    rows = len(task.data.train.target) - len(task.data.held_out)
    values: dict[str, Any] = {"batch": min(max(rows // 12, 4), 32), **DEFAULTS, **settings}
    if settings.get("steps") is not None:
        values["epochs"] = settings.get("epochs")
    if not len(task.data.held_out):
        # Nothing is held out, so nothing can be evaluated during training.
        for name in ("patience", "select_by"):
            if name not in settings:
                del values[name]
        values.setdefault("split", "full")
    return Run(task=task, cell=cell, **values)  # type: ignore[arg-type]  # a run takes objects in the place of names


def without_data(run: Run) -> Run:
    """The same run, whose task has no data: what a trained model needs."""
    objects = {role: given for role, given in run.objects.items() if not isinstance(given.value, ArrayTask)}
    return Run.from_json(run.to_json(), run.code, objects)


def fit_run(
    run: Run, where: Path | str | None = None, *, listen: Listener | None = None, say: Callable[[str], None] = print
) -> TrainedModel:
    """Train a run, or continue it if it was stopped, and return its model."""
    if where is None:
        with one_sentence(f"{run.cell} with batch {run.batch}", "batch, or give the cell option checkpoint_every"):
            record, model = train_model(run, TrainOptions(listen=listen, say=say))
        return TrainedModel(model, without_data(run), record)
    train(run, where, resume=True, listen=listen, say=say)
    return load(Path(where) / run.key)
