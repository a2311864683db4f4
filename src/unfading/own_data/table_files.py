"""Sequences and targets from a file: CSV, Parquet, .npy, .npz, and the .ts, .tsv and .arff of the UCR and UEA archives.

A CSV or Parquet table has one of two layouts:

    wide    one row per sequence: a column per step, and the target
    long    one row per step: a column that names the series, a column per channel, and the target, constant in each series
"""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfading.data.arrays import read_npy, read_npz
from unfading.errors import unknown
from unfading.files.checked_json import sentence
from unfading.own_data.sequences import Array, check_finite
from unfading.tasks.series import read_series

# Names of a column that says to which series a row belongs, in files of the long layout.
SERIES_NAMES = ("series", "series_id", "sequence", "sequence_id", "id", "unique_id")
# Names of a column of targets, where none is given.
TARGET_NAMES = ("label", "target", "class", "y")
# Text that stands for a missing value.
MISSING = {"", "?", "na", "nan", "null", "none"}


class Columns(NamedTuple):
    """Which columns of a file hold what; None leaves it to the names in the file.

    Args:
        target: column of the target; for .npy the file of the targets, for .npz the name of the array.
        series: column that says to which series a row belongs.
        drop: columns that are not read.
        inputs: the columns of values, in the order in which a model reads them; none for all that hold nothing else. If they
            are given, so is the series.
    """

    target: str | None = None
    series: str | None = None
    drop: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


class TableData(NamedTuple):
    """The content of a file."""

    X: Any  # as `read_sequences` takes it
    y: Array | None  # None if the file has no targets, or they are not asked for
    layout: str  # what was found, for the user
    columns: Columns  # with the series and the inputs that were found


