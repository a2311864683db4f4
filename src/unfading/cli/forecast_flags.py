"""Flags of `unfading train --data FILE --forecast`: forecasts of series in the place of targets of sequences."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

if TYPE_CHECKING:
    from unfading.own_data.forecast_task import ForecastTask

ColumnNames = Annotated[tuple[str, ...], arg(metavar="COLUMN ...")]


@dataclass(frozen=True)
class ForecastFlags:
    """Forecasts of the next steps of series, with --data: one row per step.

    Args:
        forecast: Forecast the columns of --target. The rows of --data are steps, in the order of time.
        horizon: Steps that are forecast.
        context: Steps that a forecast reads.
        season: Steps after which the series repeat, for the seasonal naive forecast and MASE.
        past_covariates: Columns that are known up to the time of a forecast.
        future_covariates: Columns that are known in advance, as a calendar is.
        scale: Standardise by the training part of each series, by what each window reads, or not at all.
        missing: Refuse empty values, or mask them.
    """

    forecast: bool = False
    horizon: int = 1
    context: Annotated[int | None, arg(help_behavior_hint="(default: twice horizon or season, at least 16)")] = None
    season: int = 1
    past_covariates: ColumnNames = ()
    future_covariates: ColumnNames = ()
    scale: Literal["series", "window", "none"] = "series"
    missing: Literal["refuse", "mask"] = "refuse"

    def check_unused(self) -> None:
        """Raise if flags of forecasts were given without --forecast."""
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if given and not self.forecast:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"{flags}: for forecasts of series only. Add --forecast.")

    def task(
        self, data: Path, target: tuple[str, ...], series: str | None, drop: tuple[str, ...], validation: float, test: float
    ) -> "tuple[ForecastTask, list[str]]":
        """The task of a file, and what was read and inferred, with the flags that change it.

        Args:
            data: the file.
            target: columns that are forecast.
            series: column that names the series.
            drop: columns that are not read.
            validation: share of the steps that chooses the weights.
            test: share of the steps that is scored at the end.
        """
        from unfading.own_data.forecast_preparation import ForecastPreparation
        from unfading.own_data.forecast_source import task_of
        from unfading.own_data.series_files import SeriesColumns

        columns = SeriesColumns(target, self.past_covariates, self.future_covariates, series, drop)
        preparation = ForecastPreparation(self.horizon, self.context, self.season, self.scale, self.missing, validation, test)
        task, table = task_of(data, columns, preparation)
        windows = len(task.data.origins) - len(task.data.held_out)
        scale = {"series": "the training part of each series", "window": "what each window reads", "none": "nothing"}
        return task, [
            f"{data}: {table.layout}",
            f"forecasting {task.horizon} steps (--horizon) from {task.context} (--context), season {task.season} (--season)",
            f"{windows:,} windows train, {len(task.data.held_out):,} validate (--validation {validation:g}), "
            f"{len(task.data.test):,} test (--test {test:g}), in the order of time",
            f"standardised by {scale[self.scale]} (--scale {self.scale}); data SHA-256 {task.content[:12]}...",
        ]
