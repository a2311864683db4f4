"""A task of a user over frames: which half of the last frame is brighter."""

from dataclasses import dataclass

import torch

import unfading
from unfading.tasks.resident import Examples, Labelled


@dataclass(frozen=True)
class BrighterHalf(Labelled):
    """Frames of two channels; with `broken` one number of a training frame is not finite.

    Args:
        broken: whether a number is not finite.
    """

    broken: bool = False

    paper = "none"
    input_size = 2
    classes = 2

    def examples(self, part):
        generator = torch.Generator().manual_seed(0 if part == "train" else 1)
        x = torch.rand(30, 3, 2, 4, 6, generator=generator)
        target = (x[:, -1, :, :2].sum(dim=(1, 2, 3)) > x[:, -1, :, 2:].sum(dim=(1, 2, 3))).long()
        if self.broken and part == "train":
            x[:, 1, 1, 2, 5] = float("nan")
        return Examples(x, target)

    def head(self, size):
        return unfading.LastFrame(size, 2)
