"""Mean zero and spread one, as the incremental RNN has it for sensors and speech, told by the split "train" alone.

    x' = (x - mean) / spread

What validation and test hold never moves a mean. Rows that end early count with their own steps only, and stay zero past them.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor

from unfading.data import store
from unfading.errors import unknown
from unfading.lengths import zero_past
from unfading.tasks.base import Batch
from unfading.tasks.resident import Examples, Labelled

# "channel": a mean for each channel. "step": one for each (step, channel), as in FastGRNN's script. "none": as published.
Normalise = Literal["channel", "step", "none"]


class Scale(NamedTuple):
    """What is taken off and what is divided by, float32 [1 or T, 1, I]."""

    mean: Tensor
    spread: Tensor


class Normalised(Labelled):
    """Labelled sequences whose field `normalise` says how they are scaled."""

    normalise: Normalise

    def __post_init__(self) -> None:
        if self.normalise not in get_args(Normalise):
            raise ValueError(unknown("normalise", self.normalise, get_args(Normalise)))

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        batch = super().present(rows, draw)
        x = batch.x.contiguous()
        if self.normalise != "none":
            mean, spread = _scale(self, store.root(), x.device)
            # In place: the rows have been picked for this batch alone.
            x = x.sub_(mean).div_(spread)
            x = x if batch.lengths is None else zero_past(x, batch.lengths)
        return batch._replace(x=x)


def scale_of(x: Tensor, lengths: Tensor | None, *, each_step: bool) -> Scale:
    """Mean and spread of examples [N, T, I], over rows or over rows and steps. What never changes is divided by one."""
    N, T, _ = x.shape
    whole = torch.full((N,), T) if lengths is None else lengths
    if each_step and bool((whole < T).any()):
        raise ValueError("normalise='step' wants sequences of one length, and these differ. Take normalise='channel'.")
    inside = torch.arange(T) < whole.unsqueeze(1)
    means, spreads = [], []
    # Channel by channel: a copy of all in double precision would be gigabytes for speech.
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
