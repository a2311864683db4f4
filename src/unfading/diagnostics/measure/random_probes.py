"""Norms of P = ds_T/ds_t for states too large to write P out: estimates, each with an interval that holds it.

With m Gaussian probes g_i, each interval holds with probability 1 - 2 delta, delta = 5e-4:

    Frobenius   q = mean ||P^T g_i||^2 has mean ||P||_F^2, and spreads most where P has rank one: there m q / ||P||_F^2 is
                chi-squared with m degrees. So  m q / chi(1 - delta) <= ||P||_F^2 <= m q / chi(delta).
    spectral    A = P^T P with largest eigenvalue sigma^2. From below: ||P v|| <= sigma for every unit v; the power
                method's last v is used. From above: the part of g_i along the first eigenvector is Gaussian, so
                sum ||A^k g_i||^2 >= sigma^(4k) sum z_i^2 >= sigma^(4k) chi(delta), and
                sigma <= (sum ||A^k g_i||^2 / chi(delta))^(1 / 4k).

P is never formed. A backward sweep of vector-Jacobian products through the steps gives P^T g for every t at once; P v comes
from Jacobian-vector products forward from t, made of two backward passes, which every cell has.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils import _pytree

from unfading.diagnostics.measure.jacobian import Spectrum, input_jacobians, stepped
from unfading.diagnostics.measure.observe import Chain, side_by_side

DELTA = 5e-4
# Steps k of the power method: at 1,000 entries and 16 probes the ends of the interval are then 42 % apart, or less.
POWERS = 6


class Interval(NamedTuple):
    """An estimate, and the ends between which the true value lies."""

    value: float
    low: float
    high: float


@cache
def chi_squared(degrees: int, share: float) -> float:
    """The number below which a chi-squared variable of so many degrees lies with that probability."""
    low, high = 0.0, 10.0 * degrees + 100.0
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    for _ in range(200):
        middle = (low + high) / 2
        below = float(torch.special.gammainc(half, torch.tensor(middle / 2, dtype=torch.float64)))
        low, high = (middle, high) if below < share else (low, middle)
    return (low + high) / 2


def frobenius(squares: Tensor) -> Interval:
    """||P||_F from ||P^T g_i||^2, [m]."""
    m, total = len(squares), float(squares.double().sum())
    return Interval(
        math.sqrt(total / m), math.sqrt(total / chi_squared(m, 1 - DELTA)), math.sqrt(total / chi_squared(m, DELTA))
    )


def spectral(push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor], probes: Tensor) -> list[Interval]:
    """sigma(P) of every row from probes [m, rows, n]: `push` is v -> P v, `pull` is w -> P^T w, for all at once."""
    v, logs = _unit(probes)
    below = torch.zeros_like(logs)
    for _ in range(POWERS):
        w = push(v)
        # A product that overflows or is NaN is told as such, by an infinite interval.
        below = torch.linalg.vector_norm(w.double(), dim=-1)
        v, grown = _unit(pull(w))
        logs = logs + grown
    found = []
    for row in range(probes.shape[1]):
        total = float(torch.logsumexp(2 * logs[:, row], dim=0))
        low = float(below[:, row].max())
        high = math.exp(min((total - math.log(chi_squared(len(probes), DELTA))) / (4 * POWERS), 700.0)) if low > 0 else 0.0
        found.append(Interval(low, low, max(low, high)))
    return found


class Reach(NamedTuple):
    """The steps t < end of some rows of a chain, all of which run so long."""

    chain: Chain
    rows: list[int]
    end: int

    def gaussian(self, m: int, size: int, generator: Generator) -> Tensor:
        """Probes [m, rows, n], zero behind the first `size` entries."""
        g = torch.zeros(m, len(self.rows), self.chain.size, dtype=torch.float64)
        g[:, :, :size] = torch.randn(m, len(self.rows), size, dtype=torch.float64, generator=generator)
        return g.to(self.chain.x[0])

    def pulled(self, w: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
        """P_t^T w for t = end - 1 down to `first`, w [m, rows, n]."""
        for t in range(self.end - 1, first - 1, -1):
            w = self._through(t, w, transposed=True)
            yield t, w

    def pushed(self, v: Tensor, first: int) -> Tensor:
        """P_t v for t = `first`."""
        for t in range(first, self.end):
            v = self._through(t, v, transposed=False)
        return v

    def norms(self, t: int, size: int, probes: Tensor) -> list[Interval]:
        """sigma of the block of P_t that belongs to the first `size` entries of the state, for each row."""

        def pull(w: Tensor) -> Tensor:
            *_, (_, v) = self.pulled(w, t)
            return _cut(v, size)

        return spectral(lambda v: _cut(self.pushed(v, t), size), pull, probes)

    def _through(self, t: int, vector: Tensor, *, transposed: bool) -> Tensor:
        """J^T times each vector, or J times it, for the step from t to t + 1."""
        m = len(vector)
        held = side_by_side(self.chain, [t], self.rows)
        flat, new = stepped(self.chain, *_pytree.tree_map(lambda value: value.repeat(m, *[1] * (value.dim() - 1)), held))
        if not new.requires_grad:
            return torch.zeros_like(vector)
        given = vector.reshape(new.shape)
        w = given if transposed else torch.zeros_like(given, requires_grad=True)
        (through,) = torch.autograd.grad(new, [flat], w, create_graph=not transposed, allow_unused=True)
        if through is not None and not transposed:
            (through,) = torch.autograd.grad(through, [w], given, allow_unused=True)
        return torch.zeros_like(vector) if through is None else through.detach().reshape(vector.shape)


def spectra(chain: Chain, times: Sequence[int], rows: list[int], *, probes: int, generator: Generator) -> list[Spectrum]:
    """The largest singular value of J_t with its interval; of the input's Jacobian both ends, exactly."""
    seen = torch.linalg.svdvals(input_jacobians(chain, times, rows).double().cpu())
    found = []
    for i, t in enumerate(times):
        running = [k for k, b in enumerate(rows) if t < int(chain.ends[b])]
        if not running or not seen[i].isfinite().all():
            continue
        reach = Reach(chain, [rows[k] for k in running], t + 1)
        for part, size in chain.blocks.items():
            value, low, high = middle(reach.norms(t, size, reach.gaussian(probes, size, generator)))
            ends = [float(seen[i][running][:, k].median()) for k in (0, -1)]
            if all(map(math.isfinite, (value, low, high))):
                found.append(Spectrum(str(chain.position), t + 1, part, value, low, high, None, None, None, ends[0], ends[1]))
    return found


def middle(intervals: list[Interval]) -> list[float]:
    """Medians of the value and of both ends."""
    return [float(torch.tensor(values, dtype=torch.float64).median()) for values in zip(*intervals, strict=True)]


def _cut(vectors: Tensor, size: int) -> Tensor:
    """Zero behind the first `size` entries."""
    return torch.cat([vectors[..., :size], torch.zeros_like(vectors[..., size:])], dim=-1)


def _unit(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Each brought to length 1, and the logarithms of the lengths; zeros stay."""
    lengths = torch.linalg.vector_norm(vectors.double(), dim=-1)
    return (vectors.double() / lengths.clamp_min(1e-300).unsqueeze(-1)).to(vectors), lengths.log()
