"""A layer whose state holds the number of steps that it has read, for callers that pass the state on, and nothing else."""

from typing import Any

from torch import Tensor, nn

from unfading.layers.recurrent import Recurrent


class CountedLayer(nn.Module):
    """output, state = layer(x, state): two calls with a carried state equal one, also for cells that depend on the step.

    Args:
        rnn: the layer, with batch_first.
    """

    def __init__(self, rnn: Recurrent[Any]):
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor, state: tuple[Any, int] | None = None) -> tuple[Tensor, tuple[Any, int]]:
        earlier, start = (None, 0) if state is None else state
        output, final = self.rnn(x, earlier, start=start)
        return output, (final, start + x.shape[1])
