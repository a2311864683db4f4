"""A user's sequences as one padded array: from NumPy, torch, pandas or polars, or from a list of arrays of any lengths.

[N, T, I]                   N sequences of T steps with I channels
[N, T]                      N sequences with one channel: a table with one row per sequence and one column per step
[[T_1, I], [T_2, I], ...]   a list of sequences; [T_1], [T_2], ... have one channel

pandas, polars and torch are recognised by their methods, so that none of them is imported here.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LARGEST = float(np.finfo(np.float32).max)


class PaddedSequences(NamedTuple):
    """Sequences of one number of channels, padded with zeros at their end."""

    x: NDArray[np.float32]  # [N, T, I]
    lengths: NDArray[np.int64] | None  # [N]; None if all have T steps

    def __len__(self) -> int:
        return len(self.x)

    @property
    def channels(self) -> int:
        return int(self.x.shape[2])


def read_sequences(X: Any, name: str = "X") -> PaddedSequences:
    """The sequences of `X`. What cannot be read, and numbers that are not finite, raise with their row and column."""
    if isinstance(X, list | tuple) and len(X) and _lengths_differ(X):
        return _padded([plain_array(each, f"{name}[{i}]") for i, each in enumerate(X)], name)
    if isinstance(X, list | tuple) and len(X) and hasattr(X[0], "shape"):
        X = np.stack([plain_array(each, f"{name}[{i}]") for i, each in enumerate(X)])
    array = plain_array(X, name)
    if array.ndim not in (2, 3):
        raise ValueError(
            f"{name} must be [sequences, steps, channels], [sequences, steps] or a list of arrays; got shape "
            f"{list(array.shape)}. For one sequence [steps, channels] give {name}[None]."
        )
    check_finite(array, name, ("row", "column") if array.ndim == 2 else ("row", "step", "channel"), column_names(X))
    if 0 in array.shape:
        raise ValueError(f"{name} has shape {list(array.shape)}, which holds no sequence. Give at least one of one step.")
    return PaddedSequences(np.ascontiguousarray(array if array.ndim == 3 else array[:, :, None], dtype=np.float32), None)


def plain_array(values: Any, name: str) -> Array:
    """The numbers of a NumPy array, a tensor, a table or nested lists as a NumPy array of numbers."""
    if hasattr(values, "detach"):  # a torch tensor, maybe with a gradient or on a GPU
        values = values.detach().cpu()
    names = column_names(values)
    if hasattr(values, "to_numpy"):  # pandas, polars, pyarrow
        values = values.to_numpy()
    if hasattr(values, "toarray"):
        raise TypeError(f"{name} is a sparse matrix, and sequences are dense. Use {name}.toarray().")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold numbers; got {type(values).__name__} ({error}).") from None
    if array.dtype.kind == "O":
        array = _numbers(array, name, names)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold real numbers; got entries of {array.dtype}. Encode other values as numbers first.")
    return array


def _numbers(array: Array, name: str, columns: Sequence[str] | None) -> Array:
    """The numbers of an array of Python objects; NaN where a value is None or missing as pandas writes it."""
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError):
        pass
    numbers = np.full(array.shape, np.nan)
    for at, value in np.ndenumerate(array):
        if value is None or type(value).__name__ == "NAType":
            continue
        try:
            numbers[at] = float(value)
        except (TypeError, ValueError) as error:
            place = f"{list(at)}" if columns is None or len(at) != 2 else f"row {at[0]}, column {columns[at[1]]!r}"
            # scikit-learn asks for the words of this error.
            reason = str(error)[:200]
            raise TypeError(f"{name} must hold numbers; got a value at {place} that is none: {reason}.") from None
    return numbers


def column_names(X: Any) -> Sequence[str] | None:
    """The names of the columns of a pandas or polars table; None for an array."""
    names = getattr(X, "columns", None)
    return None if names is None else [str(name) for name in names]


def check_finite(
    array: Array, name: str, axes: Sequence[str], columns: Sequence[str] | None = None, advice: str | None = None
) -> None:
    """Raise for the first number that is not finite, or too large for float32, with its place.

    Args:
        array: the numbers.
        name: of the argument.
        axes: names of the axes of `array`.
        columns: names of the columns, if it is a table that has them.
        advice: what the user can do; None for the usual sentence.
    """
    wrong = ~(np.abs(array) <= LARGEST) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))
    if columns is not None and len(at) == 2:
        place += f" ({columns[at[1]]!r})"
    value = array[at]
    what = "NaN" if np.isnan(value) else f"{value}, too large for float32 (infinity)"
    count = int(wrong.sum())
    more = f"; {count - 1:,} more values are not finite" if count > 1 else ""
    raise ValueError(f"{name} has {what} at {place}{more}. {advice or 'Remove such rows, or fill in the values first.'}")


def content_hash(parts: Iterable[Array | None]) -> str:
    """The SHA-256 of arrays, with their shapes and dtypes."""
    total = hashlib.sha256()
    for part in parts:
        if part is None:
            total.update(b"none\0")
        else:
            total.update(f"{part.dtype} {part.shape}\0".encode())
            total.update(np.ascontiguousarray(part).tobytes())
    return total.hexdigest()


def _lengths_differ(X: Sequence[Any]) -> bool:
    shapes = {np.shape(each)[:1] for each in X if hasattr(each, "shape") or isinstance(each, list | tuple)}
    return len(shapes) > 1


def _padded(arrays: list[Array], name: str) -> PaddedSequences:
    columns = [each[:, None] if each.ndim == 1 else each for each in arrays]
    for i, each in enumerate(columns):
        if each.ndim != 2 or each.shape[1] != columns[0].shape[1] or 0 in each.shape:
            raise ValueError(
                f"{name}[{i}] must be [steps, {columns[0].shape[-1]}], with as many channels as {name}[0] and at least one "
                f"step; got shape {list(arrays[i].shape)}."
            )
        check_finite(each, f"{name}[{i}]", ("step", "channel"))
    lengths = np.array([len(each) for each in columns], dtype=np.int64)
    x = np.zeros((len(columns), int(lengths.max()), columns[0].shape[1]), dtype=np.float32)
    for row, each in zip(x, columns, strict=True):
        row[: len(each)] = each
    return PaddedSequences(x, lengths)
