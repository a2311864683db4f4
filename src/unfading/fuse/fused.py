"""backend="fused": the loop over time as one compiled kernel, in C on the CPU and in Triton on a GPU.

`fused` has the arguments and results of `reference`. `fused_outputs` computes the outputs alone, where no gradient is wanted.
`refusal` gives the reason why a cell cannot run in this way.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

from unfading.cells.base import Cell
from unfading.cells.reset import with_resets
from unfading.cells.wrap import outputs_first_part
from unfading.errors import NoKernel, OfThisCall, cell_name
from unfading.fuse.frames.frame_kernels import frame_kernels
from unfading.fuse.frames.fused_frames import fused_frames
from unfading.fuse.frames.pixels import check_compiles
from unfading.fuse.ir.passes import input_apart
from unfading.fuse.ir.program import InputKind
from unfading.fuse.locality import locality
from unfading.fuse.operator import LoopCall, loop_call, run_in_graph, run_loop
from unfading.fuse.plan import (
    NAMES,
    PROGRAMS,
    FramePlan,
    Plan,
    autocast_precision,
    c_kernel,
    float32_dots,
    plan,
    plan_or_raise,
    target_of,
    triton_kernel,
)
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.fuse.trace.projection import ends, slopes
from unfading.fuse.trace.tree import as_matrix, flatten, with_dense
from unfading.fuse.triton.source import triton_missing
from unfading.lengths import zero_past
from unfading.loop_options import LoopOptions
from unfading.reference import check_inputs, reference
from unfading.torch_state import constant_when_compiled, traced

CHUNK_BYTES = 1 << 21  # of inputs and states in one chunk of time, for each thread, where no gradient is wanted
DEVICES = {"c": "the CPU", "triton": "one GPU"}

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
SEQUENCE, SHARED, CONSTANT = InputKind.SEQUENCE, InputKind.SHARED, InputKind.CONSTANT


def fused(
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    options: LoopOptions = LoopOptions(),
    *,
    inputs: Any = None,
    cell_plan: Plan | FramePlan | None = None,
    if_faster: bool = False,
    scan: bool | None = None,
) -> tuple[Any, Any]:
    """As `reference`, with the same arguments and results, for a cell that `refusal` accepts.

    Args:
        scan: as in LoopOptions, whose field it becomes.
        if_faster: raise NoKernel for frames with which the reference loop is estimated to be faster.
        cell_plan: the present plan of the cell, if the caller has it: comparing a cell with its plan takes microseconds.
    """
    compiling = torch.compiler.is_compiling()
    if isinstance(cell_plan, FramePlan):
        if any_wrapped((x, *state, *cell.parameters())):
            return reference(cell, x, state, weights, options, inputs=inputs)
        return fused_frames(cell_plan, cell, x, state, weights, options, inputs, if_faster=if_faster)
    if cell_plan is None:
        cell_plan = _constant_plan(id(cell), _training(cell)) if compiling else plan_or_raise(cell)
    precision = autocast_precision(x.device.type)
    leaves = bind_inputs(cell_plan, cell, x, options.start, inputs)
    if precision:
        with torch.autocast(x.device.type, enabled=False):
            leaves = [leaf.to(cell_plan.signature.dtype) for leaf in leaves]
            tensors = [*leaves, *state, *bind_weights(cell_plan, cell, weights)]
    else:
        tensors = [*leaves, *state, *bind_weights(cell_plan, cell, weights)]
    if not compiling:
        if any_wrapped(tensors):
            return reference(cell, x, state, weights, options, inputs=inputs)
        check_tensors(cell_plan, cell, tensors)
    differentiable = any(tensor.requires_grad for tensor in tensors)
    keep = torch.is_grad_enabled() and (differentiable or (not compiling and traced()))
    n = len(state)
    dots = precision if compiling or precision or cell_plan.target == "c" else float32_dots(x.device)
    about = (cell_plan.key, len(leaves), n, len(tensors) - len(leaves) - n, options.reverse, keep, dots)
    if compiling:
        results = run_in_graph(LoopCall(*about), options.lengths, tensors)
    else:
        results = run_loop(loop_call(*about, scan), options.lengths, tensors)
    return type(state)(*results[:n]), type(state)(*results[n : 2 * n])


# -- without a gradient -------------------------------------------------------------------------------------------------------


def fused_outputs(
    cell_plan: Plan | FramePlan,
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    options: LoopOptions,
    resets: Tensor | None = None,
) -> tuple[Tensor, Any] | None:
    """`cell.output` of every step and the final state, without a gradient, by the present plan of a cell.

    None for tensor subclasses, whose memory a kernel cannot read, on a GPU, where `fused` is as fast, and for frames.

    Args:
        resets: [T, B], of a cell that reads them behind its input.
    """
    if cell_plan.target != "c" or isinstance(cell_plan, FramePlan):
        return None
    mask = None
    if resets is not None:
        apart = _with_mask_apart(cell_plan)
        if apart is None:
            x = with_resets(x, resets)
        else:
            cell_plan, mask = apart, resets.to(x.dtype).unsqueeze(2)
    inference = Inference(cell_plan, cell, weights)
    if any_wrapped((x, *state, *inference.weights)) or (mask is not None and any_wrapped((mask,))):
        return None
    return inference.outputs(x, state, options, mask)


def _with_mask_apart(cell_plan: Plan) -> Plan | None:
    """The plan with the last feature of x, the mask of resets, as an input of its own: joining them would copy all of x.

    None where the program does not read x, where the mask is not read by itself, and where it cannot be compiled.
    """
    if not cell_plan.local:
        return None
    (width,) = cell_plan.signature.inputs
    key = _key_with_mask_apart(cell_plan.key, width - 1, cell_plan.signature.dtype)
    if key is None:
        return None
    signature = cell_plan.signature._replace(inputs=(width - 1, 1), kinds=(SEQUENCE, SEQUENCE))
    return cell_plan._replace(key=key, signature=signature)


@cache
def _key_with_mask_apart(key: str, features: int, dtype: torch.dtype) -> str | None:
    program = input_apart(PROGRAMS[key], features)
    if program is None:
        return None
    apart = program.key()
    PROGRAMS.setdefault(apart, program)
    names = NAMES[key]
    NAMES.setdefault(apart, names._replace(inputs=(*names.inputs, "reset")))
    try:
        c_kernel(apart, dtype)
    except NoKernel:
        return None
    return apart


class Inference:
    """A C kernel with the weights of a cell, packed once for all calls.

    A long sequence is run in chunks of time that fit into the cache: the states of one chunk lie in memory that the next chunk
    uses again. The first touch of fresh memory costs more than the arithmetic.
    """

    def __init__(self, cell_plan: Plan, cell: Cell, weights: Any):
        self.plan, self.cell = cell_plan, cell
        self.kernel = c_kernel(cell_plan.key, cell_plan.signature.dtype)
        self.weights = [leaf.detach().contiguous() for leaf in bind_weights(cell_plan, cell, weights)]
        self.packed = self.kernel.packed(self.kernel.infer, self.weights)
        # Whether the output is the first part of the state. The kernel then writes it into the output tensor.
        self.direct = outputs_first_part(cell) and cell.output_size == cell_plan.signature.states[0]

    def outputs(self, x: Tensor, state: Any, options: LoopOptions, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """`cell.output` of every step, and the final state. A mask [T, B, 1] is the second input, beside x."""
        T, B = x.shape[:2]
        cell, states = self.cell, list(state)
        lengths, reverse, start = options[:3]
        # Shared inputs are read in the order of processing, in which the rows of a reversed chunk with lengths are not equal.
        steps = T if reverse and lengths is not None and cell.shared else self._steps(B)
        if mask is not None:
            whole: list[Tensor] | None = [x, mask]
        else:
            whole = None if steps >= T or self._local(T, reverse) else bind_inputs(self.plan, cell, x, start)
        loop = self.kernel.options(lengths, reverse)
        output = self.kernel.blank(state[0], (T, B, cell.output_size), loop)
        begins = range(0, T, steps)
        for a in reversed(begins) if reverse else begins:
            b = min(a + steps, T)
            first = T - b if reverse else a  # in the order of processing
            inputs = bind_inputs(self.plan, cell, x[a:b], start + first) if whole is None else self._of(whole, a, b, first)
            check_tensors(self.plan, cell, [*inputs, *states, *self.weights])
            trajectory, states, _ = self.kernel.forward(
                inputs, states, self.weights, self.kernel.of_chunk(loop, a), keep=False, packed=self.packed,
                first=output[a:b] if self.direct else None,
            )  # fmt: skip
            if not self.direct:
                chunk = cell.output(type(state)(*trajectory))
                if chunk.shape[-1] != cell.output_size:
                    return chunk, type(state)(*states)  # the layer raises the error
                output[a:b] = chunk
        if lengths is not None and not self.direct:
            output = zero_past(output, lengths)
        return output, type(state)(*states)

    def _steps(self, batch: int) -> int:
        """The steps of one chunk."""
        signature = self.plan.signature
        width = sum(n for n, kind in zip(signature.inputs, signature.kinds, strict=True) if kind == SEQUENCE)
        of_step = batch * (width + sum(signature.states)) * signature.dtype.itemsize
        return max(1, torch.get_num_threads() * CHUNK_BYTES // of_step)

    def _local(self, steps: int, reverse: bool) -> bool:
        """Whether chunks of x can be projected one by one, with the same result as the whole sequence.

        Noise is drawn at once, so that a seed gives the same numbers for chunks of any size.
        """
        if self.plan.local:
            return True
        shown = locality(self.cell, steps, reverse=reverse)
        return shown.refusal is None and not shown.random and not shown.writes

    def _of(self, inputs: Sequence[Tensor], a: int, b: int, first: int) -> list[Tensor]:
        """The inputs of steps a..b, which begin at number `first` in the order of processing."""
        bounds = {SEQUENCE: (a, b), SHARED: (first, first + b - a), CONSTANT: (0, 1)}
        return [leaf[slice(*bounds[kind])] for leaf, kind in zip(inputs, self.plan.signature.kinds, strict=True)]


# -- whether a cell can run ---------------------------------------------------------------------------------------------------


def refusal(cell: Cell, batch: int = 1, *, or_graphs: bool = False) -> str | None:
    """The reason why a cell does not run fused at this moment; None where it does. The arguments are those of `runnable`."""
    answer = runnable(cell, batch, or_graphs=or_graphs)
    return answer if isinstance(answer, str) else None


def runnable(cell: Cell, batch: int = 1, *, or_graphs: bool = False) -> Plan | FramePlan | str | None:
    """The plan by which a cell runs at this moment, or the reason why it does not run fused.

    On a GPU the kernels are tested once for each number of rows. None inside torch.compile for a cell that runs: there `fused`
    finds the plan itself.

    Args:
        or_graphs: whether CUDA graphs may run the cell where they take less time. The reason is then a `FasterAsGraphs`.
    """
    if torch.is_autocast_enabled("cpu") and target_of(_device(cell)) == "c":
        return OfThisCall("autocast is on, and a kernel for the CPU computes in one precision")
    if torch.compiler.is_compiling():
        if _constant_transformed():
            return OfThisCall("torch.compile does not trace a kernel inside a transform of torch.func")
        return _constant_refusal(id(cell), _training(cell))
    if _forward_mode():
        return OfThisCall("a forward-mode derivative is being computed, which only the reference loop supports")
    if torch._C._is_tracing() or _get_current_dispatch_mode_stack():
        return OfThisCall(
            "a dispatch mode or a tracer records the operations of torch, and would not see those inside a kernel"
        )
    if _has_any_global_hook():
        return OfThisCall("a hook for all modules is registered, which a compiled loop would not call")
    return _with_kernel(cell, batch, or_graphs)


def _with_kernel(cell: Cell, batch: int = 1, or_graphs: bool = False) -> Plan | FramePlan | str:
    """The plan of a cell whose kernel is compiled, or the reason why there is none."""
    cell_plan = plan(cell)
    if isinstance(cell_plan, Refusal):
        return str(cell_plan)
    try:
        if isinstance(cell_plan, FramePlan):
            return _frames_trouble(cell_plan) or cell_plan
        if cell_plan.target == "triton":
            return _triton_trouble(cell_plan, cell, batch, or_graphs) or cell_plan
        c_kernel(cell_plan.key, cell_plan.signature.dtype)
    except (NoKernel, NotFusable, RecursionError) as error:
        return str(error)
    return cell_plan


def not_a_scan(cell_plan: Plan | FramePlan | None) -> str | None:
    """The reason why a cell that runs by this plan does not run as a parallel scan; None where it does."""
    if cell_plan is None:
        return OfThisCall("in torch.compile a loop or a scan is chosen by the estimated time; use backend='auto'")
    if isinstance(cell_plan, FramePlan):
        return "its step has convolutions, and a scan needs a step in which no unit reads another one"
    if cell_plan.target == "c":
        return "a parallel scan runs on a GPU; on a CPU, backend='fused' needs less arithmetic and reads memory once"
    lanes = triton_kernel(cell_plan.key).lanes
    if lanes is None:
        return "a scan needs a step in which no unit reads another one, and this step mixes its units"
    return lanes.not_linear()


def _frames_trouble(cell_plan: FramePlan) -> str | None:
    """Why a step with convolutions does not run compiled at this moment."""
    if traced():
        return OfThisCall(
            "torch.compile or a transform of torch.func is active, which a compiled step with convolutions does not support"
        )
    kernels = frame_kernels(cell_plan.key, cell_plan.dtype, cell_plan.target)
    if cell_plan.target == "c":
        check_compiles([stage.kernels for stage in kernels.stages], cell_plan.dtype)
        return None
    return triton_missing()


# `triton.probe`, imported when a cell is first on a GPU. A global, since an import statement inside a function costs two
# microseconds at every call.
_probe: ModuleType | None = None


def _triton_trouble(cell_plan: Plan, cell: Cell, batch: int, or_graphs: bool) -> str | None:
    global _probe
    if _probe is None:
        from unfading.fuse.triton import probe

        _probe = probe
    reason: str | None = _probe.triton_trouble(cell_plan, cell, batch, or_graphs=or_graphs)
    return reason


def _device(cell: Cell) -> torch.device:
    parameter = next(cell.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _training(cell: Cell) -> tuple[bool, ...]:
    """Read in code that torch.compile traces, so that it compiles again when a module changes to training or evaluation."""
    return tuple(module.training for module in cell.modules())


# torch.compile calls these once, when it traces, and stores what they return. It passes no modules but numbers; the cell is
# alive while it is traced, so its id identifies it.


@constant_when_compiled
def _constant_plan(identity: int, training: tuple[bool, ...]) -> Plan:
    return plan_or_raise(ctypes.cast(identity, ctypes.py_object).value)


@constant_when_compiled
def _constant_refusal(identity: int, training: tuple[bool, ...]) -> str | None:
    answer = _with_kernel(ctypes.cast(identity, ctypes.py_object).value)
    return answer if isinstance(answer, str) else None


@constant_when_compiled
def _constant_transformed() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def _forward_mode() -> bool:
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


# -- the tensors that a program reads -----------------------------------------------------------------------------------------


def bind_inputs(cell_plan: Plan, cell: Cell, x: Tensor, start: int, inputs: Any = None) -> list[Tensor]:
    """The tensors that the loop reads at every step: x itself or its projection, and inputs that do not depend on x.

    Args:
        inputs: the projection of x, where it exists already.
    """
    if not cell_plan.with_project:
        inputs = cell.project(x, start) if inputs is None else inputs
        check_inputs(cell, inputs, batch=x.shape[1])
        return _leaves(inputs, cell_plan.inputs, cell)
    if len(cell_plan.signature.kinds) == 1:
        return [x]
    # One row is enough for what all rows share.
    leaves = _leaves(cell.project(x[:, :1], start) if inputs is None else inputs, cell_plan.inputs, cell)
    return [x, *(leaf for name, leaf in zip(cell_plan.names, leaves, strict=True) if name in cell.shared)]


def bind_weights(cell_plan: Plan, cell: Cell, weights: Any) -> list[Tensor]:
    """The weights of the step, and the parameters of the projection where that is compiled with it."""
    if any(cell_plan.dense):
        weights = with_dense(weights, cell_plan.dense)
    leaves = [leaf if leaf.dim() <= 2 else as_matrix(leaf) for leaf in _leaves(weights, cell_plan.weights, cell)]
    if cell_plan.affine:
        like = leaves[0]
        fields = _leaves(cell.project(ends(like.device, like.dtype)), cell_plan.inputs, cell)
        leaves += slopes([field for name, field in zip(cell_plan.names, fields, strict=True) if name not in cell.shared])
    for name in cell_plan.parameters:
        tensor: Any = cell
        for part in name.split("."):
            tensor = getattr(tensor, part)
        leaves.append(tensor)
    return leaves


def check_tensors(cell_plan: Plan, cell: Cell, tensors: Sequence[Tensor]) -> None:
    """A kernel reads memory by the sizes of the plan: every tensor must have them, and lie on the right device."""
    signature = cell_plan.signature
    dtype, first_state = signature.dtype, tensors[len(signature.inputs)]
    T, B, device = tensors[0].shape[0], first_state.shape[0], first_state.device
    sizes = {SEQUENCE: (T, B), SHARED: (T, 1), CONSTANT: (1, B)}
    shapes: list[tuple[int, ...]] = [
        (*sizes[kind], width) for kind, width in zip(signature.kinds, signature.inputs, strict=True)
    ]
    shapes += [(B, width) for width in signature.states]
    shapes += signature.weights
    on_target = target_of(device) == cell_plan.target
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or not on_target:
            raise ValueError(
                f"{cell_name(cell)}: the fused step was compiled for {dtype} {list(shape)} on {DEVICES[cell_plan.target]}; "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}."
            )


def any_wrapped(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor wraps others and has no memory of its own that a kernel could read."""
    return any(type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor) for tensor in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


def _leaves(tree: Any, structure: Any, cell: Cell) -> list[Tensor]:
    """The tensors of nested tuples, which must be nested as in the example that was compiled."""
    if torch.compiler.is_compiling():
        return _pytree.tree_leaves(tree)
    if isinstance(tree, tuple) and all(isinstance(part, Tensor) for part in tree):  # most often: no walk over the tree
        leaves, got = list(tree), (type(tree), *[None] * len(tree))
    else:
        leaves = []
        got = flatten(tree, leaves)
    if got != structure:
        raise TypeError(
            f"{cell_name(cell)}: project or weights returns other parts than when its step was compiled; return the same "
            "parts at every call."
        )
    return leaves
