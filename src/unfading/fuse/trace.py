"""From a cell's `step` to its program, by running it once on tensors without data.

The step runs on meta tensors under a dispatch mode that writes down each operation as a value of the program. What the
language has no word for, and what would make a compiled step another function than the written one (in-place work, random
numbers, a branch on values, a tensor from nowhere), is refused with the line of the file it stands in.
"""

import linecache
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unfading.fuse import aten
from unfading.fuse.aten import Matrix, Row
from unfading.fuse.build import Builder
from unfading.fuse.program import NotFusable, Program, Store, pieces_of

BATCH = 1_000_003  # rows of the example: a prime that is no feature size


class Signature(NamedTuple):
    """What a step is handed: inputs by width and kind, states by width, weights by shape."""

    inputs: tuple[int, ...]
    kinds: tuple[str, ...]  # of the inputs: sequence, shared, constant
    states: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


def trace(step: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Any], signature: Signature) -> Program:
    """The program of `step(inputs, states, weights) -> new states`, each a flat sequence of tensors."""
    builder = Builder()
    widths: dict[tuple[str, int], int] = {}
    recorder = Recorder(builder, signature.dtype)

    def example(kind: str, index: int, width: int) -> Tensor:
        widths[kind, index] = width
        return recorder.name(_meta((BATCH, width), signature.dtype), Row(builder.leaf(kind, index, 0, width), True))

    inputs = [example("input", i, n) for i, n in enumerate(signature.inputs)]
    states = [example("state", i, n) for i, n in enumerate(signature.states)]
    weights = []
    for i, shape in enumerate(signature.weights):
        size = 1
        for n in shape:
            size *= n
        widths["weight", i] = size
        tensor = _meta(shape, signature.dtype)
        flat = builder.leaf("weight", i, 0, size)
        named = Matrix(i, flat, shape, 0, shape[0], 0, shape[1]) if len(shape) == 2 else Row(builder.reshape(flat, shape), False)
        weights.append(recorder.name(tensor, named))

    try:
        with torch.enable_grad(), recorder:
            outputs = step(inputs, states, weights)
    except NotFusable:
        raise
    except Exception as error:
        raise NotFusable(f"{_first_line(error)}{_where(traceback.extract_tb(error.__traceback__))}") from error
    _refuse_own_gradients(outputs)

    stores: list[Store] = []
    for i, (output, width) in enumerate(zip(outputs, signature.states, strict=True)):
        row = recorder.value(output) if isinstance(output, Tensor) else None
        if not isinstance(row, Row) or output.shape != (BATCH, width):
            raise NotFusable(f"the step must return its states as tensors [B, {width}]; part {i} is {_kind(output)}")
        value = builder.expand(row.value, (width,))
        for a, _, piece in pieces_of(value.args if value.op == "cat" else (value,), 0):
            stores.append(Store("next", i, a, piece))
        widths["next", i] = width
    return Program(tuple(stores), widths, signature.kinds)


class Recorder(TorchDispatchMode):
    """Writes each operation on named tensors down as a value."""

    def __init__(self, builder: Builder, dtype: torch.dtype):
        super().__init__()
        self.builder = builder
        self.dtype = dtype
        self.values: dict[int, tuple[Tensor, Any]] = {}  # the tensor is kept, so that its id is not given to another

    def name(self, tensor: Tensor, value: Any) -> Tensor:
        self.values[id(tensor)] = (tensor, value)
        return tensor

    def value(self, tensor: Tensor) -> Any:
        found = self.values.get(id(tensor))
        return None if found is None else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if func._schema.is_mutable:
            self.refuse(f"{packet} writes into a tensor; a step is pure")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(f"{packet} draws random numbers; draw them in project, which runs once over all time")
        for tensor in _pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and self.value(tensor) is None:
                if tensor.numel() != 1 or tensor.device.type == "meta":
                    self.refuse(f"{packet} reads a tensor {list(tensor.shape)} that neither inputs, state nor weights handed in")
                self.name(tensor, Row(self.builder.const(float(tensor)), False))
        if packet not in aten.RULES:
            simpler = aten.decompositions().get(func)
            if simpler is None:
                self.refuse(f"the language of fused steps has no {packet}")
            with self:
                return simpler(*args, **kwargs)
        out = func(*_pytree.tree_map_only(Tensor, _as_meta, args), **_pytree.tree_map_only(Tensor, _as_meta, kwargs))
        own_args = _pytree.tree_map_only(Tensor, self.value, args)
        own_kwargs = _pytree.tree_map_only(Tensor, self.value, kwargs)
        try:
            result = aten.RULES[packet](aten.Call(self.builder, packet, own_args, own_kwargs, out, self.dtype))
        except NotFusable as error:
            self.refuse(str(error))
        stopped = not torch.is_grad_enabled()  # inside the user's own no_grad
        for tensor, value in zip(_pytree.tree_leaves(out), _flat(result), strict=True):
            if stopped and isinstance(value, Row):
                value = Row(self.builder.map("stop", value.value), value.batched)
            self.name(tensor, value)
        return out

    def refuse(self, reason: str) -> None:
        raise NotFusable(f"{reason}{_where(traceback.extract_stack(sys._getframe(1)))}")


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list) else [result]


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=True)


def _as_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "meta" else tensor.to("meta")


def _refuse_own_gradients(outputs: Sequence[Any]) -> None:
    """A torch.autograd.Function of the user's has a gradient of its own, which the program would not have."""
    stack = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            raise NotFusable(f"the step uses an autograd.Function with a gradient of its own ({node.name()})")
        stack.extend(before for before, _ in node.next_functions if before is not None)


def _kind(output: Any) -> str:
    return f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _where(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line that is neither torch's nor the compiler's own."""
    own = __file__.rpartition("/")[0]
    torchs = torch.__file__.rpartition("/")[0]
    for frame in reversed(frames):
        if not frame.filename.startswith((own, torchs, "<")):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f" ({frame.filename}:{frame.lineno}: {line})"
    return ""
