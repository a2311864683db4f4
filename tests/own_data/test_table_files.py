"""Files of sequences: every format gives the same data, and a wrong file is named with the place in it."""

import numpy as np
import pytest

from unfading.own_data.file_source import columns_of, read_source, task_of
from unfading.own_data.preparation import Preparation
from unfading.own_data.sequences import read_sequences
from unfading.own_data.table_files import Columns, read_file

X = np.round(np.random.default_rng(0).standard_normal((6, 4)), 3)
Y = np.array(["up", "down", "up", "down", "up", "down"])


def write_csv(path, header, rows, separator=","):
    path.write_text("\n".join([separator.join(header), *(separator.join(map(str, row)) for row in rows)]) + "\n")
    return path


def wide(path, separator=","):
    rows = [[*x, y] for x, y in zip(X, Y, strict=True)]
    return write_csv(path, [*(f"t{i}" for i in range(4)), "label"], rows, separator)


def long(path):
    """One row per step, the series interleaved: the order of rows inside a series is what counts."""
    rows = [[f"s{n}", X[n, t], 10 * X[n, t], Y[n]] for t in range(4) for n in range(6)]
    return write_csv(path, ["series", "a", "b", "label"], rows)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_wide_table_has_one_sequence_per_row(tmp_path, separator):
    table = read_file(wide(tmp_path / "x.csv", separator), Columns())
    assert np.array_equal(table.X, X)
    assert table.y.tolist() == Y.tolist()
    assert table.layout == "6 rows of 4 steps, one sequence per row; target 'label'"


def test_a_long_table_has_one_row_per_step(tmp_path):
    table = read_file(long(tmp_path / "x.csv"), Columns())
    assert np.array_equal(np.stack(table.X), np.stack([X, 10 * X], axis=-1))
    assert table.y.tolist() == Y.tolist()
    assert np.array_equal(np.stack(read_file(long(tmp_path / "x.csv"), Columns(drop=("b",))).X)[:, :, 0], X)


def test_an_identifier_that_does_not_repeat_is_no_series_and_no_step(tmp_path):
    path = write_csv(tmp_path / "x.csv", ["id", "a", "b", "y"], [[i, 1.5, 2.5, i % 2] for i in range(4)])
    table = read_file(path, Columns())
    assert table.X.tolist() == [[1.5, 2.5]] * 4
    assert table.layout.endswith("target 'y'; 'id' is not read")
    assert [len(x) for x in read_file(path, Columns(series="id")).X] == [1] * 4


def test_arrays_and_archives_give_the_same(tmp_path):
    codes = (Y == "up").astype(np.int64)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", codes)
    np.savez(tmp_path / "x.npz", x=X, y=codes)
    rows = "\n".join(f"{','.join(map(str, x))}:{y}" for x, y in zip(X, Y, strict=True))
    (tmp_path / "x.ts").write_text(f"@classLabel true up down\n@data\n{rows}\n")
    attributes = "".join(f"@attribute t{i} numeric\n" for i in range(4))
    rows = "\n".join(f"{','.join(map(str, x))},{y}" for x, y in zip(X, Y, strict=True))
    (tmp_path / "x.arff").write_text(f"@relation x\n{attributes}@attribute target {{up,down}}\n@data\n{rows}\n")
    for name, columns, y in (
        ("x.npy", Columns(str(tmp_path / "y.npy")), codes),
        ("x.npz", Columns(), codes),
        ("x.ts", Columns(), Y),
        ("x.arff", Columns(), Y),
    ):
        table = read_file(tmp_path / name, columns)
        assert np.array_equal(read_sequences(table.X).x[:, :, 0], X.astype(np.float32)), name
        assert table.y.tolist() == y.tolist(), name


def test_parquet_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {**{f"t{i}": X[:, i] for i in range(4)}, "label": Y}
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    table = read_file(tmp_path / "x.parquet", Columns())
    assert np.array_equal(table.X, X)
    assert table.y.tolist() == Y.tolist()


def test_parquet_without_pyarrow_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="needs pyarrow, which is not installed"):
        read_file(tmp_path / "x.parquet", Columns())


