"""Metrics that a user asks for, beside those of the task: names of the library, or functions of the user.

A metric is computed from all predictions of an evaluation at once: F1 or the root of a mean is no mean over batches. Metrics do
not change training, so they are an option of `train` and not part of a run: its key stays the same, and a finished run can be
scored again.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfading import metrics as library
from unfading.allocation import check_fits
from unfading.errors import unknown
from unfading.tasks.base import Batch, Task
from unfading.training.check_task import blame
from unfading.training.names import place_of, user_object

# A function of predictions [N, ...] and targets [N, ...] that returns one number.
Metric = Callable[[NDArray[Any], NDArray[Any]], Any]

CONFUSION_MATRIX = "confusion_matrix"
OF_CLASSES: dict[str, Metric] = {"accuracy": library.accuracy, "f1": library.f1}
OF_NUMBERS: dict[str, Metric] = {"mae": library.mae, "rmse": library.rmse}
# This one needs the error of a naive forecast, which only tasks of forecasts have: it is one of their own metrics.
OF_FORECASTS = "mase"
NAMES = (*OF_CLASSES, CONFUSION_MATRIX, *OF_NUMBERS, OF_FORECASTS)
# A matrix of more classes is larger than all else that a record holds.
MOST_CLASSES = 200


class ConfusionMatrix(NamedTuple):
    """How many rows of each class were predicted as each class."""

    split: str
    classes: list[Any]  # labels
    counts: list[list[int]]  # [true, predicted]


class UserMetrics(NamedTuple):
    """The metrics of a user, by name."""

    functions: Mapping[str, Metric]
    names: tuple[str, ...] = ()  # all that were asked for, in order

    @property
    def confusion_matrix(self) -> bool:
        """Whether a confusion matrix was asked for."""
        return CONFUSION_MATRIX in self.names

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the metrics that are one number."""
        return tuple(name for name in self.names if name != CONFUSION_MATRIX)

    @property
    def own(self) -> bool:
        """Whether a function of the user is among them."""
        return any(name not in NAMES for name in self.names)

    def check(self, prediction: Tensor, batch: Batch, task: Task, computed: Iterable[str]) -> None:
        """Raise for a metric of the library that does not fit the task.

        Args:
            prediction: of this batch.
            batch: a batch of the task.
            task: the task.
            computed: names of the metrics that the task computes itself.
        """
        name = type(task).__name__
        classes = prediction.dim() == batch.target.dim() + 1 and not batch.target.is_floating_point()
        for each in set(self.names) - set(computed):
            if each == OF_FORECASTS:
                raise ValueError(
                    f"the metric mase needs the error of a naive forecast, which {name} does not compute. Use mae, or "
                    "a function of your own that calls unfading.metrics.mase with a scale. Of forecasts, backtest and "
                    "`unfading train --forecast` print MASE."
                )
            if each in OF_NUMBERS and classes:
                raise ValueError(f"the metric {each} compares numbers, and {name} has classes. Use {', '.join(OF_CLASSES)}.")
            if each in (*OF_CLASSES, CONFUSION_MATRIX) and not classes:
                raise ValueError(f"the metric {each} compares classes, and {name} has none. Use {', '.join(OF_NUMBERS)}.")
        if self.confusion_matrix and prediction.shape[-1] > MOST_CLASSES:
            raise ValueError(
                f"a confusion matrix is for at most {MOST_CLASSES} classes; {name} has {prediction.shape[-1]}. Use f1."
            )

    def scores(self, prediction: NDArray[Any], target: NDArray[Any], computed: Iterable[str]) -> dict[str, float]:
        """The value of each metric that is one number and that the task does not compute itself.

        A prediction that is not finite has no score: functions of other libraries refuse it.
        """
        finite = bool(np.isfinite(prediction).all())
        return {
            name: _number(name, function, prediction, target) if finite else math.nan
            for name, function in self.functions.items()
            if name not in computed
        }


NO_METRICS = UserMetrics({})


