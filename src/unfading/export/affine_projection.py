"""A projection that the compiler does not have, but that is affine in the sample: x A + c, whatever computes it.

The incremental RNN of full rank builds its matrix P = I + N inside `project`. The compiler has no matrices that are computed at
each call, but the exported model needs only what they give:

    field(x) = x A + c        with  c = field(0)  and  e_i A = field(e_i) - field(0)

That a projection is affine is tested on random samples of many sizes, in float64.
"""

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from unfading.cells.base import Cell
from unfading.export.rebuild import rebuilt
from unfading.export.stage import Array, Stage
from unfading.fuse.fused import bind_inputs
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Block, InputKind, Op, TensorKind, Value
from unfading.fuse.plan import Plan

SIZES = (1e-3, 1.0, 30.0, 1e3)  # of the random samples
ROWS = 64  # random samples of each size
TOLERANCE = 1e-9  # of the largest entry, in float64


def affine_fields(cell: Cell, cell_plan: Plan) -> dict[int, tuple[Array, Array]] | None:
    """For each field of a projection that depends on x, A [n, I] and c [n]; None if one is not affine in x."""
    if InputKind.CONSTANT in cell_plan.signature.kinds:
        return None
    twin, size = copy.deepcopy(cell).double(), cell.input_size
    generator = torch.Generator().manual_seed(0)
    ends = torch.cat([torch.zeros(1, size), torch.eye(size)]).double()
    given = [factor * torch.randn(ROWS, size, generator=generator, dtype=torch.float64) for factor in SIZES]
    x = torch.cat([ends, *given])
    fields = bind_inputs(cell_plan, twin, x.unsqueeze(0), 0)
    result: dict[int, tuple[Array, Array]] = {}
    for i, kind in enumerate(cell_plan.signature.kinds):
        if kind is InputKind.SEQUENCE:
            field = fields[i][0]
            c, A = field[0], field[1 : 1 + size] - field[0]
            if not _equal(field, x @ A + c, x):
                return None
            result[i] = (np.ascontiguousarray(A.T.numpy()), c.numpy())
    return result


def _equal(field: Tensor, affine: Tensor, x: Tensor) -> bool:
    """Whether two fields are equal to rounding, each row in relation to the size of its sample."""
    size = torch.maximum(affine.abs().amax(1), x.abs().amax(1) * affine.abs().max() / x.abs().max())
    return bool(((field - affine).abs().amax(1) <= TOLERANCE * (1.0 + size)).all())


def with_affine_fields(stage: Stage, kinds: tuple[InputKind, ...], fields: dict[int, tuple[Array, Array]], size: int) -> Stage:
    """The stage of a step that reads the fields of a projection, as one that reads the sample x [size]."""
    b, weights = Builder(), list(stage.weights)
    x = b.leaf(TensorKind.INPUT, 0, 0, size)
    projected: dict[int, Value] = {}
    for i, (A, c) in fields.items():
        weights += [A, c]
        product = b.dot([(x, Block(len(weights) - 2, 0, len(A), 0, size))])
        projected[i] = b.map(Op.ADD, product, b.leaf(TensorKind.WEIGHT, len(weights) - 1, 0, len(c)))
    shared = {i: 1 + place for place, i in enumerate(i for i in range(len(kinds)) if i not in fields)}
    new: dict[int, Value] = {}
    for value in stage.program.values():
        leaf = value.leaf if value.op is Op.LEAF else None
        if leaf is not None and leaf.kind is TensorKind.INPUT and leaf.index in projected:
            new[value.id] = b.slice(projected[leaf.index], 0, leaf.start, leaf.stop)
        elif leaf is not None and leaf.kind is TensorKind.INPUT:
            new[value.id] = b.leaf(TensorKind.INPUT, shared[leaf.index], leaf.start, leaf.stop)
        else:
            new[value.id] = rebuilt(b, value, new)
    widths = {key: width for key, width in stage.program.widths.items() if key[0] not in (TensorKind.INPUT, TensorKind.WEIGHT)}
    widths |= {(TensorKind.WEIGHT, i): weight.size for i, weight in enumerate(weights)}
    widths |= {(TensorKind.INPUT, 0): size}
    widths |= {(TensorKind.INPUT, place): stage.program.widths[TensorKind.INPUT, i] for i, place in shared.items()}
    program = stage.program._replace(
        stores=tuple(store._replace(value=new[store.value.id]) for store in stage.program.stores),
        widths=widths,
        kinds=(InputKind.SEQUENCE, *(kinds[i] for i in shared)),
    )
    tables = {shared[i]: table for i, table in stage.tables.items()}
    return replace(stage, program=program, weights=tuple(weights), tables=tables)
