"""Activity recognition from wearable sensors: HAR-2 and HAR-6 (a smartphone), DSA-19 (five units on trunk and limbs).

The incremental RNN's tables use both datasets, "zero mean - unit variance normalized". FastGRNN's script uses one mean per
(step, channel), others use one per channel; `normalise` offers both.

HAR is published with a split by people. For validation we also hold out people, the last four of the 21: windows overlap by
half, so a random fifth would share half of each of its windows with training. That is 1,485 of 7,352 windows, 20.2 %.
`validation="fifth"` selects a random fifth, as in the incremental RNN's paper: four people are few for choosing settings. An
int from 0 to 4 selects one of five folds of people, for cross-validation.

For DSA the papers state 4,560 examples each for training and testing, but not which. `split_by="subjects"` trains on people 1
to 4 and tests on 5 to 8; `"segments"` trains on the first half of each recording and tests on the second. "subjects" is the
default: it tests on unseen people, which the published accuracies, 84 to 88 %, make the more likely choice. Validation is the
last fifth of each training recording.

With `rotate` and `stretch`, training windows are rotated and their speed is changed at random (`tasks/worn.py`), before they
are normalised: people do not wear a device in the same orientation, and do not move at the same speed. `readout` decides what
the head reads: the output at the "last" step as in the papers, its "mean" over time, or "pooled", which is both and the maximum
over time.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from unfading.data import store
from unfading.errors import check_count, unknown
from unfading.files.checked_json import sentence
from unfading.tasks.base import READOUTS, Readout
from unfading.tasks.resident import Examples, Part
from unfading.tasks.scaling import Normalise, Normalised
from unfading.tasks.worn import at_another_speed, check_rotation, check_stretch, worn_differently

Table = NDArray[np.float32]  # [lines, columns]

ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
CHANNELS = tuple(f"{kind}_{axis}" for kind in ("total_acc", "body_acc", "body_gyro") for axis in "xyz")
HELD_OUT_PEOPLE = (27, 28, 29, 30)
FOLDS = 5


@dataclass(frozen=True)
class Worn(Normalised):
    """Recordings from devices that people wear, whose orientation differs between people."""

    devices: ClassVar[int] = 1

    _: KW_ONLY
    rotate: float = 0.0
    stretch: float = 0.0
    readout: Readout = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotation(self.rotate)
        check_stretch(self.stretch)
        if self.readout not in READOUTS:
            raise ValueError(unknown("readout", self.readout, READOUTS))

    def head(self, size: int) -> nn.Module:
        return READOUTS[self.readout](size, self.classes)

    def augmented(self, rows: Examples, draw: Callable[[], Generator]) -> Examples:
        if not self.rotate and not self.stretch:
            return rows
        generator = draw()
        # Both are drawn, so that one does not depend on whether there is the other.
        x = worn_differently(rows.x, self.rotate, self.devices, generator)
        return rows._replace(x=at_another_speed(x, self.stretch, generator))


@dataclass(frozen=True)
class HAR6(Worn):
    """Classify six activities from windows of 128 steps (2.56 s) of nine inertial signals.

    Args:
        normalise: subtract mean and divide by standard deviation per "channel" or per "step" and channel; or "none".
        validation: the held-out training windows: those of the last four "people", a random "fifth", or, for an int from 0 to
            4, those of every fifth person, from this one on.
        rotate: largest angle, in degrees, of a random rotation of each training window; 0 for none.
        stretch: largest random change of the speed of a training window, as a share; 0 for none.
        readout: what the head reads: the output at the "last" step, its "mean" over time, or "pooled".
    """

    paper: ClassVar[str] = "Anguita 2013"
    dataset: ClassVar[str] = "har"
    merged: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, 4, 5)  # the class of each of ACTIVITIES

    normalise: Normalise = "channel"
    validation: Literal["people", "fifth"] | int = "people"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.validation, str) and self.validation not in ("people", "fifth"):
            raise ValueError(unknown("validation", self.validation, ("people", "fifth")) + f" Or a fold, 0 to {FOLDS - 1}.")
        if not isinstance(self.validation, str):
            check_count("validation", self.validation, least=0)
            if self.validation >= FOLDS:
                raise ValueError(f"validation must be a fold, 0 to {FOLDS - 1}; got {self.validation}.")

    @property
    def input_size(self) -> int:
        return len(CHANNELS)

    @property
    def classes(self) -> int:
        return max(self.merged) + 1

    def examples(self, part: Part) -> Examples:
        signals = [_table("har", f"{part}/Inertial Signals/{channel}_{part}.txt", 128) for channel in CHANNELS]
        labels = _whole_numbers(f"{part}/y_{part}.txt", len(ACTIVITIES))
        for channel, signal in zip(CHANNELS, signals, strict=True):
            if len(signal) != len(labels):
                file = f"{part}/Inertial Signals/{channel}_{part}.txt"
                raise ValueError(f"{file} of dataset 'har' has {len(signal)} lines; wanted {len(labels)}. {_again('har')}")
        return Examples(torch.from_numpy(np.stack(signals, axis=2)), torch.tensor(self.merged)[labels - 1])

    def held_out(self, n: int) -> Tensor:
        if self.validation == "fifth":
            return super().held_out(n)
        people = self.people("train")
        if len(people) != n:
            raise ValueError(f"train/subject_train.txt of dataset 'har' has {len(people)} lines; wanted {n}. {_again('har')}")
        held_out = torch.tensor(HELD_OUT_PEOPLE) if self.validation == "people" else people.unique()[self.validation :: FOLDS]
        return torch.nonzero(torch.isin(people, held_out)).squeeze(1)

    def people(self, part: Part) -> Tensor:
        """The person, 1 to 30, of each window, int64 [N]."""
        return _whole_numbers(f"{part}/subject_{part}.txt", 30)


@dataclass(frozen=True)
class HAR2(HAR6):
    """HAR with two classes: sitting, laying and walking upstairs against standing, walking and walking downstairs.

    Args:
        normalise: subtract mean and divide by standard deviation per "channel" or per "step" and channel; or "none".
        validation: the held-out training windows: those of the last four "people", a random "fifth", or, for an int from 0 to
            4, those of every fifth person, from this one on.
        rotate: largest angle, in degrees, of a random rotation of each training window; 0 for none.
        stretch: largest random change of the speed of a training window, as a share; 0 for none.
        readout: what the head reads: the output at the "last" step, its "mean" over time, or "pooled".
    """

    paper: ClassVar[str] = "Kusupati 2018"
    merged: ClassVar[tuple[int, ...]] = (1, 0, 1, 0, 1, 0)


@dataclass(frozen=True)
class DSA19(Worn):
    """Classify nineteen activities from segments of 125 steps (5 s) of 45 signals; 8 people, 60 segments each.

    Args:
        split_by: test on other "subjects" than those of training, or on later "segments" of the same.
        normalise: subtract mean and divide by standard deviation per "channel" or per "step" and channel; or "none".
        rotate: largest angle, in degrees, of a random rotation of each device in a training segment; 0 for none.
        stretch: largest random change of the speed of a training segment, as a share; 0 for none.
        readout: what the head reads: the output at the "last" step, its "mean" over time, or "pooled".
    """

    paper: ClassVar[str] = "Altun 2010"
    dataset: ClassVar[str] = "dsa"
    devices: ClassVar[int] = 5

    split_by: Literal["subjects", "segments"] = "subjects"
    normalise: Normalise = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_by not in ("subjects", "segments"):
            raise ValueError(unknown("split_by", self.split_by, ("subjects", "segments")))

    @property
    def input_size(self) -> int:
        return 45

    @property
    def classes(self) -> int:
        return 19

    def segments(self, part: Part) -> NDArray[np.int64]:
        """(activity, person, segment) of each example, counted from one, [4560, 3]; segments are consecutive in time."""
        half = 0 if part == "train" else 1
        people = range(1 + 4 * half, 5 + 4 * half) if self.split_by == "subjects" else range(1, 9)
        segments = range(1 + 30 * half, 31 + 30 * half) if self.split_by == "segments" else range(1, 61)
        return np.array([(a, p, s) for a in range(1, 20) for p in people for s in segments])

    def examples(self, part: Part) -> Examples:
        which = self.segments(part)
        tables = [_table("dsa", f"a{a:02d}/p{p}/s{s:02d}.txt", 45, delimiter=",", rows=125) for a, p, s in which]
        return Examples(torch.from_numpy(np.stack(tables)), torch.from_numpy(which[:, 0] - 1))

    def held_out(self, n: int) -> Tensor:
        segment = self.segments("train")[:, 2]
        return torch.from_numpy(np.flatnonzero(segment > segment.max() * 4 // 5))


def _table(dataset: str, file: str, columns: int, *, delimiter: str | None = None, rows: int | None = None) -> Table:
    """Read a text file of numbers and check its shape."""
    path = store.path(dataset, file)
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty. {_again(dataset)}")
    try:
        table = np.loadtxt(path, dtype=np.float32, ndmin=2, delimiter=delimiter)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} is cut short or altered: {sentence(error).rstrip('.')}. {_again(dataset)}") from None
    if table.shape[1] != columns or rows not in (None, len(table)):
        wanted = f"{columns} numbers a line" + (f" in {rows} lines" if rows else "")
        raise ValueError(f"{path} has {table.shape[1]} in {len(table)} lines; wanted {wanted}. {_again(dataset)}")
    if not np.isfinite(table).all():
        raise ValueError(f"{path} holds values that are not finite. {_again(dataset)}")
    return table


def _whole_numbers(file: str, largest: int) -> Tensor:
    """Read a column of integers from 1 to `largest` of dataset "har", int64 [N]."""
    column = torch.from_numpy(_table("har", file, 1)[:, 0])
    wrong = column[(column != column.round()) | (column < 1) | (column > largest)]
    if len(wrong):
        raise ValueError(f"{store.path('har', file)} holds {wrong[0]:g}; wanted 1 to {largest}. {_again('har')}")
    return column.long()


def _again(dataset: str) -> str:
    return f"Get dataset {dataset!r} again."
