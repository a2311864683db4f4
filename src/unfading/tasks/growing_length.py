"""Training that begins with short sequences, whose length then grows.

    T_k = warmup_T                                        the first n batches, k = 0, ..., n - 1
    T_k = warmup_T * (T / warmup_T)^((k - n + 1) / m)     the next m batches, rounded
    T_k = T                                               all later batches

A model first learns what takes few steps, and then to keep it for longer. This takes less time than training with T steps from
the beginning, and the model does not have to learn from a gradient that vanishes over T steps: each batch is only a little
longer than the one before.
"""

from dataclasses import dataclass

from unfading.errors import check_count


@dataclass(frozen=True)
class GrowingLength:
    """The length of each training batch.

    Args:
        T: the final length.
        warmup_T: the length of the first batches; None if all batches have T steps.
        warmup_batches: n, the number of these batches.
        growth_batches: m, the number of batches after them in which the length grows.
        least: the smallest length that a sequence may have.
    """

    T: int
    warmup_T: int | None = None
    warmup_batches: int = 0
    growth_batches: int = 0
    least: int = 1

    def __post_init__(self) -> None:
        check_count("T", self.T, least=self.least)
        check_count("warmup_batches", self.warmup_batches, least=0)
        check_count("growth_batches", self.growth_batches, least=0)
        if self.warmup_T is None:
            if self.warmup_batches + self.growth_batches > 0:
                raise ValueError(
                    "warmup_batches and growth_batches need warmup_T, the length of the first training batches; got "
                    f"warmup_T=None, warmup_batches={self.warmup_batches} and growth_batches={self.growth_batches}."
                )
            return
        check_count("warmup_T", self.warmup_T, least=self.least)
        if self.warmup_T >= self.T:
            raise ValueError(
                f"warmup_T must be below T = {self.T}; got {self.warmup_T}. Leave it out to train with {self.T} steps from the "
                "beginning."
            )
        if self.full_from == 0:
            raise ValueError(
                f"warmup_T={self.warmup_T} has no effect with warmup_batches={self.warmup_batches} and "
                f"growth_batches={self.growth_batches}: all training batches have {self.T} steps. Set warmup_batches, the "
                "number of batches of this length, or growth_batches of at least 2, the number of those in which it grows."
            )

    @property
    def full_from(self) -> int:
        """Index of a training batch: it and all later ones have T steps. By rounding, a few earlier ones may have, too."""
        # The last batch of the growth has T steps.
        return self.warmup_batches + max(self.growth_batches - 1, 0)

    def at(self, k: int) -> int:
        """The length of the training batch with this index."""
        if self.warmup_T is None or k >= self.full_from:
            return self.T
        share = max(k - self.warmup_batches + 1, 0) / max(self.growth_batches, 1)
        return round(self.warmup_T * (self.T / self.warmup_T) ** share)
