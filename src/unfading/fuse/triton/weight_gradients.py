"""Gradients of weights on a GPU, computed after the loop: products and sums over all steps and rows of stored tensors."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from unfading.fuse.ir.differentiate import Outer, Source, Total
from unfading.fuse.ir.program import TensorKind

Tensors = Mapping[tuple[str, int], Tensor | None]
LEAST = 4  # columns: a product in tf32 needs rows of 16 bytes

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
INPUT, STATE, SEQUENCE = TensorKind.INPUT, TensorKind.STATE, TensorKind.SEQUENCE
NEXT, INITIAL = TensorKind.NEXT, TensorKind.INITIAL


class WeightSums:
    """Adds to the gradients of weights, from the tensors of a backward loop [models, T, B, n].

    Sums, and products with an input of one feature, are computed together, as one product of [x, 1] with all sequences that the
    loop has stored.

    Args:
        stored: the sequences that the loop has stored, as parts of one tensor, and the entry at which each begins.
        lengths: of each row, for a loop in reverse with lengths.
    """

    def __init__(self, tensors: Tensors, stored: tuple[Tensor | None, Sequence[int]], *, reverse: bool, lengths: Tensor | None):
        self.tensors, self.stored, self.reverse, self.lengths = tensors, stored, reverse, lengths
        self._columns: dict[int | None, Tensor] = {}

    def add_product(self, product: Outer, weight: Tensor) -> None:
        block = product.block
        part = weight[:, block.r0 : block.r1, block.c0 : block.c1]
        if block.length == 1 and not block.transposed and product.v.kind == INPUT and product.dy.kind == SEQUENCE:
            column = self._column(product.dy, block.width, product.v.index)
            part.add_(column.unsqueeze(-1), alpha=product.scale)
            return
        dy = self._factor(product.dy, block.width)
        for own, v in self._pairs(dy, product.v, block.length):
            left, right = (v, own) if block.transposed else (own, v)
            part.baddbmm_(left.flatten(1, 2).mT, right.flatten(1, 2), alpha=product.scale)

    def add_total(self, total: Total, weight: Tensor) -> None:
        part = weight.flatten(1)[:, total.start : total.start + total.width]
        if total.dy.kind == SEQUENCE:
            part += self._column(total.dy, total.width, None)
        else:
            part += self._factor(total.dy, total.width).sum((1, 2))

    def _pairs(self, dy: Tensor, v: Source, width: int) -> list[tuple[Tensor, Tensor]]:
        """Both factors, step by step. The state before a step is the one after another step, or the initial one."""
        if v.kind != STATE:
            return [(dy, self._factor(v, width))]
        here = slice(v.start, v.start + width)
        after, first = self._of(NEXT, v.index)[..., here], self._of(INITIAL, v.index).unsqueeze(1)[..., here]
        if not self.reverse:
            return [(dy[:, 1:], after[:, :-1]), (dy[:, :1], first)]
        if self.lengths is None:
            return [(dy[:, :-1], after[:, 1:]), (dy[:, -1:], first)]
        last = torch.arange(after.shape[1], device=after.device)[:, None] == self.lengths.unsqueeze(1) - 1
        return [(dy, torch.where(last.unsqueeze(-1), first, torch.cat([after[:, 1:], first], dim=1)))]

    def _column(self, dy: Source, width: int, of: int | None) -> Tensor:
        """The sum over steps and rows of dy times an input of one feature, or, for None, of dy alone; [models, width]."""
        if not self._columns:
            self._columns = self._all_columns()
        start = self.stored[1][dy.index] + dy.start
        return self._columns[of][:, start : start + width]

    def _all_columns(self) -> dict[int | None, Tensor]:
        whole = self.stored[0]
        assert whole is not None
        inputs = {i: x for (kind, i), x in self.tensors.items() if kind == INPUT and x is not None and x.shape[-1] == 1}
        inputs = {i: x for i, x in inputs.items() if x.shape[:3] == whole.shape[:3]}
        features = list(inputs.values())
        table = features[0] if len(features) == 1 else torch.cat(features, -1) if features else whole[..., :0]
        table = functional.pad(table, (0, max(LEAST - len(features), 1)), value=1.0)
        sums = torch.bmm(table.flatten(1, 2).mT, whole.flatten(1, 2))
        return dict(zip([*inputs, None], sums.unbind(1), strict=False))

    def _factor(self, source: Source, width: int) -> Tensor:
        """A factor of a product [models, T, B, width]. Past a row's end it is zero or at least finite."""
        return self._of(source.kind, source.index)[..., source.start : source.start + width]

    def _of(self, kind: TensorKind, index: int) -> Tensor:
        tensor = self.tensors[kind, index]
        assert tensor is not None
        return tensor
