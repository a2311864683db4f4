"""Handwritten digits that move: the next frame of a clip, and the direction of movement.

A clip shows `digits` MNIST images of `digit_size` pixels on a black frame of `size` x `size`; where two overlap, the brighter
pixel is seen. With p_0 a random position, and v a velocity of 1 to `speed` pixels a step,

    moving_mnist              p_t = p_0 + t v, reflected at the edges; v in any direction.
                              Input: frames 0 .. T-1; target: frames 1 .. T.
    moving_mnist_direction    p_t = p_0 + t v modulo `size`: what leaves at one edge returns at the other. All digits of a clip
                              move in one of eight directions, each at its own speed. Input: T frames; target: the direction.

Positions are rounded to pixels. Every MNIST image is the first digit of one clip in an epoch; the further digits are those of
other clips of the batch, so that the digits of training, validation and test are apart. Movements are new in every batch.

Srivastava et al. 2015 made the first of these: `MovingMNIST(T=19, size=64, digit_size=28)` is their size. They predict ten
frames from ten; here each frame is predicted from those before it.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from unfading.data import store
from unfading.errors import check_count, check_number
from unfading.tasks import image_files
from unfading.tasks.base import Batch, accuracy, cross_entropy
from unfading.tasks.frame_heads import EveryFrame, MeanFrame
from unfading.tasks.resident import Examples, Part, Resident

MNIST_SIZE = 28
# Vertical and horizontal steps of the eight directions, from right, counterclockwise as one sees it: y grows downwards.
DIRECTIONS = ((0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1), (1, 0), (1, 1))
# Clips from which the guess of the next frame is estimated.
GUESS_CLIPS = 1024


@dataclass(frozen=True)
class MovingDigits(Resident):
    """Base of the tasks over moving digits.

    Args:
        T: number of frames that the model reads.
        size: height and width of a frame, in pixels.
        digit_size: height and width of a digit: 28, or 14, 7, 4, 2 or 1, for which pixels of MNIST are averaged.
        digits: number of digits in a clip.
        speed: largest speed, in pixels a step; the smallest is 1.
    """

    T: int = 12
    _: KW_ONLY
    size: int = 32
    digit_size: int = 14
    digits: int = 2
    speed: float = 3

    dataset = "mnist"
    input_size = 1

    def __post_init__(self) -> None:
        check_count("T", self.T)
        check_count("digits", self.digits)
        check_count("digit_size", self.digit_size)
        if MNIST_SIZE % self.digit_size:
            sizes = [n for n in range(1, MNIST_SIZE + 1) if MNIST_SIZE % n == 0]
            nearest = min(sizes, key=lambda n: abs(n - self.digit_size))
            raise ValueError(
                f"digit_size must divide {MNIST_SIZE}, because pixels of MNIST are averaged; got {self.digit_size}. Nearest "
                f"valid: {nearest}."
            )
        check_count("size", self.size)
        if self.size <= self.digit_size:
            raise ValueError(
                f"size must be larger than digit_size={self.digit_size}, so that digits can move; got {self.size}. Nearest "
                f"valid: {self.digit_size + 1}."
            )
        check_number("speed", self.speed)
        if self.speed < 1:
            raise ValueError(f"speed must be at least 1 pixel a step, the smallest speed; got {self.speed}.")

    def examples(self, part: Part) -> Examples:
        images, labels = image_files.mnist(part)
        side = MNIST_SIZE // self.digit_size
        # In chunks: as numbers of four bytes the whole would be 188 MB.
        small = [functional.avg_pool2d(chunk.float(), side).round().byte() for chunk in images.split(8192)]
        return Examples(torch.cat(small), labels)

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        generator, (B, device) = draw(), (len(rows.x), rows.x.device)
        others = torch.rand(B, self.digits - 1, generator=generator, device=device).argsort(dim=0)
        images = rows.x[torch.cat([torch.arange(B, device=device).unsqueeze(1), others], dim=1)]
        return self.clips(images, torch.rand(4, B, self.digits, generator=generator, device=device))

    @abstractmethod
    def clips(self, images: Tensor, random: Tensor) -> Batch:
        """The batch of these images, bytes [B, digits, n, n], with four random numbers in [0, 1) for each, [4, B, digits]."""

    def frames(self, images: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Frames [T, B, 1, size, size] in [0, 1] of images whose upper left corners are at (y, x), each [T, B, digits].

        A position beyond the edge continues at the opposite one.
        """
        n = self.digit_size
        pixels = torch.arange(self.size, device=images.device)
        # The row and the column of the image that a pixel of the frame shows; n, which is black, where it shows none.
        row, column = ((pixels - at.round().long().unsqueeze(-1)).remainder(self.size).clamp(max=n) for at in (y, x))
        bordered = functional.pad(images, (0, 1, 0, 1))
        B, D = images.shape[:2]
        clip = torch.arange(B, device=images.device).reshape(B, 1, 1, 1)
        digit = torch.arange(D, device=images.device).reshape(D, 1, 1)
        shown = bordered[clip, digit, row.unsqueeze(-1), column.unsqueeze(-2)]
        return shown.amax(dim=2).unsqueeze(2).to(torch.float32) / 255

    def times(self, steps: int, device: torch.device) -> Tensor:
        """0 .. steps - 1, [steps, 1, 1]."""
        return torch.arange(steps, device=device).reshape(-1, 1, 1)

    def speeds(self, random: Tensor) -> Tensor:
        """Pixels a step, from random numbers in [0, 1)."""
        return 1 + (self.speed - 1) * random


