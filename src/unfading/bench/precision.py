"""The precision of a case, set for torch as a whole and set back: nothing is left to what a machine's torch begins with."""

from contextlib import AbstractContextManager, nullcontext

import torch

from unfading.bench.cases import Dtype
from unfading.torch_state import float32_products

HALVES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

# How far from the float64 reference the results of 200 steps may be, relative to the norm of each tensor, on weights under
# which errors do not grow: rounding in float32; 10 bits of a mantissa; 10 again, over a smaller range; 7.
TOLERANCES: dict[Dtype, float] = {"float32": 2e-6, "tf32": 2e-3, "fp16": 2e-3, "bf16": 2e-2}


def float32_precision(dtype: Dtype) -> AbstractContextManager[None]:
    """Inside the block products of float32 matrices, ours and cuDNN's, are exact to float32 or, where `dtype` allows, tf32."""
    return float32_products("ieee" if dtype == "float32" else "tf32")


def casting(dtype: Dtype, device: torch.device) -> AbstractContextManager[object]:
    """Autocast, where the case asks for half precision."""
    return torch.autocast(device.type, dtype=HALVES[dtype]) if dtype in HALVES else nullcontext()
