"""Tasks whose examples are held in memory on the training device, and the order in which rows form batches.

A dataset has training files and test files. A fixed part of the training rows is held out for validation:

    train    the remaining rows, shuffled in each epoch; batches of equal size, an incomplete last batch is dropped
    valid    the held-out rows in order; the last batch may be smaller
    full     train and valid together, shuffled, for the final run after settings were chosen
    test     the test files in order; the last batch may be smaller

The order of an epoch depends on (seed, split, epoch) and is drawn on the CPU, so it is the same on every device.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn

from unfading.data import store
from unfading.errors import check_count
from unfading.tasks.base import Batch, LastStep, Split, Task, accuracy, check_split, cross_entropy
from unfading.tasks.draw import stream

Part = Literal["train", "test"]
CPU = torch.device("cpu")


class Examples(NamedTuple):
    """Examples along the first axis. A batch has them along its second axis."""

    x: Tensor  # [N, T, I] or tokens [N, T], in any compact dtype; `present` converts it to the model's input
    target: Tensor  # one target per row [N] or [N, n], or one per step [N, T] with a mask
    lengths: Tensor | None = None  # int64 [N]
    mask: Tensor | None = None  # bool [N, T]: the steps whose targets count

    def take(self, rows: Tensor) -> "Examples":
        """Only these rows."""
        lengths, mask = (None if field is None else field[rows] for field in (self.lengths, self.mask))
        return Examples(self.x[rows], self.target[rows], lengths, mask)

    def to(self, device: torch.device) -> "Examples":
        """The same examples on another device."""
        lengths, mask = (None if field is None else field.to(device) for field in (self.lengths, self.mask))
        return Examples(self.x.to(device), self.target.to(device), lengths, mask)


class Resident(Task):
    """A task over a dataset that fits in memory. Subclasses read it (`examples`) and convert rows to inputs (`present`)."""

    # Rows that a GPU evaluates at a time, whatever the batch of training, because a small batch leaves it idle. It does not
    # depend on the number of models: a task that draws noise for each batch would draw other noise in a pass of many models.
    gpu_rows: ClassVar[int] = 512

    @abstractmethod
    def examples(self, part: Part) -> Examples:
        """The published training files (including separate validation files), or the test files, on the CPU."""

    def held_out(self, n: int) -> Tensor:
        """Indices of the n training rows used for validation: a fixed fifth for every seed. Override for another."""
        return torch.from_numpy(np.sort(np.random.RandomState(0).permutation(n)[: n // 5]))

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        """The batch of these rows. `draw()` returns the batch's generator, for tasks that add noise."""
        x = rows.x.transpose(0, 1).contiguous()
        if rows.mask is None:
            return Batch(x, rows.target, rows.lengths)
        return Batch(x, rows.target.T, rows.lengths, rows.mask.T)

    def present_training(self, index: int, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        """The training batch of these rows with this index: by default as `present`. Override it if it depends on the index."""
        return self.present(rows, draw)

    def augmented(self, rows: Examples, draw: Callable[[], Generator]) -> Examples:
        """Training rows with random distortions; the rows themselves by default. `draw()` returns a generator for the batch."""
        return rows

    def batch(self, index: int, size: int, *, split: Split, seed: int, device: torch.device | str) -> Batch:
        batches = self.length(split, size)
        check_count("index", index, least=0)
        device = _exact(device)
        rows = self.split_rows(split, device)
        if split in ("train", "full"):
            epoch, place = divmod(index, batches)
            rows = rows[_order(len(rows), seed, split, epoch, device)[place * size : (place + 1) * size]]
        elif index < batches:
            rows = rows[index * size : (index + 1) * size]
        else:
            raise ValueError(f"{split} has {batches} batches of {size}; got index {index}. Last: {batches - 1}.")
        taken = self.part_on("test" if split == "test" else "train", device).take(rows)
        if split in ("train", "full"):
            taken = self.augmented(taken, lambda: stream(seed, split, index, device, purpose="augmentation"))
            return self.present_training(index, taken, lambda: stream(seed, split, index, device))
        return self.present(taken, lambda: stream(seed, split, index, device))

    def length(self, split: Split, size: int) -> int:
        check_split(split)
        check_count("size", size)
        n = len(self.split_rows(split, CPU))
        return max(1, n // size) if split in ("train", "full") else -(-n // size)

    def rows(self, split: Split) -> Tensor:
        """Row indices of a split within the training or test files, ascending, int64."""
        check_split(split)
        return self.split_rows(split, CPU)

    def training(self) -> Examples:
        """The examples of the split "train", on the CPU. Normalisation statistics may use nothing else."""
        return self.part_on("train", CPU).take(self.rows("train"))

    def part_on(self, part: Part, device: torch.device) -> Examples:
        """The examples of a part on a device; those of the last few tasks stay in memory."""
        return _held(self, part, store.root(), device)

    def split_rows(self, split: Split, device: torch.device) -> Tensor:
        """Row indices of a split on a device."""
        return _rows(self, split, store.root(), device)


class Labelled(Resident):
    """Classification of whole sequences from the last step: cross-entropy loss; accuracy is the first metric."""

    metric = "accuracy"
    higher_is_better = True

    @property
    @abstractmethod
    def classes(self) -> int:
        """Number of classes; labels are 0 .. classes - 1."""

    @property
    def guess(self) -> float:
        """Test accuracy of always predicting the most frequent training class."""
        common = torch.bincount(_counted(self.training())).argmax()
        return (_counted(self.part_on("test", CPU)) == common).double().mean().item()

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(prediction, batch.target, batch.mask)

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {
            "accuracy": accuracy(prediction, batch.target, batch.mask),
            "cross_entropy": cross_entropy(prediction, batch.target, batch.mask),
        }

    def head(self, size: int) -> nn.Module:
        return LastStep(size, self.classes)


def _counted(examples: Examples) -> Tensor:
    """The unmasked labels, flattened."""
    return examples.target.flatten() if examples.mask is None else examples.target[examples.mask]


def _exact(device: torch.device | str) -> torch.device:
    """The device with its index, so that "cuda" and "cuda:0" share cached data."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# The folder is part of the key: another UNFADING_DATA is another dataset. The size fits a few tasks on a few devices.
@lru_cache(maxsize=8)
def _held(task: Resident, part: Part, folder: Path, device: torch.device) -> Examples:
    return task.examples(part) if device == CPU else _held(task, part, folder, CPU).to(device)


@lru_cache(maxsize=32)
def _rows(task: Resident, split: Split, folder: Path, device: torch.device) -> Tensor:
    if device != CPU:
        return _rows(task, split, folder, CPU).to(device)
    n = len(_held(task, "test" if split == "test" else "train", folder, CPU).target)
    return rows_of(split, n, task.held_out(n) if split in ("train", "valid") else torch.arange(0))


def rows_of(split: Split, n: int, held_out: Tensor) -> Tensor:
    """The rows of a split, of n rows in its part, some of which are held out for validation."""
    if split in ("full", "test"):
        return torch.arange(n)
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[held_out] = True
    return torch.nonzero(chosen if split == "valid" else ~chosen).squeeze(1)


@lru_cache(maxsize=16)
def _order(n: int, seed: int, split: Split, epoch: int, device: torch.device) -> Tensor:
    return torch.randperm(n, generator=stream(seed, split, epoch, "cpu", purpose="order")).to(device)
