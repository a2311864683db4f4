"""Classification on any dataset of the UCR and UEA archives.

Reads `UCR/<name>/<name>_TRAIN` and `_TEST` of the data folder, as `.ts` or `.tsv` (series.py). Series may have any number of
channels and differ in length. A fixed random fifth of the training file is for validation.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from unfading.data import store
from unfading.errors import unknown
from unfading.tasks.resident import Examples, Part
from unfading.tasks.scaling import Normalise, Normalised
from unfading.tasks.series import Series, read_series


@dataclass(frozen=True)
class UCR(Normalised):
    """Classify the series of one dataset of the archives. The default is 24 crops from 46 satellite images.

    Args:
        name: name of the dataset, as the archives spell it.
    """

    paper: ClassVar[str] = "Dau 2019"
    dataset: ClassVar[str] = "ucr"

    name: str = "Crop"
    normalise: Normalise = "channel"

    @property
    def input_size(self) -> int:
        return _read(self.name, store.root()).train.x.shape[2]

    @property
    def classes(self) -> int:
        return _read(self.name, store.root()).classes

    def examples(self, part: Part) -> Examples:
        both = _read(self.name, store.root())
        return both.train if part == "train" else both.test


class _Set(NamedTuple):
    train: Examples
    test: Examples
    classes: int


@lru_cache(maxsize=8)
def _read(name: str, folder: Path) -> _Set:
    paths = [_path(name, part) for part in ("TRAIN", "TEST")]
    train, test = (read_series(path) for path in paths)
    wanted, got = train.values[0].shape[1], test.values[0].shape[1]
    if got != wanted:
        raise ValueError(f"{paths[1]} has {got} channels; wanted {wanted}, as in training. Fetch both again.")
    strange = sorted(set(test.labels) - set(train.classes))
    if strange:
        known = ", ".join(train.classes)
        raise ValueError(f"{paths[1]} has label {strange[0]!r}; wanted one of {known}, as in training. Fetch both again.")
    steps = max(len(values) for values in train.values + test.values)
    return _Set(_examples(train, train.classes, steps), _examples(test, train.classes, steps), len(train.classes))


def _path(name: str, part: str) -> Path:
    folder = store.find("ucr")
    if not (folder / name).is_dir():
        raise FileNotFoundError(f"{folder}: {unknown('set', name, (path.name for path in folder.iterdir() if path.is_dir()))}")
    for suffix in (".ts", ".tsv"):
        path = folder / name / f"{name}_{part}{suffix}"
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder / name} has no {name}_{part}.ts or .tsv. Fetch the set from {store.known('ucr').home}")


def _examples(series: Series, classes: list[str], steps: int) -> Examples:
    """Pad series with zeros to `steps`; lengths are None if all have `steps`."""
    x = np.zeros((len(series.values), steps, series.values[0].shape[1]), dtype=np.float32)
    for row, values in zip(x, series.values, strict=True):
        row[: len(values)] = values
    lengths = torch.tensor([len(values) for values in series.values])
    target = torch.tensor([classes.index(label) for label in series.labels])
    return Examples(torch.from_numpy(x), target, None if bool((lengths == steps).all()) else lengths)
