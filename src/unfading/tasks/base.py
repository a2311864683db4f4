"""Heads: what reads the output of a recurrent stack, [T, B, n], and answers per sequence or per step."""

import torch
from torch import Tensor, nn

from unfading.errors import check_count
from unfading.lengths import zero_past


class Head(nn.Module):
    """A linear map to `answers` numbers; subclasses say what of the sequence it reads.

    `forward(output, lengths=None)`: output [T, B, n], lengths int64 [B] or None where every row has T steps.

    Args:
        size: n, the features of the recurrent output.
        answers: numbers per answer, e.g. classes.
    """

    def __init__(self, size: int, answers: int):
        super().__init__()
        check_count("size", size)
        check_count("answers", answers)
        self.answer = nn.Linear(size, answers)


class LastStep(Head):
    """One answer per sequence, from the output of each row's last step: [B, answers]."""

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.answer(output[-1])
        last = lengths.to(output.device) - 1
        return self.answer(output[last, torch.arange(output.shape[1], device=output.device)])


class EveryStep(Head):
    """An answer for each step: [T, B, answers]; past a row's end it answers to zeros, and means nothing."""

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.answer(output if lengths is None else zero_past(output, lengths))


class MeanOverTime(Head):
    """One answer per sequence, from the mean of the output over each row's own steps: [B, answers]."""

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.answer(output.mean(dim=0))
        return self.answer(zero_past(output, lengths).sum(dim=0) / lengths.to(output.device).unsqueeze(1))
