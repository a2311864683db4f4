"""Forecasts of a trained model: of the steps after the end of series, and of the windows of a task beside naive ones."""

from typing import Any

import numpy as np
import torch
from torch import nn

from unfading.own_data.backtest import Backtest, compare_forecasts
from unfading.own_data.forecast_preparation import ForecastPreparation, check_covers
from unfading.own_data.forecast_task import ForecastData, ForecastTask
from unfading.own_data.joined_series import JoinedSeries, Positions
from unfading.own_data.time_series import Missing, Numbers, TimeSeries

# Windows that are read in one pass.
WINDOWS = 256


def join_for(task: ForecastTask, series: TimeSeries, past: Any, future: Any, missing: Missing, *, ahead: int) -> JoinedSeries:
    """Series with their covariates, and `ahead` further steps, for a model of this task. Raises if they are not of its form."""
    channels = series.arrays[0].shape[1]
    if channels != task.targets:
        raise ValueError(f"the forecaster was fitted on series with {task.targets} channels; got {channels}.")
    if task.scale == "series" and len(series.arrays) != len(task.mean):
        raise ValueError(
            f"the forecaster was fitted on {len(task.mean)} series, each with its own scale; got {len(series.arrays)}. Give "
            "the same series in the same order, or fit with scale='window', which takes any."
        )
    joined = ForecastPreparation(missing=missing).join(series, past, future, ahead=ahead)
    counts = (joined.values.shape[1] - channels, joined.future.shape[1])
    for name, wanted, count in zip(("past", "future"), (task.past, task.future), counts, strict=True):
        if count != wanted:
            raise ValueError(f"the forecaster was fitted with {wanted} {name}_covariates; got {count}.")
    return joined


def forecast_windows(model: nn.Module, task: ForecastTask, joined: JoinedSeries, origins: Positions) -> Numbers:
    """Forecasts of windows, [windows, horizon, targets], in the units of the series."""
    scaled = task.scaled(joined)
    like = next(model.parameters())
    forecasts = []
    with torch.no_grad():
        for i in range(0, len(origins), WINDOWS):
            own = origins[i : i + WINDOWS]
            window = task.window(scaled, torch.from_numpy(own))
            prediction, _ = model(window.x.to(like.device, like.dtype))
            forecasts.append(task.unscaled(prediction, joined.series_of(own), window))
    return np.concatenate(forecasts)


def forecast_ahead(
    model: nn.Module, task: ForecastTask, series: TimeSeries, past: Any, future: Any, missing: Missing
) -> Numbers:
    """Forecasts of the steps after the end of each series, [series, horizon, targets], in its own units."""
    check_covers(series, task.sizes)
    joined = join_for(task, series, past, future, missing, ahead=task.horizon)
    return forecast_windows(model, task, joined, joined.starts[1:] - task.horizon)


def backtest_task(model: nn.Module, task: ForecastTask, name: str, origins: Positions) -> Backtest:
    """The forecasts of some windows of the task's own data, beside the naive ones.

    Args:
        model: the trained model.
        task: its task, with the data.
        name: name of the model.
        origins: the windows.
    """
    data: ForecastData = task.data
    joined = data.series
    series = [joined.values[start:end, : task.targets] for start, end in zip(joined.starts, joined.starts[1:], strict=False)]
    own = joined.series_of(origins)
    # The first forecast of each series; one without any needs no scale.
    firsts = [origins[own == i].min(initial=joined.starts[i + 1]) - joined.starts[i] for i in range(len(series))]
    forecasts = (name, forecast_windows(model, task, joined, origins))
    return compare_forecasts(series, joined, origins, firsts, task.sizes, task.season, forecasts)
