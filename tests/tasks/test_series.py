"""Files of the UCR and UEA archives: what is written is what is read, and what is damaged is named with its line."""

import numpy as np
import pytest

from unfading.tasks.series import read_series

TS = """# remarks
@problemName Toy
@timeStamps false
@univariate false
@dimensions 2
@equalLength false
@classLabel true up down
@data
1,2,3:4,5,6:up
1.5,-2e1:0.25,7:down
"""


def written(folder, text, suffix=".ts"):
    path = folder / f"Toy_TRAIN{suffix}"
    path.write_text(text)
    return path


def test_ts_gives_channels_as_columns(tmp_path):
    series = read_series(written(tmp_path, TS))
    np.testing.assert_array_equal(series.values[0], [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(series.values[1], [[1.5, 0.25], [-20, 7]])
    assert series.labels == ["up", "down"]
    assert series.classes == ["up", "down"]


def test_tsv_takes_the_label_first_and_trailing_nan_as_the_end(tmp_path):
    series = read_series(written(tmp_path, "10\t1\t2\t3\n-1.0\t4\t5\tNaN\n2\t1\t1\t1\n", ".tsv"))
    assert [len(values) for values in series.values] == [3, 2, 3]
    np.testing.assert_array_equal(series.values[1], [[4], [5]])
    assert series.labels == ["10", "-1", "2"]
    assert series.classes == ["-1", "2", "10"]  # by value, not by letter


def test_missing_values_inside_lie_on_the_line_between_their_neighbours(tmp_path):
    series = read_series(written(tmp_path, TS.replace("1,2,3:4,5,6", "?,2,?,?,5:1,NaN,3,4,5")))
    np.testing.assert_array_equal(series.values[0], [[2, 1], [2, 2], [3, 3], [4, 4], [5, 5]])


def test_a_channel_may_end_before_the_others_only_by_missing_values(tmp_path):
    series = read_series(written(tmp_path, TS.replace("1,2,3:4,5,6", "1,2,?:4,5,?")))
    np.testing.assert_array_equal(series.values[0], [[1, 4], [2, 5]])


@pytest.mark.parametrize(
    ("text", "suffix", "sentence"),
    [
        (TS.replace("@data", "@dta"), ".ts", "has no @data line"),
        (TS.replace("@timeStamps false", "@timeStamps true"), ".ts", "has a time stamp with each value"),
        (TS.replace("@classLabel true up down", "@targetLabel true"), ".ts", "does not say `@classLabel true`"),
        (TS.replace(":down", ":sideways"), ".ts", "line 10: label 'sideways' is not one of up, down"),
        (TS.replace("1.5,-2e1:", ""), ".ts", "line 10: 1 channels and a label where 2 and a label are promised"),
        (TS.replace("0.25,7", "0.25"), ".ts", "line 10: channels of different lengths"),
        (TS.replace("0.25,7", "0.25,x7"), ".ts", "line 10: 'x7' is not a number"),
        (TS.replace("0.25,7", "?,?"), ".ts", "line 10: a channel without a single value"),
        (TS.replace("@equalLength false", "@seriesLength 3"), ".ts", "line 10: 2 steps where 3 are promised"),
        (TS[: TS.index("1.5") + 3], ".ts", "line 10: 0 channels and a label where 2 and a label are promised"),
        (TS[: TS.index("1,2,3")], ".ts", "holds no series"),
        ("", ".tsv", "holds no series"),
        ("1\t2\t3\n2\t4\n", ".tsv", "line 2: 1 values where line 1 has 2"),
        ("one\t2\t3\n", ".tsv", "line 1: 'one' is not a number"),
        ("NaN\t2\t3\n", ".tsv", "line 1: the label is missing"),
        (TS, ".arff", "is neither .ts nor .tsv"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, text, suffix, sentence):
    path = written(tmp_path, text, suffix)
    with pytest.raises(ValueError, match=sentence) as error:
        read_series(path)
    assert str(path) in str(error.value)
    assert path.read_text() == text


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "Toy_TRAIN.tsv"
    path.write_bytes(b"1\t2\xff\n")
    with pytest.raises(ValueError, match="is not text: byte 3 is 0xff"):
        read_series(path)
