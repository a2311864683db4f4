"""Training that begins with short sequences, whose length then grows.

    T_k = first                                          the first n batches, k = 0, ..., n - 1
    T_k = first * (T / first)^((k - n + 1) / m)          the next m batches, rounded
    T_k = T                                              all later batches

A model first learns what takes few steps, and then to keep it for longer. This takes less time than training with T steps from
the beginning, and a gradient that vanishes over T steps need not be found at once: each batch is only a little longer than the
one before.
"""

from dataclasses import dataclass

from unfading.errors import check_count


@dataclass(frozen=True)
class GrowingLength:
    """The length of each training batch.

    Args:
        T: the final length.
        first: the first length; None if all batches have T steps.
        warmup: n, the number of batches with the first length.
        growth: m, the number of batches in which the length grows.
        least: the smallest length that a sequence may have.
    """

    T: int
    first: int | None
    warmup: int
    growth: int
    least: int = 1

    def __post_init__(self) -> None:
        check_count("warmup_batches", self.warmup, least=0)
        check_count("growth_batches", self.growth, least=0)
        if self.first is None and self.warmup + self.growth > 0:
            raise ValueError(
                "warmup_batches and growth_batches need warmup_T, the length of the first training batches; got "
                f"warmup_T=None, warmup_batches={self.warmup} and growth_batches={self.growth}."
            )
        if self.first is not None and self.warmup + self.growth == 0:
            raise ValueError(
                f"warmup_T={self.first} has no effect with warmup_batches=0 and growth_batches=0: give the number of training "
                "batches of this length, or of those in which the length grows."
            )
        if self.first is not None:
            check_count("warmup_T", self.first, least=self.least)
            if self.first >= self.T:
                raise ValueError(f"warmup_T must be below T = {self.T}; got {self.first}.")

    @property
    def full_from(self) -> int:
        """Index of the first training batch with T steps; so have all later ones."""
        # The last batch of the growth has T steps, too.
        return self.warmup + max(self.growth - 1, 0)

    def at(self, k: int) -> int:
        """The length of the training batch with this index."""
        if self.first is None or k >= self.full_from:
            return self.T
        share = max(k - self.warmup + 1, 0) / max(self.growth, 1)
        return round(self.first * (self.T / self.first) ** share)
