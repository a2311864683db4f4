"""A user's own tasks, which go wrong at a given step: nothing of the library knows them."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import unfading


class Sum(unfading.Task):
    """The sum of T numbers; batches carry their own index, so that a loss may know the step."""

    paper = "none"
    measure = "mse"
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
    """Sum, and at step `at`, for `times` steps, a loss or a gradient that is not finite.

    Args:
        at: the step.
        times: how many steps from there.
        how: "loss" or "gradient".
        seed: of the one run that breaks; None for all.
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
        # Zero, with a gradient that is beyond all numbers.
        beyond = torch.sqrt(torch.where(breaks, (prediction - prediction.detach()).square().sum(), 1.0)) - 1.0
        return loss + torch.where(breaks, 1.0 + beyond, beyond)


@dataclass(frozen=True)
class Worsens(Sum):
    """Sum, whose validation asks for ever more the opposite of what training teaches; its test asks what training does."""

    rising = False

    def metrics(self, prediction, batch):
        score = super().metrics(prediction, batch)["mse"]
        return {"mse": torch.where(batch.target[0, 1] // 1000 == 1, -score, score)}


@dataclass(frozen=True)
class Rises(Worsens):
    """The same scores under a measure that should rise."""

    measure = "mse"
    rising = True


class Half(nn.Module):
    """No task."""
