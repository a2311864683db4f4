"""From a model to its stages: the programs of its normalisation, encoder, layers and head, for one sample at a time."""

import copy
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.wrap import WrapperCell, ZoneoutCell, outputs_first_part
from unfading.export.affine_projection import affine_fields, with_affine_fields
from unfading.export.fold import folded
from unfading.export.rebuild import rebuilt
from unfading.export.share import share_transposes
from unfading.export.stage import Array, Stage
from unfading.fuse.contents import Contents
from unfading.fuse.fused import bind_inputs, bind_weights
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Block, InputKind, Op, Program, Store, TensorKind, Value
from unfading.fuse.isolation import apart
from unfading.fuse.locality import check_local
from unfading.fuse.plan import PROGRAMS, Plan, plan
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.fuse.trace.projection import output_program
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent
from unfading.tasks.base import EveryStep, LastStep, MeanOverTime, OneHot, PooledOverTime
from unfading.tasks.scaling import Scale, Standardise

LOCAL = 1024  # steps of the sequence with which it is tested that a projection needs one step at a time
STEPS = 16384  # in half of which what depends on the index of the step alone must have settled
FAR = 1 << 20  # a step at which that is tested again


# The mean of all outputs, or the last one, the mean and the maximum, concatenated.
Pooling = Literal["mean", "pooled"]
POOLINGS: dict[type[nn.Module], Pooling] = {MeanOverTime: "mean", PooledOverTime: "pooled"}


class Exported(NamedTuple):
    """A model as a list of stages."""

    name: str
    stages: tuple[Stage, ...]
    tokens: Array | None  # of a model that reads tokens: the vector of each token, [symbols, n]
    pooling: Pooling | None  # what the head reads of all outputs so far; None if it reads one output

    @property
    def input_size(self) -> int:
        """Numbers of a sample; 1 for a token."""
        return self.stages[0].input_size if self.tokens is None else 1

    @property
    def output_size(self) -> int:
        return self.stages[-1].output_size

    @property
    def pooled_size(self) -> int:
        """Numbers of an output of the last layer, where the head reads several of them."""
        size = self.stages[-1].input_size
        return size // PooledOverTime.vectors if self.pooling == "pooled" else size


def exported(model: Model | Recurrent, scale: Scale | None = None, *, stream: bool = True) -> Exported:
    """The stages of a model, or of a recurrent layer without encoder and head.

    Args:
        model: the model; its parameters are read in float32 and in evaluation mode.
        scale: mean and spread with which samples are normalised, (x - mean) / spread; [1 or T, 1, I] as of a task.
        stream: whether the model must run one sample at a time. If not, a bidirectional layer has a stage per direction.
    """
    if not isinstance(model, Model | Recurrent):
        raise TypeError(f"model must be a Model or a recurrent layer; got {type(model).__name__}.")
    twin = model
    if model.training or any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()):
        twin = copy.deepcopy(model).cpu().float().eval()  # else the model itself, whose plans may exist already
    rnn = twin.rnn if isinstance(twin, Model) else twin
    name = type(rnn).__name__
    if stream and rnn.bidirectional:
        raise ValueError(
            f"{name} is bidirectional: its reverse direction begins at the end, which a stream of samples has not."
        )
    if rnn.frame_axes:
        raise ValueError(f"{name} reads frames, and an export is written for vectors.")
    if isinstance(twin, Model) and isinstance(twin.encoder, Standardise):
        if scale is not None:
            raise ValueError("the model standardises its samples itself; leave scale= out.")
        scale = twin.encoder.scale
    with torch.no_grad():
        tokens = _token_vectors(twin.encoder) if isinstance(twin, Model) else None
        stages = [] if scale is None else [_normalisation(scale, rnn.input_size, tokens is not None)]
        states = rnn.initial_states(1)
        for i, cell in enumerate(rnn.runners):
            depth, reverse = divmod(i, rnn.directions)
            stages.append(_layer(cell, states[i], f"layer{depth}" + "_reverse" * reverse))
        if isinstance(twin, Model):
            stages.append(_head(twin.head, rnn.output_size))
    pooling = POOLINGS.get(type(twin.head)) if isinstance(twin, Model) else None
    less = [folded(stage) for stage in stages]
    return Exported(name, tuple(share_transposes(stage) for stage in less) if stream else tuple(less), tokens, pooling)


# -- before and after the layers ----------------------------------------------------------------------------------------------


