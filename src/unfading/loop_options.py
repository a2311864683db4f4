"""The options of one run over time: the same value from the layer that is called down to the kernel."""

from typing import NamedTuple

from torch import Tensor


class LoopOptions(NamedTuple):
    """How a cell is run over a sequence."""

    lengths: Tensor | None = None
    """int64 [B], the steps of each row; None where every row has all of them. [models, B] in a kernel for a GPU."""

    reverse: bool = False
    """Whether each row is run from its last step to its first."""

    start: int = 0
    """The absolute index of the first step."""

    backend: str = "auto"
    """Which implementation runs the loop, as `unfading.use_backend` names them."""

    checkpoint_every: int | None = None
    """The steps between two stored states; None stores every state."""

    dots: str = ""
    """The precision of the dots of a kernel for a GPU: "bf16" or "fp16" under autocast, "tf32" or "tf32x3" without it. Empty
    for what torch's settings say when the kernel runs."""

    order: Tensor | None = None
    """The batch rows by falling length. A C kernel needs it beside lengths, and computes it once per call."""

    scan: bool | None = None
    """For a step whose units are independent, on a GPU: whether chunks of time run side by side. None for what is faster."""
