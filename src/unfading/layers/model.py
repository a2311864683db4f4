"""Model: encoder, recurrent stack and head. The papers count the parameters of this whole."""

from typing import Any

import torch
from torch import Tensor, nn

from unfading.errors import check_count, check_type
from unfading.layers.recurrent import Recurrent, detach, split_resets


class Model(nn.Module):
    """prediction, state = model(x, state=None, *, lengths=None, resets=None, start=0, truncate=None), with x [T, B, ...].

    With `truncate=N` gradients flow back over at most N steps; the prediction is the same. The other arguments are those of
    `Recurrent`.

    Args:
        encoder: module applied to x first: `nn.Identity()`, or an `nn.Embedding` for tokens [T, B].
        rnn: the recurrent stack, without batch_first.
        head: module called with (output [T, B, n], lengths); see `unfading.LastStep`, `EveryStep` and `MeanOverTime`, and for
            frames, output [T, B, n, height, width], `LastFrame`, `MeanFrame`, `EveryFrame` and `GestureHead`.
    """

    def __init__(self, encoder: nn.Module, rnn: Recurrent, head: nn.Module):
        super().__init__()
        check_type("encoder", encoder, nn.Module)
        check_type("rnn", rnn, Recurrent)
        check_type("head", head, nn.Module)
        if rnn.batch_first:
            raise ValueError("Model takes input [T, B, ...]; got a stack with batch_first=True. Build the stack without it.")
        self.encoder = encoder
        self.rnn = rnn
        self.head = head

    @property
    def trainable(self) -> list[str]:
        """The names of the parameters that are trained."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        start: int = 0,
        truncate: int | None = None,
    ) -> tuple[Tensor, Any]:
        x = self.encoder(x)
        if truncate is None:
            output, state = self.rnn(x, state, lengths=lengths, resets=resets, start=start)
        else:
            self._check_truncate(truncate, lengths)
            output, state = self._in_chunks(x, state, resets, start, truncate)
        return self.head(output, lengths), state

    def _check_truncate(self, every: int, lengths: Tensor | None) -> None:
        check_count("truncate", every)
        if lengths is not None or self.rnn.bidirectional:
            what = "rows of different lengths" if lengths is not None else "a bidirectional stack"
            raise ValueError(f"truncate={every} passes the state from chunk to chunk, which {what} cannot do. Leave it out.")

    def _in_chunks(self, x: Tensor, state: Any, resets: Tensor | None, start: int, every: int) -> tuple[Tensor, Any]:
        self.rnn.check_chunks(len(x), every)
        outputs = []
        for chunk, own in zip(x.split(every), split_resets(resets, x, every), strict=True):
            output, state = self.rnn(chunk, detach(state), resets=own, start=start)
            outputs.append(output)
            start += len(chunk)
        return torch.cat(outputs), state
