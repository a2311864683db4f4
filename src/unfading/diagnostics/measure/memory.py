"""Which entries of a memory are written and read, and when (NRU, Fig. 6).

    write_t[j] = |s_t[j] - s_{t-1}[j]|                     how much entry j changes in step t
    read_t[j]  = ||d h_t / d s_{t-1}[j]||                  how strongly the next h depends on it

Both are root mean squares over rows. The memory is the last part of the state: NRU's m, the LSTM's c, or h if there is no other
part. The columns of the Jacobian are exact if h is small, with one backward pass for each entry of h. Otherwise they are
estimated from Gaussian probes g, with E (g^T J)_j^2 = read[j]^2. The entries of frames follow each other channel by channel.
Maps are averaged down to 160 steps by 48 entries, the
resolution of the figure.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from unfading.diagnostics.measure.jacobian import step_flat_state
from unfading.diagnostics.measure.observe import Chain, batch_steps

STEPS, ENTRIES = 160, 48
# Steps times rows that are computed as one batch, and the entries of all their states.
BATCH, BATCH_ENTRIES = 4096, 4_000_000


class MemoryUse(NamedTuple):
    """One tile of the map: a few entries of the memory over a few steps."""

    layer: str
    part: str
    step: int  # the first of its steps, from 1, in the order of processing
    entry: int  # the first of its entries, from 0
    write: float
    read: float


def memory_map(chain: Chain, rows: list[int], *, probes: int, generator: Generator) -> list[MemoryUse]:
    """The map of a chain's memory."""
    part, size = list(chain.parts.items())[-1]
    h = next(iter(chain.parts.values()))
    steps, entries = _bounds(chain.T, STEPS), _bounds(size, ENTRIES)
    write = torch.stack(
        [
            (chain.states[t + 1][-1] - chain.states[t][-1]).detach()[rows].double().square().mean(0).flatten()
            for t in range(chain.T)
        ]
    )
    exact = h <= probes
    directions = torch.eye(h) if exact else torch.randn(probes, h, generator=generator) / math.sqrt(probes)
    most = max(1, min(BATCH, BATCH_ENTRIES // chain.size) // len(rows))
    read = torch.cat([_read(chain, times, rows, size, directions) for times in _time_chunks(chain.T, most)])
    tiles = []
    for i, first in enumerate(steps[:-1]):
        for j, entry in enumerate(entries[:-1]):
            values = [squares[first : steps[i + 1], entry : entries[j + 1]].mean().sqrt() for squares in (write.cpu(), read)]
            tiles.append(MemoryUse(str(chain.position), part, first + 1, entry, *(_finite(value) for value in values)))
    return tiles


def _read(chain: Chain, times: range, rows: list[int], size: int, directions: Tensor) -> Tensor:
    """read_t^2, [steps, size]."""
    flat, new = step_flat_state(chain, *batch_steps(chain, times, rows))
    total = torch.zeros(len(times), size, dtype=torch.float64)
    for direction in directions.to(new) if new.requires_grad else ():
        projection = (new[:, : len(direction)] * direction).sum()
        (gradient,) = torch.autograd.grad(projection, [flat], retain_graph=True, allow_unused=True)
        if gradient is not None:
            total += gradient[:, -size:].double().square().reshape(len(times), len(rows), size).mean(1).cpu()
    return total


def _time_chunks(T: int, most: int) -> list[range]:
    return [range(first, min(first + most, T)) for first in range(0, T, most)]


def _bounds(length: int, most: int) -> list[int]:
    """The bounds of at most `most` nearly equal intervals of 0..length."""
    count = min(length, most)
    return [i * length // count for i in range(count + 1)]


def _finite(value: Tensor) -> float:
    """The number, with 0 for what is not finite."""
    return float(value.nan_to_num(0.0, posinf=0.0))
