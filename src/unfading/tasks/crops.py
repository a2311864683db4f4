"""Crop classification from 26 satellite images of a field: the TUM dataset of STAR's second experiment.

An observation is a patch of 3 x 3 pixels in 6 bands, 54 numbers. STAR predicts either at every date, where the class can also
be cloud, snow, cloud shadow or water, or once per sequence, from the mean of the output over time. The UCR dataset `Crop`, 46
dates of one number, is `UCR(name="Crop")`.

The published files are pickles, which can execute code when they are read, so they are refused. `docs/tasks/real-data.md` has a
short script that converts them to `train.npz` and `test.npz`; run it where you trust the files:

    x        float [N, T, 54]    observations, zero past a field's last one
    lengths  int [N]             number of observations of each field; optional if all have T
    y_date   int [N, T]          a label for each date, for per="date"
    y        int [N]             one label for each field, for per="sequence"

The published 55th number, the day of the year, is dropped, as in STAR.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unfading.data import store
from unfading.data.arrays import PickledArray, read_npz
from unfading.errors import unknown
from unfading.tasks.base import Batch, EveryStep, MeanOverTime
from unfading.tasks.resident import Examples, Part
from unfading.tasks.scaling import Normalise, Normalised

FEATURES = 54
# A larger label means a damaged file, and would create a head of that size.
_MOST = 999
_CONVERT = "Convert the published files as docs/tasks/real-data.md shows."


@dataclass(frozen=True)
class TUMCrops(Normalised):
    """Predict the crop, or what covers it, at each date or for the whole season.

    Args:
        per: "date" for a prediction at each observation, "sequence" for one per field.
    """

    paper: ClassVar[str] = "Rußwurm 2017"
    dataset: ClassVar[str] = "tum"

    per: Literal["date", "sequence"] = "date"
    normalise: Normalise = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per not in ("date", "sequence"):
            raise ValueError(unknown("per", self.per, ("date", "sequence")))

    @property
    def input_size(self) -> int:
        return FEATURES

    @property
    def classes(self) -> int:
        return 1 + max(int(_read(self, part, store.root()).target.max()) for part in ("train", "test"))

    def examples(self, part: Part) -> Examples:
        return _read(self, part, store.root())

    def head(self, size: int) -> nn.Module:
        return EveryStep(size, self.classes) if self.per == "date" else MeanOverTime(size, self.classes)

    def weight(self, batch: Batch) -> int:
        return batch.x.shape[1] if batch.mask is None else int(batch.mask.sum())


@lru_cache(maxsize=8)
def _read(task: TUMCrops, part: Part, folder: Path) -> Examples:
    file = folder / store.known("tum").folder / f"{part}.npz"
    if not file.exists() and any(file.parent.rglob("*.pkl")):
        raise ValueError(store.PICKLED.format(next(file.parent.rglob("*.pkl")), _CONVERT))
    x, y, lengths = read_crops(store.path("tum", f"{part}.npz"), "y_date" if task.per == "date" else "y")
    inside = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
    own = None if bool(inside.all()) else lengths
    return Examples(x, y, own, inside if task.per == "date" else None)


def read_crops(path: Path, labels: str) -> tuple[Tensor, Tensor, Tensor]:
    """Read a converted file: observations float32 [N, T, 54], the named labels int64, and lengths int64 [N]."""
    store.refuse_pickle(path, _CONVERT)
    try:
        arrays = read_npz(path, ("x", "lengths", labels))
    except PickledArray:
        raise ValueError(store.PICKLED.format(f"an array of {path}", _CONVERT)) from None
    except ValueError as error:
        raise ValueError(f"{path} is not a complete .npz file: {error}. {_CONVERT}") from None
    for name in ("x", labels):
        if name not in arrays:
            raise ValueError(f"{path} has no array {name!r}. {_CONVERT}")
    x = arrays["x"]
    if x.ndim != 3 or x.shape[2] != FEATURES or 0 in x.shape:
        raise ValueError(f"{path} has x of shape {list(x.shape)}; wanted [N, T, {FEATURES}]. {_CONVERT}")
    lengths = arrays.get("lengths", np.full(len(x), x.shape[1]))
    _check_whole(path, "lengths", lengths, x.shape[:1], 1, x.shape[1])
    _check_whole(path, labels, arrays[labels], x.shape[:1] if labels == "y" else x.shape[:2], 0, _MOST)
    if not np.isfinite(x).all():
        raise ValueError(f"{path} holds observations that are not finite. {_CONVERT}")
    return (
        torch.from_numpy(x.astype(np.float32)),
        torch.from_numpy(arrays[labels].astype(np.int64)),
        torch.from_numpy(lengths.astype(np.int64)),
    )


def _check_whole(path: Path, name: str, array: NDArray[Any], shape: tuple[int, ...], least: int, most: int) -> None:
    if array.shape != shape or array.dtype.kind not in "iu":
        raise ValueError(f"{path} has {name} {array.dtype} {list(array.shape)}; wanted whole numbers {list(shape)}. {_CONVERT}")
    if array.min() < least or array.max() > most:
        wrong = array.min() if array.min() < least else array.max()
        raise ValueError(f"{path} has {wrong} in {name}; wanted {least} to {most}. {_CONVERT}")
