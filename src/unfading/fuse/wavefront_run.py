"""Run the layers of a stack on chunks of time, forward and backward, in the order in which they can run side by side.

Each layer has a stream of the GPU. A chunk is projected there and runs as one launch of the loop in which each program has all
units of some rows: launches of that loop never wait for each other. Gradients of weights and parameters are sums over all time.
They are computed once per layer, as where layers run one after the other: those of parameters by projecting the whole sequence
again.

Memory that two streams use belongs to the stream of the caller. It is allocated before the streams of the layers begin, and
freed after the caller's stream has waited for all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.reset import with_resets
from unfading.fuse.fused import bind_inputs, check_tensors
from unfading.fuse.ir.program import InputKind, TensorKind
from unfading.fuse.operator import FusedLoop, LoopCall
from unfading.fuse.plan import Plan
from unfading.fuse.triton.kernel import GradientMemory, ReadyLoop, Tensors, TritonKernel
from unfading.fuse.triton.launch_settings import LaunchSettings
from unfading.loop_options import LoopOptions
from unfading.torch_state import traced

STREAMS = 32  # torch has no more of them

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
INPUT, INITIAL, NEXT, FINAL, SAVED = (
    TensorKind.INPUT, TensorKind.INITIAL, TensorKind.NEXT, TensorKind.FINAL, TensorKind.SAVED,
)  # fmt: skip
D_NEXT, D_FINAL, D_INITIAL, D_WEIGHT = TensorKind.D_NEXT, TensorKind.D_FINAL, TensorKind.D_INITIAL, TensorKind.D_WEIGHT
SHARED = InputKind.SHARED


class WaveLayer(NamedTuple):
    """One layer of a stack."""

    cell: Cell
    plan: Plan
    kernel: TritonKernel
    settings: dict[str, LaunchSettings]  # of its loops, by name


class Stack(NamedTuple):
    """A stack of layers, and how it runs over one batch of sequences."""

    layers: Sequence[WaveLayer]
    sizes: Sequence[tuple[int, int, int]]  # the numbers of states, of weights and of parameters of each layer
    bounds: Sequence[tuple[int, int]]  # the first step of each chunk, and that of the next one
    rows: int
    start: int
    lengths: Tensor | None  # [B]
    masks: Sequence[Tensor | None]  # of dropout, which the input of each layer is multiplied with
    autocast: torch.dtype | None  # None where it is off
    dots: str  # the precision of matrix products
    resets: Tensor | None = None  # [T, B], which the layers read behind their input

    @property
    def steps(self) -> int:
        return self.bounds[-1][1]

    def options(self) -> LoopOptions:
        """Those of a loop over the whole sequence."""
        return LoopOptions(self.lengths, dots=self.dots)

    def parts(self, values: Sequence[Any]) -> list[tuple[list[Any], list[Any], list[Any]]]:
        """For each layer, what belongs to its states, its weights and its parameters."""
        ends = list(accumulate((n for sizes in self.sizes for n in sizes), initial=0))
        groups = iter([list(values[a:b]) for a, b in pairwise(ends)])
        return list(zip(groups, groups, groups, strict=True))


# -- order --------------------------------------------------------------------------------------------------------------------


def diagonals(layers: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Every (layer, chunk), after those that it reads, one diagonal after the other."""
    for total in range(layers + chunks - 1):
        for layer in range(max(0, total - chunks + 1), min(layers, total + 1)):
            yield layer, total - layer


class LayerStreams:
    """A stream of the GPU for each layer; on a CPU none, and work is done in the order in which it is written."""

    def __init__(self, device: torch.device, layers: int):
        self.on_gpu = device.type == "cuda"
        self.events: dict[tuple[int, int], torch.cuda.Event] = {}
        if self.on_gpu:
            self.caller, self.streams = torch.cuda.current_stream(device), _streams(device)[:layers]

    def __enter__(self) -> "LayerStreams":
        """What follows waits for all earlier work of the caller."""
        if self.on_gpu:
            begin = self.caller.record_event()
            for stream in self.streams:
                stream.wait_event(begin)
        return self

    def __exit__(self, *error: object) -> None:
        """What follows in the caller's stream waits for all layers."""
        if self.on_gpu:
            for stream in self.streams:
                self.caller.wait_event(stream.record_event())

    def of(self, layer: int) -> AbstractContextManager[Any]:
        """A context in which work goes to the stream of a layer."""
        return torch.cuda.stream(self.streams[layer % STREAMS]) if self.on_gpu else nullcontext()

    def ended(self, layer: int, chunk: int) -> None:
        """The work of a layer on a chunk is complete."""
        if self.on_gpu:
            self.events[layer, chunk] = self.streams[layer % STREAMS].record_event()

    def wait(self, layer: int, other: int, chunk: int) -> None:
        """What follows in a layer waits for the work of another layer on a chunk."""
        if self.on_gpu and (other, chunk) in self.events:
            self.streams[layer % STREAMS].wait_event(self.events[other, chunk])


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


