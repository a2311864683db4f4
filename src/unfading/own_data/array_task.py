"""Tasks over a user's own arrays: classification and regression of whole sequences. Data of a file can be read again."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from unfading.errors import check_share, unknown
from unfading.own_data.own_task import OwnTask
from unfading.own_data.sequences import PaddedSequences, content_hash
from unfading.own_data.targets import Label, Labels
from unfading.tasks.base import READOUTS, Batch, Readout, accuracy, cross_entropy
from unfading.tasks.resident import CPU, Examples, Part
from unfading.tasks.scaling import Rescaled, Standardise


class Rows(NamedTuple):
    """Sequences and their targets."""

    sequences: PaddedSequences
    target: NDArray[Any]  # int64 [N], or float32 [N, outputs]

    def take(self, chosen: NDArray[np.int64]) -> "Rows":
        """Only these rows."""
        x, lengths = self.sequences
        return Rows(PaddedSequences(x[chosen], None if lengths is None else lengths[chosen]), self.target[chosen])

    def examples(self) -> Examples:
        """The same rows as tensors."""
        values, lengths = self.sequences
        x, target = torch.from_numpy(values), torch.from_numpy(self.target)
        return Examples(x, target, None if lengths is None else torch.from_numpy(lengths))


class ArrayData(NamedTuple):
    """The rows of a task: those for training and validation together, and those for the test."""

    train: Rows
    held_out: NDArray[np.int64]  # rows of `train` that are used for validation
    test: Rows | None = None

    @property
    def content(self) -> str:
        """The SHA-256 of all rows and of the split."""
        test = (None, None, None) if self.test is None else (*self.test.sequences, self.test.target)
        return content_hash([*self.train.sequences, self.train.target, self.held_out, *test])

    def training(self) -> Rows:
        """The rows that are neither held out nor for the test. The scale is computed from them."""
        return self.train.take(np.setdiff1d(np.arange(len(self.train.target)), self.held_out))


@dataclass(frozen=True, kw_only=True)
class ArrayTask(OwnTask):
    """A task over arrays of a user.

    Args:
        channels: number of channels of the sequences.
        mean: mean of each channel over the training rows, with which inputs are standardised; empty for inputs as they are.
        spread: standard deviation of each channel.
        readout: what the head reads: "last", the output at the last step of each sequence, "mean", its mean over time, or
            "pooled", both of them and its maximum over time.
    """

    channels: int
    mean: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    readout: Readout = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readout not in get_args(Readout):
            raise ValueError(unknown("readout", self.readout, get_args(Readout)))

    def read_source(self) -> ArrayData:
        from unfading.own_data.file_source import read_source  # imports this module

        return read_source(self.source, getattr(self, "classes", None))

    @property
    def input_size(self) -> int:
        return self.channels

    @property
    def has_test(self) -> bool:
        return self.data.test is not None

    def encoder(self) -> nn.Module:
        return Standardise(self.mean, self.spread) if self.mean else nn.Identity()

    @abstractmethod
    def answers(self, prediction: Tensor) -> NDArray[Any]:
        """Predictions [N, ...] in the form of the targets."""

    def examples(self, part: Part) -> Examples:
        rows = self.data.train if part == "train" else self.data.test
        if rows is None:
            raise ValueError("this task has no test rows. Hold some out: fit(..., test=0.2).")
        return rows.examples()

    def _scored(self) -> Tensor:
        """Targets of the rows on which a guess is scored: of the test, or else of validation or training."""
        if self.has_test:
            return self.part_on("test", CPU).target
        held_out = self.part_on("train", CPU).take(self.rows("valid")).target
        return held_out if len(held_out) else self.training().target


@dataclass(frozen=True, kw_only=True)
class ArrayClassification(ArrayTask):
    """Classification of whole sequences: cross-entropy, maybe weighted by class; accuracy is the first metric.

    Args:
        classes: the labels, in the order of the model's outputs.
        weights: weight of each class in the loss; empty if all are equal.
    """

    metric = "accuracy"
    higher_is_better = True

    classes: tuple[Label, ...]
    weights: tuple[float, ...] = ()

    @property
    def guess(self) -> float:
        """Accuracy of always predicting the most frequent training class."""
        common = torch.bincount(self.training().target).argmax()
        return (self._scored() == common).double().mean().item()

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        if not self.weights:
            return cross_entropy(prediction, batch.target)
        return functional.cross_entropy(prediction, batch.target, weight=prediction.new_tensor(self.weights))

    def loss_weight(self, batch: Batch) -> float:
        if not self.weights:
            return self.weight(batch)
        return float(torch.tensor(self.weights, dtype=torch.float64)[batch.target.cpu()].sum())

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": accuracy(prediction, batch.target), "cross_entropy": cross_entropy(prediction, batch.target)}

    def head(self, size: int) -> nn.Module:
        return READOUTS[self.readout](size, len(self.classes))

    def answers(self, prediction: Tensor) -> NDArray[Any]:
        """The most probable label of each row."""
        labels: NDArray[Any] = np.array(self.classes)[prediction.argmax(dim=-1).numpy()]
        return labels


@dataclass(frozen=True, kw_only=True)
class ArrayRegression(ArrayTask):
    """Regression of whole sequences: squared error of standardised targets; the mean squared error is the first metric.

    Args:
        outputs: numbers per row.
        target_mean: mean of each target over the training rows.
        target_spread: standard deviation of each target.
    """

    metric = "mse"
    higher_is_better = False

    outputs: int
    target_mean: tuple[float, ...] = ()
    target_spread: tuple[float, ...] = ()

    @property
    def guess(self) -> float:
        """Mean squared error of always predicting the mean of the training rows."""
        mean = self.training().target.mean(dim=0)
        return (self._scored() - mean).double().square().mean().item()

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        error = prediction - batch.target
        spread = prediction.new_tensor(self.target_spread) if self.target_spread else 1.0
        return (error / spread).square().mean()

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        error = prediction - batch.target
        return {"mse": error.square().mean(), "mae": error.abs().mean()}

    def head(self, size: int) -> nn.Module:
        head = READOUTS[self.readout](size, self.outputs)
        return Rescaled(head, self.target_mean, self.target_spread) if self.target_spread else head

    def answers(self, prediction: Tensor) -> NDArray[Any]:
        """One number per row, or several."""
        numbers: NDArray[Any] = prediction.double().numpy()
        return numbers[:, 0] if self.outputs == 1 else numbers


# Tasks of rows with a target, by their name in runs.
ARRAY_TASKS: dict[str, type[ArrayTask]] = {"classification": ArrayClassification, "regression": ArrayRegression}


def classification(data: ArrayData, labels: Labels, *, scale: bool, weights: Sequence[float] = (), **fields: Any) -> ArrayTask:
    """The task of labelled rows, with the data attached."""
    own = ArrayClassification(classes=labels.classes, weights=tuple(weights), **_described(data, scale), **fields)
    return own.with_data(data)


def regression(data: ArrayData, *, scale: bool, **fields: Any) -> ArrayTask:
    """The task of rows with numbers as targets, with the data attached."""
    target = data.training().target
    mean, spread = mean_and_spread(target) if scale else ((), ())
    own = ArrayRegression(outputs=target.shape[1], target_mean=mean, target_spread=spread, **_described(data, scale), **fields)
    return own.with_data(data)


def hold_out(target: NDArray[Any], share: float, draw: np.random.Generator, *, labelled: bool) -> NDArray[np.int64]:
    """A random share of rows, ascending. Of labelled rows each class gives its share, and keeps at least one row."""
    check_share("share", share)
    n = len(target)
    count = round(n * share)
    order = draw.permutation(n)
    if labelled:
        order = order[np.argsort(target[order], kind="stable")]
    # At even distances in the order of classes.
    chosen = order[((np.arange(count) + 0.5) * n / max(count, 1)).astype(np.int64)]
    if labelled:
        rest = np.setdiff1d(order, chosen)
        chosen = chosen[np.isin(target[chosen], target[rest])]
    return np.sort(chosen)


def last_share(n: int, share: float) -> NDArray[np.int64]:
    """The last share of n rows in their order, for rows that follow each other in time."""
    check_share("share", share)
    return np.arange(n - round(n * share), n)


def _described(data: ArrayData, scale: bool) -> dict[str, Any]:
    """The fields that follow from the data."""
    sequences = data.training().sequences
    x, lengths = sequences
    steps = x.reshape(-1, x.shape[2]) if lengths is None else x[np.arange(x.shape[1]) < lengths[:, None]]
    mean, spread = mean_and_spread(steps) if scale else ((), ())
    return {"content": data.content, "channels": sequences.channels, "mean": mean, "spread": spread}


def mean_and_spread(values: NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each column; a column that is constant in float32 gets spread 1."""
    mean, spread = values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)
    spread = np.where(spread <= np.finfo(np.float32).eps * np.abs(mean), 1.0, spread)
    return tuple(mean.tolist()), tuple(spread.tolist())
