"""From a cell to its program, by running `step` once, and where it can be `project`, on tensors without data.

Both run on meta tensors under a dispatch mode that writes down each operation as a value of the program. What the language
has no word for, and what would make a compiled step another function than the written one (in-place work, random numbers, a
branch on values, a tensor from nowhere), is refused with the line of the file it stands in.

`project` is compiled into the loop with the step where it is written in the same language: then what it makes of the whole
sequence, often four times the size of the output, never exists. Where it is not, it runs before the loop as it is.
"""

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.join import joined
from unfading.fuse.ir.program import NotFusable, Program, Store, Value, pieces_of
from unfading.fuse.trace import aten
from unfading.fuse.trace.autograd_graph import made_from, refuse_own_gradients
from unfading.fuse.trace.values import BATCH, TIME, Call, Matrix, Opaque, Row
from unfading.source_lines import defined, first_line, where

Tensors = Sequence[Tensor]
READ_OUT = "a number is read out of a tensor, by .item(), float() or a branch on it; a compiled step has no values at hand"
UNKNOWN = {torch.ops.aten._local_scalar_dense: READ_OUT}
ROWS = ((), (BATCH,), (TIME * BATCH,), (TIME, BATCH))  # what may stand in front of the features


class Signature(NamedTuple):
    """What a compiled loop is handed: inputs by width and kind, states by width, weights by shape."""

    inputs: tuple[int, ...]
    kinds: tuple[str, ...]  # of the inputs: sequence, shared, constant
    states: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


