"""How much of a state remains after its signal is followed by zeros or by noise.

A cell reads a signal, then `steps` further inputs without information: zeros, or standard normal noise, the same for all rows.
With v the state at the end of the signal and w the state at the end of all steps, for each part of the state:

    norm_before, norm_after      mean ||v||, mean ||w||
    cosine                       mean of v w / (||v|| ||w||): does the state still point in the same direction?
    kept                         mean of ||w_a - w_b|| / ||v_a - v_b|| over pairs of signals: can they still be distinguished?

Kag et al. 2020, section 4.3.3: "capable of suppressing noise", after 28 rows of an image and 972 steps of noise. The two
questions are independent: noise may dominate a state (cosine near 0, a large norm) that still holds its signal (kept near 1),
and the reverse.
"""

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Generator, Tensor

from unfading.cells.base import Cell
from unfading.diagnostics.measure.single_steps import check_single_steps
from unfading.errors import check_count
from unfading.reference import scan

Row = dict[str, Any]


@torch.no_grad()
def after_noise(cell: Cell, signal: Tensor, *, steps: int = 972, seed: int = 0) -> list[Row]:
    """One row for each part of the state, after zeros and after noise; None for a number that is not finite.

    Args:
        cell: any cell, in any precision; it is not changed.
        signal: [T, B, I] with at least two rows.
        steps: number of steps of zeros, and of noise, after the signal.
        seed: of the noise.
    """
    check_count("steps", steps)
    if signal.dim() != 3 or signal.shape[1] < 2 or signal.shape[2] != cell.input_size:
        raise ValueError(
            f"signal must be [T, B, {cell.input_size}] with B at least 2, because pairs of rows are compared; "
            f"got {list(signal.shape)}."
        )
    # In float64, so that rounding is not mistaken for forgetting.
    cell, signal = deepcopy(cell).double().eval(), signal.double()
    check_single_steps(cell, len(signal) + steps)
    T, B, size = signal.shape
    _, before = scan(cell, cell.project(signal), cell.initial_state(B), cell.weights())
    noise = torch.randn(steps, 1, size, generator=Generator().manual_seed(seed), dtype=torch.float64)
    noise = noise.expand(steps, B, size)
    rows: list[Row] = []
    for name, rest in (("zeros", torch.zeros_like(noise)), ("noise", noise)):
        _, after = scan(cell, cell.project(rest, T), before, cell.weights())
        for part, v, w in zip(before._fields, before, after, strict=True):
            rows.append({"part": part, "after": name, **_compare(v, w)})
    return rows


def _compare(v: Tensor, w: Tensor) -> Row:
    """The numbers for the states v and w, [B, n]."""
    norms = v.norm(dim=1), w.norm(dim=1)
    numbers = {
        "norm_before": norms[0].mean(),
        "norm_after": norms[1].mean(),
        "cosine": ((v * w).sum(1) / (norms[0] * norms[1])).mean(),
        "kept": ((w[1:] - w[:-1]).norm(dim=1) / (v[1:] - v[:-1]).norm(dim=1)).mean(),
    }
    return {name: float(number) if math.isfinite(number) else None for name, number in numbers.items()}
