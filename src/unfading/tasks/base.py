"""The base class of tasks, and the encoders and heads that tasks provide.

A task owns its data, loss, metrics and output head, and is independent of the model:

    batch = task.batch(index, size, split="train", seed=0, device="cpu")         pure in its arguments
    model = Model(task.encoder(), rnn, task.head(rnn.output_size))               rnn reads task.input_size features
    prediction, state = model(batch.x, lengths=batch.lengths)
    task.loss(prediction, batch).backward()

Because `batch` is pure, resumed runs, workers, ranks that take rows of the global batch and the models of a fleet all see the
same data, and no generator state has to be stored. Random data are drawn on the requested device, so a CPU and a GPU draw
different numbers from the same seed; the order of a dataset's rows is the same on every device.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from unfading.allocation import refuse_large
from unfading.errors import check_count, check_share, unknown
from unfading.lengths import checked_lengths, zero_past

# "full" is "train" and "valid" together, for the final run after settings were chosen by validation.
Split = Literal["train", "valid", "full", "test"]


class Batch(NamedTuple):
    """Inputs and targets of a model."""

    x: Tensor  # [T, B, I], int64 tokens [T, B], or frames [T, B, I, height, width] with I channels
    target: Tensor  # one target per row [B] or [B, n], one per step [T, B], or one frame per step [T, B, n, height, width]
    lengths: Tensor | None = None  # int64 [B] if rows differ in length
    mask: Tensor | None = None  # bool, shaped like target: the targets that count; None if all do

    def rows(self, start: int, stop: int) -> "Batch":
        """The batch of the rows from `start` to `stop` alone."""
        T, B = self.x.shape[:2]
        shape = self.target.shape[:2]
        # Targets [T, B], one per step, or [B, n]: a first axis that is not as long as the batch is time.
        axis = 1 if shape[0] != B or shape == (T, B) else 0
        target, mask = (None if part is None else part.narrow(axis, start, stop - start) for part in (self.target, self.mask))
        assert target is not None
        return Batch(self.x[:, start:stop], target, None if self.lengths is None else self.lengths[start:stop], mask)


class Task(ABC):
    """A task. Subclasses are frozen dataclasses whose fields are JSON values; equal fields give equal batches."""

    paper: ClassVar[str]  # the paper that introduced it
    metric: ClassVar[str]  # name of the first metric, in which `guess` is given
    higher_is_better: ClassVar[bool] = False  # whether a larger value of the metric is better
    dataset: ClassVar[str | None] = None  # name in `unfading.data.datasets`; None if the data are generated

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # `measure` and `rising` are earlier names, read from tasks that were written with them.
        for earlier, name in (("measure", "metric"), ("rising", "higher_is_better")):
            if earlier in vars(cls) and name not in vars(cls):
                setattr(cls, name, vars(cls)[earlier])

    @property
    @abstractmethod
    def input_size(self) -> int:
        """Number of features that the recurrent stack reads, or of channels where it reads frames."""

    @property
    @abstractmethod
    def guess(self) -> float:
        """Score of a prediction that does not depend on earlier inputs, in the first metric."""

    @abstractmethod
    def batch(self, index: int, size: int, *, split: Split, seed: int, device: torch.device | str) -> Batch:
        """The batch with this index. It depends only on the arguments and the fields of the task."""

    @abstractmethod
    def length(self, split: Split, size: int) -> int | None:
        """Number of batches in one pass over the split; None if it is endless."""

    @abstractmethod
    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        """The training loss, a scalar."""

    @abstractmethod
    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Scalars by name, means over the batch; the first is `metric`."""

    @abstractmethod
    def head(self, size: int) -> nn.Module:
        """The module that maps `size` recurrent features to the prediction."""

    @property
    def has_test(self) -> bool:
        """Whether there are test rows. Without them a record has no test score."""
        return True

    @property
    def full_length_from(self) -> int:
        """Index of a training batch: its sequences and those of all later ones have their full length. 0 if none is shorter."""
        return 0

    def encoder(self) -> nn.Module:
        """The module between x and the recurrent stack."""
        return nn.Identity()

    def weight(self, batch: Batch) -> int:
        """Weight of this batch when means over batches are taken: by default its number of rows."""
        return batch.x.shape[1]

    def loss_weight(self, batch: Batch) -> float:
        """The number by which `loss` divides a sum over this batch, up to a constant factor: by default `weight`.

        The loss of a batch must be the mean of the losses of its parts with these weights, where several processes share it.
        """
        return self.weight(batch)

    def carried(self, index: int, size: int, *, split: Split) -> bool:
        """True if this batch continues the sequences of the previous one; start it from the previous final state, detached."""
        return False


def check_split(split: str) -> None:
    """Raise ValueError for an unknown split."""
    if split not in get_args(Split):
        raise ValueError(unknown("split", split, get_args(Split)))


