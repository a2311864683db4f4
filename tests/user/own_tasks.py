"""Tasks and a cell of a user, named by file in tests. Some tasks fail at a given step."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

import unfading


class Sum(unfading.Task):
    """The sum of T numbers. The target holds the index of the batch, so that a loss can depend on the step."""

    paper = "none"
    metric = "mse"
    input_size = 1
    guess = 1.0

    def batch(self, index, size, *, split, seed, device):
        number = index + 1000 * ["train", "valid", "full", "test"].index(split)
        generator = torch.Generator().manual_seed(number * 7919 + seed)
        x = torch.rand(5, size, 1, generator=generator)
        return unfading.Batch(x.to(device), torch.cat([x.sum(dim=0), torch.full((size, 1), float(number))], dim=1).to(device))

    def length(self, split, size):
        return None

    def loss(self, prediction, batch):
        return functional.mse_loss(prediction, batch.target[:, :1])

    def metrics(self, prediction, batch):
        return {"mse": functional.mse_loss(prediction, batch.target[:, :1])}

    def head(self, size):
        return unfading.LastStep(size, 1)


@dataclass(frozen=True)
class Breaks(Sum):
    """Sum with a loss or a gradient that is not finite from step `at`, for `times` steps.

    Args:
        at: the step.
        times: number of steps.
        how: "loss" or "gradient".
        above: fail only if the mean size of the prediction is larger.
    """

    at: int = 7
    times: int = 1000
    how: str = "loss"
    above: float = -1.0

    def loss(self, prediction, batch):
        loss = super().loss(prediction, batch)
        step, size = batch.target[0, 1], prediction.detach().abs().mean()
        breaks = (step >= self.at) & (step < self.at + self.times) & (size > self.above)
        if self.how == "loss":
            return torch.where(breaks, float("nan"), loss)
        # Zero, with an infinite gradient.
        infinite = torch.sqrt(torch.where(breaks, (prediction - prediction.detach()).square().sum(), 1.0)) - 1.0
        return loss + torch.where(breaks, 1.0 + infinite, infinite)


@dataclass(frozen=True)
class Worsens(Sum):
    """Sum with the opposite objective on the validation rows, so that training makes validation worse; the test is usual."""

    higher_is_better = False

    def metrics(self, prediction, batch):
        score = super().metrics(prediction, batch)["mse"]
        return {"mse": torch.where(batch.target[0, 1] // 1000 == 1, -score, score)}


@dataclass(frozen=True)
class Rises(Sum):
    """The same with a metric for which higher is better."""

    higher_is_better = True

    def metrics(self, prediction, batch):
        score = super().metrics(prediction, batch)["mse"]
        return {"mse": torch.where(batch.target[0, 1] // 1000 == 1, score, -score)}


@dataclass(frozen=True)
class Same(Sum):
    """Sum with the same rows for every seed, so that seeds differ only in their noise."""

    def batch(self, index, size, *, split, seed, device):
        return super().batch(index, size, split=split, seed=0, device=device)


@dataclass(frozen=True)
class Level(Sum):
    """Sum with a constant metric."""

    def metrics(self, prediction, batch):
        return {"mse": 0.0 * super().metrics(prediction, batch)["mse"] + 0.5}


class SortedCell(unfading.ElmanCell):
    """Elman with sorted units, which the compiler does not support."""

    def step(self, inputs, state, weights):
        new = super().step(inputs, state, weights)
        return type(new)(torch.sort(new.h, dim=-1).values)


@dataclass(frozen=True)
class Slow(Sum):
    """Sum with one step that takes a minute.

    Args:
        at: the step.
    """

    at: int = 5

    def batch(self, index, size, *, split, seed, device):
        if index == self.at and split == "train":
            for folder in Path().glob("*"):
                (folder / "slow").touch()
            time.sleep(60)
        return super().batch(index, size, split=split, seed=seed, device=device)


@dataclass(frozen=True)
class Cliff(Sum):
    """Sum with one step whose gradient is finite but so large that the next loss is not.

    Args:
        at: the step.
    """

    at: int = 6

    def loss(self, prediction, batch):
        loss = super().loss(prediction, batch)
        here = (batch.target[0, 1] == self.at).to(loss.dtype)
        return (1 - here) * loss + here * 1e30 * (prediction - prediction.detach()).sum()


@dataclass(frozen=True)
class Blind(Sum):
    """Sum with a validation metric that is not finite after step `at`.

    Args:
        at: the step.
    """

    at: int = 9

    def loss(self, prediction, batch):
        if batch.target[0, 1] < 1000:
            type(self).step = int(batch.target[0, 1])
        return super().loss(prediction, batch)

    def metrics(self, prediction, batch):
        score = super().metrics(prediction, batch)["mse"]
        return {"mse": score if type(self).step < self.at or batch.target[0, 1] >= 3000 else score * float("nan")}


class Normal(torch.nn.Module):
    """A head with running statistics."""

    def __init__(self, size):
        super().__init__()
        self.normal = torch.nn.BatchNorm1d(size)
        self.answer = torch.nn.Linear(size, 1)

    def forward(self, output, lengths=None):
        return self.answer(self.normal(output[-1]))


@dataclass(frozen=True)
class Counting(Sum):
    """Sum with a head that changes its buffers."""

    def head(self, size):
        return Normal(size)


@dataclass(frozen=True)
class Explodes(Sum):
    """Sum with a loss that is a million times larger from step `at`, for `times` steps, and stays finite.

    Args:
        at: the step.
        times: number of steps.
    """

    at: int = 7
    times: int = 1000

    def loss(self, prediction, batch):
        step = batch.target[0, 1]
        return super().loss(prediction, batch) * torch.where((step >= self.at) & (step < self.at + self.times), 1e6, 1.0)
