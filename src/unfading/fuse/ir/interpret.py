"""An interpreter of programs in torch: each operation evaluated on a batch of rows, differentiable any number of times.

It serves second derivatives, for which no kernel is written, and it defines on one page what each operation means. The
kernels are tested against the reference loop, not against this.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unfading.fuse.ir.program import COMPARISONS, FUNCTIONS, NUMBERS, Block, Op, Program, TensorKind, Value


class _WithGradient(torch.autograd.Function):
    """A value, with the gradient of another of the same shape."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, carrier: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor]:
        return None, d


OPERATIONS: dict[Op, Callable[..., Tensor]] = {
    **{op: getattr(torch, op) for op in FUNCTIONS},
    **{op: getattr(torch, op) for op in (Op.ADD, Op.SUB, Op.MUL, Op.DIV, *COMPARISONS)},
    Op.RECIP: torch.reciprocal,
    Op.MAX: torch.maximum,
    Op.MIN: torch.minimum,
    Op.COPY: lambda x: x,
    Op.STOP: lambda x: x.detach(),
    Op.WHERE: lambda condition, a, b: torch.where(condition != 0, a, b),
    Op.WITH_GRADIENT: lambda a, b: _WithGradient.apply(*torch.broadcast_tensors(a, b)),
}


def next_states(
    program: Program, inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """The states after one step of a forward program: inputs and states are [B, n], weights have their own shapes."""
    flat_weights = [weight.reshape(-1) for weight in weights]
    sources = {TensorKind.INPUT: inputs, TensorKind.STATE: states, TensorKind.WEIGHT: flat_weights}
    batch = states[0].shape[0]
    results: dict[int, Tensor] = {}
    for value in program.values():
        if value.op is Op.LEAF:
            leaf = value.leaf
            results[value.id] = sources[leaf.kind][leaf.index][..., leaf.start : leaf.stop]
        elif value.op in NUMBERS:
            results[value.id] = states[0].new_full((), value.number if value.op is Op.CONST else 0.0)
        else:
            results[value.id] = evaluate(value, [results[arg.id] for arg in value.args], weights)
    pieces: list[list[Tensor]] = [[] for _ in states]
    for store in program.stores:
        if store.kind == TensorKind.NEXT:
            pieces[store.index].append(results[store.value.id].expand((batch, *store.value.shape)))
    return [torch.cat(piece, dim=-1) for piece in pieces]


def evaluate(value: Value, args: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """One operation on tensors, which have the batch axis in front where they depend on it."""
    if value.op is Op.DOT:
        products = [_product(v, weights[block.weight], block) for v, block in zip(args, value.blocks, strict=True)]
        return sum(products[1:], start=products[0])  # some may be [1, n], shared by all rows
    if value.op is Op.POWER:
        return args[0] ** value.number
    if value.op in OPERATIONS:
        out = OPERATIONS[value.op](*args)
        return out.to(args[0].dtype) if out.dtype == torch.bool else out
    if value.op is Op.CAT:
        leads = (arg.shape[: arg.dim() - len(piece.shape)] for arg, piece in zip(args, value.args, strict=True))
        batch = torch.broadcast_shapes(*leads)
        pieces = [arg.expand((*batch, *piece.shape)) for arg, piece in zip(args, value.args, strict=True)]
        return torch.cat(pieces, dim=len(batch) + value.axis)
    x, own = args[0], value.args[0].shape
    lead = x.shape[: x.dim() - len(own)]  # the batch; nothing for a value that depends on parameters alone
    if value.op is Op.EXPAND:
        return x.reshape((*lead, *(1,) * (len(value.shape) - len(own)), *own)).expand((*lead, *value.shape))
    if value.op is Op.RESHAPE:
        return x.reshape((*lead, *value.shape))
    if value.op is Op.SLICE:
        axis, start, stop = value.slice
        return x.narrow(len(lead) + axis, start, stop - start)
    axes = [len(lead) + axis for axis in value.axes]
    if value.op is Op.PERMUTE:
        return x.permute((*range(len(lead)), *axes))
    return x.sum(axes, keepdim=True) if value.op is Op.SUM else x.amax(axes, keepdim=True)


def _product(v: Tensor, weight: Tensor, block: Block) -> Tensor:
    part = weight[block.r0 : block.r1, block.c0 : block.c1]
    return v @ (part if block.transposed else part.T)
