"""Tasks that are generated, on the device that trains, as many batches as are asked for.

    adding              the sum of two marked values out of T
    copying             k symbols, T steps of silence, then the k symbols
    variable copying    the same with a lag drawn from 1 .. T
    random labels       copying with answers that have nothing to do with the input
    denoising           k symbols strewn over T steps, then the k symbols

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
    """A task without a dataset: each batch is drawn from a stream of its own."""

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
    """The sum of two marked values, due after the last step (Hochreiter & Schmidhuber 1997, as in Arjovsky et al. 2016).

    Each step has a value from U[0, 1] and a mark. Two steps are marked, one in each half.
    Always answering 1 has a mean squared error of 1/6, the variance of the sum of two uniform numbers.

    Args:
        T: steps.
    """

    T: int = 200

    paper = "Hochreiter 1997"
    measure = "mse"
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
    """Tokens in, a token answered at every step: what the recall tasks share. Cross entropy first, then accuracy of recall."""

    T: int = 100
    _: KW_ONLY
    items: int = 10
    symbols: int = 8

    measure = "cross_entropy"

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
        """What is to be remembered, [items, B]."""
        shape = (self.items, size)
        return torch.randint(1, self.symbols + 1, shape, generator=generator, device=generator.device)

    def copied(self, items: Tensor, lag: int) -> Batch:
        """Items, lag - 1 blanks, the marker and `items` blanks; to be answered: blanks, and the items at the end."""
        x = items.new_full((lag + 2 * self.items, items.shape[1]), BLANK)
        target = x.clone()
        x[: self.items] = items
        x[self.items + lag - 1] = self.symbols + 1
        target[-self.items :] = items
        return Batch(x, target)


@dataclass(frozen=True)
class Copying(Recall):
    """Repeat `items` symbols after T steps (Arjovsky et al. 2016): T + 2 items steps, cross entropy over all of them.

    A guesser that knows the time but remembers nothing answers blanks, and then one symbol in `symbols`:
    items ln(symbols) / (T + 2 items). NRU's paper prints T + 2 n in the denominator, for T + 2 k.

    Args:
        T: steps from the last item to the first that is recalled, less one.
        items: how many symbols there are to remember.
        symbols: how many there are to choose from.
        keep: the state is begun anew only every `keep` batches, and carried over between them. 2, 5 and 10 are NRU's check that
            a network learns to forget.
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
    """Copying with random symbols for answers (NRU's check of stability): nothing can be learnt beyond the guess."""

    paper = "Chandar 2019"

    def draw(self, size: int, generator: Generator) -> Batch:
        batch = super().draw(size, generator)
        batch.target[-self.items :] = self.drawn_items(size, generator)
        return batch


@dataclass(frozen=True)
class VariableCopying(Recall):
    """Copying with a lag drawn evenly from 1 .. T (Henaff et al. 2016, as in NRU): no fixed clock solves it.

    The loss of a row is the mean over its own steps, that of a batch the mean over its rows.

    Args:
        T: longest lag.
        per_row: a lag for each row, with lengths and a mask; else one for each batch, as in NRU's code.
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
        if not self.per_row:
            return self.copied(items, int(torch.randint(1, self.T + 1, (), generator=generator, device=generator.device)))
        lags = torch.randint(1, self.T + 1, (size,), generator=generator, device=generator.device)
        step = torch.arange(self.T + 2 * self.items, device=generator.device).unsqueeze(1)
        # Row by row, how far each step is past the marker; the items are due at 1 .. k.
        past = step - (self.items + lags - 1)
        due = (past >= 1) & (past <= self.items)
        x = torch.where(past == 0, self.symbols + 1, BLANK)
        x[: self.items] = items
        target = torch.where(due, items.gather(0, (past - 1).clamp(0, self.items - 1)), BLANK)
        return Batch(x, target, lags + 2 * self.items, past <= self.items)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        if batch.mask is None or batch.lengths is None:
            return super().loss(prediction, batch)
        losses = functional.cross_entropy(prediction.movedim(-1, 1), batch.target, reduction="none")
        return ((losses * batch.mask).sum(dim=0) / batch.lengths).mean()

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        recalled = accuracy(prediction, batch.target, batch.target != BLANK)
        return {"cross_entropy": self.loss(prediction, batch), "accuracy": recalled}


@dataclass(frozen=True)
class Denoising(Recall):
    """Recall `items` symbols from among T steps of noise, in order, after a marker (Jing et al. 2017): T + 1 + items steps.

    The places of the symbols are distinct, as in NRU's code; GORU's draws them with replacement and so loses some.

    Args:
        T: steps before the marker, at least `items`.
        all_steps: take the cross entropy over all steps; else over the recalled ones alone, as NRU does.
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
        # The places of the k largest of T random numbers are k distinct places, each set equally likely.
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
        # The steps that the mask names, without a search for them.
        return cross_entropy(prediction[-self.items :], batch.target[-self.items :])