@dataclass(frozen=True)
class MovingMNIST(MovingDigits):
    """Predict the next frame of a clip of digits that move and bounce off the edges.

    The prediction is a logit for each pixel. Loss: cross entropy with the brightness of the pixel. A guess predicts for each
    pixel its mean brightness over the training clips; it is estimated from 1,024 clips.
    """

    paper = "Srivastava 2015"
    metric = "mse"

    @property
    def guess(self) -> float:
        return _error_of_mean_frame(self, store.root())

    def clips(self, images: Tensor, random: Tensor) -> Batch:
        angle, speed = 2 * math.pi * random[0], self.speeds(random[1])
        time, room = self.times(self.T + 1, images.device), self.size - self.digit_size
        y = reflected(room * random[2] + time * speed * angle.sin(), room)
        x = reflected(room * random[3] + time * speed * angle.cos(), room)
        frames = self.frames(images, y, x)
        return Batch(frames[:-1].contiguous(), frames[1:].contiguous())

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return functional.binary_cross_entropy_with_logits(prediction, batch.target)

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        error = functional.mse_loss(torch.sigmoid(prediction), batch.target)
        return {"mse": error, "cross_entropy": self.loss(prediction, batch)}

    def head(self, size: int) -> nn.Module:
        return EveryFrame(size, 1)


@dataclass(frozen=True)
class MovingMNISTDirection(MovingDigits):
    """Name the direction, one of eight, in which the digits of a clip move.

    Every direction is as likely as the others. The head reads the mean of the output over time, as STAR's for gestures does.
    """

    paper = "Srivastava 2015"
    metric = "accuracy"
    higher_is_better = True
    guess = 1 / len(DIRECTIONS)

    def clips(self, images: Tensor, random: Tensor) -> Batch:
        direction = (len(DIRECTIONS) * random[0, :, 0]).long().clamp(max=len(DIRECTIONS) - 1)
        steps = torch.tensor(DIRECTIONS, device=images.device)[direction]  # [B, 2]
        distance = self.times(self.T, images.device) * self.speeds(random[1])
        y = self.size * random[2] + distance * steps[:, :1]
        x = self.size * random[3] + distance * steps[:, 1:]
        return Batch(self.frames(images, y, x), direction)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(prediction, batch.target)

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": accuracy(prediction, batch.target), "cross_entropy": self.loss(prediction, batch)}

    def head(self, size: int) -> nn.Module:
        return MeanFrame(size, len(DIRECTIONS))


def reflected(position: Tensor, room: float) -> Tensor:
    """A position that moves between 0 and `room` and turns back at both: the distance of `position` to the nearest 2 k room."""
    return room - (position.remainder(2 * room) - room).abs()


@lru_cache(maxsize=16)
def _error_of_mean_frame(task: MovingMNIST, folder: Path) -> float:
    """Mean squared error, on test clips, of the mean frame of training clips."""
    train, test = (task.batch(0, GUESS_CLIPS, split=split, seed=0, device="cpu").target for split in ("train", "test"))
    return float((test - train.mean(dim=(0, 1))).square().mean())
