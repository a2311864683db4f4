"""Work that can be done when a model is exported, taken out of the program of a stage.

`fold_constants` replaces what depends on the weights alone, such as the sigmoid of a parameter, by its value.
`fold_affine` replaces what is affine in the input of the stage, such as P (W x + b) with a low-rank P, by one product

    A x + c        with  c = f(0)  and  A e_i = f(e_i) - f(0)

where that takes fewer numbers.
"""

from dataclasses import replace

import numpy as np
import torch

from unfading.export.int8 import block_entries
from unfading.export.matrix_storage import numbers_of
from unfading.export.rebuild import rebuilt
from unfading.export.stage import Array, Stage
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.interpret import evaluate
from unfading.fuse.ir.passes import join_dots
from unfading.fuse.ir.program import NUMBERS, VIEWS, Block, Op, Program, TensorKind, Value
from unfading.fuse.trace.projection import LINEAR

FOR_GRADIENTS = frozenset([Op.STOP, Op.COPY, Op.WITH_GRADIENT])  # the value of each is that of its first argument


def folded(stage: Stage) -> Stage:
    """The same stage with less to compute at each step."""
    stage = fold_affine(fold_constants(_settled_tables(stage)))
    read = stage.program.reads(TensorKind.INPUT)
    return replace(stage, tables={i: table for i, table in stage.tables.items() if i in read})


def _settled_tables(stage: Stage) -> Stage:
    """The same stage with tables of one row as weights."""
    single = {i: table for i, table in stage.tables.items() if len(table) == 1}
    if not single:
        return stage
    weights, at = list(stage.weights), {}
    for i, table in single.items():
        at[i] = len(weights)
        weights.append(table[0])
    rewriter = _Rewriter(stage)
    for value in rewriter.order:
        leaf = value.leaf if value.op is Op.LEAF else None
        if leaf is not None and leaf.kind is TensorKind.INPUT and leaf.index in at:
            rewriter.new[value.id] = rewriter.builder.leaf(TensorKind.WEIGHT, at[leaf.index], leaf.start, leaf.stop)
        else:
            rewriter.rebuild(value)
    tables = {i: table for i, table in stage.tables.items() if i not in single}
    return replace(stage, program=rewriter.program(weights), weights=tuple(weights), tables=tables)


class _Rewriter:
    """A new program, value by value."""

    def __init__(self, stage: Stage):
        self.stage, self.builder = stage, Builder()
        self.order = stage.program.values()
        self.new: dict[int, Value] = {}

    def rebuild(self, value: Value) -> None:
        """The same operation on the new arguments."""
        if value.op in FOR_GRADIENTS:
            self.new[value.id] = self.builder.expand(self.new[value.args[0].id], value.shape)
        else:
            self.new[value.id] = rebuilt(self.builder, value, self.new)

    def program(self, weights: list[Array]) -> Program:
        """The program, with dots that are summed joined."""
        program = self.stage.program
        stores = tuple(store._replace(value=self.new[store.value.id]) for store in program.stores)
        widths = {key: width for key, width in program.widths.items() if key[0] is not TensorKind.WEIGHT}
        widths |= {(TensorKind.WEIGHT, i): weight.size for i, weight in enumerate(weights)}
        return join_dots(self.builder, program._replace(stores=stores, widths=widths))