def read_metrics(metrics: Sequence[str | Metric]) -> UserMetrics:
    """The metrics of these names and functions.

    Args:
        metrics: names of the library, names of functions in a user's file (my.py:function), or functions.
    """
    if isinstance(metrics, str) or callable(metrics) or not isinstance(metrics, Sequence):
        raise TypeError(f'metrics must be a list of names and functions, e.g. ["f1"]; got {metrics!r}.')
    functions: dict[str, Metric] = {}
    for metric in metrics:
        name, function = _named(metric)
        if name in functions:
            raise ValueError(f"the metric {name} is given twice. Leave one out, or give the function another name.")
        functions[name] = function
    numbers = {name: each for name, each in functions.items() if name not in (CONFUSION_MATRIX, OF_FORECASTS)}
    return UserMetrics(numbers, tuple(functions))


def _named(metric: str | Metric) -> tuple[str, Metric]:
    if isinstance(metric, str) and not place_of(metric):
        if metric not in NAMES:
            raise ValueError(f"{unknown('metric', metric, NAMES)} A function of your own is named my.py:function.")
        return metric, {**OF_CLASSES, **OF_NUMBERS}.get(metric, library.confusion_matrix)
    function = user_object(metric) if isinstance(metric, str) else metric
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise TypeError(f"a metric is a name or a function with a name, def my_metric(prediction, target); got {function!r}.")
    if name in ("loss", *NAMES) and function is not getattr(library, name, None):
        raise ValueError(f"a metric of your own cannot be named {name}, which is a metric of the library. Rename the function.")
    return name, function


def _number(name: str, function: Metric, prediction: NDArray[Any], target: NDArray[Any]) -> float:
    try:
        value = function(prediction, target)
    except Exception as error:
        blame(error, f"the metric {name}")
    scalar = isinstance(value, Tensor | np.generic | np.ndarray) and math.prod(value.shape) == 1
    number = value.item() if scalar else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"the metric {name} must return one number; got {_shape(value)}.")
    return float(number)


def _shape(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of shape {list(value.shape)}" if isinstance(value, Tensor | np.ndarray) else kind


class Predictions:
    """The predictions of every model of a fleet in an evaluation, and their targets, on the CPU; none without metrics.

    Args:
        metrics: what they are for.
        task: the task.
        split: the rows that are evaluated.
        batches: the number of batches to come.
    """

    def __init__(self, metrics: UserMetrics, task: Task, split: str, batches: int):
        self.metrics, self.task, self.split, self.batches = metrics, task, split, batches
        self._predictions: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, prediction: Tensor, batch: Batch, computed: Iterable[str]) -> None:
        """Take the predictions [E, ...] of a batch, of which the task has computed metrics of these names."""
        if not self.metrics.names:
            return
        if not self._predictions:
            self.metrics.check(prediction[0], batch, self.task, computed)
            needed = prediction.numel() * prediction.element_size() * self.batches
            check_fits("metrics over all predictions of an evaluation", needed, "number of valid_batches, or no metrics")
        self._predictions.append(torch.stack([_rows(each, batch) for each in prediction]).cpu())
        self._targets.append(_rows(batch.target, batch).cpu())

    def score(self, models: Sequence[dict[str, Any]]) -> list[ConfusionMatrix | None]:
        """Add the metrics to the scores of each model. Returns the confusion matrix of each, if it was asked for."""
        if not self.metrics.names:
            return [None] * len(models)
        target = torch.cat(self._targets).numpy()
        matrices = []
        for e, scores in enumerate(models):
            prediction = torch.cat([each[e] for each in self._predictions]).numpy()
            scores |= self.metrics.scores(prediction, target, scores)
            wanted = self.metrics.confusion_matrix
            matrices.append(_confusion(prediction, target, self.task, self.split) if wanted else None)
        return matrices


def _rows(values: Tensor, batch: Batch) -> Tensor:
    """Predictions or targets of a batch with one axis in the place of rows, or of steps and rows; only those that count."""
    if batch.mask is not None:
        return values[batch.mask]
    per_step = batch.target.dim() > 1 and batch.target.shape[:2] == batch.x.shape[:2]
    return values.flatten(0, 1) if per_step else values


def _confusion(prediction: NDArray[Any], target: NDArray[Any], task: Task, split: str) -> ConfusionMatrix:
    """The confusion matrix of predictions, with the labels of the task."""
    counts = library.confusion_matrix(prediction, target)
    labels = getattr(task, "classes", None)
    classes = list(labels) if isinstance(labels, tuple) and len(labels) == len(counts) else list(range(len(counts)))
    return ConfusionMatrix(split, classes, counts.tolist())
