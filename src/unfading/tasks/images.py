"""Images as sequences: pixel by pixel, permuted, or row by row followed by noise.

    pixel MNIST       784 steps of one pixel, row by row; 785 in NRU's layout, with a final zero
    permuted MNIST    the same pixels in a fixed random order: step t reads pixel p[t]
    noisy MNIST       28 rows of 28, then noise up to T = 1000
    noisy CIFAR       32 rows of 96 (red, green, blue), then noise up to T = 1000
    digits            64 steps of one pixel; small and fast

`scale` converts bytes b to inputs; mean m and deviation s come from the training rows alone:

    unit         b / 255                   STAR, NRU
    signed       2 b / 255 - 1             the CIFAR loader of the incremental RNN's authors (FPTT's code)
    standard     (b - m) / s, per channel  the incremental RNN
    pixelwise    (b - m) / s, per pixel    EdgeML

`shift`, `rotate`, `zoom` and `flip` distort training images at random (`tasks/augment.py`), before they are cut into steps.

Each paper uses its own permutation. Available are `incremental`, the incremental RNN's (numpy's RandomState(42); the paper says
only "seed 42"), `nru`, from NRU's code (RandomState(50), drawn after the permutation of its 60,000 training rows), `urnn`
(RandomState(92916)), and from the code of coRNN and of LEM and UnICORNN `cornn` and `lem` (torch's randperm, seeds 12008 and
5544). An integer seeds RandomState. STAR and JANET use a file whose seed was not published.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Generator, Tensor

from unfading.data import store
from unfading.errors import check_count, unknown
from unfading.tasks import image_files
from unfading.tasks.augment import Augmentation
from unfading.tasks.base import Batch
from unfading.tasks.draw import stream
from unfading.tasks.growing_length import GrowingLength
from unfading.tasks.resident import Examples, Labelled, Part

Scale = Literal["unit", "signed", "standard", "pixelwise"]
Validation = Literal["fifth", "first_5000", "nru"]
# Entries with a smaller deviation are constant; dividing by it would divide by zero.
LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Images(Labelled):
    """Images of ten classes, stored as bytes and scaled batch by batch.

    Args:
        scale: how bytes become inputs: "unit", "signed", "standard" or "pixelwise".
        validation: the held-out training rows: a random "fifth", or a number of rows.
        shift: largest random shift of a training image, in pixels along each axis.
        rotate: largest random rotation of a training image, in degrees.
        zoom: largest random change of the size of a training image, as a share of the size, below 1.
        flip: mirror half of the training images left to right, at random.
    """

    _: KW_ONLY
    scale: Scale = "unit"
    validation: Validation | int = "fifth"
    shift: float = 0.0
    rotate: float = 0.0
    zoom: float = 0.0
    flip: bool = False

    classes = 10
    channels: ClassVar[int] = 1
    brightest: ClassVar[int] = 255
    splits: ClassVar[tuple[Validation, ...]] = ("fifth",)  # names that `validation` may have

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise ValueError(unknown("scale", self.scale, get_args(Scale)))
        if not isinstance(self.validation, str):
            check_count("validation", self.validation)
        elif self.validation not in self.splits:
            raise ValueError(unknown("validation", self.validation, self.splits) + " Or give a number of rows, an int.")
        self.augmentation()

    def augmentation(self) -> Augmentation:
        """The distortions of training images."""
        return Augmentation(shift=self.shift, rotate=self.rotate, zoom=self.zoom, flip=self.flip)

    def augmented(self, rows: Examples, draw: Callable[[], Generator]) -> Examples:
        distort = self.augmentation()
        if not distort.active:
            return rows
        return rows._replace(x=self.as_sequences(distort(self.as_images(rows.x), draw())))

    def held_out(self, n: int) -> Tensor:
        if isinstance(self.validation, str):
            return super().held_out(n)
        if self.validation >= n:
            raise ValueError(f"validation must be below {n}, the number of training rows; got {self.validation}.")
        return torch.from_numpy(np.sort(np.random.RandomState(0).permutation(n)[: self.validation]))

    @abstractmethod
    def as_images(self, x: Tensor) -> Tensor:
        """Sequences [N, T, I] as images [N, channels, height, width]."""

    @abstractmethod
    def as_sequences(self, images: Tensor) -> Tensor:
        """Images [N, channels, height, width] as sequences [N, T, I]; the features of a step are grouped by channel."""

    @abstractmethod
    def images(self, part: Part) -> tuple[Tensor, Tensor]:
        """Bytes [N, channels, height, width], and the labels [N]."""

    def examples(self, part: Part) -> Examples:
        images, labels = self.images(part)
        return Examples(self.as_sequences(images), labels)

    def scaled(self, x: Tensor) -> Tensor:
        """Bytes [B, T, I] as inputs [T, B, I]."""
        shift, factor = _scaling(self, store.root(), x.device)
        # Transposed while they are bytes, a quarter of the size.
        return x.transpose(0, 1).contiguous().to(torch.float32).sub_(shift).mul_(factor)

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        return Batch(self.scaled(rows.x), rows.target)


@lru_cache(maxsize=16)
def _scaling(task: Images, folder: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shift and factor of x -> (x - shift) * factor: [1], [I] or, per pixel, [T, 1, I]."""
    if task.scale == "unit":
        shift, factor = torch.zeros(1), torch.tensor([1 / task.brightest])
    elif task.scale == "signed":
        shift, factor = torch.tensor([task.brightest / 2]), torch.tensor([2 / task.brightest])
    else:
        x = task.training().x
        n, T, I = x.shape
        # In chunks: in float64 the whole would be eight times as large.
        total, squares = torch.zeros(T, I, dtype=torch.float64), torch.zeros(T, I, dtype=torch.float64)
        for chunk in x.split(1024):
            total += chunk.double().sum(dim=0)
            squares += chunk.double().square().sum(dim=0)
        mean, second = total / n, squares / n
        if task.scale == "standard":
            mean, second = (m.view(T, task.channels, -1).mean(dim=(0, 2)) for m in (mean, second))
            mean, second = (m.repeat_interleave(I // task.channels) for m in (mean, second))
        deviation = (second - mean.square()).clamp(min=0).sqrt()
        deviation = torch.where(deviation < LEAST_DEVIATION, 1.0, deviation)
        shift, factor = mean.float(), (1 / deviation).float()
        if task.scale == "pixelwise":
            shift, factor = shift.unsqueeze(1), factor.unsqueeze(1)
    return shift.to(device), factor.to(device)


@dataclass(frozen=True)
class PixelMNIST(Images):
    """Classify handwritten digits read pixel by pixel in 784 steps (Le et al. 2015).

    Args:
        scale: how bytes become inputs: "unit", "signed", "standard" or "pixelwise".
        validation: the held-out training rows: a random "fifth" or number of rows, or a paper's own split, "first_5000" (uRNN;
            TensorFlow's tutorial, hence STAR and JANET) or "nru" (the last 10,000 of the 60,000, shuffled).
        extra_step: append a zero step, at which the class is predicted: NRU's 785 steps.
    """

    _: KW_ONLY
    extra_step: bool = False

    paper = "Le 2015"
    dataset = "mnist"
    input_size = 1
    splits = get_args(Validation)

    def images(self, part: Part) -> tuple[Tensor, Tensor]:
        return _mnist(part)

    def as_images(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 1, 28, 28)

    def as_sequences(self, images: Tensor) -> Tensor:
        return images.reshape(-1, 784, 1)

    def held_out(self, n: int) -> Tensor:
        if self.validation == "first_5000":
            return torch.arange(5000)
        if self.validation == "nru":
            return torch.from_numpy(np.random.RandomState(50).permutation(n)[-10000:])
        return super().held_out(n)

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        x = self.scaled(rows.x)
        if self.extra_step:
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return Batch(x, rows.target)


def permutation(name: str | int, size: int = 784) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The order of the pixels: a paper's permutation by name, or one drawn from a seed."""
    if isinstance(name, int) and not isinstance(name, bool):
        check_count("permutation", name, least=0)
        return np.random.RandomState(name).permutation(size)
    seeds, torch_seeds = {"incremental": 42, "nru": 50, "urnn": 92916}, {"cornn": 12008, "lem": 5544}
    if name in torch_seeds:
        return torch.randperm(size, generator=Generator().manual_seed(torch_seeds[name]), device="cpu").numpy()
    if name not in seeds:
        raise ValueError(unknown("permutation", name, {**seeds, **torch_seeds}) + " Or give a seed, an int.")
    state = np.random.RandomState(seeds[name])
    if name == "nru":
        state.permutation(60000)
    return state.permutation(size)


@dataclass(frozen=True)
class PermutedMNIST(PixelMNIST):
    """Pixel MNIST in a fixed random order (Le et al. 2015).

    Args:
        permutation: "incremental", "nru", "urnn", "cornn", "lem", or a seed.
    """

    permutation: str | int = "incremental"

    def __post_init__(self) -> None:
        super().__post_init__()
        permutation(self.permutation)

    def as_images(self, x: Tensor) -> Tensor:
        return super().as_images(x[:, _order(self.permutation, x.device).argsort()])

    def as_sequences(self, images: Tensor) -> Tensor:
        return super().as_sequences(images)[:, _order(self.permutation, images.device)]


@lru_cache(maxsize=8)
def _order(name: str | int, device: torch.device) -> Tensor:
    return torch.from_numpy(permutation(name)).to(device)


def _mnist(part: Part) -> tuple[Tensor, Tensor]:
    images, labels = image_files.mnist(part)
    return images.unsqueeze(1), labels


@dataclass(frozen=True)
class Noisy(Images):
    """Rows of an image, then N(0, 1) noise up to step T, then predict the class.

    Args:
        T: total number of steps.
        fixed_noise: use the same noise in every row and batch, as in the code of coRNN and LipschitzRNN; otherwise fresh noise.
        start: step at which the image starts, or "random" for one that is drawn for every row. Noise comes before and after it.
        warmup_T: number of steps of the first `warmup_batches` training batches, which have less noise; None if all batches
            have T steps.
        warmup_batches: number of training batches with `warmup_T` steps.
        growth_batches: number of training batches after these in which the number of steps grows from `warmup_T` to T, each
            time by the same factor.
    """

    T: int = 1000
    _: KW_ONLY
    fixed_noise: bool = False
    start: int | Literal["random"] = 0
    warmup_T: int | None = None
    warmup_batches: int = 0
    growth_batches: int = 0

    height: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("T", self.T, least=self.height)
        if isinstance(self.start, str) and self.start != "random":
            raise ValueError(unknown("start", self.start, ("random",)) + " Or give a step, an int.")
        shortest = self.lengths.at(0)
        if self.start != "random":
            check_count("start", self.start, least=0)
            if self.start > shortest - self.height:
                longer = "T" if self.warmup_T is None else "warmup_T"
                raise ValueError(
                    f"start must be at most {shortest - self.height}, so that the {self.height} rows of the image fit into the "
                    f"{shortest} steps of the first training batch; got {self.start}. Use a smaller start or a larger {longer}."
                )

    @property
    def lengths(self) -> GrowingLength:
        """The numbers of steps of the training batches."""
        return GrowingLength(self.T, self.warmup_T, self.warmup_batches, self.growth_batches, least=self.height)

    @property
    def full_length_from(self) -> int:
        return self.lengths.full_from

    def as_images(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.channels, -1)).transpose(1, 2)

    def as_sequences(self, images: Tensor) -> Tensor:
        return images.transpose(1, 2).flatten(2)

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        return self._in_noise(rows, self.T, draw())

    def present_training(self, index: int, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        return self._in_noise(rows, self.lengths.at(index), draw())

    def _in_noise(self, rows: Examples, T: int, generator: Generator) -> Batch:
        """Sequences of T steps: the rows of an image, and noise."""
        x = self.scaled(rows.x)
        steps, (_, B, I) = T - self.height, x.shape
        if self.fixed_noise:
            # A shorter batch has the first steps of the same noise.
            noise = _fixed_noise(self.T - self.height, I, x.device)[:steps].expand(steps, B, I)
        else:
            noise = torch.randn(steps, B, I, generator=generator, device=x.device, dtype=x.dtype)
        if self.start == "random":
            starts = torch.randint(steps + 1, (B,), generator=generator, device=x.device)
            return Batch(_moved(x, noise, starts), rows.target)
        return Batch(torch.cat([noise[: self.start], x, noise[self.start :]]), rows.target)


def _moved(image: Tensor, noise: Tensor, starts: Tensor) -> Tensor:
    """Noise [n, B, I] with row b of the image [h, B, I] inserted at step starts[b], [h + n, B, I]."""
    height, B, _ = image.shape
    step = torch.arange(height + len(noise), device=image.device).unsqueeze(1)  # [T, 1]
    # Which step of (image, noise) comes at each step: noise, the image, then the noise that is left.
    source = torch.where(step < starts, step + height, torch.where(step < starts + height, step - starts, step))
    return torch.cat([image, noise])[source, torch.arange(B, device=image.device)]


@lru_cache(maxsize=4)
def _fixed_noise(steps: int, features: int, device: torch.device) -> Tensor:
    generator = stream(0, "train", 0, "cpu", purpose="fixed noise")
    return torch.randn(steps, 1, features, generator=generator, dtype=torch.float32).to(device)


@dataclass(frozen=True)
class NoisyMNIST(Noisy):
    """28 rows of an MNIST image, then noise (Kag et al. 2020)."""

    _: KW_ONLY
    scale: Scale = "standard"

    paper = "Kag 2020"
    dataset = "mnist"
    input_size = 28
    height = 28

    def images(self, part: Part) -> tuple[Tensor, Tensor]:
        return _mnist(part)


@dataclass(frozen=True)
class NoisyCIFAR(Noisy):
    """32 rows of a CIFAR-10 image, each 32 of red, 32 of green and 32 of blue, then noise (Chang et al. 2019)."""

    _: KW_ONLY
    scale: Scale = "signed"

    paper = "Chang 2019"
    dataset = "cifar10"
    input_size = 96
    height = 32
    channels = 3

    def images(self, part: Part) -> tuple[Tensor, Tensor]:
        return image_files.cifar10(part)


@dataclass(frozen=True)
class Digits(Images):
    """scikit-learn's 8 x 8 digits, pixel by pixel. It is one file; its last fifth is our test set."""

    paper = "Alpaydin 1998"
    dataset = "digits"
    input_size = 1
    brightest = 16

    def images(self, part: Part) -> tuple[Tensor, Tensor]:
        images, labels = image_files.digits()
        rows = slice(0, -(len(images) // 5)) if part == "train" else slice(-(len(images) // 5), None)
        return images[rows].reshape(-1, 1, 8, 8), labels[rows]

    def as_images(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 1, 8, 8)

    def as_sequences(self, images: Tensor) -> Tensor:
        return images.reshape(-1, 64, 1)
