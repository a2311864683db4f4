"""Language modelling: predict the next word or character of the Penn Treebank, in Mikolov's preparation.

A file is one sequence of tokens, separated by blanks, with <eos> for each end of line. A file of n + 1 tokens has n tokens to
predict, each from those before it, and all of them count: positions that do not fill a batch are masked, not dropped.

    carry = False    each `steps` tokens are a sequence with zero initial state; sequences are shuffled for training
    carry = True     the text is cut into `size` streams of equal length, read side by side, `steps` tokens per batch; the
                     state is carried from batch to batch (`carried`), the gradient is not: truncated backpropagation
    reset_every = n  with carry, the state is zero again after every n batches, for a cell whose state has no bound

The incremental RNN's paper reads words in sequences of 300; NRU reads characters with truncated backpropagation over 150 steps.
The metric is nats per word (its exp is the perplexity, which cannot be averaged over batches) or bits per character. The
validation split is the published file.
"""

import math
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from unfading.data import store
from unfading.errors import check_count, check_positive, check_share
from unfading.tasks.base import Batch, EveryStep, Split, Task, accuracy, check_split, cross_entropy
from unfading.tasks.draw import stream

END = "<eos>"
# Range of the initial token vectors unless `embedding_std` is given, as in Mikolov's and Zaremba's models.
START = 0.1