@pytest.mark.parametrize(
    ("text", "columns", "sentence"),
    [
        ("a,b,label\n1,2,x\n1,,y\n", Columns(), r"has NaN at row 1, column 1 \('b'\)"),
        (
            "a,b,label\n1,2,x\n1,two,y\n",
            Columns(),
            "has 'two' in column 'b', row 1, which is not a number. Leave",
        ),
        ("a,b,label\n1,2,x\n1,2\n", Columns(), "row 1: 2 values, and the header names 3 columns"),
        ("a,b,label\n1,2,x\n1,2,\n", Columns(), "no target in column 'label', row 1"),
        ("a,b,label\n1,2,x\n", Columns("lable"), "unknown column 'lable'. Did you mean 'label'"),
        ("a,b\n1,2\n", Columns(), "has no target. Name it with --target"),
        ("1,2\n3,4\n", Columns(), "begins with numbers. Its first line must name the columns"),
        ("a,b,label\n", Columns(), "has 1 lines"),
        ("label\nx\ny\n", Columns(), "has no column of values"),
        ("a,a,label\n1,2,x\n", Columns(), "has two columns named 'a'"),
        ("series,a,label\ns,1,x\ns,2,y\n", Columns(), "the target changes inside the series s"),
    ],
)
def test_a_wrong_table_is_named(tmp_path, text, columns, sentence):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_file(tmp_path / "x.csv", columns)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_file(tmp_path / "x.csv", Columns())
    (tmp_path / "x.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"unknown ending '\.pkl'"):
        read_file(tmp_path / "x.pkl", Columns())
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="cannot be read: it holds Python objects"):
        read_file(tmp_path / "x.npy", Columns())
    (tmp_path / "x.csv").write_bytes(b"a,b\n\xff,1\n")
    with pytest.raises(ValueError, match="not text in UTF-8: byte 4"):
        read_file(tmp_path / "x.csv", Columns())


def test_a_file_for_predictions_needs_no_target(tmp_path):
    write_csv(tmp_path / "x.csv", ["t0", "t1"], [[1, 2]])
    assert read_file(tmp_path / "x.csv", Columns("label"), targets=False).X.tolist() == [[1.0, 2.0]]


def test_an_empty_column_of_targets_is_not_read_for_predictions(tmp_path):
    write_csv(tmp_path / "x.csv", ["t0", "t1", "label"], [[1, 2, ""]])
    assert read_file(tmp_path / "x.csv", Columns("label"), targets=False).X.tolist() == [[1.0, 2.0]]


def test_a_file_for_predictions_is_read_by_the_names_of_the_training_file(tmp_path):
    task, _ = task_of(long(tmp_path / "x.csv"), Columns(), Preparation(), seed=0)
    columns = columns_of(task.source)
    rows = [["s0", 10.0, 1.0, "ignored"], ["s0", 20.0, 2.0, "ignored"]]
    other = write_csv(tmp_path / "new.csv", ["series", "b", "a", "comment"], rows)
    assert read_file(other, columns, targets=False).X[0].tolist() == [[1.0, 10.0], [2.0, 20.0]]
    write_csv(other, ["series", "b", "c"], [["s0", 10.0, 1.0]])
    with pytest.raises(ValueError, match="has no column 'a', which the training file had"):
        read_file(other, columns, targets=False)


def test_labels_of_arrays_may_be_text(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    np.savez(tmp_path / "x.npz", x=X, y=Y)
    assert read_file(tmp_path / "x.npy", Columns(str(tmp_path / "y.npy"))).y.tolist() == Y.tolist()
    assert read_file(tmp_path / "x.npz", Columns()).y.tolist() == Y.tolist()
    with pytest.raises(ValueError, match="no numbers of at most 64 bits"):
        read_file(tmp_path / "y.npy", Columns())


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        ([[1.0, np.nan]], [0], "NaN at row 0, column 1"),
        ([[[1.0], [np.inf]]], [0], "at row 0, step 1, channel 0"),
        ([1.0, 2.0], [0, 1], r"shape \[2\]; wanted \[sequences, steps\]"),
        ([[]], [0], r"shape \[1, 0\]"),
        ([[1.0, 2.0], [1.0, 2.0]], [1.0, np.nan], "NaN at row 1"),
    ],
)
def test_wrong_values_of_arrays_are_named_with_the_file(tmp_path, x, y, sentence):
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    np.savez(tmp_path / "both.npz", x=x, y=y)
    in_targets = np.isnan(y).any()
    name = "y.npy" if in_targets else "x.npy"
    with pytest.raises(ValueError, match=f"{name} has .*{sentence}"):
        read_file(tmp_path / "x.npy", Columns(str(tmp_path / "y.npy")))
    with pytest.raises(ValueError, match=rf"both\.npz, array '{name[0]}', has .*{sentence}"):
        read_file(tmp_path / "both.npz", Columns())
    if not in_targets:
        with pytest.raises(ValueError, match=sentence):
            read_file(tmp_path / "x.npy", Columns(), targets=False)


def test_a_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"x\.parquet cannot be read as Parquet: "):
        read_file(tmp_path / "x.parquet", Columns())


def test_the_data_of_a_file_are_read_again_from_the_fields_of_the_task(tmp_path):
    path = wide(tmp_path / "x.csv")
    task, _ = task_of(path, Columns(), Preparation(test=0.3), seed=5)
    assert read_source(task.source, task.classes).content == task.content
    write_csv(path, ["t0", "t1", "t2", "t3", "label"], [[1.0, 1.0, 1.0, 1.0, "sideways"]])
    with pytest.raises(ValueError, match="has changed since the run was trained: it has the new label 'sideways'"):
        read_source(task.source, task.classes)
