"""A task of a user whose training batches begin with 4 steps and grow to 12."""

from dataclasses import dataclass

import torch

import unfading
from tests.user.own_tasks import Sum
from unfading.tasks.growing_length import GrowingLength

LENGTHS = GrowingLength(12, warmup_T=4, warmup_batches=2, growth_batches=3)


@dataclass(frozen=True)
class Growing(Sum):
    """The sum of the first four of T numbers."""

    full_length_from = LENGTHS.full_from

    def batch(self, index, size, *, split, seed, device):
        batch = super().batch(index, size, split=split, seed=seed, device=device)
        T = LENGTHS.at(index) if split == "train" else LENGTHS.T
        x = torch.cat([batch.x[:4], torch.zeros(T - 4, size, 1, device=device)])
        return unfading.Batch(x, batch.target)
