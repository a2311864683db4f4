"""Tasks that fail on purpose, named by file in tests."""

import os
import signal
from dataclasses import dataclass

from unfading.tasks.synthetic import Adding


@dataclass(frozen=True)
class Raising(Adding):
    """Adding with an error at the batch of index `at`."""

    at: int = 3

    def batch(self, index, size, *, split, seed, device):
        if split == "train" and index == self.at:
            raise ValueError("the sensor was unplugged")
        return super().batch(index, size, split=split, seed=seed, device=device)


@dataclass(frozen=True)
class Deadly(Adding):
    """Adding that kills its process at the batch of index `at`, except for one seed."""

    at: int = 3
    spared: int = 1

    def batch(self, index, size, *, split, seed, device):
        if split == "train" and index == self.at and seed != self.spared:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(index, size, split=split, seed=seed, device=device)
