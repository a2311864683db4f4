"""The compiled loop as operators of torch, with gradients, vmap, second derivatives, torch.compile and export.

Two bare operators, `unfading::fused_forward` and `unfading::fused_backward`, stand for the loops in compiled and exported
graphs. Their first argument is the text of the program, so that an exported graph runs in a process that has never traced the
cell. An autograd.Function around each loop adds its gradient and its vmap rule: on a GPU the models of a vmap run in one
launch, on a CPU one after the other. The gradient of the backward loop is that of the reference loop.

`torch.library.register_autograd` serves loaded graphs alone: it raises under torch.func.grad, and forward-mode derivatives come
out as silent zeros. Forward mode goes to the reference loop, which `refusal` in `fused.py` ensures.

In the operators, `models` is 0, or the size of a first axis that every tensor has; where models share a tensor, that axis has
stride 0. `dots` is the precision of matrix products on a GPU: in a graph that of autocast, and empty without it; else that of
the forward pass, so that the backward pass has the same.
"""

import inspect
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unfading.fuse.graph_program import check_arguments, key_of, text_of
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.ir.program import InputKind, Program, TensorKind
from unfading.fuse.plan import PROGRAMS, c_kernel, target_of, triton_kernel
from unfading.loop_options import LoopOptions
from unfading.reference import scan
from unfading.torch_state import constant_when_compiled, exporting, traced

# -- the bare operators -------------------------------------------------------------------------------------------------------


def run_forward(
    key: str,
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    keep: bool,
    dots: str,
    scan: bool | None = None,
) -> list[Tensor]:
    """The states after every step, the final states, and, with `keep`, what the gradient needs."""
    if target_of(states[0].device) == "triton":
        options = _gpu_options(lengths, reverse, states, dots, scan)
        trajectory, final, saved = triton_kernel(key).forward(inputs, states, weights, options, keep=keep)
    else:
        kernel = c_kernel(key, states[0].dtype)
        trajectory, final, saved = kernel.forward(inputs, states, weights, kernel.options(lengths, reverse), keep=keep)
    return [*trajectory, *final, *([] if saved is None else [saved])]


