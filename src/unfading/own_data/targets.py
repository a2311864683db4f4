"""A user's targets: labels of classes, or numbers."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfading.own_data.sequences import Array, check_finite, plain_array

Label = str | int | float | bool


class Labels(NamedTuple):
    """Classes in sorted order, and the class of each row as an index."""

    classes: tuple[Label, ...]
    rows: NDArray[np.int64]


def read_labels(y: Any, name: str = "y") -> Labels:
    """The labels of `y`, one per row: text, whole numbers or truth values."""
    values = _vector(y, name)
    if values.dtype.kind == "f":
        check_finite(values, name, ("row",))
    if values.dtype.kind == "O":
        empty = next((i for i, each in enumerate(values) if each is None or each != each), None)
        if empty is not None:
            raise ValueError(f"{name} has no label at row {empty} (NaN). Remove such rows.")
        kinds = {type(each).__name__ for each in values.tolist()}
        if len(kinds) > 1:
            raise TypeError(f"{name} mixes labels of {' and '.join(sorted(kinds))}. Use one type.")
    classes, rows = np.unique(values, return_inverse=True)
    return Labels(tuple(classes.tolist()), rows.reshape(-1).astype(np.int64))


def check_classes(labels: Labels) -> None:
    """Raise for labels of a single class."""
    if len(labels.classes) < 2:
        label = labels.classes[0]
        other = "" if isinstance(label, str) else " If the targets are quantities, choose the task regression."
        raise ValueError(
            f"the targets have one class, {label!r}; a classification needs at least two. Add rows of another class.{other}"
        )


def read_numbers(y: Any, name: str = "y") -> NDArray[np.float32]:
    """The numbers of `y`, [N, outputs]."""
    values = plain_array(y, name)
    if values.ndim not in (1, 2) or 0 in values.shape:
        raise ValueError(f"{name} must be [rows] or [rows, outputs]; got shape {list(values.shape)}.")
    check_finite(values, name, ("row", "output"))
    return np.ascontiguousarray(values.reshape(len(values), -1), dtype=np.float32)


def class_weights(weights: Mapping[Any, float] | Literal["balanced"] | None, labels: Labels) -> tuple[float, ...]:
    """One weight per class: given by label, or inversely proportional to its number of rows; empty if all are equal."""
    if weights is None:
        return ()
    if isinstance(weights, Mapping):
        strange = [label for label in weights if label not in labels.classes]
        if strange:
            raise ValueError(f"class_weight names {strange[0]!r}, which is no label of y. Labels: {list(labels.classes)}.")
        for label, weight in weights.items():
            if not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
                raise ValueError(f"class_weight must have numbers of at least 0; got {weight!r} for {label!r}.")
        return tuple(float(weights.get(label, 1.0)) for label in labels.classes)
    if weights != "balanced":
        raise ValueError(f"class_weight must be 'balanced', a dict of weights by label, or None; got {weights!r}.")
    counts = np.bincount(labels.rows, minlength=len(labels.classes))
    return tuple((len(labels.rows) / (len(counts) * counts)).tolist())


def check_rows(count: int, y: Any, name: str = "y") -> None:
    """Raise unless there is one target per sequence."""
    if len(y) != count:
        raise ValueError(f"X has {count} sequences, and {name} has {len(y)} rows. Give one target per sequence.")


def _vector(y: Any, name: str) -> Array:
    if hasattr(y, "detach"):
        y = y.detach().cpu()
    values: Array = y.to_numpy() if hasattr(y, "to_numpy") else np.asarray(y)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{name} must hold one label per row, [rows]; got shape {list(values.shape)}.")
    return values
