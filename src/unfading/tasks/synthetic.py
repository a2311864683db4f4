"""Generated tasks: an unlimited number of batches, drawn on the training device.

    adding              the sum of two marked values out of T
    copying             k symbols, T blank steps, then the k symbols again
    variable copying    the same with a lag drawn from 1 .. T
    random labels       copying with targets that are independent of the input
    denoising           k symbols scattered over T steps, then the k symbols again

Tokens of the recall tasks: 0 blank (or noise), 1 .. n symbols, n + 1 the marker that asks for recall; k = `items` and
n = `symbols`, in the papers 10 and 8.
"""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from math import log

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from unfading.errors import check_count
from unfading.tasks.base import Batch, EveryStep, LastStep, OneHot, Split, Task, accuracy, cross_entropy
from unfading.tasks.draw import stream

BLANK = 0


class Generated(Task):
    """A task without a dataset: each batch is drawn with its own generator."""

    @abstractmethod
    def draw(self, size: int, generator: Generator) -> Batch:
        """A batch of `size` rows, on the generator's device."""

    def batch(self, index: int, size: int, *, split: Split, seed: int, device: torch.device | str) -> Batch:
        check_count("size", size)
        return self.draw(size, stream(seed, split, index, device))

    def length(self, split: Split, size: int) -> None:
        return None


