"""What is left in a state after a signal has been followed by nothing, or by noise.

A cell reads a signal, then `steps` more inputs that carry nothing: zeros, or standard normal noise, the same for all rows.
With v the state when the signal ends and w at the very end, for each part of the state:

    norm_before, norm_after      mean ||v||, mean ||w||
    cosine                       mean of v w / (||v|| ||w||): is it still the same state?
    kept                         mean of ||w_a - w_b|| / ||v_a - v_b|| over pairs of signals: can they still be told apart?

Kag et al. 2020, section 4.3.3: "capable of suppressing noise", after 28 rows of an image and 972 steps of noise. A state may be
drowned (cosine near 0, a large norm) and its signal still be there (kept near 1), and the other way round.
"""

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Generator, Tensor

from unfading.cells.base import Cell
from unfading.errors import check_count
from unfading.reference import scan

Row = dict[str, Any]


@torch.no_grad()
def after_noise(cell: Cell, signal: Tensor, *, steps: int = 972, seed: int = 0) -> list[Row]:
    """One row for each part of the state, and for zeros and noise; a number that is not finite is None.

    Args:
        cell: any cell, in any precision; it is not changed.
        signal: [T, B, I], two rows at least.
        steps: of zeros, and of noise, after it.
        seed: of the noise.
    """
    check_count("steps", steps)
    if signal.dim() != 3 or signal.shape[1] < 2 or signal.shape[2] != cell.input_size:
        raise ValueError(
            f"signal must be [T, B, {cell.input_size}] with B at least 2, to be told apart; got {list(signal.shape)}."
        )
    # In float64: what float32 rounds away is not what the cell forgets.
    cell, signal = deepcopy(cell).double().eval(), signal.double()
    T, B, size = signal.shape
    begin = cell.initial_state(B)
    _, before = scan(cell, cell.project(signal), begin, cell.weights())
    drawn = torch.randn(steps, 1, size, generator=Generator().manual_seed(seed), dtype=torch.float64)
    drawn = drawn.expand(steps, B, size)
    found: list[Row] = []
    for name, rest in (("zeros", torch.zeros_like(drawn)), ("noise", drawn)):
        _, after = scan(cell, cell.project(rest, T), before, cell.weights())
        for part, v, w in zip(before._fields, before, after, strict=True):
            found.append({"part": part, "after": name, **_compared(v, w)})
    return found


def _compared(v: Tensor, w: Tensor) -> Row:
    """Of two states [B, n]."""
    norms = v.norm(dim=1), w.norm(dim=1)
    numbers = {
        "norm_before": norms[0].mean(),
        "norm_after": norms[1].mean(),
        "cosine": ((v * w).sum(1) / (norms[0] * norms[1])).mean(),
        "kept": ((w[1:] - w[:-1]).norm(dim=1) / (v[1:] - v[:-1]).norm(dim=1)).mean(),
    }
    return {name: float(number) if math.isfinite(number) else None for name, number in numbers.items()}
