"""The task of a file, and its data again from the fields of the task, for other processes and later sessions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unfading.own_data.array_task import ArrayData, ArrayTask
from unfading.own_data.preparation import Preparation
from unfading.own_data.table_files import Columns, TableData, read_file
from unfading.own_data.targets import Label, Labels


def task_of(path: Path, columns: Columns, preparation: Preparation, seed: int) -> tuple[ArrayTask, TableData]:
    """The task of a file, with its data attached, and what the file holds."""
    table = read_file(path, columns)
    # Columns as they were found, so that a file for predictions is read in the same way.
    source = {
        "file": str(path),
        "target": columns.target,
        "series": table.columns.series,
        "drop": list(columns.drop),
        "inputs": list(table.columns.inputs),
        "validation": preparation.validation,
        "test": preparation.test,
        "seed": seed,
    }
    return preparation.make_task(table.X, table.y, seed, source=source), table


def columns_of(source: Mapping[str, Any]) -> Columns:
    """The columns with which a file was read."""
    # Runs of earlier versions have no inputs.
    return Columns(source["target"], source["series"], tuple(source["drop"]), tuple(source.get("inputs", ())))


def read_source(source: Mapping[str, Any], classes: Sequence[Label] | None) -> ArrayData:
    """The data of a task, read again from its file.

    Args:
        source: the field of the task.
        classes: the labels of a classification; None for a regression.
    """
    table = read_file(Path(source["file"]), columns_of(source))
    labels = None if classes is None else _labels(source["file"], table.y, classes)
    preparation = Preparation(validation=source["validation"], test=source["test"])
    return preparation.split(table.X, table.y, source["seed"], labels)


def _labels(file: str, y: Any, classes: Sequence[Label]) -> Labels:
    index = {label: i for i, label in enumerate(classes)}
    strange = [label for label in y.tolist() if label not in index]
    if strange:
        raise ValueError(f"{file} has changed since the run was trained: it has the new label {strange[0]!r}.")
    return Labels(tuple(classes), np.array([index[label] for label in y.tolist()], dtype=np.int64))
