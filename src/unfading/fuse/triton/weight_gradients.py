"""Gradients of weights on a GPU, computed after the loop: products and sums over all steps and rows of stored tensors.

Each takes as few operations of torch as possible: the host needs longer to launch one than the GPU needs for most of them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from unfading.fuse.ir.differentiate import Outer, Source, Total
from unfading.fuse.ir.program import TensorKind
from unfading.loop_options import LoopOptions

Tensors = Mapping[tuple[str, int], Tensor | None]
LEAST = 4  # columns: a product in tf32 needs rows of 16 bytes

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
INPUT, STATE, SEQUENCE = TensorKind.INPUT, TensorKind.STATE, TensorKind.SEQUENCE
NEXT, INITIAL, D_WEIGHT = TensorKind.NEXT, TensorKind.INITIAL, TensorKind.D_WEIGHT


class Feature(NamedTuple):
    """One feature of an input of the loop."""

    input: int
    column: int


class SumRun(NamedTuple):
    """Entries of a weight, counted as in a vector, whose gradients are adjacent sums over steps and rows."""

    start: int
    size: int
    column: int  # at which the factors dy begin in the stored sequences
    of: Feature | None  # what dy is multiplied with; None for a sum of dy alone


class WeightProduct(NamedTuple):
    """An `Outer`, and what follows from it and from the shape of its weight."""

    outer: Outer
    width: int  # of dy
    length: int  # of v
    whole: bool  # it is all of the gradient, not a block of it
    run: SumRun | None  # of the sums that it consists of, where v is one feature of an input


class Terms(NamedTuple):
    """The terms of the gradient of one weight."""

    products: tuple[WeightProduct, ...]
    totals: tuple[Total, ...]
    run: SumRun | None  # which is all of the gradient
    one: bool  # the first product is all of the gradient


class WeightGradients:
    """Computes the gradients of the weights of a program.

    Args:
        sizes: the entries in a row of each sequence that the backward loop stores.
    """

    def __init__(self, outer: Sequence[Outer], totals: Sequence[Total], sizes: Sequence[int]):
        self.outer, self.totals, self.width = outer, totals, sum(sizes)
        # The sequences are parts of one tensor, in the order of the weights that are their sums.
        first = {product.dy.index: product.block[:2] for product in reversed(outer) if _is_column(product)}
        first = {total.dy.index: (total.weight, total.start) for total in totals if total.dy.kind == SEQUENCE} | first
        self.order = sorted(range(len(sizes)), key=lambda i: (first.get(i, (math.inf, 0)), i))
        self.sizes = [sizes[i] for i in self.order]
        self.starts = dict(zip(self.order, accumulate(self.sizes, initial=0), strict=False))
        # Those that are multiplied with a gradient of their own, without others.
        self.features = sorted({Feature(product.v.index, product.v.start) for product in outer if _is_column(product)})
        self._terms: dict[int, Terms] = {}  # by weight

    def sources(self) -> list[Source]:
        """The gradients that the products and sums read."""
        return [*(product.dy for product in self.outer), *(total.dy for total in self.totals)]

    def sequences(self, stored: Tensor) -> dict[int, Tensor]:
        """The sequences as parts of one tensor."""
        return dict(zip(self.order, stored.split_with_sizes(self.sizes, -1), strict=True))

    def compute(
        self, weights: Sequence[Tensor], wanted: Sequence[bool], tensors: Tensors, stored: Tensor | None, options: LoopOptions
    ) -> list[Tensor | None]:
        """The gradient of each weight; None where it is not wanted.

        Args:
            tensors: those of the loop, by kind and number.
            stored: all sequences that the loop has stored.
        """
        sums = WeightSums(self.starts, self.features, tensors, stored, options)
        return [self._gradient(i, weights[i], sums) if want else None for i, want in enumerate(wanted)]

    def _gradient(self, index: int, weight: Tensor, sums: "WeightSums") -> Tensor:
        shape = weight.shape
        terms = self._terms.get(index)
        if terms is None:
            terms = self._terms[index] = self._terms_of(index, tuple(shape[1:] if sums.models else shape))
        products, totals, run, one = terms
        entries = sums.tensors.get((D_WEIGHT, index))  # sums that the loop itself has computed
        if entries is not None:
            gradient = entries.sum(-2).reshape(shape)
        elif run is not None:
            return sums.columns(run).reshape(shape)
        elif one:
            gradient = weight.new_empty(shape)
            sums.add_product(products[0], gradient, beta=0)
            products = products[1:]
        else:
            gradient = weight.new_zeros(shape)
        for product in products:
            sums.add_product(product, gradient)
        for total in totals:
            sums.add_total(total, self.run_of_total(total), gradient)
        return gradient

    def _terms_of(self, index: int, shape: tuple[int, ...]) -> Terms:
        products = tuple(self._product(outer, shape) for outer in self.outer if outer.block.weight == index)
        totals = tuple(total for total in self.totals if total.weight == index)
        entries = [product.run if shape[-1] == 1 and product.outer.scale == 1 else None for product in products]
        run = _joined([*entries, *(self.run_of_total(total) for total in totals)])
        if run is not None and (run.start, run.size) != (0, math.prod(shape)):
            run = None
        return Terms(products, totals, run, bool(products) and products[0].whole and products[0].run is None)

    def _product(self, outer: Outer, shape: tuple[int, ...]) -> WeightProduct:
        block, dy, v, _ = outer
        of = Feature(v.index, v.start)
        run = SumRun(block.r0, block.width, self.starts[dy.index] + dy.start, of) if _is_column(outer) else None
        return WeightProduct(outer, block.width, block.length, block[1:5] == (0, shape[0], 0, shape[1]), run)

    def run_of_total(self, total: Total) -> SumRun | None:
        """The run of sums that a total is; None where it is not computed with the others."""
        if total.dy.kind != SEQUENCE:
            return None
        return SumRun(total.start, total.width, self.starts[total.dy.index] + total.dy.start, None)


def _is_column(product: Outer) -> bool:
    """Whether a product is with one feature of an input, and so one column of a matrix."""
    block = product.block
    return block.length == 1 and not block.transposed and product.v.kind == INPUT and product.dy.kind == SEQUENCE


def _joined(runs: Sequence[SumRun | None]) -> SumRun | None:
    """Runs that follow each other, as one; None where they do not."""
    whole: SumRun | None = None
    for run in sorted(runs, key=lambda run: -1 if run is None else run.start):
        if run is None:
            return None
        if whole is None:
            whole = run
        elif run == SumRun(whole.start + whole.size, run.size, whole.column + whole.size, whole.of):
            whole = whole._replace(size=whole.size + run.size)
        else:
            return None
    return whole


class WeightSums:
    """The sums of one backward loop over steps and rows.

    Sums of a gradient alone, and of its products with one feature of an input, are computed together, as one product of [x, 1]
    with all sequences that the loop has stored.

    Products are written into tensors, by operations that autocast leaves in float32.
    """

    def __init__(
        self,
        starts: Mapping[int, int],
        features: Sequence[Feature],
        tensors: Tensors,
        stored: Tensor | None,
        options: LoopOptions,
    ):
        self.starts, self.features, self.tensors, self.options = starts, features, tensors, options
        self.models = self._of(INITIAL, 0).dim() == 3
        self.stored = None if stored is None else stored.flatten(-3, -2)
        self._columns: dict[Feature | None, Tensor] = {}

    def add_product(self, product: WeightProduct, weight: Tensor, beta: int = 1) -> None:
        """Add a product to the gradient of a weight. With beta = 0, what the gradient has been before is ignored."""
        (block, dy_source, v_source, scale), width, length, whole, run = product
        part = weight if whole else weight[..., block.r0 : block.r1, block.c0 : block.c1]
        if run is not None:
            part.add_(self.columns(run).unsqueeze(-1), alpha=scale)
            return
        dy = self._matrix(dy_source, width)
        for own, v in self._pairs(dy, v_source, length):
            left, right = (v, own) if block.transposed else (own, v)
            self._multiply(part, left, right, beta, scale)
            beta = 1

    def add_total(self, total: Total, run: SumRun | None, weight: Tensor) -> None:
        """Add a sum to the gradient of a weight."""
        part = weight.flatten(1 if self.models else 0)[..., total.start : total.start + total.width]
        part += self.columns(run) if run is not None else self._matrix(total.dy, total.width).sum(-2)

    def columns(self, run: SumRun) -> Tensor:
        """The sums over steps and rows that a run consists of, [size]."""
        if not self._columns:
            self._columns = self._all_columns()
        return _cut(self._columns[run.of], run.column, run.size)

    def _all_columns(self) -> dict[Feature | None, Tensor]:
        whole = self.stored
        assert whole is not None
        features = [_cut(self._of(INPUT, index).flatten(-3, -2), column, 1) for index, column in self.features]
        table = features[0] if len(features) == 1 else torch.cat(features, -1) if features else whole[..., :0]
        table = functional.pad(table, (0, max(LEAST - len(features), 1)), value=1.0)
        sums = whole.new_empty((*whole.shape[:-2], table.shape[-1], whole.shape[-1]))
        self._multiply(sums, table, whole, 0, 1)
        return dict(zip([*self.features, None], sums.unbind(-2), strict=False))

    def _multiply(self, result: Tensor, left: Tensor, right: Tensor, beta: int, scale: float) -> None:
        """Add left^T right to a result, or, with beta = 0, write it there."""
        add = result.baddbmm_ if self.models else result.addmm_
        add(left.mT, right, beta=beta, alpha=scale)

    def _pairs(self, dy: Tensor, v: Source, width: int) -> list[tuple[Tensor, Tensor]]:
        """Both factors, step by step. The state before a step is the one after another step, or the initial one."""
        if v.kind != STATE:
            return [(dy, self._matrix(v, width))]
        after, first = self._of(NEXT, v.index), _cut(self._of(INITIAL, v.index), v.start, width)
        B, rest = first.shape[-2], dy.shape[-2] - first.shape[-2]
        lengths = self.options.lengths
        if lengths is not None and self.options.reverse:
            after = _cut(after, v.start, width)
            last = torch.arange(after.shape[-3], device=after.device)[:, None] == lengths.unsqueeze(-2) - 1
            shifted = torch.cat([after.narrow(-3, 1, after.shape[-3] - 1), first.unsqueeze(-3)], dim=-3)
            return [(dy, torch.where(last.unsqueeze(-1), first.unsqueeze(-3), shifted).flatten(-3, -2))]
        after = _cut(after.flatten(-3, -2), v.start, width)
        here, there, start = (0, B, rest) if self.options.reverse else (B, 0, 0)
        return [(dy.narrow(-2, here, rest), after.narrow(-2, there, rest)), (dy.narrow(-2, start, B), first)]

    def _matrix(self, source: Source, width: int) -> Tensor:
        """A factor of a product [steps and rows, width]. Past a row's end it is zero or at least finite."""
        if source.kind == SEQUENCE:
            assert self.stored is not None
            return _cut(self.stored, self.starts[source.index] + source.start, width)
        return _cut(self._of(source.kind, source.index).flatten(-3, -2), source.start, width)

    def _of(self, kind: TensorKind, index: int) -> Tensor:
        tensor = self.tensors[kind, index]
        assert tensor is not None
        return tensor


def _cut(tensor: Tensor, start: int, size: int) -> Tensor:
    """Entries of each row."""
    return tensor if size == tensor.shape[-1] else tensor.narrow(-1, start, size)