def run_backward(
    key: str,
    gradients: Sequence[Tensor | None],
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    stored: Sequence[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    wanted: Sequence[bool],
    dots: str,
    scan: bool | None = None,
) -> list[Tensor | None]:
    """The gradients of inputs, states and weights; None for one that is not wanted.

    `stored` is what forward returned, without the final states.
    """
    n = len(states)
    arguments, arriving = (inputs, states, weights), (gradients[:n], gradients[n:])
    saved = (stored[:n], stored[n] if len(stored) > n else None)
    if target_of(states[0].device) == "triton":
        options = _gpu_options(lengths, reverse, states, dots, scan)
        parts = triton_kernel(key).backward(arriving, arguments, saved, options, wanted)
    else:
        kernel = c_kernel(key, states[0].dtype)
        parts = kernel.backward(arriving, arguments, saved, kernel.options(lengths, reverse), wanted)
    return [d for part in parts for d in part]


def _gpu_options(lengths: Tensor | None, reverse: bool, states: list[Tensor], dots: str, scan: bool | None) -> LoopOptions:
    if lengths is not None:
        lengths = lengths.to(states[0].device, torch.int64).contiguous()  # a kernel takes its address alone
    return LoopOptions(lengths, reverse, dots=dots, scan=scan)


def _forward(
    program: str,
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    keep: bool,
    models: int,
    dots: str,
) -> list[Tensor]:
    key = key_of(program)
    check_arguments(key, inputs, states, weights, lengths, models)
    return run_forward(key, inputs, states, weights, lengths, reverse, keep, dots)


def _backward(
    program: str,
    gradients: list[Tensor | None],
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    stored: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    wanted: list[bool],
    models: int,
    dots: str,
) -> list[Tensor]:
    key = key_of(program)
    check_arguments(key, inputs, states, weights, lengths, models)
    results = run_backward(key, gradients, inputs, states, weights, stored, lengths, reverse, wanted, dots)
    return _without_none(results, states[0])


def _without_none(gradients: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """An operator returns tensors: an empty one for a gradient that is not wanted."""
    return [like.new_empty(0) if d is None else d for d in gradients]


# Exported programs contain the names of the operators and of their arguments.
forward_op = torch.library.custom_op(
    "unfading::fused_forward",
    _forward,
    mutates_args=(),
    schema="(str program, Tensor[] inputs, Tensor[] states, Tensor[] weights, Tensor? lengths, bool reverse, bool keep, "
    "int models, str dots) -> Tensor[]",
)
backward_op = torch.library.custom_op(
    "unfading::fused_backward",
    _backward,
    mutates_args=(),
    schema="(str program, Tensor?[] gradients, Tensor[] inputs, Tensor[] states, Tensor[] weights, Tensor[] stored, "
    "Tensor? lengths, bool reverse, bool[] wanted, int models, str dots) -> Tensor[]",
)


@forward_op.register_fake
def _(
    program: str,
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    keep: bool,
    models: int,
    dots: str,
) -> list[Tensor]:
    key = key_of(program)
    lead = states[0].shape[:1] if models else ()
    if not keep:
        saved_width = 0
    elif target_of(states[0].device) == "triton":
        saved_width = triton_kernel(key).saved
    else:
        saved_width = c_kernel(key, states[0].dtype).saved
    timed = next(x for x, kind in zip(inputs, PROGRAMS[key].kinds, strict=True) if kind != InputKind.CONSTANT)
    T, B = timed.shape[len(lead)], states[0].shape[-2]
    saved = [states[0].new_empty((*lead, T, B, saved_width))] if saved_width else []
    trajectory = [state.new_empty((*lead, T, B, state.shape[-1])) for state in states]
    return [*trajectory, *(state.new_empty(state.shape) for state in states), *saved]


@backward_op.register_fake
def _(
    program: str,
    gradients: list[Tensor | None],
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    stored: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    wanted: list[bool],
    models: int,
    dots: str,
) -> list[Tensor]:
    always = range(len(inputs), len(inputs) + len(states))
    return [x.new_empty(x.shape if wanted[i] or i in always else 0) for i, x in enumerate((*inputs, *states, *weights))]


# -- the gradient of a loaded graph -------------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.program, loop_inputs, states, weights, lengths, reverse, keep, models, dots = inputs
    ctx.call = LoopCall("", len(loop_inputs), len(states), len(weights), reverse, keep, dots, models=models)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(lengths, *loop_inputs, *states, *weights)


def _recompute_and_differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    """The gradient of a graph that saved nothing for it: the loop runs once more."""
    lengths, *tensors = ctx.saved_tensors
    program, call, n = ctx.program, ctx.call, ctx.call.states
    parts, options = _parts(call, tensors), (call.models, call.dots)
    results = forward_op(program, *parts, lengths, call.reverse, True, *options)
    stored = [*results[:n], *results[2 * n :]]
    wanted = [tensor.requires_grad for tensor in tensors]
    d = backward_op(program, list(gradients[: 2 * n]), *parts, stored, lengths, call.reverse, wanted, *options)
    return (None, *_parts(call, d), None, None, None, None, None)


forward_op.register_autograd(_recompute_and_differentiate, setup_context=_remember)


# -- with gradients -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoopCall:
    """What a call of a loop takes beside its tensors. A dataclass: a transform of torch.func would take a tuple apart."""

    key: str  # of the program
    inputs: int  # the numbers of tensors
    states: int
    weights: int
    reverse: bool
    keep: bool  # whether to store what the gradient needs
    dots: str = ""
    scan: bool | None = None  # as in LoopOptions
    models: int = 0  # 0 where there is no axis of models
    wanted: tuple[bool, ...] = ()  # of a backward loop, for every input, state and weight

    @property
    def tensors(self) -> int:
        """The number of inputs, states and weights."""
        return self.inputs + self.states + self.weights


@cache
def loop_call(
    key: str, inputs: int, states: int, weights: int, reverse: bool, keep: bool, dots: str, scan: bool | None
) -> LoopCall:
    """The same object for every call like this one, since it takes microseconds to create one."""
    return LoopCall(key, inputs, states, weights, reverse, keep, dots, scan)


class FusedLoop(torch.autograd.Function):
    """(inputs, states, weights) -> (trajectory, final states, what the gradient needs)."""

    @staticmethod
    def forward(call: LoopCall, lengths: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = _parts(call, tensors)
        if torch.compiler.is_compiling():
            return tuple(forward_op(text_of(call.key), *parts, lengths, call.reverse, call.keep, call.models, call.dots))
        return tuple(run_forward(call.key, *parts, lengths, call.reverse, call.keep, call.dots, call.scan))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        call, lengths, *tensors = inputs
        n = call.states
        ctx.call, ctx.has_lengths = call, lengths is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2 * n :])
        ctx.save_for_backward(*([lengths] if lengths is not None else []), *tensors, *output[:n], *output[2 * n :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        lengths = saved[0] if ctx.has_lengths else None
        tensors = saved[1:] if ctx.has_lengths else saved
        gradients, wanted = gradients[: 2 * call.states], ctx.needs_input_grad[2:]
        results: Sequence[Tensor | None]
        # A second derivative may follow; in a compiled graph there is none.
        if torch.compiler.is_compiling():
            results = FusedLoopBackward.forward(replace(call, wanted=wanted), lengths, *gradients, *tensors)
        elif torch.is_grad_enabled() or traced():
            results = FusedLoopBackward.apply(replace(call, wanted=wanted), lengths, *gradients, *tensors)
        else:
            parts = (*_parts(call, tensors[: call.tensors]), tensors[call.tensors :])
            results = run_backward(call.key, gradients, *parts, lengths, call.reverse, wanted, call.dots, call.scan)
        return (None, None, *[d if want else None for d, want in zip(results, wanted, strict=True)])

    @staticmethod
    def vmap(info: Any, dims: Any, call: LoopCall, lengths: Tensor | None, *tensors: Tensor) -> Any:
        return _vmap(FusedLoop, info, dims, call, lengths, *tensors)


# `FusedLoop.apply` serves transforms of torch.func as well: it binds its arguments to a signature and unwraps tensors that have
# outlived a transform, both in Python. This is what it then calls.
_apply = super(torch.autograd.Function, FusedLoop).apply


def run_loop(call: LoopCall, lengths: Tensor | None, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """FusedLoop outside of torch.compile."""
    transformed = torch._C._functorch.maybe_current_level() is not None
    if not (call.keep or transformed):
        return FusedLoop.forward(call, lengths, *tensors)
    tensors = without_unread(call.key, tensors) if call.keep else tensors
    if transformed or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return FusedLoop.apply(call, lengths, *tensors)
    return _apply(call, lengths, *tensors)


def run_in_graph(call: LoopCall, lengths: Tensor | None, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As FusedLoop, in a graph of torch.compile or torch.export."""
    if call.keep:
        tensors = without_unread(call.key, list(tensors))
        if not exporting():
            # torch.compile takes no tensor twice.
            return FusedLoop.apply(call, lengths, *[tensor.view_as(tensor) for tensor in tensors])
    return tuple(forward_op(text_of(call.key), *_parts(call, tensors), lengths, call.reverse, False, call.models, call.dots))


def without_unread(key: str, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, detached where no gradient reaches them.

    As in the reference loop, what a step does not read has no gradient: an optimiser would act on zeros, and a hook of the user
    would be called with None.
    """
    reads = _with_gradient(key, tensors[0].dtype, target_of(tensors[0].device))
    if all(reads):
        return tensors
    return [tensor if has else tensor.detach() for tensor, has in zip(tensors, reads, strict=True)]


@constant_when_compiled
def _with_gradient(key: str, dtype: torch.dtype, target: str | None) -> tuple[bool, ...]:
    """For every input, state and weight, whether a gradient reaches it."""
    kernel = triton_kernel(key) if target == "triton" else c_kernel(key, dtype)
    return kernel.has_gradient


class FusedLoopBackward(torch.autograd.Function):
    """(gradients, what FusedLoop received and stored) -> gradients of inputs, states and weights."""

    @staticmethod
    def forward(call: LoopCall, lengths: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        gradients, inputs, states, weights, stored = _all_parts(call, tensors)
        arguments = (list(gradients), inputs, states, weights, stored, lengths, call.reverse, list(call.wanted))
        if torch.compiler.is_compiling():
            return tuple(backward_op(text_of(call.key), *arguments, call.models, call.dots))
        return tuple(_without_none(run_backward(call.key, *arguments, call.dots, call.scan), states[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.call, lengths, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(lengths, *tensors)

    @staticmethod
    def backward(ctx: Any, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (lengths, *tensors) = ctx.call, ctx.saved_tensors
        gradients, inputs, states, weights, stored = _all_parts(call, tensors)
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]

        def derivative(*arguments: Tensor) -> tuple[Tensor, ...]:
            """What `forward` computes, as the gradient of the reference loop."""
            cotangents, point = arguments[: len(given)], arguments[len(given) :]

            def outputs(*point: Tensor) -> tuple[Tensor, ...]:
                results = _reference(call, point, lengths)
                return tuple(results[i] for i in given)

            return torch.func.vjp(outputs, *point)[1](cotangents)

        point = (*inputs, *states, *weights)
        pull = torch.func.vjp(derivative, *(gradients[i] for i in given), *point)[1]
        results = pull(
            tuple(torch.zeros_like(x) if s is None or s.shape != x.shape else s for s, x in zip(second, point, strict=True))
        )
        to_gradients: list[Tensor | None] = [None] * len(gradients)
        for i, gradient in zip(given, results, strict=False):
            to_gradients[i] = gradient
        return (None, None, *to_gradients, *results[len(given) :], *[None] * len(stored))

    @staticmethod
    def vmap(info: Any, dims: Any, call: LoopCall, lengths: Tensor | None, *tensors: Tensor | None) -> Any:
        return _vmap(FusedLoopBackward, info, dims, call, lengths, *tensors)


class _ProgramCell:
    """A program in the place of a cell, for the reference loop."""

    def __init__(self, program: Program):
        self.program = program
        names = [f"input{i}" for i in range(len(program.kinds))]
        states = sum(kind == TensorKind.NEXT for kind, _ in program.widths)
        make: Any = namedtuple  # the field names are known only here
        self.make_inputs, self.make_state = make("Inputs", names), make("State", [f"state{i}" for i in range(states)])
        self.shared = tuple(name for name, kind in zip(names, program.kinds, strict=True) if kind == InputKind.SHARED)
        self.constant = tuple(name for name, kind in zip(names, program.kinds, strict=True) if kind == InputKind.CONSTANT)

    def step(self, inputs: Sequence[Tensor], state: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
        return self.make_state(*next_states(self.program, inputs, state, weights))


def _reference(call: LoopCall, point: Sequence[Tensor], lengths: Any) -> tuple[Tensor, ...]:
    """The trajectory and the final states, computed by the reference loop."""
    cell: Any = _ProgramCell(PROGRAMS[call.key])

    def run(lengths: Any, *point: Tensor) -> tuple[Tensor, ...]:
        inputs, states, weights = _parts(call, point)
        trajectory, final = scan(
            cell, cell.make_inputs(*inputs), cell.make_state(*states), weights, lengths=lengths, reverse=call.reverse
        )
        return (*trajectory, *final)

    if not call.models:
        return run(lengths, *point)
    return torch.func.vmap(run, in_dims=(None if lengths is None else 0, *[0] * len(point)))(lengths, *point)


def _parts(call: LoopCall, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, states, weights."""
    inputs, states = call.inputs, call.states
    return list(tensors[:inputs]), list(tensors[inputs : inputs + states]), list(tensors[inputs + states :])


def _all_parts(call: LoopCall, tensors: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients, inputs, states, weights, and what forward stored."""
    n = 2 * call.states
    end = n + call.tensors
    return tensors[:n], *_parts(call, tensors[n:end]), list(tensors[end:])


# -- vmap ---------------------------------------------------------------------------------------------------------------------


def _vmap(function: Any, info: Any, dims: Any, call: LoopCall, *tensors: Tensor | None) -> Any:
    """The vmap rule of a loop: on a GPU all models in one launch, unless this is inside another vmap; else one by one."""
    if not call.models and any(tensor is not None and target_of(tensor.device) == "triton" for tensor in tensors):
        together = function.apply(replace(call, models=info.batch_size), *_models(info, tensors, dims[1:]))
        return together, (0,) * len(together)
    return _stacked([function.apply(call, *_model_parts(tensors, dims[1:], i)) for i in range(info.batch_size)])


def _models(info: Any, tensors: Sequence[Tensor | None], dims: Sequence[int | None]) -> list[Tensor | None]:
    """Every tensor with a first axis of models, of stride 0 where they share it."""
    pairs = zip(tensors, dims, strict=True)
    return [
        None if tensor is None else tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in pairs
    ]


def _model(tensor: Tensor | None, dim: int | None, i: int) -> Tensor | None:
    """The part of a batched tensor that belongs to model i."""
    return tensor if tensor is None or dim is None else tensor.select(dim, i)


def _model_parts(tensors: Sequence[Tensor | None], dims: Sequence[int | None], i: int) -> list[Tensor | None]:
    return [_model(tensor, dim, i) for tensor, dim in zip(tensors, dims, strict=True)]


def _stacked(results: list[tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The results of the models along a new first axis."""
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


# At every call torch computes the signature, unless it is stored, and binds the arguments to it. There are no names and no
# defaults, so this one, which takes every argument as it is, does the same.
for function in (FusedLoop.forward, FusedLoopBackward.forward):
    arguments = [inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)]
    setattr(function, "__signature__", inspect.Signature(arguments))  # noqa: B010
