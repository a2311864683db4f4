"""A cell's `project` compiled together with its step, so that the loop reads x itself and nothing is made of it beforehand."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unfading.cells.base import Cell
from unfading.fuse.ir.program import NotFusable, Program
from unfading.fuse.trace.affine import along, is_affine
from unfading.fuse.trace.recorder import Signature, projected_values, trace_with_project
from unfading.fuse.trace.tree import flatten


def with_project(cell: Cell, step: Any, signature: Signature) -> tuple[Program, Signature, tuple[str, ...]]:
    """The program of project and step together, what it is handed, and which parameters project reads."""
    fields = _fields(signature)
    tensors = _tensors(cell, signature)

    def traced(names: Sequence[str]) -> tuple[Program, Signature]:
        wide = _wide(cell, signature, [tuple(tensors[name].shape) for name in names])
        return trace_with_project(_projection(cell, names), step, wide, fields, len(signature.weights)), wide

    program, _ = traced(list(tensors))
    own = len(signature.weights)
    read = program.reads("weight") | {block.weight for block in program.blocks()}
    names = [name for i, name in enumerate(tensors, start=own) if i in read]
    return *traced(names), tuple(names)


def affine_project(cell: Cell, step: Any, signature: Signature) -> tuple[Program, Signature, tuple[str, ...]]:
    """The program of x A + c and step together, where project is that; what it is handed, and what these are called."""
    fields, tensors = _fields(signature), _tensors(cell, signature)
    wide = _wide(cell, signature, [tuple(tensor.shape) for tensor in tensors.values()])
    _, _, values = projected_values(_projection(cell, list(tensors)), wide, fields, len(signature.weights), 0)
    moving = [i for i, taken in enumerate(fields) if taken is None]
    if cell.input_size != 1 or not is_affine([values[i] for i in moving]):
        raise NotFusable("the projection has dots of its own, and stays outside")
    wide = _wide(cell, signature, [(signature.inputs[i],) for i in moving for _ in "Ac"])

    def project(x: Tensor, start: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        made = iter(along(x, vectors))
        return [next(made) if taken is None else x for taken in fields]

    program = trace_with_project(project, step, wide, fields, len(signature.weights))
    return program, wide, tuple(f"{letter}{i}" for i in moving for letter in "Ac")


def _fields(signature: Signature) -> list[int | None]:
    """Of each field that project returns, which input it is taken from; None where it is compiled."""
    if "constant" in signature.kinds:
        raise NotFusable("what holds for all time may be made of all of x, or drawn at random")
    kept = [i for i, kind in enumerate(signature.kinds) if kind != "sequence"]
    return [kept.index(i) + 1 if i in kept else None for i in range(len(signature.kinds))]


def _wide(cell: Cell, signature: Signature, more: Sequence[tuple[int, ...]]) -> Signature:
    """The signature with x in the place of what is made of it, and with more weights."""
    kept = [i for i, kind in enumerate(signature.kinds) if kind != "sequence"]
    return signature._replace(
        inputs=(cell.input_size, *(signature.inputs[i] for i in kept)),
        kinds=("sequence", *(signature.kinds[i] for i in kept)),
        weights=(*signature.weights, *more),
    )


def _tensors(cell: Cell, signature: Signature) -> dict[str, Tensor]:
    named = (*cell.named_parameters(), *cell.named_buffers())
    return {name: tensor for name, tensor in named if tensor.dtype == signature.dtype}


def _projection(cell: Cell, names: Sequence[str]) -> Callable[[Tensor, int, Sequence[Tensor]], list[Tensor]]:
    """`project` as a function of x, of its first step, and of these parameters."""

    def project(x: Tensor, start: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        given = {f"cell.{name}": tensor for name, tensor in zip(names, parameters, strict=True)}
        leaves: list[Tensor] = []
        flatten(torch.func.functional_call(_Project(cell), given, (x, start)), leaves)
        return leaves

    return project


class _Project(nn.Module):
    """A cell's `project` as a module's forward, so that its parameters can be handed in."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, start: int) -> Any:
        return self.cell.project(x, start)
