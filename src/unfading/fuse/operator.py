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
from typing import Any, NamedTuple

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
    models: int,
    dots: str,
) -> list[Tensor]:
    """The states after every step, the final states, and, with `keep`, what the gradient needs."""
    if target_of(states[0].device) == "triton":
        arguments = (_with_models(inputs, models), _with_models(states, models), _with_models(weights, models))
        options = _gpu_options(lengths, reverse, states, models, dots)
        trajectory, final, saved = triton_kernel(key).forward(*arguments, options, keep=keep)
        tensors = [*trajectory, *final, *([] if saved is None else [saved])]
        return tensors if models else [tensor.squeeze(0) for tensor in tensors]
    kernel = c_kernel(key, states[0].dtype)
    trajectory, final, saved = kernel.forward(inputs, states, weights, kernel.options(lengths, reverse), keep=keep)
    return [*trajectory, *final, *([] if saved is None else [saved])]


def run_backward(
    key: str,
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
    """The gradients of inputs, states and weights; an empty tensor for one that is not wanted.

    `stored` is what forward returned, without the final states.
    """
    n = len(states)
    if target_of(states[0].device) == "triton":
        arguments = (_with_models(inputs, models), _with_models(states, models), _with_models(weights, models))
        arriving = [None if d is None else d if models else d.unsqueeze(0) for d in gradients]
        stored = _with_models(stored, models)
        options = _gpu_options(lengths, reverse, states, models, dots)
        parts = triton_kernel(key).backward(
            (arriving[:n], arriving[n:]), arguments, (stored[:n], stored[n] if len(stored) > n else None), options, wanted
        )
        results = [d if d is None or models else d.squeeze(0) for part in parts for d in part]
    else:
        kernel = c_kernel(key, states[0].dtype)
        saved = stored[n] if len(stored) > n else None
        options = kernel.options(lengths, reverse)
        parts = kernel.backward((gradients[:n], gradients[n:]), (inputs, states, weights), (stored[:n], saved), options, wanted)
        results = [d for part in parts for d in part]
    return [states[0].new_empty(0) if d is None else d for d in results]


def _with_models(tensors: list[Tensor], models: int) -> list[Tensor]:
    return tensors if models else [tensor.unsqueeze(0) for tensor in tensors]


def _gpu_options(lengths: Tensor | None, reverse: bool, states: list[Tensor], models: int, dots: str) -> LoopOptions:
    if lengths is not None:
        lengths = lengths.to(states[0].device, torch.int64)
        lengths = lengths if models else lengths.unsqueeze(0)
    return LoopOptions(lengths, reverse, dots=dots)


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
    return run_forward(key, inputs, states, weights, lengths, reverse, keep, models, dots)


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
    return run_backward(key, gradients, inputs, states, weights, stored, lengths, reverse, wanted, models, dots)


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
    program, loop_inputs, states, weights, lengths, reverse, _, models, dots = inputs
    ctx.program, ctx.reverse = program, reverse
    ctx.sizes = Sizes(len(loop_inputs), len(states), len(weights), models, dots)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(lengths, *loop_inputs, *states, *weights)


def _recompute_and_differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    """The gradient of a graph that saved nothing for it: the loop runs once more."""
    lengths, *tensors = ctx.saved_tensors
    program, sizes, n = ctx.program, ctx.sizes, ctx.sizes.states
    parts = _parts(sizes, tensors)
    options = (sizes.models, sizes.dots)
    results = forward_op(program, *parts, lengths, ctx.reverse, True, *options)
    stored = [*results[:n], *results[2 * n :]]
    wanted = [tensor.requires_grad for tensor in tensors]
    d = backward_op(program, list(gradients[: 2 * n]), *parts, stored, lengths, ctx.reverse, wanted, *options)
    return (None, *_parts(sizes, d), None, None, None, None, None)


forward_op.register_autograd(_recompute_and_differentiate, setup_context=_remember)


# -- with gradients -----------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """How the tensors of a call divide into inputs, states and weights, and what else the operators take."""

    inputs: int
    states: int
    weights: int
    models: int = 0  # 0 where there is no axis of models
    dots: str = ""


class FusedLoop(torch.autograd.Function):
    """(inputs, states, weights) -> (trajectory, final states, what the gradient needs)."""

    @staticmethod
    def forward(
        key: str, sizes: Sizes, lengths: Tensor | None, reverse: bool, keep: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, states, weights = _parts(sizes, tensors)
        if torch.compiler.is_compiling():
            text = text_of(key)
            return tuple(forward_op(text, inputs, states, weights, lengths, reverse, keep, sizes.models, sizes.dots))
        return tuple(run_forward(key, inputs, states, weights, lengths, reverse, keep, sizes.models, sizes.dots))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        key, sizes, lengths, reverse, _, *tensors = inputs
        n = sizes.states
        ctx.key, ctx.sizes, ctx.reverse, ctx.has_lengths = key, sizes, reverse, lengths is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2 * n :])
        ctx.save_for_backward(*([lengths] if lengths is not None else []), *tensors, *output[:n], *output[2 * n :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        lengths = saved[0] if ctx.has_lengths else None
        tensors = saved[1:] if ctx.has_lengths else saved
        n = ctx.sizes.states
        wanted = tuple(ctx.needs_input_grad[5:])
        # A second derivative may follow; in a compiled graph there is none.
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or traced()):
            results = FusedLoopBackward.apply(ctx.key, ctx.sizes, lengths, ctx.reverse, wanted, *gradients[: 2 * n], *tensors)
        else:
            results = FusedLoopBackward.forward(ctx.key, ctx.sizes, lengths, ctx.reverse, wanted, *gradients[: 2 * n], *tensors)
        return (None,) * 5 + tuple(d if want else None for d, want in zip(results, wanted, strict=True))

    @staticmethod
    def vmap(info: Any, dims: Any, key: str, sizes: Any, lengths: Any, reverse: bool, keep: bool, *tensors: Tensor) -> Any:
        if _in_one_launch(sizes, tensors):
            lengths, *stacked = _models(info, (lengths, *tensors), (dims[2], *dims[5:]))
            together = FusedLoop.apply(key, sizes._replace(models=info.batch_size), lengths, reverse, keep, *stacked)
            return together, (0,) * len(together)
        results = [
            FusedLoop.apply(key, sizes, _model(lengths, dims[2], i), reverse, keep, *_model_parts(tensors, dims[5:], i))
            for i in range(info.batch_size)
        ]
        return _stacked(results)


def run_in_graph(
    key: str, sizes: Sizes, lengths: Tensor | None, reverse: bool, keep: bool, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """As FusedLoop, in a graph of torch.compile or torch.export."""
    if keep:
        tensors = without_unread(key, list(tensors))
        if not exporting():
            # torch.compile takes no tensor twice.
            return FusedLoop.apply(key, sizes, lengths, reverse, True, *[tensor.view_as(tensor) for tensor in tensors])
    return tuple(forward_op(text_of(key), *_parts(sizes, tensors), lengths, reverse, False, sizes.models, sizes.dots))


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
    def forward(
        key: str, sizes: Sizes, lengths: Tensor | None, reverse: bool, wanted: tuple[bool, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        gradients, inputs, states, weights, stored = _all_parts(sizes, tensors)
        arguments = (list(gradients), inputs, states, weights, stored)
        options = (lengths, reverse, list(wanted), sizes.models, sizes.dots)
        if torch.compiler.is_compiling():
            return tuple(backward_op(text_of(key), *arguments, *options))
        return tuple(run_backward(key, *arguments, *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.key, ctx.sizes, lengths, ctx.reverse, ctx.wanted, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(lengths, *tensors)

    @staticmethod
    def backward(ctx: Any, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        lengths, *tensors = ctx.saved_tensors
        gradients, inputs, states, weights, stored = _all_parts(ctx.sizes, tensors)
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        program, sizes = PROGRAMS[ctx.key], ctx.sizes

        def derivative(*arguments: Tensor) -> tuple[Tensor, ...]:
            """What `forward` computes, as the gradient of the reference loop."""
            cotangents, point = arguments[: len(given)], arguments[len(given) :]

            def outputs(*point: Tensor) -> tuple[Tensor, ...]:
                results = _reference(program, sizes, point, lengths, ctx.reverse)
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
        return (None,) * 5 + (*to_gradients, *results[len(given) :], *[None] * len(stored))

    @staticmethod
    def vmap(
        info: Any, dims: Any, key: str, sizes: Any, lengths: Any, reverse: bool, wanted: Any, *tensors: Tensor | None
    ) -> Any:
        if _in_one_launch(sizes, tensors):
            lengths, *stacked = _models(info, (lengths, *tensors), (dims[2], *dims[5:]))
            together = FusedLoopBackward.apply(key, sizes._replace(models=info.batch_size), lengths, reverse, wanted, *stacked)
            return together, (0,) * len(together)
        results = [
            FusedLoopBackward.apply(
                key, sizes, _model(lengths, dims[2], i), reverse, wanted, *_model_parts(tensors, dims[5:], i)
            )
            for i in range(info.batch_size)
        ]
        return _stacked(results)


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


def _reference(program: Program, sizes: Sizes, point: Sequence[Tensor], lengths: Any, reverse: bool) -> tuple[Tensor, ...]:
    """The trajectory and the final states, computed by the reference loop."""
    cell: Any = _ProgramCell(program)

    def run(lengths: Any, *point: Tensor) -> tuple[Tensor, ...]:
        inputs, states, weights = _parts(sizes, point)
        trajectory, final = scan(
            cell, cell.make_inputs(*inputs), cell.make_state(*states), weights, lengths=lengths, reverse=reverse
        )
        return (*trajectory, *final)

    if not sizes.models:
        return run(lengths, *point)
    return torch.func.vmap(run, in_dims=(None if lengths is None else 0, *[0] * len(point)))(lengths, *point)


def _parts(sizes: Sizes, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, states, weights."""
    inputs, states = sizes.inputs, sizes.states
    return list(tensors[:inputs]), list(tensors[inputs : inputs + states]), list(tensors[inputs + states :])


def _all_parts(sizes: Sizes, tensors: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients, inputs, states, weights, and what forward stored."""
    n = 2 * sizes.states
    end = n + sum(sizes[:3])
    return tensors[:n], *_parts(sizes, tensors[n:end]), list(tensors[end:])


# -- vmap ---------------------------------------------------------------------------------------------------------------------


def _in_one_launch(sizes: Sizes, tensors: Sequence[Tensor | None]) -> bool:
    """Whether the models of a vmap can share a launch: on a GPU, and not inside another vmap."""
    return not sizes.models and any(tensor is not None and target_of(tensor.device) == "triton" for tensor in tensors)


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


# torch computes the signature at every call, unless it is stored.
for function in (FusedLoop.forward, FusedLoopBackward.forward):
    setattr(function, "__signature__", inspect.signature(function))  # noqa: B010
