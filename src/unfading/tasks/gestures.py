"""Hand gestures in video: 20BN-Jester V1, STAR's third experiment.

The publisher's layout, below `jester` in the data folder:

    20bn-jester-v1/<clip>/00001.jpg ...     148,092 clips at 12 frames a second, 100 pixels high
    jester-v1-labels.csv                    27 gestures, one a line
    jester-v1-train.csv                     118,562 lines <clip>;<gesture>
    jester-v1-validation.csv                14,787 lines <clip>;<gesture>
    jester-v1-test.csv                      14,743 clips, whose gestures were not published

Scores can be computed on the publisher's validation clips only: they are the split "test" here, and a fifth of the training
clips is held out for validation. STAR's paper does not say on which clips it reports.

The model reads the T consecutive frames in the middle of a clip, scaled to `size` x `size` pixels and to [0, 1]. A clip with
fewer frames holds its last one. The paper states 32 frames of 112 x 112, and not how they were cut or scaled. A clip is read
from its files whenever a batch has it: all of them would take 180 GB of memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Generator, nn

from unfading.data import store
from unfading.errors import check_count
from unfading.files.checked_json import brief, sentence
from unfading.tasks.base import Batch
from unfading.tasks.clip_files import read_clips
from unfading.tasks.frame_heads import GestureHead
from unfading.tasks.resident import Examples, Labelled, Part

CLASSES = 27
CLIPS = "20bn-jester-v1"
MOST_DIGITS = 18  # of the number of a clip, which has 64 bits
_AGAIN = "Get dataset 'jester' again."


@dataclass(frozen=True)
class Jester(Labelled):
    """Classify 27 hand gestures in video clips; the network is that of STAR's paper.

    Args:
        T: number of consecutive frames.
        size: height and width to which frames are scaled, in pixels.
    """

    paper: ClassVar[str] = "Materzynska 2019"
    dataset: ClassVar[str] = "jester"
    classes = CLASSES
    input_size = 3
    gpu_rows = 1

    T: int = 32
    size: int = 112

    def __post_init__(self) -> None:
        check_count("T", self.T)
        check_count("size", self.size)

    def examples(self, part: Part) -> Examples:
        """Names of clips, which are numbers, in the place of frames, and their gestures."""
        gestures = read_gestures(store.path("jester", "jester-v1-labels.csv"))
        file = store.path("jester", f"jester-v1-{'train' if part == 'train' else 'validation'}.csv")
        clips, labels = read_list(file, gestures)
        return Examples(torch.tensor(clips), torch.tensor(labels))

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        folder = store.find("jester") / CLIPS
        frames = read_clips([folder / str(clip) for clip in rows.x.tolist()], self.T, self.size)
        return Batch(frames.to(rows.x.device).to(torch.float32).div_(255), rows.target)

    def head(self, size: int) -> nn.Module:
        return GestureHead(size, CLASSES)


def read_gestures(file: Path) -> dict[str, int]:
    """The class of every gesture: its line in the file, from 0."""
    names = [line.strip() for line in _lines(file)]
    if len(names) != CLASSES or len(set(names)) != CLASSES:
        raise ValueError(f"{file} should name {CLASSES} gestures, one a line; got {len(set(names))} different ones. {_AGAIN}")
    return {name: number for number, name in enumerate(names)}


def read_list(file: Path, gestures: dict[str, int]) -> tuple[list[int], list[int]]:
    """The clips of a file and their classes, in the order of the file."""
    clips, labels = [], []
    for number, line in enumerate(_lines(file), start=1):
        clip, separator, gesture = (part.strip() for part in line.partition(";"))
        if not separator or not clip.isascii() or not clip.isdecimal() or len(clip) > MOST_DIGITS:
            raise ValueError(f"{file}, line {number}, should be <clip>;<gesture>; got {brief(line)}. {_AGAIN}")
        if gesture not in gestures:
            raise ValueError(f"{file}, line {number}, names the gesture {brief(gesture)}, not one of the {CLASSES}. {_AGAIN}")
        clips.append(int(clip))
        labels.append(gestures[gesture])
    if not clips:
        raise ValueError(f"{file} lists no clips. {_AGAIN}")
    return clips, labels


def _lines(file: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text ({sentence(error)}). {_AGAIN}") from None
