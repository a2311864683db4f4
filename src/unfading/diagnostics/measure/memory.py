"""Which entries of a memory are written and read, and when (NRU, Fig. 6).

    write_t[j] = |s_t[j] - s_{t-1}[j]|                     how much entry j changes in step t
    read_t[j]  = ||d h_t / d s_{t-1}[j]||                  how strongly the next h depends on it

in root mean square over rows. The memory is the last part of the state: NRU's m, the LSTM's c, and h itself where there is no
other. Columns of the Jacobian are exact where h is small, by one backward pass for each of its entries; else they are estimated
from Gaussian probes g, with E (g^T J)_j^2 = read[j]^2. Maps are averaged down to 160 steps by 48 entries: more cannot be seen.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from unfading.diagnostics.measure.jacobian import stepped
from unfading.diagnostics.measure.observe import Chain, side_by_side

STEPS, ENTRIES = 160, 48
# Steps and rows that are taken side by side.
AT_ONCE = 4096


class Square(NamedTuple):
    """One square of the map: a few entries over a few steps."""

    layer: str
    part: str
    step: int  # the first of its steps, from 1, in the order of processing
    entry: int  # the first of its entries, from 0
    write: float
    read: float


def maps(chain: Chain, rows: list[int], *, probes: int, generator: Generator) -> list[Square]:
    """The map of a chain's memory."""
    part, size = list(chain.parts.items())[-1]
    h = next(iter(chain.parts.values()))
    steps, entries = _bounds(chain.T, STEPS), _bounds(size, ENTRIES)
    write = torch.stack(
        [(chain.states[t + 1][-1] - chain.states[t][-1]).detach()[rows].double().square().mean(0) for t in range(chain.T)]
    )
    # As one pass for each entry of h, or as so many probes.
    exactly = h <= probes
    directions = torch.eye(h) if exactly else torch.randn(probes, h, generator=generator) / math.sqrt(probes)
    read = torch.cat([_read(chain, times, rows, size, directions) for times in _pieces(chain.T, AT_ONCE // len(rows))])
    found = []
    for i, first in enumerate(steps[:-1]):
        for j, entry in enumerate(entries[:-1]):
            squares = [each[first : steps[i + 1], entry : entries[j + 1]].mean().sqrt() for each in (write.cpu(), read)]
            found.append(Square(str(chain.position), part, first + 1, entry, *(_number(square) for square in squares)))
    return found


def _read(chain: Chain, times: range, rows: list[int], size: int, directions: Tensor) -> Tensor:
    """read_t^2 [steps, size]"""
    flat, new = stepped(chain, *side_by_side(chain, times, rows))
    total = torch.zeros(len(times), size, dtype=torch.float64)
    for direction in directions.to(new) if new.requires_grad else ():
        towards = (new[:, : len(direction)] * direction).sum()
        (gradient,) = torch.autograd.grad(towards, [flat], retain_graph=True, allow_unused=True)
        if gradient is not None:
            total += gradient[:, -size:].double().square().reshape(len(times), len(rows), size).mean(1).cpu()
    return total


def _pieces(T: int, most: int) -> list[range]:
    return [range(first, min(first + most, T)) for first in range(0, T, most)]


def _bounds(length: int, most: int) -> list[int]:
    """Where at most so many nearly equal pieces of 0..length begin, and the end."""
    pieces = min(length, most)
    return [i * length // pieces for i in range(pieces + 1)]


def _number(value: Tensor) -> float:
    return float(value.nan_to_num(0.0, posinf=0.0))
