"""Series in one array, one after the other, and the windows into them.

A window is named by its origin o, the position of the first step that is forecast. It reads the steps o - context .. o - 1 and
forecasts o .. o + horizon - 1, all of one series.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfading.own_data.array_task import mean_and_spread
from unfading.own_data.time_series import Numbers

Positions = NDArray[np.int64]


class WindowSizes(NamedTuple):
    """The sizes of a window."""

    context: int
    horizon: int
    targets: int  # channels that are forecast

    def origins(self, values: Numbers, first: int, end: int, stride: int = 1) -> Positions:
        """Origins in one series [T, V] from `first` on, whose targets end before `end`.

        Left out are windows in which some channel has no known value to start from, and those without any known target.
        """
        origins = np.arange(max(first, self.context), end - self.horizon + 1, stride)
        known = ~np.isnan(values[:, : self.targets])
        count = np.concatenate([np.zeros((1, self.targets), np.int64), known.cumsum(axis=0)])
        read = count[origins] - count[origins - self.context]
        scored = count[origins + self.horizon] - count[origins]
        return origins[(read > 0).all(axis=1) & (scored > 0).any(axis=1)]


class JoinedSeries(NamedTuple):
    """Series one after the other along the first axis."""

    values: Numbers  # [sum of T_n, V]: the channels that are forecast, then the past covariates; NaN is a missing value
    future: Numbers  # [sum of T_n, F]: covariates that are known in advance
    starts: Positions  # [N + 1]: where each series begins, and where the last one ends

    @classmethod
    def join(cls, values: Sequence[Numbers], future: Sequence[Numbers]) -> "JoinedSeries":
        """Join values [T_n, V] and covariates [T_n, F]."""
        starts = np.cumsum([0, *(len(each) for each in values)], dtype=np.int64)
        return cls(np.concatenate(values), np.concatenate(future), starts)

    def slice(self, i: int, first: int, end: int) -> tuple[Numbers, Numbers]:
        """Values and known covariates of the steps first .. end - 1 of series i."""
        steps = slice(self.starts[i] + first, self.starts[i] + end)
        return self.values[steps], self.future[steps]

    def series_of(self, origins: Positions) -> Positions:
        """The series in which each window lies."""
        return np.searchsorted(self.starts, origins, side="right") - 1

    def targets(self, origins: Positions, sizes: WindowSizes) -> Numbers:
        """What came: [windows, horizon, targets]."""
        targets: Numbers = self.values[origins[:, None] + np.arange(sizes.horizon), : sizes.targets]
        return targets

    def naive(self, origins: Positions, sizes: WindowSizes, season: int) -> Numbers:
        """Seasonal naive forecasts [windows, horizon, targets]; with season 1, the last known value."""
        forecasts = np.empty((len(origins), sizes.horizon, sizes.targets))
        series = self.series_of(origins)
        for i in np.unique(series):
            start, end = self.starts[i], self.starts[i + 1]
            own = series == i
            forecasts[own] = naive_forecasts(
                self.values[start:end, : sizes.targets], origins[own] - start, sizes.horizon, season
            )
        return forecasts


def naive_forecasts(values: Numbers, origins: Positions, horizon: int, season: int) -> Numbers:
    """Seasonal naive forecasts of one series: y[o + k - m season] for step o + k, with the smallest m that is past and known.

    Where there is none, the last known value is repeated, which is the forecast of season 1.

    Args:
        values: the series [T, C]; NaN is a missing value.
        origins: first step of each forecast.
        horizon: steps of a forecast.
        season: steps after which the series repeats.

    Returns:
        [origins, horizon, C]
    """
    steps = origins[:, None] - season + np.arange(horizon) % season
    forecasts: Numbers = _last_known(values, season)[np.maximum(steps, 0)]
    forecasts[steps < 0] = np.nan
    if season == 1:
        return forecasts
    return np.where(np.isnan(forecasts), naive_forecasts(values, origins, horizon, 1), forecasts)


def _last_known(values: Numbers, season: int) -> Numbers:
    """Each missing value replaced by the last known one at the same step of an earlier season; NaN if there is none."""
    T, C = values.shape
    padded = np.full((-(-T // season) * season, C), np.nan)
    padded[:T] = values
    by_season = padded.reshape(-1, season, C)
    place = np.where(np.isnan(by_season), -1, np.arange(len(by_season))[:, None, None])
    place = np.maximum.accumulate(place, axis=0)
    filled = np.take_along_axis(by_season, np.maximum(place, 0), axis=0)
    return np.where(place < 0, np.nan, filled).reshape(-1, C)[:T]


def known_scale(values: Numbers) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the known values of each column; 0 and 1 for a column without any."""
    known = [column[~np.isnan(column)] for column in values.T]
    scales = [mean_and_spread(column[:, None]) if len(column) else ((0.0,), (1.0,)) for column in known]
    return tuple(mean for (mean,), _ in scales), tuple(spread for _, (spread,) in scales)