def _token_vectors(encoder: nn.Module) -> Array | None:
    """The vector of each token; None for an encoder that passes samples on."""
    if isinstance(encoder, nn.Identity | Standardise):
        return None
    if isinstance(encoder, OneHot):
        return _numbers(encoder.eye)
    if isinstance(encoder, nn.Embedding) and encoder.max_norm is None:
        return _numbers(encoder.weight)
    raise ValueError(
        f"the encoder {type(encoder).__name__} cannot be exported; wanted nn.Identity, OneHot or nn.Embedding. Apply it to the "
        " samples outside of the model."
    )


def _normalisation(scale: Scale, size: int, tokens: bool) -> Stage:
    if tokens:
        raise ValueError("scale= normalises samples, and this model reads tokens; leave it out.")
    mean, spread = (_numbers(part).reshape(-1, part.shape[-1]) for part in scale)
    if mean.shape != spread.shape or mean.shape[1] != size:
        raise ValueError(f"scale= takes mean and spread [1 or T, 1, {size}]; got {list(scale.mean.shape)}.")
    if not (np.isfinite(mean).all() and np.isfinite(spread).all() and (spread > 0).all()):
        raise ValueError("scale= takes finite numbers with a spread above 0; these are not.")
    b = Builder()
    x, means, factors = (b.leaf(TensorKind.INPUT, i, 0, size) for i in range(3))
    value = b.map(Op.MUL, b.map(Op.SUB, x, means), factors)
    kinds = (InputKind.SEQUENCE, InputKind.SHARED, InputKind.SHARED)
    program = _program(value, [size] * 3, kinds, [])
    return Stage("normalise", program, (), tables={1: mean, 2: 1 / spread})


def _head(head: nn.Module, size: int) -> Stage:
    answer = getattr(head, "answer", None)
    if not isinstance(head, LastStep | EveryStep | MeanOverTime | PooledOverTime) or not isinstance(answer, nn.Linear):
        raise ValueError(
            f"the head {type(head).__name__} cannot be exported; wanted LastStep, EveryStep, MeanOverTime or PooledOverTime "
            "with an nn.Linear. Export model.rnn, and compute the head outside."
        )
    size *= head.vectors
    b, weight = Builder(), _numbers(answer.weight)
    value = b.dot([(b.leaf(TensorKind.INPUT, 0, 0, size), Block(0, 0, len(weight), 0, size))])
    weights = [weight]
    if answer.bias is not None:
        weights.append(_numbers(answer.bias))
        value = b.map(Op.ADD, value, b.leaf(TensorKind.WEIGHT, 1, 0, len(weight)))
    return Stage("head", _program(value, [size], (InputKind.SEQUENCE,), weights), tuple(weights))


def _program(value: Value, inputs: list[int], kinds: tuple[InputKind, ...], weights: list[Array]) -> Program:
    """A program without states, whose output is this value."""
    widths = {(TensorKind.INPUT, i): n for i, n in enumerate(inputs)} | {(TensorKind.NEXT, 0): value.size}
    widths |= {(TensorKind.WEIGHT, i): weight.size for i, weight in enumerate(weights)}
    return Program((Store(TensorKind.NEXT, 0, 0, value),), widths, kinds)


# -- layers -------------------------------------------------------------------------------------------------------------------


def _layer(cell: Cell, state: tuple[Tensor, ...], name: str) -> Stage:
    rates = []
    while isinstance(cell, WrapperCell):
        rates += [cell.rate] if isinstance(cell, ZoneoutCell) else []  # in evaluation dropout does nothing
        cell = cell.cell
    cell_plan = _plan_of(cell)
    fields = {} if cell_plan.with_project else _affine_fields(cell, cell_plan)
    if not cell_plan.local:
        check_local([cell], LOCAL, "one sample at a time")
    weights = [_numbers(leaf) for leaf in bind_weights(cell_plan, cell, cell.weights())]
    parts = tuple(_numbers(part[0]) for part in state)
    names = tuple(getattr(state, "_fields", [f"state{i}" for i in range(len(state))]))
    program = PROGRAMS[cell_plan.key]
    for rate in reversed(rates):
        program = _with_zoneout(program, rate)
    if not outputs_first_part(cell) or cell.output_size != len(parts[0]):
        try:
            output, tensors = apart(lambda: output_program(Contents(cell), state))
        except NotFusable as error:
            raise ValueError(f"{type(cell).__name__}.output cannot be exported: {error}.") from None
        program = _with_output(program, output, len(weights))
        weights += [_numbers(tensor) for tensor in tensors]
    stage = Stage(name, program, tuple(weights), parts, names, _tables(cell, cell_plan))
    return stage if cell_plan.with_project else with_affine_fields(stage, cell_plan.signature.kinds, fields, cell.input_size)


