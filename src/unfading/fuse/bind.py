"""The tensors that a plan's program reads, from a cell and what it is called with."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.fuse.devices import place_of
from unfading.fuse.ir.program import InputKind
from unfading.fuse.plan import Plan
from unfading.fuse.trace.projection import ends, slopes
from unfading.fuse.trace.tree import flatten, with_dense
from unfading.reference import check_inputs, projected

_WHERE = {"c": "the CPU", "triton": "one GPU"}


def gather_inputs(found: Plan, cell: Cell, x: Tensor, start: int, constants: Mapping[str, Tensor]) -> list[Tensor]:
    """What the loop reads at every step: x itself, or what `project` makes of it, and what does not depend on x."""
    if not found.with_project:
        inputs = projected(cell, x, start, constants)
        check_inputs(cell, inputs, batch=x.shape[1])
        return _leaves(inputs, found.inputs, cell)
    if len(found.signature.kinds) == 1:
        return [x]
    # One row tells what all rows share.
    thin = _leaves(cell.project(x[:, :1], start), found.inputs, cell)
    return [x, *(leaf for name, leaf in zip(found.names, thin, strict=True) if name in cell.shared)]


def gather_weights(found: Plan, cell: Cell, weights: Any) -> list[Tensor]:
    """The weights of the step, and the parameters that `project` reads where it is compiled with it."""
    leaves = _leaves(with_dense(weights, found.dense), found.weights, cell)
    if found.affine:
        like = leaves[0]
        fields = _leaves(cell.project(ends(like.device, like.dtype)), found.inputs, cell)
        leaves += slopes([field for name, field in zip(found.names, fields, strict=True) if name not in cell.shared])
    for name in found.parameters:
        tensor: Any = cell
        for part in name.split("."):
            tensor = getattr(tensor, part)
        leaves.append(tensor)
    return leaves


def check(found: Plan, cell: Cell, tensors: Sequence[Tensor]) -> None:
    """A kernel reads memory by the plan's sizes: what comes must have them, and lie where it says."""
    signature = found.signature
    T, B = tensors[0].shape[0], tensors[len(signature.inputs)].shape[0]
    sizes = {InputKind.SEQUENCE: (T, B), InputKind.SHARED: (T, 1), InputKind.CONSTANT: (1, B)}
    shapes: list[tuple[int, ...]] = [
        (*sizes[kind], width) for kind, width in zip(signature.kinds, signature.inputs, strict=True)
    ]
    shapes += [(B, width) for width in signature.states]
    shapes += signature.weights
    device = tensors[len(signature.inputs)].device
    for tensor, shape in zip(tensors, shapes, strict=True):
        wrong = tensor.device != device or place_of(tensor.device) != found.place
        if tensor.shape != shape or tensor.dtype != signature.dtype or wrong:
            meant = f"{signature.dtype} {list(shape)} on {_WHERE[found.place]}"
            raise ValueError(
                f"{type(cell).__name__}: the fused step was compiled for {meant}; got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}."
            )


def _leaves(tree: Any, structure: Any, cell: Cell) -> list[Tensor]:
    if torch.compiler.is_compiling():
        return _pytree.tree_leaves(tree)
    leaves: list[Tensor] = []
    if flatten(tree, leaves) != structure:
        raise TypeError(f"{type(cell).__name__}.project or weights gives other parts than when its step was compiled.")
    return leaves
