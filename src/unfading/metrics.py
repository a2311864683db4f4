"""Metrics of predictions, as plain functions over NumPy arrays or torch tensors.

    mae(prediction, target)             mean |prediction - target|
    rmse(prediction, target)            sqrt(mean (prediction - target)^2)
    mase(prediction, target, scale)     mean |prediction - target| / scale,   scale = naive_error(training, season)
    accuracy(prediction, target)        share of targets that are predicted
    f1(prediction, target)              mean over classes of 2 TP / (2 TP + FP + FN)
    confusion_matrix(prediction, target)    [classes, classes]: how many targets of class i were predicted as class j

`prediction` and `target` have the same shape. `mask` has it too: False excludes a target, which may then be NaN. Arrays give a
NumPy number and tensors a scalar tensor, through which a gradient passes. The metrics of classes also take the scores of all
classes, `prediction` [..., classes], of which the largest decides, and give NumPy numbers: they have no gradient.
"""

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfading.errors import check_count

__all__ = ["mae", "mase", "naive_error", "rmse"]

Numbers = TypeVar("Numbers", Tensor, NDArray[Any])


def mae(prediction: Numbers, target: Numbers, mask: Numbers | None = None) -> Numbers:
    """Mean absolute error."""
    return _mean(abs(_error(prediction, target, mask)), mask)


def rmse(prediction: Numbers, target: Numbers, mask: Numbers | None = None) -> Numbers:
    """Root of the mean squared error."""
    return _mean(_error(prediction, target, mask) ** 2, mask) ** 0.5


def mase(prediction: Numbers, target: Numbers, scale: Numbers | float, mask: Numbers | None = None) -> Numbers:
    """Mean absolute scaled error: below 1, forecasts are better than the naive one was on the training part.

    Args:
        prediction: forecasts.
        target: what came, of the same shape.
        scale: `naive_error` of the training part: one number, or an array that broadcasts to targets of several channels.
        mask: bool, the targets that count; None if all do.
    """
    return _mean(abs(_error(prediction, target, mask)) / scale, mask)


def naive_error(training: Any, season: int = 1) -> Any:
    """The scale of MASE: mean |y[t] - y[t - season]|, the error of repeating the last season of a training series.

    Args:
        training: one series, [T] or [T, channels]; NaN is a missing value, and pairs with one do not count.
        season: steps after which the series repeats; 1 repeats the last value.

    Returns:
        One number, or one per channel.
    """
    check_count("season", season)
    values = training.detach().cpu().numpy() if isinstance(training, Tensor) else np.asarray(training)
    values = values.astype(np.float64)
    if len(values) <= season:
        raise ValueError(f"MASE with season={season} needs a training series of more than {season} steps; got {len(values)}.")
    steps = np.abs(values[season:] - values[:-season])
    known = ~np.isnan(steps)
    count = known.sum(axis=0)
    total = np.where(known, steps, 0.0).sum(axis=0)
    if not np.all(total > 0):
        raise ValueError(
            f"MASE with season={season} is not defined for a training series that equals itself {season} steps earlier, "
            "or has no two such values: its scale is 0. Use mae."
        )
    return total / count


def accuracy(prediction: Any, target: Any, mask: Any = None) -> float:
    """Share of the targets that are predicted; prediction holds classes, or the scores of all classes [..., classes]."""
    predicted, true, _ = _classes(prediction, target, mask)
    return float((predicted == true).mean())


def f1(prediction: Any, target: Any, mask: Any = None) -> float:
    """F1 score, macro average: 2 TP / (2 TP + FP + FN) of each class, and the mean over classes.

    A class that is neither predicted nor a target does not count.
    """
    counts = confusion_matrix(prediction, target, mask)
    right, either = np.diag(counts), counts.sum(axis=0) + counts.sum(axis=1)
    return float((2.0 * right[either > 0] / either[either > 0]).mean())


def confusion_matrix(prediction: Any, target: Any, mask: Any = None) -> NDArray[np.int64]:
    """How many targets of each class (row) were predicted as each class (column).

    Args:
        prediction: classes, shaped like the target; or scores of all classes, [..., classes].
        target: the true classes. With scores they are the numbers 0 .. classes - 1; else they may be any labels, and the
            matrix has their sorted order.
        mask: bool, the targets that count; None if all do.
    """
    predicted, true, classes = _classes(prediction, target, mask)
    return np.bincount(true * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def _classes(prediction: Any, target: Any, mask: Any) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Predicted and true classes as numbers, one axis each, of the targets that count; and the number of classes."""
    prediction, target = _array(prediction), _array(target)
    counted = np.ones(target.shape, dtype=bool) if mask is None else _array(mask)
    if not counted.any():
        raise ValueError("there is no target that counts: the target is empty, or its mask is False everywhere.")
    if prediction.ndim == target.ndim + 1 and prediction.shape[:-1] == target.shape:
        classes = prediction.shape[-1]
        true = target[counted]
        if not np.issubdtype(true.dtype, np.integer) or true.min() < 0 or true.max() >= classes:
            raise ValueError(f"with the scores of {classes} classes, targets must be whole numbers in 0..{classes - 1}.")
        return prediction.argmax(axis=-1)[counted], true, classes
    if prediction.shape != target.shape:
        raise ValueError(
            f"prediction must have the shape of the target, {list(target.shape)}, or one more axis with the scores of all "
            f"classes; got {list(prediction.shape)}."
        )
    labels, numbers = np.unique(np.concatenate([prediction[counted], target[counted]]), return_inverse=True)
    predicted, true = np.split(numbers.reshape(-1), 2)
    return predicted, true, len(labels)


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _error(prediction: Numbers, target: Numbers, mask: Numbers | None) -> Numbers:
    """prediction - target, and 0 where a target does not count: before any other arithmetic, whose gradient NaN would spoil."""
    if not isinstance(prediction, Tensor):
        prediction, target = np.asarray(prediction), np.asarray(target)
    if prediction.shape != target.shape:
        raise ValueError(f"prediction and target must have one shape; got {list(prediction.shape)} and {list(target.shape)}.")
    if mask is None:
        return prediction - target
    if isinstance(prediction, Tensor):
        return torch.where(mask, prediction - target, 0.0)
    return np.where(mask, prediction - target, 0.0)


def _mean(values: Numbers, mask: Numbers | None) -> Numbers:
    """The mean of the values that count. It has no shape that depends on data, so that `torch.func.vmap` can run it."""
    return values.mean() if mask is None else values.sum() / mask.sum()
