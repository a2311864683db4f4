"""From arrays and their targets to a task: what the targets are, and which rows train, validate and test."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfading.errors import check_share, unknown
from unfading.own_data.array_task import (
    ARRAY_TASKS,
    ArrayData,
    ArrayTask,
    Rows,
    classification,
    hold_out,
    regression,
)
from unfading.own_data.sequences import PaddedSequences, read_sequences
from unfading.own_data.targets import Labels, check_classes, check_rows, class_weights, read_labels, read_numbers
from unfading.tasks.base import Readout

TaskType = Literal["classification", "regression"]
# Labels of more classes than this, in numbers, are taken for a quantity.
MOST_CLASSES = 50


class Preparation(NamedTuple):
    """How arrays become the data of a task.

    Args:
        task: "classification" or "regression"; None infers it from the targets.
        validation: share of the rows that chooses the weights and ends training early; 0 for none.
        test: share of the rows that is scored at the end; 0 for none.
        scale: standardise channels, and numbers as targets, by mean and standard deviation of the training rows.
        class_weight: "balanced", a dict of weights by label, or None.
        readout: what the head reads: the "last" step of each sequence, the "mean" over time, or "pooled", which is both and
            the maximum over time.
    """

    task: TaskType | None = None
    validation: float = 0.2
    test: float = 0.0
    scale: bool = True
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None
    readout: Readout = "pooled"

    def make_task(self, X: Any, y: Any, seed: int, **fields: Any) -> ArrayTask:
        """The task of these arrays, split with this seed."""
        labels = read_labels(y) if self.task_type(y) == "classification" else None
        data = self.split(X, y, seed, labels)
        if labels is not None:
            check_classes(labels)
        fields = {"readout": self.readout, **fields}
        if labels is None:
            if self.class_weight is not None:
                raise ValueError(f"class_weight={self.class_weight!r} is for classification, and this is a regression.")
            return regression(data, scale=self.scale, **fields)
        weights = class_weights(self.class_weight, Labels(labels.classes, data.training().target))
        return classification(data, labels, scale=self.scale, weights=weights, **fields)

    def task_type(self, y: Any) -> str:
        """The type that is given, or else that of the targets: text, truth values and few whole numbers are labels."""
        if self.task is not None:
            if self.task not in ARRAY_TASKS:
                raise ValueError(unknown("task", self.task, ARRAY_TASKS))
            return self.task
        values = np.asarray(y.detach().cpu() if hasattr(y, "detach") else y)
        if values.dtype.kind not in "iuf":
            return "classification"
        whole = values.ndim == 1 and bool(np.all(np.isfinite(values))) and bool(np.all(values == np.round(values)))
        return "classification" if whole and len(np.unique(values)) <= MOST_CLASSES else "regression"

    def split(self, X: Any, y: Any, seed: int, labels: Labels | None) -> ArrayData:
        """The rows for training, validation and test. Of labelled rows, each class gives its share."""
        check_share("validation", self.validation)
        check_share("test", self.test)
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation={self.validation} and test={self.test} leave no row to train on. Their sum must be below 1."
            )
        sequences: PaddedSequences = read_sequences(X)
        target: NDArray[Any] = read_numbers(y) if labels is None else labels.rows
        check_rows(len(sequences), target)
        if len(target) < 2:  # scikit-learn asks for the words "one sample"
            raise ValueError("the data have one sample, a single sequence; training needs at least two. Add sequences.")
        draw = np.random.default_rng(seed)
        test_rows = hold_out(target, self.test, draw, labelled=labels is not None)
        rest = np.setdiff1d(np.arange(len(target)), test_rows)
        held_out = hold_out(target[rest], self.validation / (1 - self.test), draw, labelled=labels is not None)
        whole = Rows(sequences, target)
        return ArrayData(whole.take(rest), held_out, whole.take(test_rows) if len(test_rows) else None)
