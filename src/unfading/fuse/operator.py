"""The compiled loop as an operator of torch: grad, vmap, second derivatives, torch.compile and export.

Two bare operators stand for the loops in compiled and exported graphs (`loops.py`); an autograd.Function with its rule for
vmap stands around each: on a GPU the members of a vmap are models of one launch, on a CPU they run one by one. The gradient
of the backward loop is that of the reference. `torch.library.register_autograd` is not used: under torch.func.grad it
raises, and forward-mode derivatives come out as silent zeros. Forward mode goes to the reference loop; `refusal` in
`fused.py` sees to that.
"""

import inspect
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unfading.fuse import loops
from unfading.fuse.devices import place_of
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.ir.program import InputKind, Program, TensorKind
from unfading.fuse.plan import PROGRAMS
from unfading.reference import scan
from unfading.torch_state import traced

# How many inputs, states and weights there are; models, 0 without an axis of them; what autocast wants multiplied.
Sizes = tuple[int, int, int, int, str]


class Loop(torch.autograd.Function):
    """(inputs, states, weights) -> (trajectory, final states, what the gradient needs)."""

    @staticmethod
    def forward(
        key: str, sizes: Sizes, lengths: Tensor | None, reverse: bool, keep: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        operator = loops.forward_op if torch.compiler.is_compiling() else loops.forward
        return tuple(operator(key, *_parts(sizes, tensors), lengths, reverse, keep, *sizes[3:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        key, sizes, lengths, reverse, _, *tensors = inputs
        n = sizes[1]
        ctx.key, ctx.sizes, ctx.reverse, ctx.has_lengths = key, sizes, reverse, lengths is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2 * n :])
        ctx.save_for_backward(*([lengths] if lengths is not None else []), *tensors, *output[:n], *output[2 * n :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        lengths = saved[0] if ctx.has_lengths else None
        tensors = saved[1:] if ctx.has_lengths else saved
        n = ctx.sizes[1]
        wanted = tuple(ctx.needs_input_grad[5:])
        # A second derivative may be asked for; in a compiled graph there is none.
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or traced()):
            found = BackLoop.apply(ctx.key, ctx.sizes, lengths, ctx.reverse, wanted, *gradients[: 2 * n], *tensors)
        else:
            found = BackLoop.forward(ctx.key, ctx.sizes, lengths, ctx.reverse, wanted, *gradients[: 2 * n], *tensors)
        return (None,) * 5 + tuple(d if want else None for d, want in zip(found, wanted, strict=True))

    @staticmethod
    def vmap(info: Any, dims: Any, key: str, sizes: Any, lengths: Any, reverse: bool, keep: bool, *tensors: Tensor) -> Any:
        if _in_one_launch(sizes, tensors):
            lengths, *stacked = _models(info, (lengths, *tensors), (dims[2], *dims[5:]))
            together = Loop.apply(key, (*sizes[:3], info.batch_size, sizes[4]), lengths, reverse, keep, *stacked)
            return together, (0,) * len(together)
        made = [
            Loop.apply(key, sizes, _member(lengths, dims[2], i), reverse, keep, *_members(tensors, dims[5:], i))
            for i in range(info.batch_size)
        ]
        return _stacked(made)


class BackLoop(torch.autograd.Function):
    """(gradients, what Loop got and kept) -> gradients of inputs, states and weights."""

    @staticmethod
    def forward(
        key: str, sizes: Sizes, lengths: Tensor | None, reverse: bool, wanted: tuple[bool, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        gradients, inputs, states, weights, kept = _all_parts(sizes, tensors)
        operator = loops.backward_op if torch.compiler.is_compiling() else loops.backward
        return tuple(operator(key, list(gradients), inputs, states, weights, kept, lengths, reverse, list(wanted), *sizes[3:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.key, ctx.sizes, lengths, ctx.reverse, ctx.wanted, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(lengths, *tensors)

    @staticmethod
    def backward(ctx: Any, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        lengths, *tensors = ctx.saved_tensors
        gradients, inputs, states, weights, kept = _all_parts(ctx.sizes, tensors)
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        program, sizes = PROGRAMS[ctx.key], ctx.sizes

        def derivative(*arguments: Tensor) -> tuple[Tensor, ...]:
            """What `forward` computes, as the gradient of the reference loop."""
            cotangents, point = arguments[: len(given)], arguments[len(given) :]

            def outputs(*point: Tensor) -> tuple[Tensor, ...]:
                made = _reference(program, sizes, point, lengths, ctx.reverse)
                return tuple(made[i] for i in given)

            return torch.func.vjp(outputs, *point)[1](cotangents)

        point = (*inputs, *states, *weights)
        pull = torch.func.vjp(derivative, *(gradients[i] for i in given), *point)[1]
        found = pull(
            tuple(torch.zeros_like(x) if s is None or s.shape != x.shape else s for s, x in zip(second, point, strict=True))
        )
        to_gradients: list[Tensor | None] = [None] * len(gradients)
        for i, gradient in zip(given, found, strict=False):
            to_gradients[i] = gradient
        return (None,) * 5 + (*to_gradients, *found[len(given) :], *[None] * len(kept))

    @staticmethod
    def vmap(
        info: Any, dims: Any, key: str, sizes: Any, lengths: Any, reverse: bool, wanted: Any, *tensors: Tensor | None
    ) -> Any:
        if _in_one_launch(sizes, tensors):
            lengths, *stacked = _models(info, (lengths, *tensors), (dims[2], *dims[5:]))
            together = BackLoop.apply(key, (*sizes[:3], info.batch_size, sizes[4]), lengths, reverse, wanted, *stacked)
            return together, (0,) * len(together)
        made = [
            BackLoop.apply(key, sizes, _member(lengths, dims[2], i), reverse, wanted, *_members(tensors, dims[5:], i))
            for i in range(info.batch_size)
        ]
        return _stacked(made)


class _Traced:
    """A program in the place of a cell, for the reference loop."""

    def __init__(self, program: Program):
        self.program = program
        names = [f"input{i}" for i in range(len(program.kinds))]
        states = sum(kind == TensorKind.NEXT for kind, _ in program.widths)
        make: Any = namedtuple  # made from names that are known here only
        self.make_inputs, self.make_state = make("Inputs", names), make("State", [f"state{i}" for i in range(states)])
        self.shared = tuple(name for name, kind in zip(names, program.kinds, strict=True) if kind == InputKind.SHARED)
        self.constant = tuple(name for name, kind in zip(names, program.kinds, strict=True) if kind == InputKind.CONSTANT)

    def step(self, inputs: Sequence[Tensor], state: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
        return self.make_state(*next_states(self.program, inputs, state, weights))


def _reference(program: Program, sizes: Sizes, point: Sequence[Tensor], lengths: Any, reverse: bool) -> tuple[Tensor, ...]:
    """What the loop computes, by the reference."""
    cell: Any = _Traced(program)

    def run(lengths: Any, *point: Tensor) -> tuple[Tensor, ...]:
        inputs, states, weights = _parts(sizes, point)
        trajectory, final = scan(
            cell, cell.make_inputs(*inputs), cell.make_state(*states), weights, lengths=lengths, reverse=reverse
        )
        return (*trajectory, *final)

    if not sizes[3]:
        return run(lengths, *point)
    return torch.func.vmap(run, in_dims=(None if lengths is None else 0, *[0] * len(point)))(lengths, *point)


def _parts(sizes: Sizes, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, states, weights."""
    inputs, states = sizes[:2]
    return list(tensors[:inputs]), list(tensors[inputs : inputs + states]), list(tensors[inputs + states :])


def _all_parts(sizes: Sizes, tensors: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients, inputs, states, weights, and what was kept."""
    n = 2 * sizes[1]
    end = n + sum(sizes[:3])
    return tensors[:n], *_parts(sizes, tensors[n:end]), list(tensors[end:])


def _in_one_launch(sizes: Sizes, tensors: Sequence[Tensor | None]) -> bool:
    """Whether the members of a vmap can be models of one launch: on a GPU, and not inside another vmap's models."""
    return not sizes[3] and any(tensor is not None and place_of(tensor.device) == "triton" for tensor in tensors)


def _models(info: Any, tensors: Sequence[Tensor | None], dims: Sequence[int | None]) -> list[Tensor | None]:
    """Every tensor with a first axis of models, which has stride 0 where they share it."""
    pairs = zip(tensors, dims, strict=True)
    return [
        None if tensor is None else tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in pairs
    ]


def _member(tensor: Tensor | None, dim: int | None, i: int) -> Tensor | None:
    return tensor if tensor is None or dim is None else tensor.select(dim, i)


def _members(tensors: Sequence[Tensor | None], dims: Sequence[int | None], i: int) -> list[Tensor | None]:
    return [_member(tensor, dim, i) for tensor, dim in zip(tensors, dims, strict=True)]


def _stacked(made: list[tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What the members of a vmap made, along a new first axis: on a CPU they run one after the other."""
    return tuple(torch.stack(parts) for parts in zip(*made, strict=True)), (0,) * len(made[0])


# torch looks the signature up at every call; worked out once, it is there.
for function in (Loop.forward, BackLoop.forward):
    setattr(function, "__signature__", inspect.signature(function))  # noqa: B010
