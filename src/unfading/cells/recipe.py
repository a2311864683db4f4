"""The recommended training settings of a cell."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """Settings with which a cell is trained where the user gives none. `unfading train` and `unfading compare` use them."""

    rate: float = 1e-3  # learning rate
    rates: Mapping[str, float] = {}  # factors on the learning rate of parameters of the cell
    clip_norm: float | None = 1.0  # largest norm of the gradient
    options: Mapping[str, Any] = {}  # options of the cell
    length_options: tuple[str, ...] = ()  # options of the cell that take the length of the sequences
    if_diverged: str = "a smaller learning rate, or --retries 3"  # what to try then

    def cell_options(self, length: int) -> dict[str, Any]:
        """The options of the cell for sequences of this length."""
        # The shortest range of forgetting times is 2.
        return {**self.options, **dict.fromkeys(self.length_options, max(2, length))}
