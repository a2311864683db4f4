"""The precision of a case, set for torch as a whole and set back: nothing is left to what a machine's torch begins with."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from unfading.bench.cases import Dtype

HALVES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

# How far from the float64 reference the results of 200 steps may be, relative to the norm of each tensor, on weights under
# which errors do not grow: rounding in float32; 10 bits of a mantissa; 10 again, over a smaller range; 7.
TOLERANCES: dict[Dtype, float] = {"float32": 2e-6, "tf32": 2e-3, "fp16": 2e-3, "bf16": 2e-2}


@contextmanager
def float32_precision(dtype: Dtype) -> Iterator[None]:
    """Inside the block products of float32 matrices, ours and cuDNN's, are exact to float32 or, where `dtype` allows, tf32."""
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee" if dtype == "float32" else "tf32"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def casting(dtype: Dtype, device: torch.device) -> AbstractContextManager[object]:
    """Autocast, where the case asks for half precision."""
    return torch.autocast(device.type, dtype=HALVES[dtype]) if dtype in HALVES else nullcontext()