def read_file(path: Path, columns: Columns, *, targets: bool = True) -> TableData:
    """Read a file of sequences.

    Args:
        path: the file.
        columns: which columns hold what.
        targets: the file must have targets. Otherwise they are not read, and need not be there.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Give a file of sequences: {', '.join(READERS)}.")
    if path.suffix.lower() not in READERS:
        raise ValueError(f"{path} has the unknown ending {path.suffix!r}. Known: {', '.join(READERS)}.")
    data = READERS[path.suffix.lower()](path, columns, targets)
    if targets and data.y is None:
        raise ValueError(f"{path} has no target. Name it with --target, a column or, for .npy, a file.")
    return data


# -- tables --------------------------------------------------------------------------------------------------------------------


def read_table(path: Path) -> dict[str, list[Any]]:
    """The columns of a CSV or Parquet file, by name, as they are written in it."""
    return _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)


def _read_csv(path: Path) -> dict[str, list[Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            sample = stream.read(4096)
            stream.seek(0)
            lines = list(csv.reader(stream, delimiter=_delimiter(sample)))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}.") from None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}.") from None
    lines = [line for line in lines if line]
    if len(lines) < 2:
        raise ValueError(f"{path} has {len(lines)} lines; wanted a header with the names of columns, and rows.")
    names, rows = [name.strip() for name in lines[0]], lines[1:]
    uneven = next((i for i, row in enumerate(rows) if len(row) != len(names)), None)
    if uneven is not None:
        raise ValueError(f"{path}, row {uneven}: {len(rows[uneven])} values, and the header names {len(names)} columns.")
    if all(_is_number(name) for name in names):
        raise ValueError(f"{path} begins with numbers. Its first line must name the columns.")
    _check_names(path, names)
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"{path} has two columns named {twice!r}. Give each column a name of its own.")


def _delimiter(sample: str) -> str:
    first = sample.partition("\n")[0]
    return max(",;\t", key=first.count)


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs pyarrow, which is not installed: pip install pyarrow.") from None
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow raises errors of many kinds for damaged bytes
        raise ValueError(f"{path} cannot be read as Parquet: {sentence(error)}.") from None
    _check_names(path, table.column_names)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _sequences_of_table(path: Path, columns: Columns, targets: bool) -> TableData:
    return _table(path, read_table(path), columns, targets)


def _table(path: Path, table: dict[str, list[Any]], columns: Columns, targets: bool) -> TableData:
    """The sequences of a table, by the names of its columns."""
    if columns.inputs:
        _check_inputs(path, columns, table)
    else:
        table = without_columns(path, table, columns.drop)
        columns = columns._replace(series=series_column(path, columns.series, table))
    optional = not targets and columns.target not in table
    target = _named(path, None if optional else columns.target, table, TARGET_NAMES)
    # Without a column of the series, one with such a name holds a name for each row.
    unread = [] if columns.series is not None else [name for name in table if name.lower() in SERIES_NAMES and name != target]
    inputs = list(columns.inputs) or [name for name in table if name not in (target, columns.series, *unread)]
    if not inputs:
        raise ValueError(f"{path} has no column of values beside {target!r}.")
    values = np.stack([column_numbers(path, name, table[name]) for name in inputs], axis=1)
    check_finite(values, str(path), ("row", "column"), inputs)
    labels = _targets(path, target, table[target]) if targets and target is not None else None
    content = "no target" if target is None else f"target {target!r}"
    content += "".join(f"; {name!r} is not read" for name in unread)
    columns = columns._replace(inputs=tuple(inputs))
    if columns.series is None:
        layout = f"{len(values):,} rows of {len(inputs)} steps, one sequence per row; {content}"
        return TableData(values, labels, layout, columns)
    X, labels = _long(path, values, labels, table[columns.series])
    layout = f"{len(X):,} series by {columns.series!r}, {len(inputs)} channels; {content}"
    return TableData(X, labels, layout, columns)


def _check_inputs(path: Path, columns: Columns, table: dict[str, list[Any]]) -> None:
    """Raise unless the table has the columns from which a model was trained."""
    wanted = columns.inputs if columns.series is None else (columns.series, *columns.inputs)
    missing = next((name for name in wanted if name not in table), None)
    if missing is not None:
        raise ValueError(
            f"{path} has no column {missing!r}, which the training file had. Columns are matched by name; an array (.npy) has "
            "none, and is read in its order."
        )


def without_columns(path: Path, table: dict[str, list[Any]], drop: Sequence[str]) -> dict[str, list[Any]]:
    """The table without some of its columns."""
    for name in drop:
        check_column(path, name, table)
    return {name: values for name, values in table.items() if name not in drop}


def series_column(path: Path, name: str | None, table: dict[str, list[Any]]) -> str | None:
    """The column that says to which series a row belongs: the named one, or one with a usual name whose values repeat."""
    series = _named(path, name, table, SERIES_NAMES)
    return None if name is None and series is not None and len(set(table[series])) == len(table[series]) else series


def rows_of_series(series: Sequence[Any]) -> dict[str, NDArray[np.int64]]:
    """The rows of each series, which may be anywhere in the file; series in the order of the file."""
    names, first, index = np.unique(np.asarray(series, dtype=str), return_index=True, return_inverse=True)
    return {str(names[i]): np.flatnonzero(index == i) for i in np.argsort(first)}


def _long(path: Path, values: Array, labels: Array | None, series: list[Any]) -> tuple[list[Array], Array | None]:
    """One sequence and target per series; the order of its rows in the file is that of its steps."""
    members = rows_of_series(series)
    X = [values[rows] for rows in members.values()]
    if labels is None:
        return X, None
    for name, rows in members.items():
        if (labels[rows] != labels[rows[0]]).any():
            raise ValueError(f"{path}: the target changes inside the series {name}. Give one target per series.")
    return X, labels[[rows[0] for rows in members.values()]]


def _named(path: Path, name: str | None, table: dict[str, list[Any]], usual: Sequence[str]) -> str | None:
    """The column of that name, or else the first with a usual name."""
    if name is not None:
        check_column(path, name, table)
        return name
    return next((each for each in table if each.lower() in usual), None)


def check_column(path: Path, name: str, table: dict[str, list[Any]]) -> None:
    """Raise unless the table has a column of that name."""
    if name not in table:
        raise ValueError(f"{path}: {unknown('column', name, table)}")


def column_numbers(path: Path, name: str, values: list[Any], advice: str | None = None) -> NDArray[np.float64]:
    """The numbers of a column; NaN where a value is missing.

    Args:
        path: the file.
        name: of the column.
        values: as they are written in the file.
        advice: what the user can do about text; None for leaving the column out.
    """
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        pass
    numbers = np.full(len(values), np.nan)
    for i, value in enumerate(values):
        if value is None or str(value).strip().lower() in MISSING:
            continue
        if not _is_number(value):
            raise ValueError(
                f"{path} has {str(value)[:30]!r} in column {name!r}, row {i}, which is not a number. "
                f"{advice or f'Leave the column out with --drop {name}.'}"
            )
        numbers[i] = float(value)
    return numbers


def _targets(path: Path, name: str, values: list[Any]) -> Array:
    empty = next((i for i, each in enumerate(values) if each is None or str(each).strip().lower() in MISSING), None)
    if empty is not None:
        raise ValueError(f"{path} has no target in column {name!r}, row {empty}. Remove such rows.")
    if all(_is_number(each) for each in values):
        numbers = np.asarray(values, dtype=np.float64)
        return numbers.astype(np.int64) if (numbers == np.round(numbers)).all() and np.abs(numbers).max() < 2**53 else numbers
    return np.array([str(each).strip() for each in values])


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


# -- arrays and archives -------------------------------------------------------------------------------------------------------


def _npy(path: Path, columns: Columns, targets: bool) -> TableData:
    y = _array(Path(columns.target), text=True) if targets and columns.target is not None else None
    x = _array(path)
    _check_arrays(x, str(path), y, str(columns.target))
    layout = f"an array {list(x.shape)}" + ("" if y is None else f"; targets in {columns.target}")
    return TableData(x, y, layout, columns)


def _array(path: Path, *, text: bool = False) -> Array:
    try:
        return read_npy(path, text=text)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None


def _check_arrays(x: Array, name: str, y: Array | None, name_of_targets: str) -> None:
    """Raise for a shape that holds no sequences, and for numbers that are not finite, with the name of the file."""
    if x.ndim not in (2, 3) or 0 in x.shape:
        raise ValueError(
            f"{name} has shape {list(x.shape)}; wanted [sequences, steps] or [sequences, steps, channels], "
            "at least one sequence of one step."
        )
    check_finite(x, name, ("row", "column") if x.ndim == 2 else ("row", "step", "channel"))
    if y is not None:
        check_finite(y, name_of_targets, ("row", "output"))


def _npz(path: Path, columns: Columns, targets: bool) -> TableData:
    target = columns.target or "y"
    try:
        arrays = {**read_npz(path, ("x", "X")), **(read_npz(path, (target,), text=True) if targets else {})}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    x = arrays.get("x", arrays.get("X"))
    if x is None:
        raise ValueError(f"{path} has no array named x (or X), which holds the sequences.")
    if targets and columns.target is not None and target not in arrays:
        raise ValueError(f"{path} has no array named {target!r}.")
    _check_arrays(x, f"{path}, array {'x' if 'x' in arrays else 'X'!r},", arrays.get(target), f"{path}, array {target!r},")
    return TableData(x, arrays.get(target), f"an array {list(x.shape)}; targets in {target!r}", columns)


def _archive(path: Path, columns: Columns, targets: bool) -> TableData:
    series = read_series(path)
    layout = f"{len(series.values):,} series of the archives; labels in the file"
    return TableData(list(series.values), np.array(series.labels), layout, columns)


def _arff(path: Path, columns: Columns, targets: bool) -> TableData:
    names: list[str] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip().lower() == "@data"), None)
    if start is None:
        raise ValueError(f"{path} has no @data line.")
    for line in lines[:start]:
        words = line.split(None, 2)
        if words and words[0].lower() == "@attribute":
            if len(words) == 3 and words[2].strip().lower().startswith("relational"):
                raise ValueError(f"{path} nests its channels (relational). Take the set as .ts, which is read.")
            names.append(words[1].strip("'\""))
    rows = [[cell.strip().strip("'\"") for cell in line.split(",")] for line in lines[start + 1 :] if line.strip()]
    uneven = next((i for i, row in enumerate(rows) if len(row) != len(names)), None)
    if uneven is not None or not rows:
        raise ValueError(f"{path}, row {uneven or 0}: wanted {len(names)} values, as many as attributes.")
    _check_names(path, names)
    table: dict[str, list[Any]] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return _table(path, table, columns if columns.target is not None else columns._replace(target=names[-1]), targets)


READERS: dict[str, Callable[[Path, Columns, bool], TableData]] = {
    ".csv": _sequences_of_table,
    ".tsv": _archive,
    ".parquet": _sequences_of_table,
    ".npy": _npy,
    ".npz": _npz,
    ".ts": _archive,
    ".arff": _arff,
}
