"""How a gradient fares over time: ||dh_T/dh_t|| at every lag T - t, and ||dL/dh_t|| in every layer.

    P_t = ds_T/ds_t = J_T J_{T-1} ... J_{t+1}           whole state; its block [h, h] is dh_T/dh_t with the rest of s_t held
    ratio = ||dh_T/dh_1|| / ||dh_T/dh_{T-1}||           incremental RNN, Fig. 3b: 1 where nothing fades

One backward sweep over the exact step Jacobians gives P_t for all t; its scale is kept apart as a logarithm, so that no product
overflows on the way. T is each row's own last step. ||dL/dh_t|| comes from one backward pass of the model to all states of all
layers at once, the direct way from the loss to step t included (Fig. 9; NRU Fig. 7).
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from unfading.diagnostics.measure import random_probes as probe
from unfading.diagnostics.measure.jacobian import state_jacobians
from unfading.diagnostics.measure.observe import Chain

# Entries of all the Jacobians that are in memory at a time.
ENTRIES = 4_000_000
# The largest number that is told: above it a float has no room.
CEILING = 300.0


class Lag(NamedTuple):
    """||ds_T/ds_t|| at one lag, in the median over rows. Where it is exact, all of low, value and high are equal."""

    layer: str
    part: str  # h: dh_T/dh_t with the rest of the state at t held; all: of the whole state
    lag: int  # T - t
    spectral: float
    spectral_low: float
    spectral_high: float
    frobenius: float
    frobenius_low: float
    frobenius_high: float


class Gradient(NamedTuple):
    """||dL/ds_t|| at one step of one layer, mean over rows; lag counts from each row's last step."""

    layer: str
    lag: int
    norm: float  # of the whole state
    h: float  # of h alone
    reached: bool  # whether the graph leads there at all


def chosen(T: int, *, all_up_to: int = 32, factor: float = 1.05) -> list[int]:
    """The lags that are measured: every one up to 32, then each 5 % further, and the last, T - 1."""
    found, lag = [], 1.0
    while round(lag) < T - 1:
        found.append(round(lag))
        lag = lag + 1 if lag < all_up_to else lag * factor
    return [*found, T - 1] if T > 1 else []


def exact(chain: Chain, rows: list[int], lags: list[int]) -> list[Lag]:
    """The norms at the given lags, from the Jacobians themselves."""
    told = []
    for (part, lag), both in norms(chain, rows, lags).items():
        if all(math.isfinite(value) for pair in both for value in pair):
            spectral, frobenius = (
                float(torch.tensor(values, dtype=torch.float64).median()) for values in zip(*both, strict=True)
            )
            told.append(Lag(str(chain.position), part, lag, *[spectral] * 3, *[frobenius] * 3))
    return sorted(told, key=lambda each: (list(chain.blocks).index(each.part), each.lag))


def norms(chain: Chain, rows: list[int], lags: list[int]) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """By part of the state and lag: the spectral and the Frobenius norm of each row that is so long."""
    n = chain.size
    parts = chain.blocks
    ends = [int(chain.ends[b]) for b in rows]
    P = torch.eye(n, dtype=torch.float64).repeat(len(rows), 1, 1)
    logs = torch.zeros(len(rows), dtype=torch.float64)  # log10 of what P was divided by
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    chunk = max(1, ENTRIES // (len(rows) * n * n))
    for last in range(chain.T, 1, -chunk):
        times = range(max(1, last - chunk), last)
        J = state_jacobians(chain, times, rows).double().cpu()
        for t in reversed(times):
            P = P @ J[t - times.start]
            scale = P.abs().amax(dim=(1, 2)).clamp_min(1e-300)
            P, logs = P / scale[:, None, None], logs + scale.log10()
            for b in [b for b in range(len(rows)) if ends[b] - t in lags]:
                for part, size in parts.items():
                    block = P[b, :size, :size]
                    spectral = torch.linalg.matrix_norm(block, 2) if block.isfinite().all() else torch.tensor(math.nan)
                    both = (_scaled(spectral, logs[b]), _scaled(torch.linalg.matrix_norm(block), logs[b]))
                    found.setdefault((part, ends[b] - t), []).append(both)
    return found


def estimated(chain: Chain, rows: list[int], lags: list[int], *, probes: int, generator: Generator) -> list[Lag]:
    """The norms with their intervals, from Gaussian probes; of these rows, the longest."""
    end = int(chain.ends[rows].max())
    reach = probe.Reach(chain, [b for b in rows if int(chain.ends[b]) == end], end)
    found = []
    for part, size in chain.blocks.items():
        g = reach.gaussian(probes, size, generator)
        squares = {end - t: v[:, :, :size].double().square().sum(dim=-1) for t, v in reach.pulled(g, 1)}
        for lag in [lag for lag in lags if lag in squares and squares[lag].isfinite().all()]:
            spectral = reach.norms(end - lag, size, reach.gaussian(probes, size, generator))
            frobenius = [probe.frobenius(each) for each in squares[lag].unbind(1)]
            numbers = [*probe.middle(spectral), *probe.middle(frobenius)]
            if all(math.isfinite(number) for number in numbers):
                found.append(Lag(str(chain.position), part, lag, *numbers))
    return found


def ratio(lags: list[Lag], layer: str) -> float | None:
    """||dh_T/dh_1|| / ||dh_T/dh_{T-1}|| of a layer; None where there are not two lags."""
    own = sorted((each.lag, each.spectral) for each in lags if each.layer == layer and each.part == "h")
    return own[-1][1] / own[0][1] if len(own) > 1 and own[0][0] == 1 and own[0][1] > 0 else None


# dL/ds_t of every chain, step and part; None where the graph does not lead.
Swept = list[list[list[Tensor | None]]]


def swept(chains: list[Chain], loss: Tensor) -> Swept:
    """dL/ds_t for every layer and step after the first, in one backward pass; the graph is kept."""
    nodes = [part for chain in chains for state in chain.states[1:] for part in state]
    nothing = [None] * len(nodes)
    given = iter(torch.autograd.grad(loss, nodes, retain_graph=True, allow_unused=True) if loss.requires_grad else nothing)
    return [[[next(given) for _ in chain.parts] for _ in range(chain.T)] for chain in chains]


def gradients(chains: list[Chain], bars: Swept) -> list[Gradient]:
    """||dL/ds_t|| for every layer and step after the first."""
    found = []
    for chain, bar in zip(chains, bars, strict=True):
        ends, B = chain.ends, len(chain.ends)
        squares = torch.zeros(2, chain.T, B, dtype=torch.float64)  # of the whole state, of h
        reached = torch.zeros(chain.T, dtype=torch.bool)
        for t, parts in enumerate(bar):
            for i, gradient in enumerate(parts):
                if gradient is not None:
                    square = gradient.detach().double().square().sum(dim=-1).cpu()
                    squares[0, t] += square
                    squares[1, t] += square if i == 0 else 0.0
                    reached[t] = True
        norms = squares.sqrt()
        for lag in range(chain.T):
            rows = [b for b in range(B) if lag < ends[b]]
            steps = [int(ends[b]) - 1 - lag for b in rows]
            if rows:
                whole, h = (float(norms[k][steps, rows].mean()) for k in (0, 1))
                there = bool(reached[steps].any())
                found.append(Gradient(str(chain.position), lag, whole, h, there))
    return found


def _scaled(norm: Tensor, log: Tensor) -> float:
    if not float(norm) > 0:
        return float(norm)
    return 10.0 ** min(float(norm.log10() + log), CEILING)