def _entries(stage: Stage, value: Value, results: dict[int, torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """A value that depends on weights, in float64."""
    if value.op is Op.LEAF:
        return weights[value.leaf.index].reshape(-1)[value.leaf.start : value.leaf.stop]
    if value.op in NUMBERS:
        return torch.tensor(value.number if value.op is Op.CONST else 0.0, dtype=torch.float64)
    return evaluate(value, [results[arg.id] for arg in value.args], weights)


def fold_constants(stage: Stage) -> Stage:
    """The same stage with values that depend on weights alone as weights, and those of one entry as numbers."""
    rewriter, weights = _Rewriter(stage), list(stage.weights)
    tensors = [torch.from_numpy(weight) for weight in weights]
    constant: dict[int, torch.Tensor] = {}
    for value in rewriter.order:
        is_leaf = value.op is Op.LEAF and value.leaf.kind is TensorKind.WEIGHT
        if not (is_leaf or value.op in NUMBERS or (value.args and all(arg.id in constant for arg in value.args))):
            rewriter.rebuild(value)
            continue
        result = constant[value.id] = _entries(stage, value, constant, tensors)
        b = rewriter.builder
        if value.size == 1 and value.op not in NUMBERS:
            rewriter.new[value.id] = b.expand(b.const(float(result)), value.shape)
        elif is_leaf or value.op in NUMBERS or value.op in VIEWS:
            rewriter.rebuild(value)
        else:
            weights.append(result.reshape(-1).numpy())
            flat = b.leaf(TensorKind.WEIGHT, len(weights) - 1, 0, value.size)
            rewriter.new[value.id] = b.reshape(flat, value.shape)
    return stage.with_program(rewriter.program(weights), tuple(weights))


def fold_affine(stage: Stage) -> Stage:
    """The same stage with values that are affine in its input as one product each, where that takes fewer weights."""
    order, size = stage.program.values(), stage.input_size
    affine = _affine(order)
    stored = {store.value.id for store in stage.program.stores}
    outside = {arg.id for value in order if value.id not in affine for arg in value.args} | stored
    tops = [value for value in order if value.id in affine and value.id in outside and value.op not in (Op.LEAF, *VIEWS)]
    blocks = {block for value in order if value.id in affine and value.op is Op.DOT for block in value.blocks}
    used_elsewhere = {block for value in order if value.id not in affine and value.op is Op.DOT for block in value.blocks}
    now = sum(numbers_of(block_entries(stage, block)) for block in blocks - used_elsewhere)
    depth = max((len(value.blocks) for value in order if value.id in affine and value.op is Op.DOT), default=0)
    if depth == 0 or any(len(value.shape) != 1 for value in tops) or sum(value.size for value in tops) * size > now:
        return stage
    if len(blocks) == len(tops):  # one product each already
        return stage
    rewriter, weights = _Rewriter(stage), list(stage.weights)
    at_ends = _at_ends(stage, order, affine)
    b, x = rewriter.builder, rewriter.builder.leaf(TensorKind.INPUT, 0, 0, size)
    for value in order:
        if value not in tops:
            rewriter.rebuild(value)
            continue
        ends = at_ends[value.id].expand(size + 1, -1).numpy()
        weights += [np.ascontiguousarray((ends[1:] - ends[0]).T), ends[0]]
        product = b.dot([(x, Block(len(weights) - 2, 0, value.size, 0, size))])
        start = b.leaf(TensorKind.WEIGHT, len(weights) - 1, 0, value.size)
        rewriter.new[value.id] = b.map(Op.ADD, product, start) if ends[0].any() else product
    return stage.with_program(rewriter.program(weights), tuple(weights))


def _affine(order: list[Value]) -> set[int]:
    """The values that depend on input 0 and on weights alone, and are affine in the input."""
    affine: set[int] = set()
    constant: set[int] = set()
    for value in order:
        reads = [arg.id in affine for arg in value.args]
        if value.op is Op.LEAF:
            if value.leaf.kind is TensorKind.WEIGHT:
                constant.add(value.id)
            elif value.leaf.kind is TensorKind.INPUT and value.leaf.index == 0:
                affine.add(value.id)
        elif value.op in NUMBERS or all(arg.id in constant for arg in value.args):
            constant.add(value.id)
        elif all(arg.id in constant or arg.id in affine for arg in value.args):
            scaled = (value.op is Op.MUL and not all(reads)) or (value.op is Op.DIV and not reads[1])
            if value.op in LINEAR or scaled:
                affine.add(value.id)
    return affine


def _at_ends(stage: Stage, order: list[Value], affine: set[int]) -> dict[int, torch.Tensor]:
    """The affine values at x = 0 and at each unit vector, [I + 1, n]."""
    size = stage.input_size
    ends = torch.cat([torch.zeros(1, size, dtype=torch.float64), torch.eye(size, dtype=torch.float64)])
    weights = [torch.from_numpy(weight) for weight in stage.weights]
    results: dict[int, torch.Tensor] = {}
    for value in order:
        if value.op is Op.LEAF and value.leaf.kind is TensorKind.INPUT and value.leaf.index == 0:
            results[value.id] = ends[:, value.leaf.start : value.leaf.stop]
        elif value.id in affine or all(arg.id in results for arg in value.args):
            if value.op is Op.LEAF and value.leaf.kind is not TensorKind.WEIGHT:
                continue
            results[value.id] = _entries(stage, value, results, weights)
    return results
