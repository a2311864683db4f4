"""The whole network: encoder, recurrent stack, head. The papers' parameter counts are of this object."""

from typing import Any

from torch import Tensor, nn

from unfading.recurrent import Recurrent


class Model(nn.Module):
    """prediction, state = model(x, state=None, *, lengths=None, start=0), in the library's layout [T, B, ...].

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

    def forward(self, x: Tensor, state: Any = None, *, lengths: Tensor | None = None, start: int = 0) -> tuple[Tensor, Any]:
        output, state = self.rnn(self.encoder(x), state, lengths=lengths, start=start)
        return self.head(output, lengths), state