def _with_zoneout(step: Program, rate: float) -> Program:
    """The program of a step with zoneout in evaluation: rate * state + (1 - rate) * the state after the step."""
    b = Builder()
    new: dict[int, Value] = {}
    for value in step.values():
        new[value.id] = rebuilt(b, value, new)
    stores = []
    for store in step.stores:
        before = b.leaf(TensorKind.STATE, store.index, store.start, store.start + store.value.size)
        after = b.map(Op.ADD, b.map(Op.MUL, rate, before), b.map(Op.MUL, 1 - rate, new[store.value.id]))
        stores.append(store._replace(value=after))
    return step._replace(stores=tuple(stores))


def _with_output(step: Program, output: Program, weights: int) -> Program:
    """The program of a step and of the output that reads the state after it, whose weights are numbered from `weights` on."""
    b = Builder()
    new: dict[int, Value] = {}
    for value in step.values():
        new[value.id] = rebuilt(b, value, new)
    stores = [store._replace(value=new[store.value.id]) for store in step.stores]
    count = sum(kind is TensorKind.STATE for kind, _ in step.widths)
    states = [b.cat([store.value for store in stores if store.index == i], 0) for i in range(count)]
    new = {}
    for value in output.values():
        leaf = value.leaf if value.op is Op.LEAF else None
        if leaf is not None and leaf.kind is TensorKind.INPUT:
            new[value.id] = b.slice(states[leaf.index], 0, leaf.start, leaf.stop)
        elif leaf is not None:
            new[value.id] = b.leaf(TensorKind.WEIGHT, weights + leaf.index, leaf.start, leaf.stop)
        elif value.op is Op.DOT:
            moved = [block._replace(weight=weights + block.weight) for block in value.blocks]
            new[value.id] = b.dot(list(zip((new[arg.id] for arg in value.args), moved, strict=True)))
        else:
            new[value.id] = rebuilt(b, value, new)
    stores += [store._replace(index=count, value=new[store.value.id]) for store in output.stores]
    more = {(TensorKind.WEIGHT, weights + i): n for (kind, i), n in output.widths.items() if kind is TensorKind.WEIGHT}
    width = output.widths[TensorKind.NEXT, 0]
    return step._replace(stores=tuple(stores), widths={**step.widths, **more, (TensorKind.NEXT, count): width})


def _plan_of(cell: Cell) -> Plan:
    name, result = type(cell).__name__, plan(cell)
    if isinstance(result, Refusal):
        raise ValueError(f"{name} cannot be exported: {result}.")
    assert isinstance(result, Plan)  # cells over frames were refused before
    return result


def _affine_fields(cell: Cell, cell_plan: Plan) -> dict[int, tuple[Array, Array]]:
    fields = affine_fields(cell, cell_plan)
    if fields is None:
        raise ValueError(
            f"{type(cell).__name__} cannot be exported: its project uses operations that a compiled step does not have, or "
            "needs more than one sample at a time, and it is not affine in the sample."
        )
    return fields


def _tables(cell: Cell, cell_plan: Plan) -> dict[int, Array]:
    """The inputs that depend on the index of the step alone: each [P, n], constant from row P - 1 on."""
    kinds = cell_plan.signature.kinds
    tables: dict[int, Array] = {}
    if InputKind.SHARED not in kinds:
        return tables
    ranges = [(0, STEPS), (FAR, 2)]
    first, far = (bind_inputs(cell_plan, cell, torch.zeros(n, 1, cell.input_size), start) for start, n in ranges)
    for i, kind in enumerate(kinds):
        if kind is InputKind.SHARED:
            rows, last = _numbers(first[i][:, 0]), _numbers(far[i][:, 0])
            # Equal up to rounding: vector instructions and those for the rest of an array round differently.
            before = np.flatnonzero(~np.isclose(rows, last[-1], rtol=1e-6, atol=0.0).all(axis=1))
            length = int(before[-1]) + 2 if len(before) else 1
            if length > STEPS // 2:
                raise ValueError(
                    f"{type(cell).__name__} cannot be exported: an input that depends on the index of the step still "
                    f"changes after {STEPS // 2} steps, and a table of it must end."
                )
            tables[i] = rows[:length]
    return tables


def _numbers(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()
