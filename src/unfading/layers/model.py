"""The whole network: encoder, recurrent stack, head. The papers' parameter counts are of this object."""

from typing import Any

import torch
from torch import Tensor, nn

from unfading.errors import check_count
from unfading.layers.recurrent import Recurrent, detach


class Model(nn.Module):
    """prediction, state = model(x, state=None, *, lengths=None, start=0, truncate=None), in the library's layout [T, B, ...].

    With `truncate` the graph is cut every so many steps: the prediction is the same, and gradients reach no further back.

    Args:
        encoder: what x passes first: `nn.Identity()`, or an `nn.Embedding` for tokens [T, B].
        rnn: the recurrent stack, time first.
        head: reads (output [T, B, n], lengths); see `unfading.LastStep`, `EveryStep`, `MeanOverTime`.
    """

    def __init__(self, encoder: nn.Module, rnn: Recurrent, head: nn.Module):
        super().__init__()
        if rnn.batch_first:
            raise ValueError("Model works in the layout [T, B, ...]; got a stack with batch_first=True. Build it without.")
        self.encoder = encoder
        self.rnn = rnn
        self.head = head

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that training moves."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def forward(
        self, x: Tensor, state: Any = None, *, lengths: Tensor | None = None, start: int = 0, truncate: int | None = None
    ) -> tuple[Tensor, Any]:
        x = self.encoder(x)
        if truncate is None:
            output, state = self.rnn(x, state, lengths=lengths, start=start)
        else:
            output, state = self._in_pieces(x, state, lengths, start, truncate)
        return self.head(output, lengths), state

    def _in_pieces(self, x: Tensor, state: Any, lengths: Tensor | None, start: int, every: int) -> tuple[Tensor, Any]:
        check_count("truncate", every)
        if lengths is not None or self.rnn.bidirectional:
            what = "rows of several lengths" if lengths is not None else "a bidirectional stack"
            raise ValueError(f"truncate={every} carries the state from piece to piece, which {what} has not. Leave it out.")
        outputs = []
        for piece in x.split(every):
            output, state = self.rnn(piece, detach(state), start=start)
            outputs.append(output)
            start += len(piece)
        return torch.cat(outputs), state
