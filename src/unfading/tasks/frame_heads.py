"""Heads that read the output of convolutional cells, [T, B, n, height, width].

    LastFrame      the mean over the pixels of the last step, then a linear layer: one prediction per sequence
    MeanFrame      the mean over time and pixels, then a linear layer: one prediction per sequence
    EveryFrame     a linear layer at every pixel of every step (a convolution of one pixel): one frame per step
    GestureHead    the mean over time, four convolutions, the mean over pixels, a linear layer: the gesture network of STAR

GestureHead: Turkoglu et al. 2019 (STAR), section C.3, "a shallow CNN is used to convert the hidden state to a label, with 4
layers that have filter depths 128, 128, 256 and 256", kernels of 3 x 3, and section 5.3, "an averaging layer over all time
steps". The paper does not say where the mean over time stands, nor how the CNN reduces the frames. Here the mean comes first,
as in STAR's network for crops, so that the CNN runs once per clip; each of its layers has stride 2 and a ReLU.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from unfading.allocation import refuse_large
from unfading.errors import check_count
from unfading.lengths import checked_lengths, zero_past

GESTURE_CHANNELS = (128, 128, 256, 256)


class FrameHead(nn.Module):
    """Base of the heads over frames. `forward(output, lengths=None)`: output [T, B, n, height, width], lengths int64 [B].

    Args:
        size: n, the number of channels of the recurrent output.
        answers: size of a prediction: the number of classes, or the channels of a predicted frame.
    """

    def __init__(self, size: int, answers: int):
        super().__init__()
        check_count("size", size)
        check_count("answers", answers)
        self.size = size
        self.answers = answers

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        if not isinstance(output, Tensor):
            raise TypeError(f"{name} takes the output of a layer, a Tensor; got {type(output).__name__}.")
        if output.dim() != 5 or output.shape[2] != self.size or 0 in output.shape:
            hint = " Frames are the output of convolutional cells, e.g. ConvSTAR." if output.dim() == 3 else ""
            raise ValueError(
                f"{name} takes output of shape [T, B, {self.size}, height, width]; got {list(output.shape)}.{hint}"
            )
        return self.predict(output, None if lengths is None else checked_lengths(lengths, output))

    def predict(self, output: Tensor, lengths: Tensor | None) -> Tensor:
        """The prediction from output [T, B, n, height, width] whose rows have these lengths, [B]; None for T steps each."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.size}, {self.answers}"


class LastFrame(FrameHead):
    """One prediction per sequence, from the mean over the pixels at each row's last step: [B, answers]."""

    def __init__(self, size: int, answers: int):
        super().__init__(size, answers)
        with refuse_large("LastFrame", "size or number of answers"):
            self.answer = nn.Linear(size, answers)

    def predict(self, output: Tensor, lengths: Tensor | None) -> Tensor:
        rows = torch.arange(output.shape[1], device=output.device)
        last = output[-1] if lengths is None else output[lengths - 1, rows]
        return self.answer(last.mean(dim=(2, 3)))


class MeanFrame(FrameHead):
    """One prediction per sequence, from the mean over the pixels of each row's own steps: [B, answers]."""

    def __init__(self, size: int, answers: int):
        super().__init__(size, answers)
        with refuse_large("MeanFrame", "size or number of answers"):
            self.answer = nn.Linear(size, answers)

    def predict(self, output: Tensor, lengths: Tensor | None) -> Tensor:
        return self.answer(_mean_over_time(output, lengths).mean(dim=(2, 3)))


class EveryFrame(FrameHead):
    """A frame at each step: [T, B, answers, height, width]. Past a row's end it reads zeros; ignore it there."""

    def __init__(self, size: int, answers: int):
        super().__init__(size, answers)
        with refuse_large("EveryFrame", "size or number of answers"):
            self.answer = nn.Conv2d(size, answers, kernel_size=1)

    def predict(self, output: Tensor, lengths: Tensor | None) -> Tensor:
        frames = output if lengths is None else zero_past(output, lengths)
        return self.answer(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])


class GestureHead(FrameHead):
    """One prediction per clip: the mean over each row's own steps, four convolutions, the mean over pixels: [B, answers]."""

    def __init__(self, size: int, answers: int):
        super().__init__(size, answers)
        channels = (size, *GESTURE_CHANNELS)
        with refuse_large("GestureHead", "size or number of answers"):
            self.convolutions = nn.ModuleList(
                nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1) for before, after in pairwise(channels)
            )
            self.answer = nn.Linear(channels[-1], answers)

    def predict(self, output: Tensor, lengths: Tensor | None) -> Tensor:
        frame = _mean_over_time(output, lengths)
        for convolution in self.convolutions:
            frame = functional.relu(convolution(frame))
        return self.answer(frame.mean(dim=(2, 3)))


def _mean_over_time(output: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean frame over each row's own steps, [B, n, height, width]."""
    if lengths is None:
        return output.mean(dim=0)
    return zero_past(output, lengths).sum(dim=0) / lengths.reshape(-1, 1, 1, 1)
