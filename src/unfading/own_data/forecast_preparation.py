"""From series and their covariates to the task of forecasting them, split by time.

The last part of each series is its test, and what comes before it the validation:

    |------------- training -------------|-- validation --|-- test --|

A window belongs to the part in which all its targets lie, so that no target is in two parts. What a window reads may lie in an
earlier part, as it does when the model is used. Scales are computed from the training part.
"""

from typing import Any, NamedTuple

import numpy as np

from unfading.errors import check_count, check_share
from unfading.own_data.forecast_task import ForecastData, ForecastScale, ForecastTask
from unfading.own_data.joined_series import JoinedSeries, Positions, WindowSizes, known_scale
from unfading.own_data.time_series import Missing, Numbers, TimeSeries, read_covariates

LEAST_CONTEXT = 16


class SeriesParts(NamedTuple):
    """Where the parts of a series end."""

    training: int
    validation: int
    test: int


class ForecastPreparation(NamedTuple):
    """How series become the data of a task.

    Args:
        horizon: steps that are forecast.
        context: steps that a forecast reads; None for twice the longer of horizon and season, at least 16.
        season: steps after which the series repeat; 1 for no season.
        scale: "series", "window" or "none", as `ForecastTask` describes them.
        missing: "refuse" raises for NaN; "mask" reads it as a missing value.
        validation: share of the steps of each series that chooses the weights and ends training early; 0 for none.
        test: share that is scored at the end; 0 for none.
    """

    horizon: int = 1
    context: int | None = None
    season: int = 1
    scale: ForecastScale = "series"
    missing: Missing = "refuse"
    validation: float = 0.2
    test: float = 0.0

    def window_sizes(self, series: TimeSeries) -> WindowSizes:
        """The sizes of the windows of these series."""
        for name, value in (("horizon", self.horizon), ("season", self.season)):
            check_count(name, value)
        context = max(2 * max(self.horizon, self.season), LEAST_CONTEXT) if self.context is None else self.context
        check_count("context", context)
        return WindowSizes(context, self.horizon, series.arrays[0].shape[1])

    def join(self, series: TimeSeries, past: Any, future: Any, *, ahead: int = 0) -> JoinedSeries:
        """The series with their covariates, and `ahead` further steps, of which only `future` is known."""
        before = read_covariates(past, "past_covariates", series, self.missing, ahead=None)
        known = read_covariates(future, "future_covariates", series, "refuse", ahead=ahead)
        values = [np.hstack(pair) for pair in zip(series.arrays, before, strict=True)]
        extended = [np.concatenate([each, np.full((ahead, each.shape[1]), np.nan)]) for each in values]
        return JoinedSeries.join(extended, known)

    def make_task(self, series: TimeSeries, past: Any = None, future: Any = None, **fields: Any) -> ForecastTask:
        """The task of these series, with the data attached."""
        check_share("validation", self.validation)
        check_share("test", self.test)
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation={self.validation} and test={self.test} leave no step to train on. Their sum must be below 1."
            )
        sizes = self.window_sizes(series)
        joined = self.join(series, past, future)
        parts = [self.parts(length, sizes) for length in series.lengths]
        data = self._split(joined, parts, sizes)
        training = [joined.slice(i, 0, part.training) for i, part in enumerate(parts)]
        scales = [known_scale(values) for values, _ in training] if self.scale == "series" else []
        known = np.concatenate([future for _, future in training])
        future_scale = known_scale(known) if self.scale != "none" else ((), ())
        task = ForecastTask(
            content=data.content,
            context=sizes.context,
            horizon=sizes.horizon,
            targets=sizes.targets,
            past=joined.values.shape[1] - sizes.targets,
            future=joined.future.shape[1],
            season=self.season,
            scale=self.scale,
            mean=tuple(mean for mean, _ in scales),
            spread=tuple(spread for _, spread in scales),
            future_mean=future_scale[0],
            future_spread=future_scale[1],
            **fields,
        )
        return task.with_data(data)

    def parts(self, length: int, sizes: WindowSizes) -> SeriesParts:
        """The parts of a series. Each has at least one window; a series too short for that is all training."""
        validation, test = (max(round(length * share), self.horizon) if share else 0 for share in (self.validation, self.test))
        training = length - validation - test
        if training < sizes.context + sizes.horizon:
            return SeriesParts(length, length, length)
        return SeriesParts(training, training + validation, length)

    def _split(self, joined: JoinedSeries, parts: list[SeriesParts], sizes: WindowSizes) -> ForecastData:
        split: list[list[Positions]] = [[], [], []]
        for i, part in enumerate(parts):
            values, _ = joined.slice(i, 0, part.test)
            for origins, first, end in zip(split, (0, *part[:2]), part, strict=True):
                origins.append(joined.starts[i] + sizes.origins(values, first, end))
        train, held_out, test = map(np.concatenate, split)
        self._check_windows(len(train), len(held_out), len(test), parts, sizes)
        return ForecastData(joined, np.concatenate([train, held_out]), np.arange(len(train), len(train) + len(held_out)), test)

    def _check_windows(self, train: int, held_out: int, test: int, parts: list[SeriesParts], sizes: WindowSizes) -> None:
        window = f"a window takes {sizes.context + sizes.horizon} steps (context={sizes.context}, horizon={sizes.horizon})"
        longest = max(part.test for part in parts)
        if not train:
            raise ValueError(
                f"the series give no window to train on: {window}, and the longest series has {longest}. Give longer series or "
                "a shorter context; of missing values, each window needs a known one to read and one to forecast."
            )
        for name, share, count in (("validation", self.validation, held_out), ("test", self.test, test)):
            if share and not count:
                raise ValueError(
                    f"the series are too short for {name}={share}: {window}, and the longest series has {longest}. Give longer "
                    f"series, a shorter context, or {name}=0."
                )


def check_covers(series: TimeSeries, sizes: WindowSizes, name: str = "series") -> None:
    """Raise for a series that is shorter than what a forecast reads, or in which nothing of it is known."""
    for i, array in enumerate(series.arrays):
        own = f"{name}[{i}]" if series.several else name
        if len(array) < sizes.context:
            raise ValueError(f"{own} has {len(array)} steps; a forecast reads the last {sizes.context} (context).")
        empty = np.flatnonzero(np.isnan(_last(array, sizes.context)).all(axis=0))
        if len(empty):
            raise ValueError(f"{own} has no known value in column {empty[0]} in its last {sizes.context} steps (context).")


def _last(array: Numbers, steps: int) -> Numbers:
    return array[len(array) - steps :]
