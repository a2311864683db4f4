"""Estimates of the norms of P = ds_T/ds_t for states too large to compute P itself, each with a confidence interval.

With m Gaussian probes g_i, each interval contains the true value with probability 1 - 2 delta, delta = 5e-4:

    Frobenius   q = mean ||P^T g_i||^2 has mean ||P||_F^2. Its variance is largest if P has rank one: then m q / ||P||_F^2 is
                chi-squared with m degrees of freedom. So  m q / chi(1 - delta) <= ||P||_F^2 <= m q / chi(delta).
    spectral    A = P^T P has the largest eigenvalue sigma^2. Lower bound: ||P v|| <= sigma for every unit v; v is the last
                iterate of the power method. Upper bound: the component of g_i along the first eigenvector is Gaussian, so
                sum ||A^k g_i||^2 >= sigma^(4k) sum z_i^2 >= sigma^(4k) chi(delta), and
                sigma <= (sum ||A^k g_i||^2 / chi(delta))^(1 / 4k).

P is never formed. One backward sweep of vector-Jacobian products through the steps gives P^T g for every t. P v is a sequence
of Jacobian-vector products forward from t; each is computed by two backward passes, which every cell supports.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils import _pytree

from unfading.diagnostics.measure.jacobian import Spectrum, input_jacobians, step_flat_state
from unfading.diagnostics.measure.observe import Chain, batch_steps

DELTA = 5e-4
# Iterations k of the power method. With 1,000 entries and 16 probes, the ends of the interval then differ by at most 42 %.
POWER_STEPS = 6


class Interval(NamedTuple):
    """An estimate and the interval that contains the true value."""

    value: float
    low: float
    high: float


@cache
def chi_squared_quantile(degrees: int, probability: float) -> float:
    """The value below which a chi-squared variable with these degrees of freedom lies with the given probability."""
    low, high = 0.0, 10.0 * degrees + 100.0
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    for _ in range(200):
        middle = (low + high) / 2
        below = float(torch.special.gammainc(half, torch.tensor(middle / 2, dtype=torch.float64)))
        low, high = (middle, high) if below < probability else (low, middle)
    return (low + high) / 2


def frobenius_norm(squares: Tensor) -> Interval:
    """||P||_F from ||P^T g_i||^2, [m]."""
    m, total = len(squares), float(squares.double().sum())
    return Interval(
        math.sqrt(total / m),
        math.sqrt(total / chi_squared_quantile(m, 1 - DELTA)),
        math.sqrt(total / chi_squared_quantile(m, DELTA)),
    )


def spectral_norms(jvp: Callable[[Tensor], Tensor], vjp: Callable[[Tensor], Tensor], probes: Tensor) -> list[Interval]:
    """sigma(P) of every row from probes [m, rows, n]; `jvp` is v -> P v and `vjp` is w -> P^T w, for all probes at once."""
    v, logs = _normalise(probes)
    lower = torch.zeros_like(logs)
    for _ in range(POWER_STEPS):
        w = jvp(v)
        # A product that overflows or is NaN results in an infinite interval.
        lower = torch.linalg.vector_norm(w.double(), dim=-1)
        v, growth = _normalise(vjp(w))
        logs = logs + growth
    intervals = []
    for row in range(probes.shape[1]):
        total = float(torch.logsumexp(2 * logs[:, row], dim=0))
        low = float(lower[:, row].max())
        exponent = (total - math.log(chi_squared_quantile(len(probes), DELTA))) / (4 * POWER_STEPS)
        high = math.exp(min(exponent, 700.0)) if low > 0 else 0.0
        intervals.append(Interval(low, low, max(low, high)))
    return intervals


class JacobianProducts(NamedTuple):
    """Products of vectors with P_t = ds_end/ds_t and its transpose, t < end, for rows that have at least `end` steps."""

    chain: Chain
    rows: list[int]
    end: int

    def gaussian(self, m: int, size: int, generator: Generator) -> Tensor:
        """Probes [m, rows, n] that are zero beyond the first `size` entries."""
        g = torch.zeros(m, len(self.rows), self.chain.size, dtype=torch.float64)
        g[:, :, :size] = torch.randn(m, len(self.rows), size, dtype=torch.float64, generator=generator)
        return g.to(self.chain.x[0])

    def vjps(self, w: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
        """P_t^T w for t = end - 1 down to `first`, w [m, rows, n]."""
        for t in range(self.end - 1, first - 1, -1):
            w = self._step_product(t, w, transposed=True)
            yield t, w

    def jvp(self, v: Tensor, first: int) -> Tensor:
        """P_t v for t = `first`, v [m, rows, n]."""
        for t in range(first, self.end):
            v = self._step_product(t, v, transposed=False)
        return v

    def spectral_norms(self, t: int, size: int, probes: Tensor) -> list[Interval]:
        """sigma of the block of P_t for the first `size` entries of the state, for each row."""

        def vjp(w: Tensor) -> Tensor:
            *_, (_, v) = self.vjps(w, t)
            return _zero_beyond(v, size)

        return spectral_norms(lambda v: _zero_beyond(self.jvp(v, t), size), vjp, probes)

    def _step_product(self, t: int, vectors: Tensor, *, transposed: bool) -> Tensor:
        """J^T or J times each vector, for the step from t to t + 1."""
        m = len(vectors)
        before = batch_steps(self.chain, [t], self.rows)
        repeated = _pytree.tree_map(lambda value: value.repeat(m, *[1] * (value.dim() - 1)), before)
        flat, new = step_flat_state(self.chain, *repeated)
        if not new.requires_grad:
            return torch.zeros_like(vectors)
        given = vectors.reshape(new.shape)
        w = given if transposed else torch.zeros_like(given, requires_grad=True)
        (product,) = torch.autograd.grad(new, [flat], w, create_graph=not transposed, allow_unused=True)
        if product is not None and not transposed:
            (product,) = torch.autograd.grad(product, [w], given, allow_unused=True)
        return torch.zeros_like(vectors) if product is None else product.detach().reshape(vectors.shape)


def spectra(chain: Chain, times: Sequence[int], rows: list[int], *, probes: int, generator: Generator) -> list[Spectrum]:
    """The largest singular value of J_t with its interval; the largest and smallest of dh_t/dx_t exactly."""
    input_values = torch.linalg.svdvals(input_jacobians(chain, times, rows).double().cpu())
    results = []
    for i, t in enumerate(times):
        running = [k for k, b in enumerate(rows) if t < int(chain.ends[b])]
        if not running or not input_values[i].isfinite().all():
            continue
        products = JacobianProducts(chain, [rows[k] for k in running], t + 1)
        for part, size in chain.blocks.items():
            value, low, high = medians(products.spectral_norms(t, size, products.gaussian(probes, size, generator)))
            ends = [float(input_values[i][running][:, k].median()) for k in (0, -1)]
            if all(map(math.isfinite, (value, low, high))):
                results.append(Spectrum(str(chain.position), t + 1, part, value, low, high, None, None, None, ends[0], ends[1]))
    return results


def medians(intervals: list[Interval]) -> list[float]:
    """The medians over rows of the value and of both ends."""
    return [float(torch.tensor(values, dtype=torch.float64).median()) for values in zip(*intervals, strict=True)]


def _zero_beyond(vectors: Tensor, size: int) -> Tensor:
    """The vectors with zeros beyond the first `size` entries."""
    return torch.cat([vectors[..., :size], torch.zeros_like(vectors[..., size:])], dim=-1)


def _normalise(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors scaled to length 1 and the logarithms of their lengths; zero vectors stay zero."""
    lengths = torch.linalg.vector_norm(vectors.double(), dim=-1)
    return (vectors.double() / lengths.clamp_min(1e-300).unsqueeze(-1)).to(vectors), lengths.log()
