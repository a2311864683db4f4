"""Questions about torch's global state: is a tracer or transform active, and how precise are float32 products on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch


def traced() -> bool:
    """True under torch.compile or a transform of torch.func, where code must not branch on the values of tensors."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Inside the block float32 products, ours and cuDNN's, are exact to float32 ("ieee") or rounded to tf32's three digits."""
    cudnn: Any = torch.backends.cudnn
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.rnn, cudnn.conv)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = precision
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
