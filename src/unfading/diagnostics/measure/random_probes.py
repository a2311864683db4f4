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

from unfading.diagnostics.measure.jacobian import Spectrum, detached_weights, input_jacobians, step_flat_state
from unfading.diagnostics.measure.observe import Chain, batch_steps, select_rows
from unfading.diagnostics.measure.single_steps import check_single_steps

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
        return _jacobian_product(new, flat, vectors.flatten(0, 1), transposed=transposed).reshape(vectors.shape)


class InputProducts(NamedTuple):
    """Products of vectors with K_t = dh_t/dx_t and its transpose, for inputs too large to compute K_t: frames."""

    chain: Chain
    rows: list[int]
    t: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of entries of h and of x."""
        return next(iter(self.chain.parts.values())), self.chain.x[self.t][0].numel()

    def product(self, vectors: Tensor, *, transposed: bool) -> Tensor:
        """K^T or K times each vector [m, rows, entries]."""
        m, chain, repeat = len(vectors), self.chain, self._repeat
        _, state = batch_steps(chain, [self.t], self.rows)
        x = repeat(select_rows(chain.x[self.t], self.rows), m).requires_grad_()
        inputs = _pytree.tree_map(lambda field: field.squeeze(0), chain.cell.project(x.unsqueeze(0), chain.index[self.t]))
        state = type(state)(*(repeat(part, m) for part in state))
        h = chain.cell.step(inputs, state, detached_weights(chain))[0].flatten(1)
        product = _jacobian_product(h, x, vectors.flatten(0, 1), transposed=transposed)
        return product.reshape(m, len(self.rows), -1)

    def spectral_norms(self, probes: Tensor) -> list[Interval]:
        """sigma(K) of every row, from probes [m, rows, entries of x]."""
        return spectral_norms(lambda v: self.product(v, transposed=False), lambda w: self.product(w, transposed=True), probes)

    def gaussian(self, m: int, size: int, generator: Generator) -> Tensor:
        """Probes [m, rows, size]."""
        g = torch.randn(m, len(self.rows), size, dtype=torch.float64, generator=generator)
        return g.to(self.chain.x[0])

    @staticmethod
    def _repeat(value: Tensor, m: int) -> Tensor:
        return value.repeat(m, *[1] * (value.dim() - 1))


def channels(chain: Chain, times: Sequence[int], rows: list[int], *, probes: int, generator: Generator) -> Tensor:
    """The effect of each channel of the input frames on h, [I], as `jacobian.features` has it for features.

    With Gaussian g the square of an entry of K^T g has the squared norm of its column of K as its mean.
    """
    check_single_steps(chain.cell, chain.T, reverse=chain.position.backward)
    squares = torch.zeros(chain.x[0].shape[1], dtype=torch.float64)
    for t in times:
        products = InputProducts(chain, rows, t)
        columns = products.product(products.gaussian(probes, products.sizes[0], generator), transposed=True)
        running = (t < chain.ends[rows]).to(columns.device).reshape(1, -1, 1)
        columns = (columns * running).double().square().mean(dim=(0, 1))
        squares += columns.reshape(len(squares), -1).sum(dim=1).cpu()
    return (squares / len(times)).sqrt()


def _jacobian_product(new: Tensor, leaf: Tensor, vectors: Tensor, *, transposed: bool) -> Tensor:
    """J^T or J times the vector of each row, with J = d new / d leaf, new [rows, n]; in the shape of the other of the two."""
    shape = leaf.shape if transposed else new.shape
    if not new.requires_grad:
        return torch.zeros(shape, dtype=new.dtype, device=new.device)
    w = vectors if transposed else torch.zeros_like(new, requires_grad=True)
    (product,) = torch.autograd.grad(new, [leaf], w, create_graph=not transposed, allow_unused=True)
    if product is not None and not transposed:
        (product,) = torch.autograd.grad(product, [w], vectors.reshape(leaf.shape), allow_unused=True)
    return torch.zeros(shape, dtype=new.dtype, device=new.device) if product is None else product.detach()


def spectra(chain: Chain, times: Sequence[int], rows: list[int], *, probes: int, generator: Generator) -> list[Spectrum]:
    """The largest singular value of J_t with its interval, and those of dh_t/dx_t: exact, except for frames."""
    results = []
    for t in times:
        running = [b for b in rows if t < int(chain.ends[b])]
        of_input = _input_ends(chain, t, running, probes, generator) if running else None
        if of_input is None:
            continue
        products = JacobianProducts(chain, running, t + 1)
        for part, size in chain.blocks.items():
            value, low, high = medians(products.spectral_norms(t, size, products.gaussian(probes, size, generator)))
            if all(map(math.isfinite, (value, low, high))):
                results.append(Spectrum(str(chain.position), t + 1, part, value, low, high, None, None, None, *of_input))
    return results


def _input_ends(chain: Chain, t: int, rows: list[int], probes: int, generator: Generator) -> tuple[float, float | None] | None:
    """The largest and the smallest singular value of dh_t/dx_t, medians over rows; None where they are not finite.

    Of frames the largest is a lower bound, from the power method, and the smallest is not known.
    """
    if chain.frame:
        check_single_steps(chain.cell, chain.T, reverse=chain.position.backward)
        products = InputProducts(chain, rows, t)
        largest, _, _ = medians(products.spectral_norms(products.gaussian(probes, products.sizes[1], generator)))
        return (largest, None) if math.isfinite(largest) else None
    values = torch.linalg.svdvals(input_jacobians(chain, [t], rows).double().cpu())[0]
    return (float(values[:, 0].median()), float(values[:, -1].median())) if values.isfinite().all() else None


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
