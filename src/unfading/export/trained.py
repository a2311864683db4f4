"""A file of trained weights as the subject of an export: the model, its task, and the normalisation of samples."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from unfading.export.c_model import CSource
from unfading.export.quantised_model import Quantised, quantised
from unfading.export.write_c import Precision, c
from unfading.layers.model import Model
from unfading.tasks.base import Batch, Split, Task
from unfading.tasks.scaling import Normalised, Scale
from unfading.training import weights
from unfading.training.run import Run

ROWS = 128  # of a batch


class Trained(NamedTuple):
    """A trained model with its task."""

    name: str
    model: Model
    task: Task
    scale: Scale | None  # of the normalisation that becomes a part of the exported model

    def batches(self, split: Split, most: int | None = None) -> Iterator[Batch]:
        """Batches of the task with samples as the exported model takes them."""
        count = self.task.length(split, ROWS)
        count = most if count is None else count if most is None else min(count, most)
        for index in range(count or 1):
            batch = self.task.batch(index, ROWS, split=split, seed=0, device="cpu")
            yield batch._replace(x=self.samples(batch.x))

    def samples(self, x: Tensor) -> Tensor:
        """Samples before the normalisation that the exported model contains."""
        return x if self.scale is None else x * self.scale.spread[: len(x)] + self.scale.mean[: len(x)]

    def quantised(self, batches: int) -> Quantised:
        """The model in integers, calibrated on this many batches of training rows."""
        return quantised(self.model, self.batches("train", batches), scale=self.scale)

    def write(self, folder: Path, precision: Precision, batches: int) -> CSource:
        """Write the model as C."""
        if precision == "integer":
            return c(self.quantised(batches), folder)
        return c(self.model, folder, precision=precision, scale=self.scale)


def read(path_or_url: str, *, normalised_samples: bool = False) -> Trained:
    """Read a file of weights.

    Args:
        path_or_url: as `unfading.load` takes it.
        normalised_samples: leave the normalisation of the task out of the exported model.
    """
    model = weights.load(path_or_url)
    task = Run.from_json(weights.card(path_or_url)["run"]).make_task()
    scale = None
    if isinstance(task, Normalised) and not normalised_samples:
        scale = task.scale()
    return Trained(Path(path_or_url).stem, model, task, scale)
