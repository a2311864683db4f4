"""`fit`: train a cell on arrays, and return the trained model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from unfading.allocation import one_sentence
from unfading.cells.base import Cell
from unfading.errors import unknown
from unfading.own_data.own_task import OwnTask
from unfading.own_data.preparation import Preparation, TaskType
from unfading.tasks.base import Readout
from unfading.training.callbacks import Callback
from unfading.training.loop import train_model
from unfading.training.options import Listener, TrainOptions, displayed
from unfading.training.run import Run
from unfading.training.settings import FIELDS
from unfading.training.train import train
from unfading.training.trained_model import TrainedModel
from unfading.training.user_metrics import Metric
from unfading.training.weights import load

# Training on a user's own data, unless settings are given: a few rows need more epochs than many.
EPOCHS, STEPS = 100, 2000  # at least so many of both
PATIENCE, EVALUATED_EVERY = 20, 20  # evaluations, and steps between them at least
LARGEST_BATCH = 32


def fit(
    X: Any,
    y: Any,
    cell: str | type[Cell] = "GRU",
    *,
    task: TaskType | None = None,
    validation: float = 0.2,
    test: float = 0.0,
    scale: bool = True,
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
    readout: Readout = "pooled",
    where: Path | str | None = None,
    listen: Listener | None = None,
    say: Callable[[str], None] = print,
    metrics: Sequence[str | Metric] = (),
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
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
        readout: what the head reads: the "last" step of each sequence, the "mean" over time, or "pooled", which is both and
            the maximum over time.
        where: parent of the run's folder, e.g. runs/mine, which `unfading report` and `load` read; None writes nothing.
        listen: called with a `ProgressUpdate` as training goes.
        say: called with messages for the user.
        metrics: further metrics, in a list: names (accuracy, f1, confusion_matrix, mae, rmse, mase), and functions that take
            the predictions and the targets of all rows as NumPy arrays and return one number. A classification has scores
            [rows, classes] as predictions and the numbers of the classes as targets. The record has the results.
        callbacks: functions that are called with a `TrainingEvent` after every step and evaluation, and at the end. One that
            returns True ends the training; one that raises ends it with an error, after a checkpoint.
        progress: show a progress bar, on a terminal or in a notebook.
        settings: settings of the `Run`: hidden, layers, rate, batch, epochs, patience, seed, cell_options, ... The defaults
            here are hidden=64, rate=0.005, a batch of a twelfth of the rows (4 to 32), at least 100 epochs and 2,000 steps,
            patience=20 and select_by="loss".
    """
    preparation = Preparation(task, validation, test, scale, class_weight, readout)
    own = preparation.make_task(X, y, settings.get("seed", 0))
    options = TrainOptions(listen=listen, say=say, metrics=metrics, callbacks=callbacks, progress=progress)
    return fit_run(make_run(own, cell, settings), where, options)


def default_settings(task: OwnTask, batch: int | None = None) -> dict[str, Any]:
    """Settings of a run on a user's own data, unless others are given.

    Args:
        task: the task, with its data.
        batch: sequences in a batch; None for a twelfth of the training rows, at least 4 and at most 32.
    """
    held_out, rows = len(task.rows("valid")), len(task.rows("train"))
    batch = min(max(rows // 12, 4), LARGEST_BATCH) if batch is None else batch
    steps = max(1, rows // batch)  # of an epoch
    settings = {"hidden": 64, "rate": 5e-3, "batch": batch, "steps": None, "epochs": max(EPOCHS, -(-STEPS // steps))}
    if not held_out:  # nothing can be evaluated during training
        return {**settings, "split": "full"}
    return {**settings, "patience": PATIENCE, "valid_every": max(steps, EVALUATED_EVERY), "select_by": "loss"}


def make_run(task: OwnTask, cell: str | type[Cell], settings: Mapping[str, Any]) -> Run:
    """The run of a task over a user's data, with the default settings for what is left out."""
    for name in settings:
        if name not in FIELDS:
            raise TypeError(unknown("setting", name, FIELDS))
    values: dict[str, Any] = {**default_settings(task, settings.get("batch")), **settings}
    if settings.get("steps") is not None:
        values["epochs"] = settings.get("epochs")
    return Run(task=task, cell=cell, **values)  # type: ignore[arg-type]  # a run takes objects in the place of names


def without_data(run: Run) -> Run:
    """The same run, whose task has no data: what a trained model needs."""
    objects = {role: given for role, given in run.objects.items() if not isinstance(given.value, OwnTask)}
    return Run.from_json(run.to_json(), run.code, objects)


def fit_run(run: Run, where: Path | str | None, options: TrainOptions) -> TrainedModel:
    """Train a run, or continue it if it was stopped, and return its model."""
    if where is None:
        too_large = one_sentence(f"{run.cell} with batch {run.batch}", "batch, or give the cell option checkpoint_every")
        with too_large, displayed([run], options) as options:
            record, model = train_model(run, options)
        return TrainedModel(model, without_data(run), record)
    names = ("listen", "say", "metrics", "callbacks", "progress")
    train(run, where, resume=True, **{name: getattr(options, name) for name in names})
    return load(Path(where) / run.key)
