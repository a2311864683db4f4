"""Files of time series: which columns are read as what, steps ahead at the end, and wrong files that are named."""

from dataclasses import replace

import numpy as np
import pytest

from unfading.own_data.forecast_preparation import ForecastPreparation
from unfading.own_data.forecast_source import columns_of, read_source, task_of
from unfading.own_data.series_files import SeriesColumns, read_series_file

VALUES = np.round(np.random.default_rng(0).standard_normal((40, 2)), 3)


def write_csv(path, header, rows):
    path.write_text("\n".join([",".join(header), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def one(path, ahead=0):
    """One series with a time, two channels and a calendar; `ahead` further rows have the calendar alone."""
    rows = [[f"2020-{t}", *VALUES[t], t % 7] for t in range(40)]
    rows += [[f"2020-{t}", "", "", t % 7] for t in range(40, 40 + ahead)]
    return write_csv(path, ["Date", "a", "b", "day"], rows)


def test_all_columns_but_the_time_are_forecast(tmp_path):
    table = read_series_file(one(tmp_path / "x.csv"), SeriesColumns(drop=("day",)), "refuse")
    assert np.array_equal(table.series.arrays[0], VALUES)
    assert (table.past, table.future, table.names) == (None, None, [])
    assert table.layout == "one series, 40 steps, one per row in the order of the file; forecast: a, b; not read: Date"


def test_an_identifier_of_each_row_is_not_forecast(tmp_path):
    path = write_csv(tmp_path / "x.csv", ["id", "a"], [[t, VALUES[t, 0]] for t in range(40)])
    assert read_series_file(path, SeriesColumns(), "refuse").columns.targets == ("a",)


def test_rows_without_a_target_at_the_end_are_steps_ahead(tmp_path):
    columns = SeriesColumns(("b",), ("a",), ("day",))
    table = read_series_file(one(tmp_path / "x.csv", ahead=5), columns, "refuse")
    assert np.array_equal(table.series.arrays[0], VALUES[:, 1:])
    assert np.array_equal(table.past[0], VALUES[:, :1])
    assert table.future[0][:, 0].tolist() == [t % 7 for t in range(45)]


def test_series_are_told_apart_by_their_column_in_the_order_of_the_file(tmp_path):
    rows = [[name, VALUES[t, i]] for t in range(20) for i, name in enumerate("zy")]
    table = read_series_file(write_csv(tmp_path / "x.csv", ["id", "a"], rows), SeriesColumns(), "refuse")
    assert table.names == ["z", "y"]
    assert [each[:, 0].tolist() for each in table.series.arrays] == VALUES[:20].T.tolist()


def test_missing_values_are_named_or_kept(tmp_path):
    rows = [[VALUES[t, 0], "" if t == 3 else VALUES[t, 1]] for t in range(20)]
    path = write_csv(tmp_path / "x.csv", ["a", "b"], rows)
    with pytest.raises(ValueError, match=r"x.csv has NaN at row 3, column 1 \('b'\). .* with --missing mask"):
        read_series_file(path, SeriesColumns(), "refuse")
    (series,) = read_series_file(path, SeriesColumns(), "mask").series.arrays
    assert np.argwhere(np.isnan(series)).tolist() == [[3, 1]]


def test_parquet_gives_the_same(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"a": VALUES[:, 0], "b": VALUES[:, 1]})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert np.array_equal(read_series_file(tmp_path / "x.parquet", SeriesColumns(), "refuse").series.arrays[0], VALUES)


def test_the_data_of_a_file_are_read_again_from_the_fields_of_the_task(tmp_path):
    path = one(tmp_path / "x.csv", ahead=3)
    task, table = task_of(path, SeriesColumns(("b",), (), ("day",)), ForecastPreparation(2, 8, test=0.2))
    assert read_source(task).content == task.content
    assert columns_of(task.source) == table.columns
    assert len(replace(task).data.test) == len(task.data.test)
    one(path)  # without the steps ahead, which no window reads
    assert read_source(task).content == task.content
    path.write_text(path.read_text().replace(str(VALUES[0, 1]), "7.5"))
    assert read_source(task).content != task.content


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (SeriesColumns(("c",)), "unknown column 'c'"),
        (SeriesColumns(("a",), ("a",)), "the column 'a' is named twice"),
        (SeriesColumns(drop=("a", "b", "day")), "has no column to forecast. Name it with --target"),
        (
            SeriesColumns(("Date",)),
            "'2020-0' in column 'Date', row 0, .* not a number. A column of dates or text cannot be forecast",
        ),
        (SeriesColumns(("a",), ("Date",)), "not a number. A covariate must be a column of numbers"),
        (SeriesColumns(series="day", targets=("a",), past=("moon",)), "unknown column 'moon'"),
    ],
)
def test_wrong_columns_are_named(tmp_path, columns, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_series_file(one(tmp_path / "x.csv"), columns, "refuse")


def test_a_series_without_values_and_other_files_are_named(tmp_path):
    path = write_csv(tmp_path / "x.csv", ["id", "a"], [["s", 1.0], ["s", 2.0], ["t", ""], ["t", ""]])
    with pytest.raises(ValueError, match="has no value to forecast in the series t"):
        read_series_file(path, SeriesColumns(), "mask")
    with pytest.raises(ValueError, match=r"does not exist\. Give a table with one row per step: \.csv or \.parquet"):
        read_series_file(tmp_path / "none.csv", SeriesColumns(), "mask")
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"series are read from \.csv or \.parquet"):
        read_series_file(tmp_path / "x.npy", SeriesColumns(), "mask")
