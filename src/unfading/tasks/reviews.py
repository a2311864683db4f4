"""Yelp-5: predict the stars, one to five, of a review; from the published JSON lines.

The incremental RNN's paper uses the first million reviews of the file, half for training and half for testing, with the 20,000
most frequent words and 300 words per review. It does not say which half is which, how text is split into words, or on which
side it pads. Here the first half is for training, and a fixed fifth of it for validation; a word is a run of letters, digits
and apostrophes, in lower case; token 0 is any word outside the most frequent ones of the split "train"; reviews keep their own
lengths, so the network sees no padding.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from unfading.data import store
from unfading.errors import check_count
from unfading.files.checked_json import brief
from unfading.tasks.base import Batch
from unfading.tasks.resident import Examples, Labelled, Part

FILE = "yelp_academic_dataset_review.json"
UNKNOWN = 0
_WORD = re.compile(r"[\w']+")


@dataclass(frozen=True)
class Yelp5(Labelled):
    """Stars of a review, classes 0 to 4.

    Args:
        reviews: number of reviews, from the start of the file; the first half is for training.
        words: size of the vocabulary, including the token for rare words.
        steps: largest number of words read per review.
        embedding: size of the learnt word vectors.
    """

    paper: ClassVar[str] = "Yelp 2017"
    dataset: ClassVar[str] = "yelp"

    reviews: int = 1_000_000
    words: int = 20_000
    steps: int = 300
    embedding: int = 128

    def __post_init__(self) -> None:
        check_count("reviews", self.reviews, least=10)
        check_count("words", self.words, least=2)
        check_count("steps", self.steps)
        check_count("embedding", self.embedding)

    @property
    def input_size(self) -> int:
        return self.embedding

    @property
    def classes(self) -> int:
        return 5

    def examples(self, part: Part) -> Examples:
        tokens, stars, lengths = _read(self, store.root())
        half = self.reviews // 2
        rows = slice(0, half) if part == "train" else slice(half, None)
        return Examples(tokens[rows], stars[rows], lengths[rows])

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        batch = super().present(rows, draw)
        return batch._replace(x=batch.x.contiguous().long())

    def encoder(self) -> nn.Module:
        return nn.Embedding(self.words, self.embedding)


def words_of(text: str) -> list[str]:
    """The words of a review."""
    return _WORD.findall(text.lower())


def read_reviews(path: Path, count: int) -> Iterator[tuple[str, int]]:
    """Text and stars of the first `count` reviews. An invalid line is named in the error."""
    number = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                review = json.loads(line)
                text, stars = review["text"], review["stars"]
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number} has an unknown byte, {line[error.start]:#04x}. Get it again."
                ) from None
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(
                    f"{path}, line {number} is not a review in JSON with 'text' and 'stars'. Get it again."
                ) from None
            if not isinstance(text, str) or stars not in (1, 2, 3, 4, 5):
                raise ValueError(f"{path}, line {number} has {brief(stars)} stars; wanted a text and 1 to 5. Get it again.")
            yield text, int(stars)
            if number == count:
                return
    raise ValueError(f"{path} has {number} reviews; wanted {count}. Get it again, or take reviews={number}.")


@lru_cache(maxsize=2)
def _read(task: Yelp5, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, stars and lengths of all reviews. The vocabulary comes from the split "train"."""
    half = task.reviews // 2
    trains = np.ones(half, dtype=bool)
    trains[task.held_out(half)] = False
    # Words are first numbered in order of appearance and counted in training rows; then the most frequent get their tokens.
    as_they_come: dict[str, int] = {}
    counts: Counter[int] = Counter()
    texts: list[NDArray[np.int32]] = []
    stars = np.empty(task.reviews, dtype=np.int64)
    for i, (text, given) in enumerate(read_reviews(store.path("yelp", FILE), task.reviews)):
        numbers = [as_they_come.setdefault(word, len(as_they_come)) for word in words_of(text)[: task.steps]]
        if i < half and trains[i]:
            counts.update(numbers)
        texts.append(np.array(numbers, dtype=np.int32))
        stars[i] = given - 1
    names = list(as_they_come)
    common = sorted(counts, key=lambda number: (-counts[number], names[number]))[: task.words - 1]
    rank = np.full(len(names), UNKNOWN, dtype=np.int16 if task.words <= 1 << 15 else np.int32)
    rank[common] = np.arange(1, len(common) + 1)
    tokens = np.full((task.reviews, task.steps), UNKNOWN, dtype=rank.dtype)
    for row, come in zip(tokens, texts, strict=True):
        row[: len(come)] = rank[come]
    # A review without words is read as one unknown word.
    lengths = np.maximum([len(come) for come in texts], 1)
    return (torch.from_numpy(tokens), torch.from_numpy(stars), torch.from_numpy(lengths))
