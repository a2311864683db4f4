"""What a program means, in torch: each operation evaluated on a batch of rows, differentiable as often as one likes.

The kernels are tested against the reference loop, not against this; it serves second derivatives, for which no kernel is
written, and shows in one page what every word of the language stands for.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unfading.fuse.ir.program import FUNCTIONS, Block, Program, Value

OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in (*FUNCTIONS, "neg")},
    **{name: getattr(torch, name) for name in ["add", "sub", "mul", "div", "gt", "ge", "lt", "le", "eq", "ne"]},
    "recip": torch.reciprocal,
    "max": torch.maximum,
    "min": torch.minimum,
    "copy": lambda x: x,
    "stop": lambda x: x.detach(),
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
}


def next_states(
    program: Program, inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """The states after one step of a forward program: inputs and states [B, n], weights as they are."""
    sources = {"input": inputs, "state": states, "weight": [weight.reshape(-1) for weight in weights]}
    batch = states[0].shape[0]
    found: dict[int, Tensor] = {}
    for value in program.values():
        if value.op == "leaf":
            leaf = value.attr
            found[value.id] = sources[leaf.kind][leaf.index][..., leaf.start : leaf.stop]
        elif value.op in ("const", "zero"):
            found[value.id] = states[0].new_full((), value.attr or 0.0)
        else:
            found[value.id] = _one(value, [found[arg.id] for arg in value.args], weights)
    pieces: list[list[Tensor]] = [[] for _ in states]
    for store in program.stores:
        if store.kind == "next":
            pieces[store.index].append(found[store.value.id].expand((batch, *store.value.shape)))
    return [torch.cat(piece, dim=-1) for piece in pieces]


def _one(value: Value, args: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
    op, shape = value.op, value.shape
    if op == "dot":
        products = [_product(v, weights[block.weight], block) for v, block in zip(args, value.attr, strict=True)]
        return sum(products[1:], start=products[0])  # of rows that are shared [1, n], and of others [B, n]
    if op == "power":
        return args[0] ** value.attr
    if op in OPERATIONS:
        out = OPERATIONS[op](*args)
        return out.to(args[0].dtype) if out.dtype == torch.bool else out
    x, own = args[0], value.args[0].shape if value.args else ()
    lead = x.shape[: x.dim() - len(own)]  # the batch, or nothing for what comes of parameters alone
    if op == "expand":
        return x.reshape((*lead, *(1,) * (len(shape) - len(own)), *own)).expand((*lead, *shape))
    if op == "reshape":
        return x.reshape((*lead, *shape))
    if op == "permute":
        return x.permute((*range(len(lead)), *(len(lead) + axis for axis in value.attr)))
    if op == "slice":
        axis, start, stop = value.attr
        return x.narrow(len(lead) + axis, start, stop - start)
    if op == "cat":
        leads = (arg.shape[: arg.dim() - len(piece.shape)] for arg, piece in zip(args, value.args, strict=True))
        batch = torch.broadcast_shapes(*leads)
        pieces = [arg.expand((*batch, *piece.shape)) for arg, piece in zip(args, value.args, strict=True)]
        return torch.cat(pieces, dim=len(batch) + value.attr)
    axes = [len(lead) + axis for axis in value.attr]
    return x.sum(axes, keepdim=True) if op == "sum" else x.amax(axes, keepdim=True)


def _product(v: Tensor, weight: Tensor, block: Block) -> Tensor:
    part = weight[block.r0 : block.r1, block.c0 : block.c1]
    return v @ (part if block.transposed else part.T)
