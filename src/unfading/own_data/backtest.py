"""Backtests: forecasts of the past of series by a model and by naive rules, with their scores, and a page about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unfading.metrics import mae, mase, naive_error, rmse
from unfading.own_data.joined_series import JoinedSeries, Positions, WindowSizes
from unfading.own_data.time_series import Numbers

NAIVE, SEASONAL = "naive", "seasonal naive"


@dataclass(frozen=True)
class Backtest:
    """Forecasts of the same windows by a model and by naive rules.

    `print` shows the scores as a table, and `save` writes a page or a picture.

    Args:
        series: the series [T_n, channels], in which NaN is a missing value.
        season: steps after which they repeat.
        window_series: which series each window is of.
        first_step: the first step of the series that each window forecasts.
        target: what came, [windows, horizon, channels].
        forecasts: by model, shaped like `target`: the trained one first, then "naive" and, if there is a season, "seasonal
            naive".
        naive_error: the scale of MASE for each window and channel, from the steps before the first forecast of its series; NaN
            where it is not defined.
    """

    series: Sequence[Numbers]
    season: int
    window_series: Positions
    first_step: Positions
    target: Numbers
    forecasts: Mapping[str, Numbers]
    naive_error: Numbers

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """MAE, RMSE and MASE of each model, over all known targets."""
        mask, scale = ~np.isnan(self.target), self.naive_error[:, None, :]
        return {
            name: {
                "mae": float(mae(forecast, self.target, mask)),
                "rmse": float(rmse(forecast, self.target, mask)),
                "mase": float(mase(forecast, self.target, scale, mask)),
            }
            for name, forecast in self.forecasts.items()
        }

    @property
    def errors_by_step(self) -> dict[str, list[float]]:
        """Mean absolute error of each model at each step ahead, divided by the naive error if that is defined."""
        scale = self.naive_error[:, None, :] if np.isfinite(self.naive_error).all() else 1.0
        errors = {name: np.abs(forecast - self.target) / scale for name, forecast in self.forecasts.items()}
        # A step ahead at which nothing is known has no error.
        return {name: [_known_mean(error[:, k]) for k in range(error.shape[1])] for name, error in errors.items()}

    def __str__(self) -> str:
        width = max(map(len, self.forecasts))
        lines = [f"{'':{width}}  {'MAE':>10}  {'RMSE':>10}  {'MASE':>8}"]
        for name, scores in self.scores.items():
            lines.append(f"{name:{width}}  {scores['mae']:10.4g}  {scores['rmse']:10.4g}  {scores['mase']:8.4g}")
        return "\n".join(lines)

    def save(self, path: Path | str) -> Path:
        """Write the page of the backtest (.html), or its figure of forecasts alone (.png or .svg). Needs the extra `report`."""
        from unfading.report import backtest_page

        return backtest_page.write(self.rows(), Path(path))

    def rows(self) -> dict[str, Any]:
        """The backtest as plain values, for its page."""
        windows = [
            {
                "series": int(series),
                "first": int(first),
                "forecasts": {name: forecast[i].tolist() for name, forecast in self.forecasts.items()},
            }
            for i, (series, first) in enumerate(zip(self.window_series, self.first_step, strict=True))
        ]
        return {
            "model": next(iter(self.forecasts)),
            "season": self.season,
            "horizon": self.target.shape[1],
            "series": [each.tolist() for each in self.series],
            "scores": self.scores,
            "errors_by_step": self.errors_by_step,
            "scaled": bool(np.isfinite(self.naive_error).all()),
            "windows": windows,
        }


def compare_forecasts(
    series: Sequence[Numbers],
    joined: JoinedSeries,
    origins: Positions,
    starts: Sequence[int],
    sizes: WindowSizes,
    season: int,
    model: tuple[str, Numbers],
) -> Backtest:
    """The backtest of a model's forecasts.

    Args:
        series: the series [T_n, channels].
        joined: the same, joined.
        origins: windows of `joined`.
        starts: the first step of each series that is forecast.
        sizes: of the windows.
        season: steps after which the series repeat.
        model: name and forecasts of the model, [windows, horizon, channels].
    """
    name, forecasts = model
    rules = {NAIVE: 1, **({SEASONAL: season} if season > 1 else {})}
    own = joined.series_of(origins)
    scales = np.stack([_scale(each[:start], season) for each, start in zip(series, starts, strict=True)])
    return Backtest(
        series=series,
        season=season,
        window_series=own,
        first_step=origins - joined.starts[own],
        target=joined.targets(origins, sizes),
        forecasts={name: forecasts, **{rule: joined.naive(origins, sizes, each) for rule, each in rules.items()}},
        naive_error=scales[own],
    )


def _scale(training: Numbers, season: int) -> Numbers:
    """The naive error of each channel; NaN where it is not defined."""
    scale = np.full(training.shape[1], np.nan)
    for j, channel in enumerate(training.T):
        try:
            scale[j] = naive_error(channel, season)
        except ValueError:  # constant, or too short
            continue
    return scale


def _known_mean(values: Numbers) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
