"""Metrics of predictions, as plain functions over NumPy arrays or torch tensors.

    mae(prediction, target)             mean |prediction - target|
    rmse(prediction, target)            sqrt(mean (prediction - target)^2)
    mase(prediction, target, scale)     mean |prediction - target| / scale,   scale = naive_error(training, season)

`prediction` and `target` have the same shape. `mask` has it too: False excludes a target, which may then be NaN. Arrays give a
NumPy number and tensors a scalar tensor, through which a gradient passes.
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