# -- the loops ----------------------------------------------------------------------------------------------------------------


class ForeignTensor(Exception):
    """A projection reads a tensor with a gradient that is neither its input nor a parameter of the cell."""


class WavefrontLoop(torch.autograd.Function):
    """(x; states, weights and parameters of every layer) -> (output of the last layer; final states of every layer)."""

    @staticmethod
    def forward(ctx: Any, stack: Stack, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        run = WavefrontRun(stack, x, tensors)
        results = run.forward(keep=True)
        ctx.run = run
        ctx.set_materialize_grads(False)
        # An error is raised if one of these has changed since. The run has its own references, without the graph.
        ctx.save_for_backward(x, *tensors, results[0])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors[:-1]
        wanted = ctx.needs_input_grad[1:]
        if all(d is None for d in gradients):
            return (None,) * (1 + len(wanted))
        if torch.is_grad_enabled() or traced():  # a second derivative may follow
            return (None, *_one_by_one(ctx.run.stack, x, tensors, gradients, wanted))
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        results = ctx.run.backward(gradients, wanted, again=again)
        if not again:
            ctx.run = None  # its memory
        return (None, *(d if want else None for d, want in zip(results, wanted, strict=True)))


class LayerMemory:
    """The tensors of one layer for the whole sequence, [T, B, n], and between the chunks, [chunks + 1, B, n]."""

    def __init__(self, stack: Stack, layer: WaveLayer, like: Tensor, *, keep: bool):
        T, B, kernel = stack.steps, stack.rows, layer.kernel
        blank = like.new_empty if stack.lengths is None else like.new_zeros
        self.trajectory = [blank((T, B, n)) for n in kernel.states]
        self.between = [like.new_empty((len(stack.bounds) + 1, B, n)) for n in kernel.states]
        self.saved = blank((T, B, kernel.saved)) if keep and kernel.saved else None
        # Without a reference to the tensor that is returned, which refers to the graph.
        self.next = [part.data for part in self.trajectory]

    def tensors(self, chunk: int, a: int, b: int) -> Tensors:
        """Those of a chunk, steps a..b, which both passes take."""
        tensors: Tensors = {(SAVED, 0): None if self.saved is None else self.saved[a:b]}
        for i, (part, between) in enumerate(zip(self.next, self.between, strict=True)):
            tensors[NEXT, i], tensors[INITIAL, i], tensors[FINAL, i] = part[a:b], between[chunk], between[chunk + 1]
        return tensors


class LayerGradients:
    """The gradients of one layer: what its backward loop writes, and the results."""

    def __init__(self, run: "WavefrontRun", index: int, d_finals: Sequence[Tensor | None], wanted: tuple[list[bool], ...]):
        stack, layer = run.stack, run.stack.layers[index]
        like, extent, kernel = run.like, (0, stack.steps, stack.rows), layer.kernel
        fields = [field.requires_grad for field in run.fields[index, 0]]
        _, self.wanted_weights, wanted_parameters = wanted
        self.memory: GradientMemory = kernel.blank_gradients(
            extent, like, stack.options(), fields, layer.settings["back"], len(stack.bounds)
        )
        self.tensors = self.memory.tensors()
        self.between = [torch.empty_like(between) for between in run.memory[index].between]
        for between, given in zip(self.between, d_finals, strict=True):
            between[-1] = 0.0 if given is None else given
        self.weights = [
            torch.empty_like(weight) if want else None
            for weight, want in zip(run.weights[index], self.wanted_weights, strict=True)
        ]
        self.parameters = [
            torch.empty_like(parameter) if want else None
            for parameter, want in zip(run.parameters[index], wanted_parameters, strict=True)
        ]
        self.reached = [False] * len(self.parameters)

    def results(self) -> list[Tensor | None]:
        """Of the states, the weights and the parameters."""
        parameters = zip(self.parameters, self.reached, strict=True)
        return [
            *(between[0].clone() for between in self.between),
            *self.weights,
            *(d if reached else None for d, reached in parameters),
        ]


class WavefrontRun:
    """A stack over one batch of sequences, forward and backward."""

    def __init__(self, stack: Stack, x: Tensor, tensors: Sequence[Tensor]):
        self.stack, self.x = stack, x
        parts = stack.parts(tensors)
        self.states = [[state.detach() for state in states] for states, _, _ in parts]
        self.weights = [[weight.detach() for weight in weights] for _, weights, _ in parts]
        # Leaves of the graph of the projections. Those of the caller have their own place in the caller's stream, for which
        # every chunk would wait.
        self.parameters = [[p.detach().requires_grad_(p.requires_grad) for p in own] for _, _, own in parts]
        pairs = zip(stack.layers, self.parameters, strict=True)
        self.cells = [with_parameters(layer.cell, parameters) for layer, parameters in pairs]
        self.like = self.states[0][0]
        self.inputs: dict[tuple[int, int], Tensor] = {}  # of each layer and chunk, as a leaf of the graph of its projection
        self.fields: dict[tuple[int, int], list[Tensor]] = {}  # what is projected from it
        self.shapes: dict[int, list[torch.Size]] = {}  # of the fields of each layer that were checked last
        # The steps that are left to each row at the beginning of a chunk.
        self.left = [None if stack.lengths is None else stack.lengths - a for a, _ in stack.bounds]

    def forward(self, *, keep: bool) -> tuple[Tensor, ...]:
        """The output of the last layer and the final states of all layers; with `keep`, for a gradient."""
        stack, name = self.stack, "train" if keep else "infer"
        self.memory = [LayerMemory(stack, layer, self.like, keep=keep) for layer in stack.layers]
        for memory, states in zip(self.memory, self.states, strict=True):
            for between, state in zip(memory.between, states, strict=True):
                between[0] = state
        loops = self._loops(name)
        with LayerStreams(self.like.device, len(stack.layers)) as streams:
            for index, chunk in diagonals(len(stack.layers), len(stack.bounds)):
                with streams.of(index):
                    streams.wait(index, index - 1, chunk)
                    self._forward_chunk(index, chunk, loops[index], keep)
                    streams.ended(index, chunk)
        output = self.memory[-1].trajectory[0]
        finals = [between[-1].clone() for memory in self.memory for between in memory.between]
        for memory in self.memory:
            memory.trajectory = []
        return (output, *finals)

    def _loops(self, name: str) -> list[ReadyLoop]:
        options, where = self.stack.options(), (0, self.like.device)
        layers = zip(self.stack.layers, self.weights, strict=True)
        return [ReadyLoop(layer.kernel, name, weights, options, layer.settings[name], where) for layer, weights in layers]

    def _forward_chunk(self, index: int, chunk: int, loop: ReadyLoop, keep: bool) -> None:
        stack, layer = self.stack, self.stack.layers[index]
        a, b = stack.bounds[chunk]
        x = self.memory[index - 1].next[0][a:b] if index else self.x[a:b].detach()
        mask = stack.masks[index]
        x = x if mask is None else x * mask[a:b]
        if keep:
            x = x.detach().requires_grad_(index > 0 or self.x.requires_grad)
        with torch.set_grad_enabled(keep):
            fields = _fields(stack, layer.plan, self.cells[index], x, a)
        shapes = [field.shape for field in fields]
        if shapes != self.shapes.get(index):
            check_tensors(layer.plan, layer.cell, [*fields, *self.states[index], *self.weights[index]])
            self.shapes[index] = shapes
        if keep:
            if chunk == 0:
                check_sources(fields, [x, *self.parameters[index]])
            self.inputs[index, chunk], self.fields[index, chunk] = x, fields
        tensors = self.memory[index].tensors(chunk, a, b)
        for i, field in enumerate(fields):
            tensors[INPUT, i] = field.detach()
        loop.run(tensors, self.left[chunk], (0, b - a, stack.rows))

    def backward(self, gradients: Sequence[Tensor | None], wanted: Sequence[bool], *, again: bool) -> list[Tensor | None]:
        """The gradients of x and of the states, weights and parameters of every layer.

        Args:
            gradients: of the output and of the final states.
            again: whether another backward pass may follow.
        """
        stack, like = self.stack, self.like
        blank = like.new_empty if stack.lengths is None else like.new_zeros
        d_finals = iter(gradients[1:])
        self.gradients = [
            LayerGradients(self, index, [next(d_finals) for _ in self.states[index]], parts)
            for index, parts in enumerate(stack.parts(wanted[1:]))
        ]
        # Of the input of each layer, and of the output of the last one.
        d_x = torch.empty_like(self.x, memory_format=torch.contiguous_format) if wanted[0] else None
        between = [blank((stack.steps, stack.rows, layer.kernel.states[0])) for layer in stack.layers[:-1]]
        self.arriving = [d_x, *between, None if gradients[0] is None else gradients[0].contiguous()]
        loops = self._loops("back")
        last = len(stack.layers) - 1, len(stack.bounds) - 1
        with LayerStreams(like.device, len(stack.layers)) as streams:
            for down, back in diagonals(len(stack.layers), len(stack.bounds)):
                index, chunk = last[0] - down, last[1] - back
                with streams.of(index):
                    streams.wait(index, index + 1, chunk)
                    self._backward_chunk(index, chunk, loops[index])
                    self._pass_down(index, chunk, again)
                    streams.ended(index, chunk)
                    if chunk == 0:
                        self._sum_weights(index)
                        self._sum_parameters(index)
        results = [d_x, *(d for layer in self.gradients for d in layer.results())]
        del self.gradients, self.arriving
        return results

    def _backward_chunk(self, index: int, chunk: int, loop: ReadyLoop) -> None:
        own, arriving = self.gradients[index], self.arriving[index + 1]
        a, b = self.stack.bounds[chunk]
        tensors = self.memory[index].tensors(chunk, a, b)
        for i, field in enumerate(self.fields[index, chunk]):
            tensors[INPUT, i] = field.detach()
        for key, d in own.tensors.items():
            if d is not None and key[0] == D_WEIGHT:
                lines = len(d) // len(self.stack.bounds)
                tensors[key] = d[chunk * lines : (chunk + 1) * lines]
            else:
                tensors[key] = None if d is None else d[a:b]
        for i, between in enumerate(own.between):
            tensors[D_NEXT, i], tensors[D_INITIAL, i], tensors[D_FINAL, i] = None, between[chunk], between[chunk + 1]
        tensors[D_NEXT, 0] = None if arriving is None else arriving[a:b]
        loop.run(tensors, self.left[chunk], (0, b - a, self.stack.rows))

    def _pass_down(self, index: int, chunk: int, again: bool) -> None:
        """From the gradients of the fields of a chunk to that of the input of the layer."""
        x, mask, steps = self.inputs[index, chunk], self.stack.masks[index], slice(*self.stack.bounds[chunk])
        if x.requires_grad:
            whole = self.arriving[index]
            assert whole is not None
            fields, arriving = self._with_gradients(index, self.fields[index, chunk], steps)
            (d,) = torch.autograd.grad(fields, x, arriving, allow_unused=True, retain_graph=again) if fields else (None,)
            if d is None:
                whole[steps].zero_()
            elif mask is None:
                whole[steps].copy_(d)
            else:
                torch.mul(d, mask[steps], out=whole[steps])
        if not again:
            del self.inputs[index, chunk]

    def _with_gradients(self, index: int, fields: Sequence[Tensor], steps: slice) -> tuple[list[Tensor], list[Tensor]]:
        """The fields of some steps that have a gradient, and their gradients."""
        kinds, own = self.stack.layers[index].plan.signature.kinds, self.gradients[index].memory.inputs
        pairs = [
            (field, d[steps].sum(1, keepdim=True) if kind == SHARED else d[steps])
            for field, d, kind in zip(fields, own, kinds, strict=True)
            if field.requires_grad and d is not None
        ]
        return [field for field, _ in pairs], [d for _, d in pairs]

    def _sum_weights(self, index: int) -> None:
        """The gradients of the weights of a step, over all time."""
        own, layer, memory = self.gradients[index], self.stack.layers[index], self.memory[index]
        tensors: Tensors = {**own.tensors, (SAVED, 0): memory.saved}
        for i, (part, between) in enumerate(zip(memory.next, memory.between, strict=True)):
            tensors[NEXT, i], tensors[INITIAL, i] = part, between[0]
        for i in {product.v.index for product in layer.kernel.outer if product.v.kind == INPUT}:
            chunks = [self.fields[index, chunk][i].detach() for chunk in range(len(self.stack.bounds))]
            tensors[INPUT, i] = torch.cat(chunks)
        weights, options = self.weights[index], self.stack.options()
        sums = layer.kernel.weight_gradients(weights, own.wanted_weights, tensors, own.memory, options)
        for d, total in zip(own.weights, sums, strict=True):
            if d is not None and total is not None:
                d.copy_(total)

    def _sum_parameters(self, index: int) -> None:
        """The gradients of the parameters of a projection, over all time."""
        stack, own, mask = self.stack, self.gradients[index], self.stack.masks[index]
        chosen = [i for i, d in enumerate(own.parameters) if d is not None]
        if not chosen:
            return
        x = self.memory[index - 1].next[0] if index else self.x.detach()
        with torch.enable_grad():
            x = x if mask is None else x * mask
            fields = _fields(stack, stack.layers[index].plan, self.cells[index], x, 0)
        fields, arriving = self._with_gradients(index, fields, slice(None))
        if fields:
            sums = torch.autograd.grad(fields, [self.parameters[index][i] for i in chosen], arriving, allow_unused=True)
            for i, total in zip(chosen, sums, strict=True):
                d = own.parameters[i]
                if d is not None and total is not None:
                    d.copy_(total)
                    own.reached[i] = True


def _fields(stack: Stack, cell_plan: Plan, cell: Cell, x: Tensor, first: int) -> list[Tensor]:
    """What the loop of a layer reads at every step: x, or its projection. `first` is the index of the first step of x."""
    if stack.resets is not None:
        x = with_resets(x, stack.resets[first : first + len(x)])
    if stack.autocast is None:
        return bind_inputs(cell_plan, cell, x, stack.start + first)
    # Also in the backward pass, where autocast is off.
    with torch.autocast(x.device.type, stack.autocast):
        fields = bind_inputs(cell_plan, cell, x, stack.start + first)
    with torch.autocast(x.device.type, enabled=False):
        return [field.to(cell_plan.signature.dtype) for field in fields]


def with_parameters(cell: Cell, parameters: Sequence[Tensor]) -> Cell:
    """A cell with other tensors in the place of its parameters, in the order of `cell.parameters()`."""
    given = {id(own): new for own, new in zip(cell.parameters(), parameters, strict=True)}
    copies: dict[int, nn.Module] = {}

    def twin(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            copies[id(module)] = other = type(module).__new__(type(module))
            vars(other).update(vars(module))
            own = module._parameters.items()
            vars(other)["_parameters"] = {name: None if p is None else given[id(p)] for name, p in own}
            vars(other)["_modules"] = {name: None if m is None else twin(m) for name, m in module._modules.items()}
        return copies[id(module)]

    return cast(Cell, twin(cell))


def check_sources(fields: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Raise ForeignTensor if a gradient of the fields reaches anything but these tensors, which are leaves of the graph."""
    leaves = {id(source) for source in sources}
    nodes = [field.grad_fn for field in fields if field.grad_fn is not None]
    visited = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable") and id(node.variable) not in leaves:
            raise ForeignTensor
        following = {after for after, _ in node.next_functions if after is not None} - visited
        visited |= following
        nodes += following


# -- second derivatives -------------------------------------------------------------------------------------------------------


def _one_by_one(
    stack: Stack, x: Tensor, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of x and of the tensors, of layers that run again one after the other, with a graph."""
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # New nodes: a tensor may be given twice, as a weight and as a parameter.
        arguments = [tensor.view_as(tensor) for tensor in (x, *tensors)]
        output, finals = arguments[0], []
        for index, (states, weights, parameters) in enumerate(stack.parts(arguments[1:])):
            layer, mask = stack.layers[index], stack.masks[index]
            cell = with_parameters(layer.cell, parameters)
            fields = _fields(stack, layer.plan, cell, output if mask is None else output * mask, 0)
            call = LoopCall(layer.plan.key, len(fields), len(states), len(weights), False, True, stack.dots)
            results = FusedLoop.apply(call, stack.lengths, *fields, *states, *weights)
            output = results[0]
            finals += results[len(states) : 2 * len(states)]
        pairs = [(y, d) for y, d in zip((output, *finals), gradients, strict=True) if d is not None]
        sources = [argument for argument, want in zip(arguments, wanted, strict=True) if want]
        outputs, arriving = zip(*pairs, strict=True)
        ds = iter(torch.autograd.grad(outputs, sources, arriving, create_graph=twice, allow_unused=True))
    return [next(ds) if want else None for want in wanted]
