"""A cell's `project` compiled together with its step: the loop reads x itself, and nothing is computed from it beforehand.

`with_project` compiles project as it is written. `affine_project` is for a projection of a single feature x that is affine
in x, whatever matrices it is computed with. Then each field is

    x A + c        with  c = project(0)  and  A = project(1) - project(0)

The loop takes A and c as vectors of weights, so neither the field [T, B, n] nor its gradient is ever stored. Gradients reach
the parameters through these two rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.cells.base import Cell
from unfading.fuse.cell_copy import CellCopy, without_data
from unfading.fuse.contents import Contents
from unfading.fuse.ir.program import VIEWS, InputKind, Op, Program, Store, TensorKind, Value, in_order
from unfading.fuse.refusal import NotFusable
from unfading.fuse.trace.recorder import ProjectFunction, Signature, StepFunction, projected_values, trace, trace_with_project
from unfading.fuse.trace.tree import as_matrix, flatten
from unfading.fuse.trace.values import EXAMPLES

LINEAR = frozenset([Op.NEG, Op.COPY, Op.DOT, Op.CAT, Op.SUM, Op.ADD, Op.SUB, *VIEWS])  # in all arguments together


class Projected(NamedTuple):
    """The program of project and step together."""

    program: Program
    signature: Signature  # of the loop, with x in the place of the fields that are computed from it
    parameters: tuple[str, ...]  # names of the weights that project adds


def with_project(contents: Contents, step: StepFunction, signature: Signature) -> Projected:
    """Compile project as it is written, with the parameters that it reads as further weights."""
    cell = contents.of()
    fields, tensors, own = _fields(signature), _tensors(cell, signature), len(signature.weights)
    values = _projected(contents, tensors, signature, fields)
    program = Program(tuple(Store(TensorKind.NEXT, i, 0, value) for i, value in enumerate(values)), {}, ())
    names = _read(program, tensors, own)
    while True:
        wide = _wide(cell, signature, [tuple(tensors[name].shape) for name in names])
        program = trace_with_project(projection_of(contents, [tensors[name] for name in names]), step, wide, fields, own)
        read = _read(program, names, own)
        if read == names:
            return Projected(program, wide, tuple(names))
        names = read  # the step does not use all fields


def output_program(contents: Contents, state: Any) -> tuple[Program, list[Tensor]]:
    """`output` as a program, with the parts of the state as its inputs, and the tensors of the cell that are its weights."""
    cell = contents.of()
    tensors = [t for t in (*cell.parameters(), *cell.buffers()) if t.dtype == state[0].dtype]
    shapes = tuple(tuple(as_matrix(tensor).shape) for tensor in tensors)
    widths = tuple(part.shape[-1] for part in state)
    signature = Signature(widths, (InputKind.SEQUENCE,) * len(widths), (cell.output_size,), shapes, state[0].dtype)

    def output(inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        given = {id(tensor): weight.reshape(tensor.shape) for tensor, weight in zip(tensors, weights, strict=True)}
        twin = CellCopy(contents, without_data(given))
        result = twin.cell.output(type(state)(*inputs))
        twin.refuse_writes("output")
        return [result]

    return trace(output, signature), [as_matrix(tensor) for tensor in tensors]


def _projected(
    contents: Contents, tensors: Mapping[str, Tensor], signature: Signature, fields: Sequence[int | None]
) -> list[Value]:
    """The value of each field that project returns, with all these tensors as further weights."""
    wide = _wide(contents.of(), signature, [tuple(tensor.shape) for tensor in tensors.values()])
    project = projection_of(contents, list(tensors.values()))
    return projected_values(project, wide, fields, len(signature.weights), EXAMPLES[0])[2]


def _read(program: Program, names: Iterable[str], own: int) -> list[str]:
    """Those of the tensors behind the step's own weights that a program reads."""
    read = program.reads(TensorKind.WEIGHT) | {block.weight for block in program.blocks()}
    return [name for i, name in enumerate(names, start=own) if i in read]


