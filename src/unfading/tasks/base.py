"""The contract of a task, and the heads and encoders that tasks hand to a model.

A task owns data, loss and metrics, and says what reads the recurrent output; it never knows a model:

    batch = task.batch(index, size, split="train", seed=0, device="cpu")         pure in its arguments
    model = Model(task.encoder(), rnn, task.head(rnn.output_size))               rnn reads task.input_size features
    prediction, state = model(batch.x, lengths=batch.lengths)
    task.loss(prediction, batch).backward()

Because `batch` is pure, a run that is resumed, a worker, a rank that takes rows of the global batch and the members of a fleet
all see the same data without a generator's state being kept anywhere. What is drawn at random is drawn on the device that asks,
and a CPU and a GPU draw different numbers from one seed; which row of a dataset comes when is the same on every device.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from unfading.errors import check_count, check_share, unknown
from unfading.lengths import zero_past

# "full" is "train" and "valid" together: for the last run, when the settings have been chosen.
Split = Literal["train", "valid", "full", "test"]


class Batch(NamedTuple):
    """What a model is given, and what it should answer."""

    x: Tensor  # [T, B, I], or int64 tokens [T, B]
    target: Tensor  # one answer per row [B] or [B, n], or one per step [T, B]
    lengths: Tensor | None = None  # int64 [B], where rows have lengths of their own
    mask: Tensor | None = None  # bool, shaped like target: which answers count; None where all do


class Task(ABC):
    """A frozen dataclass whose fields are JSON values: two tasks with equal fields give equal batches."""

    paper: ClassVar[str]  # where it was introduced
    measure: ClassVar[str]  # name of its first metric, in which `guess` is told
    rising: ClassVar[bool] = False  # whether a larger measure is a better one
    dataset: ClassVar[str | None] = None  # in `unfading.datasets`; None where the data are generated

    @property
    @abstractmethod
    def input_size(self) -> int:
        """Features that the encoder hands to the recurrent stack."""

    @property
    @abstractmethod
    def guess(self) -> float:
        """What a guesser without memory scores in the first metric."""

    @abstractmethod
    def batch(self, index: int, size: int, *, split: Split, seed: int, device: torch.device | str) -> Batch:
        """The batch of that index. Depends on these arguments and the task's fields alone."""

    @abstractmethod
    def length(self, split: Split, size: int) -> int | None:
        """Batches in one pass over the split; None where there is no end."""

    @abstractmethod
    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        """What training makes small: a scalar."""

    @abstractmethod
    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Scalars by name, means over the batch; the first is the task's own measure."""

    @abstractmethod
    def head(self, size: int) -> nn.Module:
        """What reads `size` recurrent features and gives the prediction."""

    def encoder(self) -> nn.Module:
        """What x passes before the recurrent stack."""
        return nn.Identity()

    def weight(self, batch: Batch) -> int:
        """What this batch's means weigh among those of other batches: its rows, where each row has equally many answers."""
        return batch.x.shape[1]

    def carried(self, index: int, size: int, *, split: Split) -> bool:
        """Whether this batch goes on where the last one ended: row by row, its state is carried over, cut from its graph."""
        return False


def check_split(split: str) -> None:
    """Raise unless there is such a split."""
    if split not in get_args(Split):
        raise ValueError(unknown("split", split, get_args(Split)))


def cross_entropy(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of -log softmax(prediction)[target], in nats, over the answers that count; prediction [..., C], target [...]."""
    if mask is None:
        return functional.cross_entropy(prediction.flatten(0, -2), target.flatten())
    losses = functional.cross_entropy(prediction.flatten(0, -2), target.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def accuracy(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the answers that count whose largest entry is the target; prediction [..., C], target [...]."""
    right = prediction.argmax(dim=-1) == target
    if mask is None:
        return right.to(prediction.dtype).mean()
    return (right & mask).sum().to(prediction.dtype) / mask.sum()


class OneHot(nn.Module):
    """Encoder of tokens [T, B] as rows of the identity matrix, [T, B, symbols]; nothing is learnt."""

    eye: Tensor

    def __init__(self, symbols: int):
        super().__init__()
        check_count("symbols", symbols)
        # A buffer, so that it follows the model to its device and dtype.
        self.register_buffer("eye", torch.eye(symbols), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.eye)


class Head(nn.Module):
    """A linear map to `answers` numbers; subclasses say what of the sequence it reads.

    `forward(output, lengths=None)`: output [T, B, n], lengths int64 [B] or None where every row has T steps.

    Args:
        size: n, the features of the recurrent output.
        answers: numbers per answer, e.g. classes.
        dropout: share of what it reads that training drops.
    """

    def __init__(self, size: int, answers: int, dropout: float = 0.0):
        super().__init__()
        check_count("size", size)
        check_count("answers", answers)
        check_share("dropout", dropout)
        self.dropout = nn.Dropout(dropout)
        self.answer = nn.Linear(size, answers)

    def read(self, output: Tensor) -> Tensor:
        """[..., n] -> [..., answers]."""
        answers: Tensor = self.answer(self.dropout(output))
        return answers


class LastStep(Head):
    """One answer per sequence, from the output of each row's last step: [B, answers]."""

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.read(output[-1])
        last = lengths.to(output.device) - 1
        return self.read(output[last, torch.arange(output.shape[1], device=output.device)])


class EveryStep(Head):
    """An answer for each step: [T, B, answers]; past a row's end it answers to zeros, and means nothing."""

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.read(output if lengths is None else zero_past(output, lengths))


class MeanOverTime(Head):
    """One answer per sequence, from the mean of the output over each row's own steps: [B, answers]."""

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.read(output.mean(dim=0))
        return self.read(zero_past(output, lengths).sum(dim=0) / lengths.to(output.device).unsqueeze(1))