def cross_entropy(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of -log softmax(prediction)[target], in nats, over unmasked targets; prediction [..., C], target [...]."""
    if mask is None:
        return functional.cross_entropy(prediction.flatten(0, -2), target.flatten())
    losses = functional.cross_entropy(prediction.flatten(0, -2), target.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def accuracy(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Fraction of unmasked targets that are the argmax of the prediction; prediction [..., C], target [...]."""
    right = prediction.argmax(dim=-1) == target
    if mask is None:
        return right.to(prediction.dtype).mean()
    return (right & mask).sum().to(prediction.dtype) / mask.sum()


class OneHot(nn.Module):
    """Encode tokens [T, B] as one-hot vectors [T, B, symbols]; no parameters."""

    eye: Tensor

    def __init__(self, symbols: int):
        super().__init__()
        check_count("symbols", symbols)
        # A buffer, so that it follows the model to its device and dtype.
        with refuse_large("OneHot", "number of symbols"):
            self.register_buffer("eye", torch.eye(symbols), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.eye)


class Head(nn.Module):
    """A linear output layer. Subclasses choose which part of the sequence it reads.

    `forward(output, lengths=None)`: output [T, B, n], lengths int64 [B], or None if every row has T steps.

    Args:
        size: n, the number of features of the recurrent output.
        answers: size of a prediction, for example the number of classes.
        dropout: dropout rate of its input.
    """

    vectors: ClassVar[int] = 1  # vectors of n features that a prediction reads, concatenated

    def __init__(self, size: int, answers: int, dropout: float = 0.0):
        super().__init__()
        check_count("size", size)
        check_count("answers", answers)
        check_share("dropout", dropout)
        self.dropout = nn.Dropout(dropout)
        with refuse_large(type(self).__name__, "size or number of answers"):
            self.answer = nn.Linear(self.vectors * size, answers)

    def forward(self, output: Tensor, lengths: Tensor | None = None) -> Tensor:
        self._check_output(output)
        if lengths is None:
            return self.predict(output)
        if output.dim() != 3:
            raise ValueError(f"lengths= needs a batch, output [T, B, n]; got {list(output.shape)}.")
        return self.predict_rows(output, checked_lengths(lengths, output))

    def predict(self, output: Tensor) -> Tensor:
        """The prediction from output [T, B, n], or [T, n] unbatched."""
        raise NotImplementedError

    def predict_rows(self, output: Tensor, lengths: Tensor) -> Tensor:
        """The prediction from output [T, B, n] whose rows have these lengths, [B]."""
        raise NotImplementedError

    def read(self, output: Tensor) -> Tensor:
        """[..., vectors * n] -> [..., answers]."""
        answers: Tensor = self.answer(self.dropout(output))
        return answers

    def _check_output(self, output: Tensor) -> None:
        name, answer = type(self).__name__, self.answer
        if not isinstance(output, Tensor):
            raise TypeError(f"{name} takes the output of a layer, a Tensor; got {type(output).__name__}.")
        if not isinstance(answer, nn.Linear):  # the user's, or a quantised one
            return
        shape, weight = output.shape, answer.weight
        n = weight.shape[1] // self.vectors
        if len(shape) not in (2, 3) or shape[-1] != n or shape[0] == 0:
            raise ValueError(f"{name} takes output of shape [T, B, {n}], or [T, {n}] unbatched; got {list(shape)}.")
        if output.device != weight.device:
            raise ValueError(f"{name} lives on {weight.device}, and the output on {output.device}. Move one of them.")
        if output.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
            raise TypeError(f"{name} has {weight.dtype} parameters; got {output.dtype}. Use output.to({weight.dtype}).")


class LastStep(Head):
    """One prediction per sequence, from the output at each row's last step: [B, answers]."""

    def predict(self, output: Tensor) -> Tensor:
        return self.read(output[-1])

    def predict_rows(self, output: Tensor, lengths: Tensor) -> Tensor:
        return self.read(output[lengths - 1, torch.arange(output.shape[1], device=output.device)])


class EveryStep(Head):
    """A prediction at each step: [T, B, answers]. Past a row's end it reads zeros; ignore it there."""

    def predict(self, output: Tensor) -> Tensor:
        return self.read(output)

    def predict_rows(self, output: Tensor, lengths: Tensor) -> Tensor:
        return self.read(zero_past(output, lengths))


class MeanOverTime(Head):
    """One prediction per sequence, from the mean of the output over each row's own steps: [B, answers]."""

    def predict(self, output: Tensor) -> Tensor:
        return self.read(output.mean(dim=0))

    def predict_rows(self, output: Tensor, lengths: Tensor) -> Tensor:
        return self.read(zero_past(output, lengths).sum(dim=0) / lengths.unsqueeze(1))


class PooledOverTime(Head):
    """One prediction per sequence, from the output at each row's last step, its mean and its maximum over the row's own steps.

    The three are concatenated: a class may show in how a sequence ends, in its level, or in one short event.
    """

    vectors = 3

    def predict(self, output: Tensor) -> Tensor:
        return self.read(torch.cat([output[-1], output.mean(dim=0), output.amax(dim=0)], dim=-1))

    def predict_rows(self, output: Tensor, lengths: Tensor) -> Tensor:
        last = output[lengths - 1, torch.arange(output.shape[1], device=output.device)]
        mean = zero_past(output, lengths).sum(dim=0) / lengths.unsqueeze(1)
        past = torch.arange(output.shape[0], device=output.device).unsqueeze(1) >= lengths
        largest = output.masked_fill(past.unsqueeze(-1), -torch.inf).amax(dim=0)
        return self.read(torch.cat([last, mean, largest], dim=-1))


# What the head reads: the output at the last step of each sequence, its mean over the steps, or both and its maximum.
Readout = Literal["last", "mean", "pooled"]
READOUTS: dict[Readout, type[Head]] = {"last": LastStep, "mean": MeanOverTime, "pooled": PooledOverTime}
