"""Learning-rate schedules: a factor on the rate for each step, 1 at the start unless there is a warm-up.

    constant      1
    step          gamma^min(s // every, times)
    cosine        floor + (1 - floor) (1 + cos(pi s / S)) / 2, times (s + 1) / (warmup S) where that is below 1
    polynomial    floor + (1 - floor) (1 - s / S)^power

with s the number of steps taken and S the number of steps of the run.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from unfading.errors import check_count, check_positive, check_share


class LearningRateSchedule(ABC):
    """A frozen dataclass of its options."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """The factor on the learning rate after `step` of `steps` steps."""


@dataclass(frozen=True)
class Constant(LearningRateSchedule):
    """A constant rate."""

    def factor(self, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class StepDecay(LearningRateSchedule):
    """The rate is multiplied by a factor at regular intervals.

    Args:
        every: steps between two multiplications.
        gamma: the factor.
        times: largest number of multiplications; None for no limit.
    """

    every: int = 1000
    gamma: float = 0.1
    times: int | None = None

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_positive("gamma", self.gamma)
        if self.times is not None:
            check_count("times", self.times)

    def factor(self, step: int, steps: int) -> float:
        taken = step // self.every
        return float(self.gamma ** (taken if self.times is None else min(taken, self.times)))


@dataclass(frozen=True)
class Cosine(LearningRateSchedule):
    """The rate falls along half a cosine.

    Args:
        floor: the factor at the end.
        warmup: share of the steps, at the start, in which the rate is multiplied by a factor that rises linearly from 0 to 1.
    """

    floor: float = 0.0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        check_share("floor", self.floor)
        check_share("warmup", self.warmup)

    def factor(self, step: int, steps: int) -> float:
        fallen = self.floor + (1 - self.floor) * (1 + math.cos(math.pi * step / steps)) / 2
        return fallen if step + 1 >= self.warmup * steps else fallen * (step + 1) / (self.warmup * steps)


@dataclass(frozen=True)
class Polynomial(LearningRateSchedule):
    """The rate falls as a power of the share of steps that remain; power 1 is a straight line.

    Args:
        power: the exponent.
        floor: the factor at the end.
    """

    power: float = 1.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_positive("power", self.power)
        check_share("floor", self.floor)

    def factor(self, step: int, steps: int) -> float:
        return float(self.floor + (1 - self.floor) * (1 - step / steps) ** self.power)


# By the names that runs and the command line use.
SCHEDULES: dict[str, type[LearningRateSchedule]] = {
    "constant": Constant,
    "step": StepDecay,
    "cosine": Cosine,
    "polynomial": Polynomial,
}
