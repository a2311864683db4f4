"""How products of float32 are made on a GPU: set for torch as a whole, and set back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Inside the block products of float32, ours and cuDNN's, are right to float32 ("ieee") or to the three digits of tf32."""
    cudnn: Any = torch.backends.cudnn
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.rnn, cudnn.conv)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = precision
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.fp32_precision = was
