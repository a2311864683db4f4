"""The precision of a case: set in torch for a block and restored after it, whatever the defaults of the machine are."""

from contextlib import AbstractContextManager, nullcontext

import torch

from unfading.bench.cases import Dtype
from unfading.torch_state import float32_products

HALVES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

# How far from the float64 reference the results of 200 steps may be, relative to the norm of each tensor, on weights under
# which errors do not grow. float32: rounding; tf32 and fp16: 10 bits of mantissa; bf16: 7 bits.
TOLERANCES: dict[Dtype, float] = {"float32": 2e-6, "tf32": 2e-3, "fp16": 2e-3, "bf16": 2e-2}


def float32_precision(dtype: Dtype) -> AbstractContextManager[None]:
    """Inside the block, products of float32 matrices, ours and cuDNN's, are in float32, or in tf32 if `dtype` allows it."""
    return float32_products("ieee" if dtype == "float32" else "tf32")


def autocast(dtype: Dtype, device: torch.device) -> AbstractContextManager[object]:
    """Autocast for a case in half precision, else nothing."""
    return torch.autocast(device.type, dtype=HALVES[dtype]) if dtype in HALVES else nullcontext()
