"""A loss that explodes and stays finite: when a run has diverged although every number is finite.

A loss is exploded above LIMIT times the larger of two: the lowest mean of an interval so far, and the loss of a guess. A run
has diverged if its loss was exploded in every log row for a PATIENCE of its steps, or in the last PATIENCE_AT_END of them.

Explosions that end by themselves are common and short. Of the 605 finished runs in `benchmarks/results`, 72 had one and
recovered; the longest took 10 % of its run. One never recovered: it ends with a loss of 5e17 and the accuracy of a guess.
"""

import math

LIMIT = 100.0
PATIENCE = 0.25
PATIENCE_AT_END = 0.05


class Explosion:
    """Watches the log rows of a run.

    Args:
        total: number of steps of the run.
    """

    def __init__(self, total: int):
        self.total = total
        self.guess: float | None = None  # loss of a guess; the loss of the first row stands in for one that is unknown
        self.reason: str | None = None  # why the run has diverged
        self._lowest = math.inf
        self._before = 0  # step of the row before
        self._began: int | None = None  # last step before the present explosion

    def update(self, step: int, loss: float) -> bool:
        """Take the mean loss of the steps up to `step`; True if the run has diverged."""
        if not math.isfinite(loss):  # no step was taken
            return False
        if not self.guess:
            self.guess = loss
        limit = LIMIT * max(abs(self.guess), abs(self._lowest) if math.isfinite(self._lowest) else 0.0)
        self._lowest = min(self._lowest, loss)
        began, self._before = self._before if self._began is None else self._began, step
        self._began = began if loss > limit else None
        if self._began is None or step - began < (PATIENCE_AT_END if step >= self.total else PATIENCE) * self.total:
            return False
        self.reason = (
            f"loss above {limit:.3g}, {LIMIT:g} times that of a guess or the lowest, from step {began + 1} to step {step}"
        )
        return True

    @property
    def present(self) -> bool:
        """Whether the loss was exploded in the last row."""
        return self._began is not None

    def returned(self) -> None:
        """The run has returned to better weights: the explosion is over."""
        self._began, self.reason = None, None