def affine_project(contents: Contents, step: StepFunction, signature: Signature) -> Projected:
    """Compile project as x A + c, with A and c of each field as further weights."""
    cell = contents.of()
    fields, tensors = _fields(signature), _tensors(cell, signature)
    values = _projected(contents, tensors, signature, fields)
    compiled = [i for i, index in enumerate(fields) if index is None]
    if cell.input_size != 1 or not is_affine([values[i] for i in compiled]):
        raise NotFusable("the projection is not affine in a single feature, so it runs before the loop")
    wide = _wide(cell, signature, [(signature.inputs[i],) for i in compiled for _ in "Ac"])

    def project(x: Tensor, start: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        affine = iter([x * A + c for A, c in zip(vectors[::2], vectors[1::2], strict=True)])
        return [next(affine) if index is None else x for index in fields]

    program = trace_with_project(project, step, wide, fields, len(signature.weights))
    return Projected(program, wide, tuple(f"{letter}{i}" for i in compiled for letter in "Ac"))


def is_affine(values: Sequence[Value]) -> bool:
    """Whether these values are affine functions of the inputs that they read."""
    dependent: set[int] = set()  # ids of values that depend on an input
    for value in in_order(values):
        reads = [arg.id in dependent for arg in value.args]
        if value.op is Op.LEAF:
            if value.leaf.kind == TensorKind.INPUT:
                dependent.add(value.id)
        elif any(reads):
            scaled = (value.op is Op.MUL and not all(reads)) or (value.op is Op.DIV and not reads[1])
            if value.op not in LINEAR and not scaled:
                return False
            dependent.add(value.id)
    return True


# Both tensors are cached: creating one makes the host wait for a GPU.
@lru_cache(maxsize=8)
def ends(device: torch.device, dtype: torch.dtype) -> Tensor:
    """x = 0 and x = 1, [2, 1, 1]: what `project` is called with to get A and c."""
    with torch.inference_mode(False):
        return torch.tensor([0.0, 1.0], device=device, dtype=dtype).reshape(2, 1, 1)


@lru_cache(maxsize=8)
def _differences(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The matrix that maps the values at both ends to A and c."""
    with torch.inference_mode(False):
        return torch.tensor([[-1.0, 1.0], [1.0, 0.0]], device=device, dtype=dtype)


def slopes(fields: Sequence[Tensor]) -> list[Tensor]:
    """A and c of each field, from the result of `project` on `ends`."""
    return [part for field in fields for part in (_differences(field.device, field.dtype) @ field.squeeze(1)).unbind()]


def _fields(signature: Signature) -> list[int | None]:
    """For each field that project returns, the index of the input that holds it; None if it is compiled."""
    if InputKind.CONSTANT in signature.kinds:
        raise NotFusable("a field that is constant in time may depend on all of x, or be random")
    outside = [i for i, kind in enumerate(signature.kinds) if kind != InputKind.SEQUENCE]
    return [outside.index(i) + 1 if i in outside else None for i in range(len(signature.kinds))]


def _wide(cell: Cell, signature: Signature, more: Sequence[tuple[int, ...]]) -> Signature:
    """The signature with x in the place of the fields that are computed from it, and with more weights."""
    outside = [i for i, kind in enumerate(signature.kinds) if kind != InputKind.SEQUENCE]
    return signature._replace(
        inputs=(cell.input_size, *(signature.inputs[i] for i in outside)),
        kinds=(InputKind.SEQUENCE, *(signature.kinds[i] for i in outside)),
        weights=(*signature.weights, *more),
    )


def _tensors(cell: Cell, signature: Signature) -> dict[str, Tensor]:
    named = (*cell.named_parameters(), *cell.named_buffers())
    return {name: tensor for name, tensor in named if tensor.dtype == signature.dtype}


def projection_of(contents: Contents, tensors: Sequence[Tensor]) -> ProjectFunction:
    """`project` as a function of x, of the index of its first step, and of values for these tensors of the cell."""

    def project(x: Tensor, start: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        given = {id(tensor): parameter for tensor, parameter in zip(tensors, parameters, strict=True)}
        twin = CellCopy(contents, without_data(given))
        leaves: list[Tensor] = []
        flatten(twin.cell.project(x, start), leaves)
        twin.refuse_writes("project")
        return leaves

    return project
