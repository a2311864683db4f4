"""Read and set torch's global state: whether a tracer or transform is active, and the precision of float32 products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """A decorator: torch.compile calls the function once, while it traces, and stores the result.

    As torch.compiler.assume_constant_result, which would import the compiler of torch with the library: two seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced() -> bool:
    """True under torch.compile or a transform of torch.func, where code must not branch on the values of tensors."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


@constant_when_compiled
def exporting() -> bool:
    """True inside torch.export. Asked by Python while torch traces: torch 2.11 itself answers True under torch.compile too."""
    return torch.compiler.is_exporting()


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Set the precision of float32 products inside the block, ours and cuDNN's: float32 ("ieee") or tf32, with three digits."""
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