class NextToken(Task):
    """Predict the next token of a text. Subclasses choose words or characters."""

    dataset: ClassVar[str] = "ptb"
    file: ClassVar[str]  # with {} for "train", "valid" or "test"
    symbols: ClassVar[int]  # number of distinct tokens, including <eos>

    steps: int
    carry: bool
    embedding: int
    dropout: float
    reset_every: int | None = None
    embedding_std: float | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_count("embedding", self.embedding)
        check_share("dropout", self.dropout)
        if self.embedding_std is not None:
            check_positive("embedding_std", self.embedding_std)
        if self.reset_every is not None:
            check_count("reset_every", self.reset_every)
            if not self.carry:
                raise ValueError(
                    f"reset_every={self.reset_every} resets a carried state, and with carry=False none is carried. "
                    f"Set carry=True, or leave reset_every out."
                )

    @property
    @abstractmethod
    def unit(self) -> float:
        """Nats in one unit of the metric."""

    @property
    def input_size(self) -> int:
        return self.embedding

    @property
    def guess(self) -> float:
        """Test cross entropy of a unigram model fitted on the training file."""
        counts = torch.bincount(self.tokens("train")).double()
        nats = -torch.log(counts / counts.sum())[self.tokens("test")[1:]].mean().item()
        return nats / self.unit

    def tokens(self, split: Split) -> Tensor:
        """All tokens of a split, int64 [n + 1]; "full" is training followed by validation."""
        check_split(split)
        return _tokens(self.file, split, store.root())

    def length(self, split: Split, size: int) -> int:
        check_split(split)
        check_count("size", size)
        n = len(self.tokens(split)) - 1
        if self.carry:
            return -(-_stream_length(n, size) // self.steps)
        sequences = -(-n // self.steps)
        return max(1, sequences // size) if split in ("train", "full") else -(-sequences // size)

    def batch(self, index: int, size: int, *, split: Split, seed: int, device: torch.device | str) -> Batch:
        batches = self.length(split, size)
        check_count("index", index, least=0)
        if split in ("valid", "test") and index >= batches:
            raise ValueError(f"{split} has {batches} batches of {size}; got index {index}. Last: {batches - 1}.")
        tokens = _tokens(self.file, split, store.root(), torch.device(device))
        n = len(tokens) - 1
        epoch, index = divmod(index, batches)
        # First position of each row, and the position at which its stream or the text ends.
        if self.carry:
            per_stream = _stream_length(n, size)
            begin = torch.arange(size) * per_stream + index * self.steps
            end = ((torch.arange(size) + 1) * per_stream).clamp(max=n)
        else:
            sequences = -(-n // self.steps)
            order = torch.arange(sequences)
            if split in ("train", "full"):
                order = torch.randperm(sequences, generator=stream(seed, split, epoch, "cpu", purpose="order"))
            begin = order[index * size : (index + 1) * size] * self.steps
            end = torch.full_like(begin, n)
        all_count = bool((begin + self.steps <= end).all())
        begin, end = begin.to(tokens.device), end.to(tokens.device)
        place = begin + torch.arange(self.steps, device=tokens.device).unsqueeze(1)  # [T, B]
        mask = place < end
        place = torch.where(mask, place, 0)
        return Batch(tokens[place], tokens[place + 1], mask=None if all_count else mask)

    def carried(self, index: int, size: int, *, split: Split) -> bool:
        index %= self.length(split, size)
        return self.carry and index % (self.reset_every or self.length(split, size)) > 0

    def weight(self, batch: Batch) -> int:
        return batch.target.numel() if batch.mask is None else int(batch.mask.sum())

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(prediction, batch.target, batch.mask)

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {
            self.metric: cross_entropy(prediction, batch.target, batch.mask) / self.unit,
            "accuracy": accuracy(prediction, batch.target, batch.mask),
        }

    def encoder(self) -> nn.Module:
        embedding = nn.Embedding(self.symbols, self.embedding)
        if self.embedding_std is None:
            nn.init.uniform_(embedding.weight, -START, START)
        else:
            nn.init.normal_(embedding.weight, std=self.embedding_std)
        return nn.Sequential(embedding, nn.Dropout(self.dropout)) if self.dropout else embedding

    def head(self, size: int) -> nn.Module:
        return EveryStep(size, self.symbols, self.dropout)


@dataclass(frozen=True)
class PTBWords(NextToken):
    """The next of 10,000 words: 929,589 for training, 73,760 for validation, 82,430 for testing.

    Args:
        steps: number of words in a sequence.
        carry: carry the state over from the sequence before it in the text.
        embedding: size of the word vectors; the incremental RNN's paper uses the number of units.
        dropout: dropout rate of the word vectors and of the last layer's output (Zaremba 2014).
    """

    paper: ClassVar[str] = "Mikolov 2010"
    metric: ClassVar[str] = "cross_entropy"
    file: ClassVar[str] = "ptb.{}.txt"
    symbols: ClassVar[int] = 10_000

    steps: int = 300
    carry: bool = False
    embedding: int = 256
    dropout: float = 0.0

    @property
    def unit(self) -> float:
        return 1.0


@dataclass(frozen=True)
class PTBCharacters(NextToken):
    """The next of 50 characters: 5,017,482 for training, 393,042 for validation, 442,423 for testing.

    Args:
        steps: number of characters per chunk of truncated backpropagation.
        carry: carry the state over from chunk to chunk.
        embedding: size of the character vectors.
        dropout: dropout rate of the character vectors and of the last layer's output.
        reset_every: reset a carried state to zero after this number of chunks; None for only where the text begins again.
        embedding_std: standard deviation of the initial character vectors, which are then normal; None for uniform within 0.1.
    """

    paper: ClassVar[str] = "Mikolov 2012"
    metric: ClassVar[str] = "bits_per_character"
    file: ClassVar[str] = "ptb.char.{}.txt"
    symbols: ClassVar[int] = 50

    steps: int = 150
    carry: bool = True
    embedding: int = 200
    dropout: float = 0.0
    reset_every: int | None = None
    embedding_std: float | None = None

    @property
    def unit(self) -> float:
        return math.log(2)


def read_tokens(path: Path) -> list[str]:
    """Tokens separated by blanks, with <eos> for each end of line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} has an unknown byte, {byte:#04x}, at {error.start}; wanted UTF-8. Get it again.") from None
    return text.replace("\n", f" {END} ").split()


def number_tokens(tokens: list[str], vocabulary: dict[str, int], path: Path) -> Tensor:
    """Token numbers, int64 [n + 1]. A token outside the vocabulary raises: the published files have none."""
    strange = next((token for token in tokens if token not in vocabulary), None)
    if strange is not None:
        raise ValueError(f"{path} holds {strange!r}, which the training file does not. Get both again, from one publisher.")
    return torch.from_numpy(np.fromiter((vocabulary[token] for token in tokens), np.int64, len(tokens)))


def _stream_length(n: int, size: int) -> int:
    return -(-n // size)


@lru_cache(maxsize=16)
def _tokens(file: str, split: Split, folder: Path, device: torch.device | None = None) -> Tensor:
    if device is not None:
        tokens = _tokens(file, split, folder)
        return tokens if device.type == "cpu" else tokens.to(device)
    if split == "full":
        return torch.cat([_tokens(file, "train", folder), _tokens(file, "valid", folder)])
    path = store.path("ptb", file.format(split))
    return number_tokens(read_tokens(path), _vocabulary(file, folder), path)


@lru_cache(maxsize=4)
def _vocabulary(file: str, folder: Path) -> dict[str, int]:
    """Token numbers, by descending frequency in the training file, ties in alphabetical order."""
    counts = Counter(read_tokens(store.path("ptb", file.format("train"))))
    common = sorted(counts, key=lambda token: (-counts[token], token))
    return {token: number for number, token in enumerate(common)}
