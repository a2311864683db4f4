"""Where a cell's kernels run: C on the CPU, Triton on a GPU; and Triton on the CPU, interpreted, to test it without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_interpreted = False
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside the block Triton's kernels serve the CPU too: by Triton's interpreter, hence slowly, in float32.

    TRITON_INTERPRET=1 must stand in the environment before anything imports Triton.
    """
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


def place_of(device: torch.device) -> str | None:
    """Which emitter's kernels run there; None where there are none."""
    if device.type == "cpu":
        return "triton" if _interpreted else "c"
    return "triton" if device.type == "cuda" else None


def halves(device: str) -> str:
    """The short numbers that autocast wants multiplied on a kind of device; empty where it is off."""
    return _HALVES.get(torch.get_autocast_dtype(device), "") if torch.is_autocast_enabled(device) else ""
