"""Checkpointing through time: a sequence is run in segments without a graph, and again with one in the backward pass.

Between the two passes only the state before each segment is stored, and the backward pass holds the graph of one segment at a
time. With segments of sqrt T steps, memory grows like sqrt T, beside the input and the output of the layer, which are stored in
any case. The projection is part of the segment if it is local in time; any other runs once over the whole sequence, and its
result is stored. The whole sequence is run at once inside torch.compile, which plans memory itself, and inside the transforms
of torch.func, which cannot run a segment twice.
"""

from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.lengths import flip
from unfading.loop_options import LoopOptions
from unfading.reference import constants_of, leaf_names, projected
from unfading.torch_state import traced


def run_in_segments(
    implementation: Callable[..., tuple[Any, Any]], cell: Cell, x: Tensor, state: Any, weights: Any, options: LoopOptions
) -> tuple[Any, Any]:
    """As `implementation(cell, x, state, weights, options)`, in segments of `options.checkpoint_every` steps."""
    lengths, reverse, start = options[:3]
    if traced() or options.checkpoint_every is None:
        return implementation(cell, x, state, weights, options)
    whole = None if _local(cell, len(x), reverse) else cell.project(x, start)
    parameters = {f"cell.{name}": value for name, value in cell.named_parameters()}
    hooked = torch.is_grad_enabled() and _hooked((x, state, weights, parameters))
    if reverse:
        # From here on in the order of processing, in which fields that depend on time alone (`shared`) are read anyway.
        x = flip(x, lengths)
        whole = None if whole is None else _flipped(cell, whole, lengths)
    constants = constants_of(cell, x, start) if whole is None else {}
    reads: list[bool] | None = None
    segments = []
    for a, x_segment in zip(range(0, len(x), options.checkpoint_every), x.split(options.checkpoint_every), strict=True):
        segment = Segment(implementation, cell, options._replace(lengths=lengths, reverse=False, start=start))
        inputs = () if whole is None else _chunk(cell, whole, a, a + len(x_segment))
        leaves, tree = _pytree.tree_flatten(((x_segment, state, weights, constants, inputs), parameters))
        if hooked:
            reads = segment.reads(leaves, tree, reads)
            leaves = [leaf if read else leaf.detach() for leaf, read in zip(leaves, reads, strict=True)]
        segment.hooked = [hooked and (a == 0 or not 1 <= i <= len(state)) for i in range(len(leaves))]
        outputs = RecomputedSegment.apply(segment, tree, *leaves)
        *states, state = _pytree.tree_unflatten(outputs, segment.outputs)
        segments.append(states)
        start += len(x_segment)
        lengths = None if lengths is None else lengths - len(x_segment)
    parts = [list(part) for part in zip(*segments, strict=True)]
    del segments, states
    trajectory = []
    while parts:  # one part after the other, so that the segments of one are freed before the next is joined
        trajectory.append(torch.cat(parts.pop(0)))
    if reverse:
        trajectory = [flip(part, options.lengths) for part in trajectory]
    return type(state)(*trajectory), state