class Recorder(TorchDispatchMode):
    """Writes each operation on named tensors down as a value.

    Args:
        lenient: what has no word becomes opaque, and is refused only where the program would need it.
    """

    def __init__(self, builder: Builder, dtype: torch.dtype, *, lenient: bool = False):
        super().__init__()
        self.builder = builder
        self.dtype = dtype
        self.lenient = lenient
        self.values: dict[int, tuple[Tensor, Any]] = {}  # the tensor is kept, so that its id is not given to another

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here runs under torch.compile; to tell it so, torch would import all of it, which takes two seconds.
        return False

    def name(self, tensor: Tensor, value: Any) -> Tensor:
        self.values[id(tensor)] = (tensor, value)
        return tensor

    def value(self, tensor: Tensor) -> Any:
        found = self.values.get(id(tensor))
        return None if found is None else found[1]

    def rows(self, value: Value, *axes: int) -> Tensor:
        """A tensor of rows: axes in front, then the features of the value."""
        return self.name(_meta((*axes, *value.shape), self.dtype), Row(value, len(axes)))

    def weight(self, index: int, shape: tuple[int, ...]) -> Tensor:
        flat = self.builder.leaf("weight", index, 0, torch.Size(shape).numel())
        if len(shape) == 2:
            return self.name(_meta(shape, self.dtype), Matrix(index, flat, shape, 0, shape[0], 0, shape[1]))
        return self.name(_meta(shape, self.dtype), Row(self.builder.reshape(flat, shape), 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")  # what is made anew has no data either: its size may fit no memory
        if func._schema.is_mutable:
            self.refuse(f"{packet} writes into a tensor; a step is pure")
        known = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        reason = self._unknown(func, known)
        if reason is None and packet not in aten.RULES:
            # What torch differentiates as a composition arrives here whole where a decomposition below calls it.
            simpler = func.decompose if func._can_decompose() else aten.decompositions().get(func)
            if simpler is not None:
                with self:
                    return simpler(*args, **kwargs)
            reason = UNKNOWN.get(packet, f"the language of fused steps has no {packet}")
        if packet is torch.ops.aten.unbind and args[0].shape[args[1] if len(args) > 1 else 0] in (BATCH, TIME):
            self.refuse(f"{packet} along the rows")  # before it makes a million tensors
        if reason is not None and not self.lenient:
            self.refuse(reason)
        out = func(*_pytree.tree_map_only(Tensor, _as_meta, args), **_pytree.tree_map_only(Tensor, _as_meta, kwargs))
        made = [leaf for leaf in _pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        result: Any = Opaque(reason or "")
        if reason is None:
            try:
                result = self._by_rule(packet, args, kwargs, out)
            except NotFusable as error:
                if not self.lenient:
                    self.refuse(str(error))
                result = Opaque(str(error))
        for tensor, value in zip(made, result if isinstance(result, list) else [result] * len(made), strict=True):
            wrong = self._other(packet, tensor, value)
            if wrong is not None and not self.lenient:
                self.refuse(wrong)
            self.name(tensor, value if wrong is None else Opaque(wrong))
        return out

    def _other(self, packet: Any, tensor: Tensor, value: Any) -> str | None:
        """Why a value is not what torch has made: that of one row in one precision, with no axis as long as the batch."""
        if not isinstance(value, Row):
            return None
        rows, features = tuple(tensor.shape[: value.lead]), tuple(tensor.shape[value.lead :])
        if features != value.value.shape or rows not in ROWS or set(features) & {BATCH, TIME, TIME * BATCH}:
            return f"{packet} gives {_shape(tensor)}: it mixes rows"
        if tensor.is_floating_point() and tensor.dtype != self.dtype and value.value.constant is None:
            return f"{packet} makes {tensor.dtype} of {self.dtype}; a fused step keeps one precision"
        return None

    def _unknown(self, func: Any, tensors: Tensors) -> str | None:
        """Why the operation cannot be written down, whatever it is."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return f"{func.overloadpacket} draws random numbers; draw them in project, which runs once over all time"
        for tensor in tensors:
            value = self.value(tensor)
            if isinstance(value, Opaque):
                return value.reason
            if value is None:
                if func.overloadpacket is not torch.ops.aten.lift_fresh or tensor.numel() != 1:
                    shape = list(tensor.shape)
                    return f"{func.overloadpacket} reads a tensor {shape} that neither inputs, state nor weights handed in"
                self.name(tensor, Row(self.builder.expand(self.builder.const(float(tensor)), tuple(tensor.shape)), 0))
        return None

    def _by_rule(self, packet: Any, args: Any, kwargs: Any, out: Any) -> Any:
        args, kwargs = (_pytree.tree_map_only(Tensor, self.value, part) for part in (args, kwargs))
        result = aten.RULES[packet](Call(self.builder, packet, args, kwargs, out, self.dtype))
        if torch.is_grad_enabled():
            return result
        # Inside the user's own no_grad.
        several = result if isinstance(result, list) else [result]
        rows = [Row(r.entries(self.builder), 0) if isinstance(r, Matrix) else r for r in several]
        stopped = [Row(self.builder.map("stop", row.value), row.lead) for row in rows]
        return stopped if isinstance(result, list) else stopped[0]

    def refuse(self, reason: str) -> NoReturn:
        raise NotFusable(f"{reason}{where(traceback.extract_stack(sys._getframe(1)))}")


def trace(step: Callable[[Tensors, Tensors, Tensors], Any], signature: Signature) -> Program:
    """The program of `step(inputs, states, weights) -> new states`, each a flat sequence of tensors."""
    programs = []
    for _ in range(2):
        recorder = Recorder(builder := Builder(), signature.dtype)
        leaves = [builder.leaf("input", i, 0, n) for i, n in enumerate(signature.inputs)]
        weights = [recorder.weight(i, shape) for i, shape in enumerate(signature.weights)]
        programs.append(_step_program(recorder, step, leaves, weights, signature))
    if len(set(map(str, programs))) > 1:
        raise NotFusable("the step is another function at every call; a step is pure")
    return programs[0]


def trace_with_project(
    project: Callable[[Tensor, int, Tensors], Tensors],
    step: Callable[[Tensors, Tensors, Tensors], Any],
    signature: Signature,
    fields: Sequence[int | None],
    step_weights: int,
) -> Program:
    """The program of `project(x, start, parameters)` and step together; NotFusable where project is not in the language.

    Args:
        signature: its first input is x, its further ones are the fields of the inputs that are taken as they come; its
            weights are those of the step and then the parameters of `project`.
        fields: of each field that `project` returns, which input it is taken from, or None where it is compiled.
        step_weights: how many of the weights are the step's.
    """
    programs = []
    for start in (0, 104_729):  # what depends on the number of the step is no function of x, and cannot be compiled
        recorder, weights, leaves = projected_values(project, signature, fields, step_weights, start)
        programs.append(_step_program(recorder, step, leaves, weights[:step_weights], signature))
    if len(set(map(str, programs))) > 1:
        raise NotFusable("project makes the same of x at one step and something else at another")
    return programs[0]


def projected_values(
    project: Callable[[Tensor, int, Tensors], Tensors],
    signature: Signature,
    fields: Sequence[int | None],
    step_weights: int,
    start: int,
) -> tuple[Recorder, list[Tensor], list[Value]]:
    """What `project` makes of one row of x, field by field, with the recorder and all weights; as `trace_with_project`."""
    recorder = Recorder(builder := Builder(), signature.dtype, lenient=True)
    weights = [recorder.weight(i, shape) for i, shape in enumerate(signature.weights)]
    x = recorder.rows(builder.leaf("input", 0, 0, signature.inputs[0]), TIME, BATCH)
    made = _recorded(recorder, partial(project, x, start, weights[step_weights:]))
    refuse_own_gradients(made)
    leaves = []
    for tensor, taken in zip(made, fields, strict=True):
        row = recorder.value(tensor)
        if taken is not None and made_from(tensor, x):
            raise NotFusable("a field that all rows share is made from x, hence from one row or from all of them")
        if taken is not None:
            leaves.append(builder.leaf("input", taken, 0, signature.inputs[taken]))
        elif isinstance(row, Row) and tensor.shape[:2] == (TIME, BATCH) and tensor.dim() == 3:
            leaves.append(row.value)
        else:
            raise NotFusable("project makes something of x that is not in the language of fused steps")
    recorder.lenient = False  # for the step
    return recorder, weights, leaves


def _step_program(
    recorder: Recorder,
    step: Callable[[Tensors, Tensors, Tensors], Any],
    inputs: Sequence[Value],
    weights: Tensors,
    signature: Signature,
) -> Program:
    builder = recorder.builder
    leaves = [builder.leaf("state", i, 0, n) for i, n in enumerate(signature.states)]
    states = [recorder.rows(leaf, BATCH) for leaf in leaves]
    rows = [recorder.rows(value, BATCH) for value in inputs]
    outputs = _recorded(recorder, lambda: step(rows, states, weights))
    refuse_own_gradients(outputs)
    if any(tensor._backward_hooks for tensor, _ in recorder.values.values()):
        raise NotFusable(f"the step registers a hook on a gradient, which a compiled one would not call{defined(step)}")
    stores: list[Store] = []
    for i, (output, width) in enumerate(zip(outputs, signature.states, strict=True)):
        row = recorder.value(output) if isinstance(output, Tensor) else None
        if not isinstance(row, Row) or output.shape != (BATCH, width) or output.dtype != signature.dtype:
            raise NotFusable(
                f"the step must return its states as tensors {signature.dtype} [B, {width}]; part {i} is {_kind(output)}"
                f"{defined(step)}"
            )
        value = builder.expand(row.value, (width,))
        for a, _, piece in pieces_of(value.args if value.op == "cat" else (value,), 0):
            stores.append(Store("next", i, a, piece))
    widths = {("input", i): n for i, n in enumerate(signature.inputs)}
    for i, n in enumerate(signature.states):
        widths["state", i] = widths["next", i] = n
    for i, shape in enumerate(signature.weights):
        widths["weight", i] = int(torch.Size(shape).numel())
    program = joined(builder, Program(tuple(stores), widths, signature.kinds))
    if any(value.op == "const" and _of_the_example(value.attr) for value in program.values()):
        raise NotFusable(
            f"the size of the batch or the number of steps is computed with, and a compiled step knows neither{defined(step)}"
        )
    return program


def _of_the_example(number: float) -> bool:
    """Whether a number is a multiple of the example's batch or steps, or one over such a multiple."""
    whole = number if abs(number) >= 1 else 1 / number if number else 0.0
    if not 1 <= abs(whole) < 1e15 or not math.isclose(whole, round(whole), rel_tol=1e-15):
        return False
    return round(whole) % BATCH == 0 or round(whole) % TIME == 0


def _recorded(recorder: Recorder, function: Callable[[], Any]) -> Any:
    try:
        with torch.enable_grad(), recorder:
            return function()
    except NotFusable:
        raise
    except Exception as error:
        raise NotFusable(f"{first_line(error)}{where(traceback.extract_tb(error.__traceback__))}") from error


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=True)


def _as_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "meta" else tensor.to("meta")


def _kind(output: Any) -> str:
    return f"{output.dtype} {_shape(output)}" if isinstance(output, Tensor) else type(output).__name__


def _shape(tensor: Tensor) -> str:
    letters = {BATCH: "B", TIME: "T", TIME * BATCH: "T B"}
    return f"[{', '.join(letters.get(n, str(n)) for n in tensor.shape)}]"