@dataclass(frozen=True)
class Adding(Generated):
    """The sum of two marked values, predicted after the last step (Hochreiter & Schmidhuber 1997, as in Arjovsky et al. 2016).

    Each step has a value from U[0, 1] and a marker. Two steps are marked, one in each half.
    Always predicting 1 has a mean squared error of 1/6, the variance of the sum of two uniform numbers.

    Args:
        T: number of steps.
    """

    T: int = 200

    paper = "Hochreiter 1997"
    metric = "mse"
    input_size = 2
    guess = 1 / 6

    def __post_init__(self) -> None:
        check_count("T", self.T, least=2)

    def draw(self, size: int, generator: Generator) -> Batch:
        device = generator.device
        values = torch.rand(self.T, size, generator=generator, device=device, dtype=torch.float32)
        first = torch.randint(0, self.T // 2, (1, size), generator=generator, device=device)
        second = torch.randint(self.T // 2, self.T, (1, size), generator=generator, device=device)
        places = torch.cat([first, second])
        # Filled in place: torch.stack along the last axis takes seven times as long on a CPU.
        x = torch.zeros(self.T, size, 2, device=device, dtype=torch.float32)
        x[..., 0] = values
        x[..., 1].scatter_(0, places, 1.0)
        return Batch(x, values.gather(0, places).sum(dim=0).unsqueeze(1))

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return functional.mse_loss(prediction, batch.target)

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"mse": self.loss(prediction, batch)}

    def head(self, size: int) -> nn.Module:
        return LastStep(size, 1)


@dataclass(frozen=True)
class Recall(Generated):
    """Base of the recall tasks: tokens in, a predicted token at every step. Metrics: cross entropy, then recall accuracy."""

    T: int = 100
    _: KW_ONLY
    items: int = 10
    symbols: int = 8

    metric = "cross_entropy"

    def __post_init__(self) -> None:
        check_count("T", self.T)
        check_count("items", self.items)
        check_count("symbols", self.symbols)

    @property
    def input_size(self) -> int:
        return self.symbols + 2

    def encoder(self) -> nn.Module:
        return OneHot(self.symbols + 2)

    def head(self, size: int) -> nn.Module:
        return EveryStep(size, self.symbols + 1)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(prediction, batch.target)

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        recalled = accuracy(prediction[-self.items :], batch.target[-self.items :])
        return {"cross_entropy": self.loss(prediction, batch), "accuracy": recalled}

    def drawn_items(self, size: int, generator: Generator) -> Tensor:
        """The symbols to remember, [items, B]."""
        shape = (self.items, size)
        return torch.randint(1, self.symbols + 1, shape, generator=generator, device=generator.device)

    def copied(self, items: Tensor, lag: int) -> Batch:
        """Input: the items, lag - 1 blanks, the marker, `items` blanks. Target: blanks, then the items."""
        x = items.new_full((lag + 2 * self.items, items.shape[1]), BLANK)
        target = x.clone()
        x[: self.items] = items
        x[self.items + lag - 1] = self.symbols + 1
        target[-self.items :] = items
        return Batch(x, target)


@dataclass(frozen=True)
class Copying(Recall):
    """Repeat `items` symbols after T steps (Arjovsky et al. 2016): T + 2 items steps, cross entropy over all of them.

    A predictor that knows the time but has no memory predicts blanks, then one symbol out of `symbols`:
    items ln(symbols) / (T + 2 items). NRU's paper prints T + 2 n in the denominator, for T + 2 k.

    Args:
        T: number of steps between the last symbol to remember and the first one to recall.
        items: number of symbols to remember.
        symbols: size of the alphabet.
        keep: the state is reset every `keep` batches and carried from batch to batch in between. NRU's paper uses 2,
            5 and 10 to check that a network learns to forget.
    """

    _: KW_ONLY
    keep: int = 1

    paper = "Arjovsky 2016"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("keep", self.keep)

    @property
    def guess(self) -> float:
        return self.items * log(self.symbols) / (self.T + 2 * self.items)

    def draw(self, size: int, generator: Generator) -> Batch:
        return self.copied(self.drawn_items(size, generator), self.T)

    def carried(self, index: int, size: int, *, split: Split) -> bool:
        return index % self.keep != 0


@dataclass(frozen=True)
class RandomLabels(Copying):
    """Copying with random targets (NRU's check of stability): nothing beyond the guess can be learnt."""

    paper = "Chandar 2019"

    def draw(self, size: int, generator: Generator) -> Batch:
        batch = super().draw(size, generator)
        batch.target[-self.items :] = self.drawn_items(size, generator)
        return batch


@dataclass(frozen=True)
class VariableCopying(Recall):
    """Copying with a lag drawn uniformly from 1 .. T (Henaff et al. 2016, as in NRU): no fixed clock solves it.

    The loss of a row is the mean over its steps; the loss of a batch is the mean over its rows. Every batch has T + 2 items
    steps, so that a training step can be captured as a CUDA graph; the blanks after a row's last item do not count.

    Args:
        T: largest lag.
        per_row: draw a lag for each row, with lengths; otherwise one per batch, as in NRU's code.
    """

    _: KW_ONLY
    per_row: bool = False

    paper = "Henaff 2016"

    @property
    def guess(self) -> float:
        lags = range(1, self.T + 1)
        return sum(self.items * log(self.symbols) / (lag + 2 * self.items) for lag in lags) / self.T

    def draw(self, size: int, generator: Generator) -> Batch:
        items = self.drawn_items(size, generator)
        count = size if self.per_row else 1
        lags = torch.randint(1, self.T + 1, (count,), generator=generator, device=generator.device).expand(size)
        step = torch.arange(self.T + 2 * self.items, device=generator.device).unsqueeze(1)
        # Distance of each step from its row's marker; the items are due at distances 1 .. k.
        past = step - (self.items + lags - 1)
        due = (past >= 1) & (past <= self.items)
        x = torch.where(past == 0, self.symbols + 1, BLANK)
        x[: self.items] = items
        target = torch.where(due, items.gather(0, (past - 1).clamp(0, self.items - 1)), BLANK)
        return Batch(x, target, lags + 2 * self.items if self.per_row else None, past <= self.items)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        assert batch.mask is not None
        losses = functional.cross_entropy(prediction.movedim(-1, 1), batch.target, reduction="none")
        return ((losses * batch.mask).sum(dim=0) / batch.mask.sum(dim=0)).mean()

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        recalled = accuracy(prediction, batch.target, batch.target != BLANK)
        return {"cross_entropy": self.loss(prediction, batch), "accuracy": recalled}


@dataclass(frozen=True)
class Denoising(Recall):
    """Recall `items` symbols scattered among T noise steps, in order, after a marker (Jing et al. 2017): T + 1 + items steps.

    The positions are distinct, as in NRU's code; GORU's code draws them with replacement and so loses some symbols.

    Args:
        T: number of steps before the marker, at least `items`.
        all_steps: take the cross entropy over all steps; otherwise over the recall steps only, as NRU does.
    """

    _: KW_ONLY
    all_steps: bool = False

    paper = "Jing 2017"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items > self.T:
            raise ValueError(f"T must leave a step to each of the {self.items} items; got T={self.T}. Nearest: {self.items}.")

    @property
    def guess(self) -> float:
        share = self.items / (self.T + 1 + self.items) if self.all_steps else 1.0
        return share * log(self.symbols)

    def draw(self, size: int, generator: Generator) -> Batch:
        items = self.drawn_items(size, generator)
        # The positions of the k largest of T random numbers: k distinct positions, every set equally likely.
        lot = torch.rand(size, self.T, generator=generator, device=generator.device, dtype=torch.float32)
        places = lot.topk(self.items, dim=1).indices.sort(dim=1).values.T
        x = items.new_full((self.T + 1 + self.items, size), BLANK)
        target = x.clone()
        x.scatter_(0, places, items)
        x[self.T] = self.symbols + 1
        target[-self.items :] = items
        return Batch(x, target, mask=None if self.all_steps else target != BLANK)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        if self.all_steps:
            return super().loss(prediction, batch)
        # The masked steps are the last ones: no search needed.
        return cross_entropy(prediction[-self.items :], batch.target[-self.items :])
