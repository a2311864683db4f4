"""From a cell to its program: run `step` once, and `project` where possible, on tensors without data.

Both run on meta tensors under a dispatch mode that records each operation as a value of the program. Operations that the
language does not have are refused, with the line of the user's file. So is everything that would make the compiled step a
different function from the written one: writing in place, random numbers, a branch on values, a tensor that is neither an
input, nor a state, nor a weight.

`project` is compiled into the loop together with the step if it is written in the same language. Then its result for the
whole sequence, often four times the size of the output, never exists. Otherwise it runs before the loop.
"""

import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.passes import join_dots
from unfading.fuse.ir.program import InputKind, Op, Program, Store, TensorId, TensorKind, Value, pieces_of
from unfading.fuse.refusal import NotFusable
from unfading.fuse.trace import aten
from unfading.fuse.trace.values import (
    EXAMPLES,
    Call,
    Example,
    Kernels,
    MatrixView,
    Moved,
    Opaque,
    RowValue,
    Traced,
    is_integer,
    largest_whole,
)
from unfading.source_lines import definition_line, first_line, user_line

Tensors: TypeAlias = Sequence[Tensor]
StepFunction: TypeAlias = Callable[[Tensors, Tensors, Tensors], Any]  # step(inputs, states, weights) -> new states
ProjectFunction: TypeAlias = Callable[[Tensor, int, Tensors], Tensors]  # project(x, start, parameters) -> fields of the inputs


class Signature(NamedTuple):
    """The tensors that a compiled loop takes: inputs by width and kind, states by width, weights by shape."""

    inputs: tuple[int, ...]
    kinds: tuple[InputKind, ...]  # of the inputs
    states: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


