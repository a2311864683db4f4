"""Gradient norms over time: ||dh_T/dh_t|| at every lag T - t, and ||dL/dh_t|| in every layer.

    P_t = ds_T/ds_t = J_T J_{T-1} ... J_{t+1}           whole state; its block [h, h] is dh_T/dh_t with the rest of s_t fixed
    ratio = ||dh_T/dh_1|| / ||dh_T/dh_{T-1}||           incremental RNN, Fig. 3b: 1 if the gradient keeps its size

One backward sweep over the exact step Jacobians gives P_t for all t. The scale of the product is stored separately as a
logarithm, so that it does not overflow. T is the last step of each row. ||dL/dh_t|| comes from one backward pass of the model
to all states of all layers at once; it includes the direct dependence of the loss on step t (Fig. 9; NRU Fig. 7).
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from unfading.diagnostics.measure import random_probes
from unfading.diagnostics.measure.jacobian import state_jacobians
from unfading.diagnostics.measure.observe import Chain

# Entries of all Jacobians that are in memory at a time.
ENTRIES = 4_000_000
# The largest reported norm, as a power of ten: a float has no room for much more.
LARGEST_EXPONENT = 300.0


class LagNorm(NamedTuple):
    """||ds_T/ds_t|| at one lag: medians over rows. If a norm is exact, its low and high are equal to it."""

    layer: str
    part: str  # h: dh_T/dh_t with the rest of the state at t held fixed; all: of the whole state
    lag: int  # T - t
    spectral: float
    spectral_low: float
    spectral_high: float
    frobenius: float
    frobenius_low: float
    frobenius_high: float


class GradientNorm(NamedTuple):
    """||dL/ds_t|| at one step of one layer: mean over rows. The lag counts from the last step of each row."""

    layer: str
    lag: int
    norm: float  # of the whole state
    h: float  # of h alone
    reached: bool  # whether L depends on this state in the autograd graph


def choose_lags(T: int, *, all_up_to: int = 32, factor: float = 1.05) -> list[int]:
    """The lags to measure: every lag up to `all_up_to`, then each larger by `factor`, and the last, T - 1."""
    lags, lag = [], 1.0
    while round(lag) < T - 1:
        lags.append(round(lag))
        lag = lag + 1 if lag < all_up_to else lag * factor
    return [*lags, T - 1] if T > 1 else []


def exact_norms(chain: Chain, rows: list[int], lags: list[int]) -> list[LagNorm]:
    """The norms at the given lags, from the exact Jacobians."""
    results = []
    for (part, lag), pairs in norms_of_rows(chain, rows, lags).items():
        if all(math.isfinite(value) for pair in pairs for value in pair):
            spectral, frobenius = (
                float(torch.tensor(values, dtype=torch.float64).median()) for values in zip(*pairs, strict=True)
            )
            results.append(LagNorm(str(chain.position), part, lag, *[spectral] * 3, *[frobenius] * 3))
    return sorted(results, key=lambda norm: (list(chain.blocks).index(norm.part), norm.lag))


def norms_of_rows(chain: Chain, rows: list[int], lags: list[int]) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """By part of the state and lag: the spectral and the Frobenius norm for each row that is long enough."""
    n = chain.size
    parts = chain.blocks
    ends = [int(chain.ends[b]) for b in rows]
    P = torch.eye(n, dtype=torch.float64).repeat(len(rows), 1, 1)
    logs = torch.zeros(len(rows), dtype=torch.float64)  # log10 of the scale that P was divided by
    results: dict[tuple[str, int], list[tuple[float, float]]] = {}
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
                    pair = (_rescale(spectral, logs[b]), _rescale(torch.linalg.matrix_norm(block), logs[b]))
                    results.setdefault((part, ends[b] - t), []).append(pair)
    return results


def estimated_norms(chain: Chain, rows: list[int], lags: list[int], *, probes: int, generator: Generator) -> list[LagNorm]:
    """The norms at the given lags with their intervals, from Gaussian probes; only the longest of the rows are measured."""
    end = int(chain.ends[rows].max())
    products = random_probes.JacobianProducts(chain, [b for b in rows if int(chain.ends[b]) == end], end)
    results = []
    for part, size in chain.blocks.items():
        g = products.gaussian(probes, size, generator)
        squares = {end - t: v[:, :, :size].double().square().sum(dim=-1) for t, v in products.vjps(g, 1)}
        for lag in [lag for lag in lags if lag in squares and squares[lag].isfinite().all()]:
            spectral = products.spectral_norms(end - lag, size, products.gaussian(probes, size, generator))
            frobenius = [random_probes.frobenius_norm(of_row) for of_row in squares[lag].unbind(1)]
            numbers = [*random_probes.medians(spectral), *random_probes.medians(frobenius)]
            if all(math.isfinite(number) for number in numbers):
                results.append(LagNorm(str(chain.position), part, lag, *numbers))
    return results


def ratio(lags: list[LagNorm], layer: str) -> float | None:
    """||dh_T/dh_1|| / ||dh_T/dh_{T-1}|| of a layer; None if fewer than two lags were measured."""
    norms = sorted((each.lag, each.spectral) for each in lags if each.layer == layer and each.part == "h")
    return norms[-1][1] / norms[0][1] if len(norms) > 1 and norms[0][0] == 1 and norms[0][1] > 0 else None


def random_end_loss(chains: list[Chain], generator: Generator) -> Tensor:
    """A stand-in for a loss: a random direction of the last output of the top layer (of the stack that ran last)."""
    last = chains[-1].position
    total = torch.zeros(())
    for chain in chains:
        if (chain.position.stack, chain.position.layer) == (last.stack, last.layer):
            output = chain.cell.output(chain.states[-1])
            direction = torch.randn(output.shape, generator=generator, dtype=torch.float64) / math.sqrt(output[0].numel())
            total = total.to(output) + (direction.to(output) * output).sum()
    return total


# dL/ds_t of every chain, step and part of the state; None if L does not depend on it.
StateGradients = list[list[list[Tensor | None]]]


def state_gradients(chains: list[Chain], loss: Tensor) -> StateGradients:
    """dL/ds_t for every layer and every step from 1, in one backward pass that retains the graph."""
    nodes = [part for chain in chains for state in chain.states[1:] for part in state]
    no_gradients = [None] * len(nodes)
    gradients = iter(
        torch.autograd.grad(loss, nodes, retain_graph=True, allow_unused=True) if loss.requires_grad else no_gradients
    )
    return [[[next(gradients) for _ in chain.parts] for _ in range(chain.T)] for chain in chains]


def gradient_norms(chains: list[Chain], gradients: StateGradients) -> list[GradientNorm]:
    """||dL/ds_t|| for every layer and every step from 1."""
    results = []
    for chain, of_chain in zip(chains, gradients, strict=True):
        ends, B = chain.ends, len(chain.ends)
        squares = torch.zeros(2, chain.T, B, dtype=torch.float64)  # of the whole state, of h
        reached = torch.zeros(chain.T, dtype=torch.bool)
        for t, parts in enumerate(of_chain):
            for i, gradient in enumerate(parts):
                if gradient is not None:
                    square = gradient.detach().double().square().flatten(1).sum(dim=1).cpu()
                    squares[0, t] += square
                    squares[1, t] += square if i == 0 else 0.0
                    reached[t] = True
        norms = squares.sqrt()
        for lag in range(chain.T):
            rows = [b for b in range(B) if lag < ends[b]]
            steps = [int(ends[b]) - 1 - lag for b in rows]
            if rows:
                whole, h = (float(norms[k][steps, rows].mean()) for k in (0, 1))
                results.append(GradientNorm(str(chain.position), lag, whole, h, bool(reached[steps].any())))
    return results


def _rescale(norm: Tensor, log: Tensor) -> float:
    """norm * 10^log, at most 10^LARGEST_EXPONENT."""
    if not float(norm) > 0:
        return float(norm)
    return 10.0 ** min(float(norm.log10() + log), LARGEST_EXPONENT)
