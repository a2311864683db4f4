"""A user's time series and their covariates: from NumPy, torch, pandas or polars.

[T]                         one series with one channel
[T, C]                      one series with C channels: a table with one row per step
[[T_1, C], [T_2, C], ...]   a list of series of any lengths; [N, T, C] are N series of one length
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from unfading.errors import unknown
from unfading.own_data.sequences import check_finite, column_names, plain_array

# What is done with NaN: an error with its row and column, or a mask.
Missing = Literal["refuse", "mask"]
ADVICE = "Fill in the values first, or allow them with missing='mask'."

Numbers = NDArray[np.float64]


class TimeSeries(NamedTuple):
    """Series in time, with the form in which they were given."""

    arrays: list[Numbers]  # [T_n, C]; NaN is a missing value
    several: bool  # a list of series, not a single one
    vectors: bool  # without an axis of channels

    @property
    def lengths(self) -> list[int]:
        """Number of steps of each series."""
        return [len(each) for each in self.arrays]

    def in_form(self, forecasts: Sequence[Numbers]) -> Any:
        """Forecasts [horizon, C] of each series in the form of the series."""
        answers = [each[:, 0] if self.vectors else each for each in forecasts]
        return answers if self.several else answers[0]


def read_time_series(values: Any, name: str = "series", missing: Missing = "refuse") -> TimeSeries:
    """The series of a user, in float64. What cannot be read raises with its row and column.

    Args:
        values: one series [T] or [T, C], a list of such, or [N, T, C].
        name: of the argument, for messages.
        missing: "refuse" raises for NaN; "mask" keeps it as a missing value.
    """
    if missing not in get_args(Missing):
        raise ValueError(unknown("option of missing", missing, get_args(Missing)))
    several = _is_several(values)
    parts = [(f"{name}[{i}]", each) for i, each in enumerate(values)] if several else [(name, values)]
    if not parts:
        raise ValueError(f"{name} is an empty list. Give at least one series.")
    arrays = [_read(each, own, missing) for own, each in parts]
    vectors = all(array.ndim == 1 for array in arrays)
    tables = [array.reshape(len(array), -1) for array in arrays]
    for (own, _), table in zip(parts, tables, strict=True):
        if table.shape[1] != tables[0].shape[1]:
            raise ValueError(
                f"{own} has {table.shape[1]} channels, and {parts[0][0]} has {tables[0].shape[1]}. Series that are forecast "
                "together have the same channels."
            )
    return TimeSeries(tables, several, vectors)


def read_covariates(values: Any, name: str, series: TimeSeries, missing: Missing, *, ahead: int | None) -> list[Numbers]:
    """Covariates [T_n, n] of each series, which begin at its first step; without any, arrays of no columns.

    Args:
        values: as `read_time_series` takes them; None for none.
        name: of the argument, for messages.
        series: the series to which they belong.
        missing: as `read_time_series` takes it.
        ahead: steps past the end of each series that they must cover; longer ones are cut. None if they end with it.
    """
    reach = 0 if ahead is None else ahead
    if values is None:
        return [np.empty((length + reach, 0)) for length in series.lengths]
    covariates = read_time_series(values, name, missing)
    if len(covariates.arrays) != len(series.arrays):
        raise ValueError(f"{name} are of {len(covariates.arrays)} series; got {len(series.arrays)} series. Give as many.")
    for i, (array, length) in enumerate(zip(covariates.arrays, series.lengths, strict=True)):
        own = f"{name}[{i}]" if covariates.several else name
        if ahead is None and len(array) != length:
            raise ValueError(f"{own} has {len(array)} steps, and its series {length}. They must begin and end together.")
        if len(array) < length + reach:
            raise ValueError(
                f"{own} has {len(array)} steps; wanted at least {length + reach}: the {length} of the series"
                + (f" and the {reach} that are forecast." if reach else ".")
            )
    return [array[: length + reach] for array, length in zip(covariates.arrays, series.lengths, strict=True)]


def _is_several(values: Any) -> bool:
    if isinstance(values, list | tuple):
        return not values or np.ndim(values[0]) > 0 or hasattr(values[0], "shape")
    return getattr(values, "ndim", None) == 3


def _read(values: Any, name: str, missing: Missing) -> Numbers:
    array = plain_array(values, name)
    if array.ndim not in (1, 2) or 0 in array.shape:
        raise ValueError(f"{name} must be [steps] or [steps, channels], or a list of such; got shape {list(array.shape)}.")
    array = array.astype(np.float64)
    checked = np.where(np.isnan(array), 0.0, array) if missing == "mask" else array
    check_finite(checked, name, ("row", "column"), column_names(values), ADVICE if missing == "refuse" else None)
    return array