class Recorder(TorchDispatchMode):
    """Records each operation on known tensors as a value.

    Args:
        builder: creates the values.
        dtype: of the cell.
        example: whose sizes tell the axes of rows from those of features.
        lenient: record unsupported operations as opaque; an error is raised only if the program depends on them.
    """

    def __init__(self, builder: Builder, dtype: torch.dtype, example: Example, *, lenient: bool = False):
        super().__init__()
        self.example = example
        self.builder = builder
        self.dtype = dtype
        self.lenient = lenient
        self.columns: list[int] = []  # of each weight, as a matrix
        self.values: dict[int, tuple[Tensor, Traced]] = {}  # by id; the tensor is held, so that no other gets its id

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here runs under torch.compile. True would make torch import its compiler, which takes two seconds.
        return False

    def name(self, tensor: Tensor, value: Traced) -> Tensor:
        """Record what a tensor stands for."""
        self.values[id(tensor)] = (tensor, value._replace(dtype=tensor.dtype) if isinstance(value, RowValue) else value)
        return tensor

    def value(self, tensor: Tensor) -> Traced | None:
        """What a tensor stands for; None for one that was not recorded."""
        entry = self.values.get(id(tensor))
        return None if entry is None else entry[1]

    def rows(self, value: Value, *lead: int) -> Tensor:
        """A tensor that stands for a value: these axes, then the features."""
        return self.name(tensor_without_data((*lead, *value.shape), self.dtype), RowValue(value, len(lead)))

    def weight(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor that stands for a weight."""
        flat = self.builder.leaf(TensorKind.WEIGHT, index, 0, math.prod(shape))
        self.columns.append(shape[-1] if shape else 1)
        if len(shape) == 2:
            return self.name(tensor_without_data(shape, self.dtype), MatrixView(index, flat, shape, 0, shape[0], 0, shape[1]))
        return self.name(tensor_without_data(shape, self.dtype), RowValue(self.builder.reshape(flat, shape), 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")  # a new tensor has no data either: it may not fit into memory
        if func._schema.is_mutable:
            self.refuse(f"{packet} writes into a tensor; a step must be pure")
        leaves, tree = _pytree.tree_flatten((args, kwargs))
        reason = self._unsupported(func, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        if reason is None and packet not in aten.RULES:
            # torch differentiates some operations as compositions; a decomposition below may still call them whole.
            simpler = func.decompose if func._can_decompose() else aten.decompositions().get(func)
            if simpler is not None:
                with self:
                    return simpler(*args, **kwargs)
            reason = _no_rule(packet)
        if packet is torch.ops.aten.unbind and args[0].shape[args[1] if len(args) > 1 else 0] in self.example.sizes:
            self.refuse(f"{packet} runs along the batch or time; rows do not mix")  # before it makes a million tensors
        if reason is not None and not self.lenient:
            self.refuse(reason)
        if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in leaves):  # a number as a tensor
            without_data = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = _pytree.tree_unflatten(without_data, tree)
        out = func(*args, **kwargs)
        result = self._by_rule(func, leaves, tree, out) if reason is None else Opaque(reason)
        self._name_results(packet, _tensors(out), result)
        return out

    def _unsupported(self, func: Any, tensors: Tensors) -> str | None:
        """Why an operation on these tensors cannot be recorded, whatever it computes."""
        packet = func.overloadpacket
        if torch.Tag.nondeterministic_seeded in func.tags:
            return f"{packet} draws random numbers; draw them in project, which runs once for the whole sequence"
        for tensor in tensors:
            value = self.value(tensor)
            if isinstance(value, Opaque):
                return value.reason
            if value is None:
                if packet is not torch.ops.aten.lift_fresh or tensor.numel() != 1:
                    shape = list(tensor.shape)
                    return (
                        f"{packet} reads a tensor {shape} that is not among inputs, state and weights; return it from weights()"
                    )
                call = Call(self.builder, packet, (), {}, (), tensor, self.dtype, self.example, self.columns)
                self.name(tensor, call.constant(tensor.detach()))
        return None

    def _name_results(self, packet: Any, tensors: Tensors, result: Any) -> None:
        """Record what the tensors that an operation returned stand for."""
        for tensor, value in zip(tensors, result if isinstance(result, list) else [result] * len(tensors), strict=True):
            mismatch = self._mismatch(packet, tensor, value)
            self.name(tensor, value if mismatch is None else self._opaque(mismatch))

    def _by_rule(self, func: Any, leaves: Sequence[Any], tree: _pytree.TreeSpec, out: Any) -> Any:
        """The result of an operation by its rule: one traced value, or a list of them."""
        packet = func.overloadpacket
        traced = [self.value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = _pytree.tree_unflatten(traced, tree)
        tensors, _ = _pytree.tree_unflatten(list(leaves), tree)
        call = Call(self.builder, packet, args, kwargs, tensors, out, self.dtype, self.example, self.columns)
        try:
            number = _number(func, leaves, traced, tree)
            result = aten.RULES[packet](call) if number is None else call.constant(number)
        except NotFusable as error:
            return self._opaque(error.refusal.reason)
        if packet in aten.MOVES and isinstance(args[0], RowValue) and args[0].number is not None and number is None:
            several = result if isinstance(result, list) else [result]
            result = [row._replace(number=args[0].number) for row in several] if isinstance(result, list) else several[0]
        if torch.is_grad_enabled():
            return result
        # Inside the user's own no_grad.
        stopped = [_stopped(self.builder, r) for r in (result if isinstance(result, list) else [result])]
        return stopped if isinstance(result, list) else stopped[0]

    def _mismatch(self, packet: Any, tensor: Tensor, value: Traced) -> str | None:
        """Why a value is not the tensor of torch: it must be the value of one row, in one precision."""
        if isinstance(value, Moved) and tensor.shape[: value.at] + tensor.shape[value.at + 1 :] != value.value.shape:
            return f"{packet} gives {self._shape(tensor)}, which mixes rows of the batch"
        if not isinstance(value, RowValue):
            return None
        rows, features = tuple(tensor.shape[: value.lead]), tuple(tensor.shape[value.lead :])
        example = self.example
        if features != value.value.shape or rows not in example.row_shapes or not example.sizes.keys().isdisjoint(features):
            return f"{packet} gives {self._shape(tensor)}, which mixes rows of the batch"
        if tensor.dtype in (self.dtype, torch.bool) or value.number is not None:
            return None
        if not is_integer(tensor.dtype):
            return aten.other_type(packet, tensor.dtype, self.dtype)
        if largest_whole(value.value) > 2 / torch.finfo(self.dtype).eps:
            return f"{packet} computes with {tensor.dtype} too large for {self.dtype}; convert to {self.dtype} before it"
        return None

    def _opaque(self, reason: str) -> Opaque:
        """An opaque value for a lenient recorder; a refusal otherwise."""
        return Opaque(reason) if self.lenient else self.refuse(reason)

    def _shape(self, tensor: Tensor) -> str:
        return f"[{', '.join(self.example.sizes.get(n, str(n)) for n in tensor.shape)}]"

    def kind(self, output: Any) -> str:
        """What a step has returned, in words."""
        return f"{output.dtype} {self._shape(output)}" if isinstance(output, Tensor) else type(output).__name__

    def refuse(self, reason: str) -> NoReturn:
        """Raise NotFusable with the line of the user's file."""
        raise NotFusable(reason, user_line(traceback.extract_stack(sys._getframe(1))))


def trace(step: StepFunction, signature: Signature) -> Program:
    """The program of a step, which takes and returns flat sequences of tensors."""

    def program(example: Example) -> Program:
        recorder = Recorder(builder := Builder(), signature.dtype, example)
        leaves = [builder.leaf(TensorKind.INPUT, i, 0, n) for i, n in enumerate(signature.inputs)]
        weights = [recorder.weight(i, shape) for i, shape in enumerate(signature.weights)]
        return _step_program(recorder, step, leaves, weights, signature)

    reason = "the step computes with the batch size or the number of steps, which a compiled step does not know"
    return _same_program(program, step, reason)


def _same_program(trace_on: Callable[[Example], Program], step: StepFunction, reason: str) -> Program:
    """The program of all examples. Raises NotFusable for the reason where it depends on the example."""
    first, *others = [trace_on(example) for example in EXAMPLES]
    text = str(first)
    if all(str(other) == text for other in others):
        return first
    if str(trace_on(EXAMPLES[0])) != text:
        raise NotFusable("two calls of the step give two different programs; a step must be pure", definition_line(step))
    raise NotFusable(reason, definition_line(step))


def trace_with_project(
    project: ProjectFunction, step: StepFunction, signature: Signature, fields: Sequence[int | None], step_weights: int
) -> Program:
    """The program of project and step together; raises NotFusable where project is not in the language.

    Args:
        signature: its first input is x, the others are the fields of the inputs that are not compiled; its weights are those
            of the step, then the parameters of `project`.
        fields: for each field that `project` returns, the index of the input that holds it, or None if it is compiled.
        step_weights: how many of the weights belong to the step.
    """

    def program(example: Example) -> Program:
        recorder, weights, leaves = projected_values(project, signature, fields, step_weights, example)
        return _step_program(recorder, step, leaves, weights[:step_weights], signature)

    return _same_program(program, step, "project or step computes with the number of steps, of rows, or of the first step")


def projected_values(
    project: ProjectFunction, signature: Signature, fields: Sequence[int | None], step_weights: int, example: Example
) -> tuple[Recorder, list[Tensor], list[Value]]:
    """The recorder, all weights, and the value of each field that `project` returns; arguments as `trace_with_project`."""
    recorder = Recorder(builder := Builder(), signature.dtype, example, lenient=True)
    T, B, start = example
    weights = [recorder.weight(i, shape) for i, shape in enumerate(signature.weights)]
    x = recorder.rows(builder.leaf(TensorKind.INPUT, 0, 0, signature.inputs[0]), T, B)
    tensors = recorded(recorder, partial(project, x, start, weights[step_weights:]))
    own_gradients_refused(tensors)
    leaves = []
    for tensor, index in zip(tensors, fields, strict=True):
        row = recorder.value(tensor)
        if index is not None and _depends_on(tensor, x):
            raise NotFusable("a field that all batch rows share depends on x, hence on one row or on all of them")
        if index is not None:
            leaves.append(builder.leaf(TensorKind.INPUT, index, 0, signature.inputs[index]))
        elif isinstance(row, RowValue) and tensor.shape[:2] == (T, B) and tensor.dim() == 3:
            leaves.append(row.value)
        else:
            raise NotFusable("project uses operations that a fused step does not have")
    recorder.lenient = False  # for the step
    return recorder, weights, leaves


def _step_program(
    recorder: Recorder, step: StepFunction, inputs: Sequence[Value], weights: Tensors, signature: Signature
) -> Program:
    """The program of a step on these values of inputs."""
    builder = recorder.builder
    leaves = [builder.leaf(TensorKind.STATE, i, 0, n) for i, n in enumerate(signature.states)]
    batch = recorder.example.batch
    states = [recorder.rows(leaf, batch) for leaf in leaves]
    rows = [recorder.rows(value, batch) for value in inputs]
    outputs = recorded(recorder, lambda: step(rows, states, weights))
    own_gradients_refused(outputs)
    if any(tensor._backward_hooks for tensor, _ in recorder.values.values()):
        reason = "the step registers a hook on a gradient, which a compiled step would not call"
        raise NotFusable(reason, definition_line(step))
    stores: list[Store] = []
    for i, (output, width) in enumerate(zip(outputs, signature.states, strict=True)):
        row = recorder.value(output) if isinstance(output, Tensor) else None
        if not isinstance(row, RowValue) or output.shape != (batch, width) or output.dtype != signature.dtype:
            got = recorder.kind(output)
            reason = f"the step must return its states as tensors {signature.dtype} [B, {width}]; part {i} is {got}"
            raise NotFusable(reason, definition_line(step))
        value = builder.expand(row.value, (width,))
        for start, _, piece in pieces_of(value.args if value.op is Op.CAT else (value,), 0):
            stores.append(Store(TensorKind.NEXT, i, start, piece))
    return join_dots(builder, Program(tuple(stores), _widths(signature), signature.kinds))


def _widths(signature: Signature) -> dict[TensorId, int]:
    widths: dict[TensorId, int] = {(TensorKind.INPUT, i): n for i, n in enumerate(signature.inputs)}
    for i, n in enumerate(signature.states):
        widths[TensorKind.STATE, i] = widths[TensorKind.NEXT, i] = n
    for i, shape in enumerate(signature.weights):
        widths[TensorKind.WEIGHT, i] = math.prod(shape)
    return widths


def recorded(recorder: Recorder, function: Callable[[], Any]) -> Any:
    """The result of a function under the recorder; its errors become refusals."""
    try:
        with torch.enable_grad(), recorder:
            return function()
    except NotFusable:
        raise
    except Exception as error:
        raise NotFusable(first_line(error), user_line(traceback.extract_tb(error.__traceback__))) from error


# -- the autograd graph of what was recorded ----------------------------------------------------------------------------------


def own_gradients_refused(outputs: Sequence[Any]) -> None:
    """Refuse a torch.autograd.Function: the program would not have the gradient that it defines."""
    for node in _nodes([output for output in outputs if isinstance(output, Tensor)]):
        if isinstance(node, BackwardCFunction):
            function = getattr(type(node), "_forward_cls", type(node))
            reason = f"the step uses {function.__name__}, an autograd.Function with its own gradient"
            raise NotFusable(reason, definition_line(function))


def _depends_on(tensor: Tensor, x: Tensor) -> bool:
    """Whether a gradient of the tensor would reach x."""
    return any(getattr(node, "variable", None) is x for node in _nodes([tensor]))


def _nodes(tensors: Tensors) -> Iterator[Any]:
    """The nodes of the autograd graph behind these tensors."""
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    visited = set()
    while stack:
        node = stack.pop()
        if node not in visited:
            visited.add(node)
            yield node
            stack.extend(before for before, _ in node.next_functions if before is not None)


# -- tensors without data -----------------------------------------------------------------------------------------------------


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def tensor_without_data(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=True)


def _number(func: Any, leaves: Sequence[Any], traced: Sequence[Any], tree: _pytree.TreeSpec) -> Tensor | None:
    """The result of an elementwise operation or a cast of constants, computed by torch in their own types; else None."""
    if torch.Tag.pointwise not in func.tags and func.overloadpacket is not torch.ops.aten._to_copy:
        return None
    numbers: list[Any] = []
    for leaf, value in zip(leaves, traced, strict=True):
        if isinstance(value, RowValue):
            if value.number is None:
                return None
            numbers.append(value.number.reshape((1,) * leaf.dim()))  # a tensor without axes has another part in type promotion
        else:
            numbers.append(torch.device("cpu") if isinstance(leaf, torch.device) else value)
    if not any(isinstance(value, RowValue) for value in traced):
        return None
    args, kwargs = _pytree.tree_unflatten(numbers, tree)
    result: Tensor = func(*args, **kwargs)
    return result


def _stopped(builder: Builder, traced: Traced) -> Traced:
    """The same without a gradient."""
    if isinstance(traced, MatrixView):
        return traced._replace(stopped=True)
    return traced if isinstance(traced, Opaque | Kernels) else traced._replace(value=builder.map(Op.STOP, traced.value))


def _no_rule(packet: Any) -> str:
    if packet is torch.ops.aten._local_scalar_dense:
        return "a number is read out of a tensor, by .item(), float() or a branch on it; a compiled step cannot do that"
    return f"{packet} is not supported in a fused step"
