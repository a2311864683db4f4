"""The task of forecasting the series of a file, and its data again from the fields of the task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unfading.own_data.forecast_preparation import ForecastPreparation
from unfading.own_data.forecast_task import ForecastData, ForecastTask
from unfading.own_data.series_files import SeriesColumns, SeriesTable, read_series_file


def task_of(path: Path, columns: SeriesColumns, preparation: ForecastPreparation) -> tuple[ForecastTask, SeriesTable]:
    """The task of a file, with its data attached, and what the file holds."""
    table = read_series_file(path, columns, preparation.missing)
    # Columns as they were found, so that a file for predictions is read in the same way.
    columns_read = {name: list(value) if isinstance(value, tuple) else value for name, value in table.columns._asdict().items()}
    split = {name: getattr(preparation, name) for name in ("missing", "validation", "test")}
    source = {"file": str(path), **columns_read, **split}
    return preparation.make_task(table.series, table.past, table.future, source=source), table


def columns_of(source: Mapping[str, Any]) -> SeriesColumns:
    """The columns with which a file was read."""
    targets, past, future, drop = (tuple(source[name]) for name in ("targets", "past", "future", "drop"))
    return SeriesColumns(targets, past, future, source["series"], drop)


def read_source(task: ForecastTask) -> ForecastData:
    """The data of a task, read again from its file."""
    source = task.source
    split = {name: source[name] for name in ("missing", "validation", "test")}
    preparation = ForecastPreparation(task.horizon, task.context, task.season, task.scale, **split)
    table = read_series_file(Path(source["file"]), columns_of(source), preparation.missing)
    data: ForecastData = preparation.make_task(table.series, table.past, table.future).data
    return data