def _hooked(tensors: Any) -> bool:
    """Whether one of these tensors, or what it is a view of, has a hook on its gradient."""
    leaves = [leaf for leaf in _pytree.tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return any(leaf._backward_hooks or (leaf._base is not None and leaf._base._backward_hooks) for leaf in leaves)


def _local(cell: Cell, steps: int, reverse: bool) -> bool:
    """Whether segments of x can be projected one by one, with the same result as the whole sequence."""
    # Imported here, since it loads the compiler.
    from unfading.fuse.locality import locality

    shown = locality(cell, steps, reverse=reverse)
    return shown.refusal is None and not shown.writes


def _flipped(cell: Cell, inputs: Any, lengths: Tensor | None) -> Any:
    """The inputs of a sequence in the order of processing, from its end."""
    leaves, tree = _pytree.tree_flatten(inputs)
    as_they_are = {*cell.shared, *cell.constant}
    named = zip(leaf_names(inputs), leaves, strict=True)
    return _pytree.tree_unflatten([leaf if name in as_they_are else flip(leaf, lengths) for name, leaf in named], tree)


def _chunk(cell: Cell, inputs: Any, start: int, stop: int) -> Any:
    """The inputs of some steps of a sequence."""
    leaves, tree = _pytree.tree_flatten(inputs)
    named = zip(leaf_names(inputs), leaves, strict=True)
    return _pytree.tree_unflatten([leaf if name in cell.constant else leaf[start:stop] for name, leaf in named], tree)


class Segment(nn.Module):
    """One segment as a function of tensors, with everything else that decides its result as it was in the first run."""

    outputs: Any  # the tree of what it returns: the parts of the trajectory, then the final state
    hooked: list[bool]  # for each of its tensors, whether a hook may wait for its gradient

    def __init__(self, implementation: Callable[..., tuple[Any, Any]], cell: Cell, options: LoopOptions):
        super().__init__()
        self.cell = cell
        self.implementation = implementation
        self.options = options
        self.training_flags = [module.training for module in cell.modules()]
        self.parameters_then = list(cell.parameters())

    def forward(self, x: Tensor, state: Any, weights: Any, constants: dict[str, Tensor], inputs: Any) -> list[Tensor]:
        if constants:
            inputs = projected(self.cell, x, self.options.start, constants)
        trajectory, last = self.implementation(self.cell, x, state, weights, self.options, inputs=inputs or None)
        leaves, self.outputs = _pytree.tree_flatten([*trajectory, last])
        return leaves

    def own_parameters(self) -> list[nn.Parameter] | None:
        """The parameters of the cell, if a gradient can be taken with respect to them as they are.

        Parameters are not replaced then, which other threads would see. They must be replaced inside the caller's own
        functional_call, and where they have hooks, which would be called twice.
        """
        now = list(self.cell.parameters())
        same = len(now) == len(self.parameters_then) and all(map(is_, now, self.parameters_then))
        return now if same and all(p.is_leaf and not p._backward_hooks for p in now) else None

    def reads(self, leaves: list[Tensor], tree: Any, before: list[bool] | None) -> list[bool]:
        """For each tensor, whether a gradient reaches it: the hook of one that is not read would be called with None.

        Args:
            leaves: the tensors.
            tree: makes the arguments and parameters of them.
            before: the result for the segments before. A tensor that they read counts as read.
        """
        if before is not None and all(read or not leaf.requires_grad for read, leaf in zip(before, leaves, strict=True)):
            return before
        device = leaves[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            # All of them: the state before the first segment needs no gradient, the next ones do.
            twins = [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
            arguments, parameters = _pytree.tree_unflatten(twins, tree)
            outputs = [output for output in torch.func.functional_call(self, parameters, arguments) if output.requires_grad]
            total = sum((output.sum() for output in outputs), start=torch.zeros((), requires_grad=True))
            wanted = [twin for twin in twins if twin.requires_grad]
            gradients = iter(torch.autograd.grad(total, wanted, allow_unused=True))
        now = [twin.requires_grad and next(gradients) is not None for twin in twins]
        return now if before is None else [a or b for a, b in zip(before, now, strict=True)]

    def first(self, arguments: Any) -> list[Tensor]:
        """Run, and store the state of the random number generators and of autocast."""
        device = arguments[0].device
        self.autocast = (device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
        before = _random_state(device)
        leaves = self(*arguments)
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_state(device), strict=True))
        self.random_state = before if drew else None
        return leaves

    def again(self, arguments: Any, parameters: dict[str, Tensor] | None) -> list[Tensor]:
        """Run as in the first run, whatever has been set since; with these parameters in place of the cell's own."""
        device = arguments[0].device
        devices = [device] if device.type == "cuda" else []
        modules = list(self.cell.modules())
        flags = [module.training for module in modules]
        kind, dtype, enabled = self.autocast
        with torch.random.fork_rng(devices) if self.random_state else nullcontext(), torch.autocast(kind, dtype, enabled):
            if self.random_state:
                torch.set_rng_state(self.random_state[0])
                if devices:
                    torch.cuda.set_rng_state(self.random_state[1], device)
            _set_training(modules, self.training_flags)
            try:
                if parameters is None:
                    leaves: list[Tensor] = self(*arguments)
                else:
                    leaves = torch.func.functional_call(self, parameters, arguments)
            finally:
                _set_training(modules, flags)
        return leaves


class RecomputedSegment(torch.autograd.Function):
    """A segment that stores only its inputs for the backward pass.

    An output without a gradient is left out of the backward pass. Zeros in its place would become NaN where they meet an
    infinite derivative, which autograd never computes. A tensor with a hook that only such outputs depend on has a gradient of
    zeros, since the hook would be called with None.
    """

    @staticmethod
    def forward(ctx: Any, segment: Segment, tree: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.segment, ctx.tree = segment, tree
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        return tuple(segment.first(_pytree.tree_unflatten(leaves, tree)[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        twice = torch.is_grad_enabled()  # a second derivative is wanted
        with torch.enable_grad():
            # New nodes, so that a gradient stops at the inputs of this segment.
            leaves = [
                leaf.view_as(leaf) if twice else leaf.detach().requires_grad_(leaf.requires_grad) for leaf in ctx.saved_tensors
            ]
            arguments, parameters = _pytree.tree_unflatten(leaves, ctx.tree)
            own = ctx.segment.own_parameters()
            if own is not None:
                leaves[len(leaves) - len(own) :] = own
            outputs = ctx.segment.again(arguments, parameters if own is None else None)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        tracked = [i for i, output in enumerate(outputs) if output.requires_grad and gradients[i] is not None]
        results = iter(
            torch.autograd.grad(
                [outputs[i] for i in tracked],
                wanted,
                [gradients[i] for i in tracked],
                create_graph=twice,
                allow_unused=True,
            )
            if tracked
            else [None] * len(wanted)
        )
        given = [next(results) if leaf.requires_grad else None for leaf in leaves]
        for i, leaf in enumerate(leaves):
            if given[i] is None and leaf.requires_grad and ctx.segment.hooked[i]:
                given[i] = torch.zeros_like(leaf)
        return (None, None, *given)


def _random_state(device: torch.device) -> list[Tensor]:
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]


def _set_training(modules: list[nn.Module], flags: list[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        if module.training != flag:
            module.training = flag
