"""Time series from a CSV or Parquet file with one row per step.

    time     column of the time, which is not read: the order of the rows is that of the steps
    series   column that names the series of a row; without it the file holds one series
    others   channels that are forecast, and covariates

Rows at the end of a series in which no channel that is forecast has a value are steps ahead. They give the covariates that are
known in advance.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unfading.own_data.sequences import check_finite
from unfading.own_data.table_files import (
    SERIES_NAMES,
    check_column,
    column_numbers,
    read_table,
    rows_of_series,
    series_column,
    without_columns,
)
from unfading.own_data.time_series import Missing, Numbers, TimeSeries

ENDINGS = (".csv", ".parquet")
# Names of a column of times, which is not read unless it is named as something else.
TIME_NAMES = ("time", "date", "datetime", "timestamp", "ds")
# What to do about text in a column that the user has named.
TEXT_IN_TARGET = "A column of dates or text cannot be forecast. Name a column of numbers with --target."
TEXT_IN_COVARIATE = "A covariate must be a column of numbers."
ADVICE = "Fill in the values first, or allow them with --missing mask."


class SeriesColumns(NamedTuple):
    """Which columns of a file hold what.

    Args:
        targets: columns that are forecast; none for all that hold nothing else.
        past: covariates that are known up to the time of a forecast.
        future: covariates that are known in advance.
        series: column that says to which series a row belongs; None leaves it to the names in the file.
        drop: columns that are not read.
    """

    targets: tuple[str, ...] = ()
    past: tuple[str, ...] = ()
    future: tuple[str, ...] = ()
    series: str | None = None
    drop: tuple[str, ...] = ()


class SeriesTable(NamedTuple):
    """The content of a file."""

    series: TimeSeries
    past: list[Numbers] | None  # covariates of each series, as long as it
    future: list[Numbers] | None  # covariates of each series and of its steps ahead
    names: list[str]  # of the series; empty for a single one without a name
    columns: SeriesColumns  # with the targets that were found
    layout: str  # what was found, for the user


def read_series_file(path: Path, columns: SeriesColumns, missing: Missing) -> SeriesTable:
    """Read the series of a file.

    Args:
        path: the file.
        columns: which columns hold what.
        missing: "refuse" raises for a missing value; "mask" keeps it as NaN.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Give a table with one row per step: {' or '.join(ENDINGS)}.")
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} has the ending {path.suffix!r}; series are read from {' or '.join(ENDINGS)}.")
    table = without_columns(path, read_table(path), columns.drop)
    series = series_column(path, columns.series, table)
    targets, unread = _targets(path, columns, series, table)
    groups = (targets, columns.past, columns.future)
    advice = (TEXT_IN_TARGET if columns.targets else None, TEXT_IN_COVARIATE, TEXT_IN_COVARIATE)
    numbers = [
        [column_numbers(path, name, table[name], about_text) for name in names]
        for names, about_text in zip(groups, advice, strict=True)
    ]
    rows = {"": np.arange(len(table[targets[0]]))} if series is None else rows_of_series(table[series])
    arrays, past, future = [], [], []
    for name, own in rows.items():
        values, before, known = (np.stack([each[own] for each in group], axis=1) if group else None for group in numbers)
        assert values is not None
        length = _length(path, name, values)
        place = f"{path}, series {name}" if name else str(path)
        arrays.append(_checked(values[:length], place, targets, missing))
        past.append(None if before is None else _checked(before[:length], place, columns.past, missing))
        future.append(None if known is None else _checked(known, place, columns.future, "refuse"))
    layout = f"{len(rows):,} series by {series!r}" if series is not None else "one series"
    layout += f", {sum(map(len, arrays)):,} steps, one per row in the order of the file; forecast: {', '.join(targets)}"
    layout += "".join(f"; {what}: {', '.join(names)}" for what, names in _further(columns, unread).items() if names)
    columns_read = columns._replace(targets=tuple(targets), series=series)
    several = TimeSeries(arrays, several=True, vectors=False)
    return SeriesTable(several, _given(past), _given(future), [name for name in rows if name], columns_read, layout)


def _targets(
    path: Path, columns: SeriesColumns, series: str | None, table: dict[str, list[Any]]
) -> tuple[list[str], list[str]]:
    """The columns that are forecast, and those that are not read."""
    covariates = (*columns.past, *columns.future)
    for name in (*columns.targets, *covariates):
        check_column(path, name, table)
    named = [*columns.targets, *covariates, *([] if series is None else [series])]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the column {twice!r} is named twice, among the targets, covariates and the series. Name it once.")
    others = [name for name in table if name not in named]
    targets = list(columns.targets) or [name for name in others if name.lower() not in (*TIME_NAMES, *SERIES_NAMES)]
    if not targets:
        raise ValueError(f"{path} has no column to forecast. Name it with --target.")
    return targets, [name for name in others if name not in targets]


def _further(columns: SeriesColumns, unread: Sequence[str]) -> dict[str, Sequence[str]]:
    return {"past covariates": columns.past, "future covariates": columns.future, "not read": unread}


def _length(path: Path, name: str, targets: Numbers) -> int:
    """Number of steps up to the last one with a value."""
    known = np.flatnonzero(~np.isnan(targets).all(axis=1))
    if not len(known):
        raise ValueError(f"{path} has no value to forecast{f' in the series {name}' if name else ''}.")
    return int(known[-1]) + 1


def _checked(values: Numbers, place: str, columns: Sequence[str], missing: Missing) -> Numbers:
    numbers = np.where(np.isnan(values), 0.0, values) if missing == "mask" else values
    check_finite(numbers, place, ("row", "column"), columns, ADVICE if missing == "refuse" else None)
    return values


def _given(covariates: list[Numbers | None]) -> list[Numbers] | None:
    given = [each for each in covariates if each is not None]
    return given or None
