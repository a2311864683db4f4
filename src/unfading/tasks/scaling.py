"""Normalisation to mean 0 and standard deviation 1, as the incremental RNN's paper does for sensors and speech.

    x' = (x - mean) / spread

Mean and spread come from the split "train" alone. Shorter rows contribute only their own steps, and stay zero past their end.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor, nn

from unfading.data import store
from unfading.errors import unknown
from unfading.lengths import zero_past
from unfading.tasks.base import Batch
from unfading.tasks.resident import Examples, Labelled

# "channel": one mean per channel. "step": one per (step, channel), as in FastGRNN's script. "none": data as published.
Normalise = Literal["channel", "step", "none"]


class Scale(NamedTuple):
    """Mean and standard deviation, float32 [1 or T, 1, I]."""

    mean: Tensor
    spread: Tensor


class Standardise(nn.Module):
    """(x - mean) / spread with fixed numbers, [I]: the encoder of a model that reads data in their own units; no parameters."""

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Sequence[float], spread: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("spread", torch.tensor(spread), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.spread

    @property
    def scale(self) -> Scale:
        """Mean and spread in the layout of a task's normalisation."""
        return Scale(self.mean.reshape(1, 1, -1), self.spread.reshape(1, 1, -1))


class Rescaled(nn.Module):
    """head(output) * spread + mean with fixed numbers: a head that answers in the units of the targets.

    Args:
        head: a head whose answers have mean 0 and spread 1.
        mean: of the targets, one number per answer.
        spread: of the targets.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, head: nn.Module, mean: Sequence[float], spread: Sequence[float]):
        super().__init__()
        self.head = head
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("spread", torch.tensor(spread), persistent=False)

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.head(output, lengths) * self.spread + self.mean


class Normalised(Labelled):
    """Classification of sequences that are normalised as the field `normalise` says."""

    normalise: Normalise

    def __post_init__(self) -> None:
        if self.normalise not in get_args(Normalise):
            raise ValueError(unknown("normalise", self.normalise, get_args(Normalise)))

    def scale(self, device: torch.device | str = "cpu") -> Scale | None:
        """Mean and spread of the normalisation; None where there is none. The training data are read."""
        return None if self.normalise == "none" else _scale(self, store.root(), torch.device(device))

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        batch = super().present(rows, draw)
        x = batch.x.contiguous()
        scale = self.scale(x.device)
        if scale is not None:
            mean, spread = scale
            # In place: x is a copy made for this batch.
            x = x.sub_(mean).div_(spread)
            x = x if batch.lengths is None else zero_past(x, batch.lengths)
        return batch._replace(x=x)


def scale_of(x: Tensor, lengths: Tensor | None, *, each_step: bool) -> Scale:
    """Mean and spread of examples [N, T, I], over rows or over rows and steps. Constant entries get spread 1."""
    N, T, _ = x.shape
    whole = torch.full((N,), T) if lengths is None else lengths
    if each_step and bool((whole < T).any()):
        raise ValueError("normalise='step' needs sequences of equal length, and these differ. Use normalise='channel'.")
    inside = torch.arange(T) < whole.unsqueeze(1)
    means, spreads = [], []
    # Channel by channel: a copy of the whole in float64 would take gigabytes for speech.
    for channel in x.unbind(-1):
        values = channel.double() if each_step else channel[inside].double().unsqueeze(1)
        spread, mean = torch.std_mean(values, dim=0, correction=0)
        means.append(mean)
        spreads.append(torch.where(spread < 1e-6, 1.0, spread))
    return Scale(torch.stack(means, dim=-1).float().unsqueeze(1), torch.stack(spreads, dim=-1).float().unsqueeze(1))


@lru_cache(maxsize=16)
def _scale(task: Normalised, folder: Path, device: torch.device) -> Scale:
    if device.type != "cpu":
        return Scale(*(part.to(device) for part in _scale(task, folder, torch.device("cpu"))))
    train = task.training()
    return scale_of(train.x, train.lengths, each_step=task.normalise == "step")
