"""Checkpointing through time: a long sequence is run in segments without a graph, and again with one in the backward pass.

What is kept between the passes is the state at the start of each segment; one segment at a time has its graph while it is
gone back through. With segments of sqrt T steps that is memory of order sqrt T, beside the layer's input and output, which
are kept in any case. The projection is inside the segment. Inside torch.compile, which plans memory itself, and inside the
transforms of torch.func, which cannot run a segment twice, the whole sequence is run at once.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.lengths import flip
from unfading.reference import constants_of
from unfading.torch_state import traced

Scan = Callable[..., tuple[Any, Any]]


def run_in_segments(
    implementation: Scan,
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    *,
    every: int,
    lengths: Tensor | None,
    reverse: bool,
    start: int,
) -> tuple[Any, Any]:
    """As `implementation(cell, x, state, weights, ...)`, segment by segment of `every` steps."""
    if traced():
        return implementation(cell, x, state, weights, lengths=lengths, reverse=reverse, start=start)
    if reverse:
        # Processing order from here on: what depends on time alone was declared shared, and is read in this order anyway.
        x = flip(x, lengths)
    constants = constants_of(cell, x, start)
    parameters = {f"cell.{name}": value for name, value in cell.named_parameters()}
    pieces = []
    for x_piece in x.split(every):
        segment = Segment(implementation, cell, lengths, start)
        leaves, tree = _pytree.tree_flatten(((x_piece, state, weights, constants), parameters))
        *states, state = _pytree.tree_unflatten(Recomputed.apply(segment, tree, *leaves), segment.outputs)
        pieces.append(states)
        start += len(x_piece)
        lengths = None if lengths is None else lengths - len(x_piece)
    parts = [list(part) for part in zip(*pieces, strict=True)]
    del pieces, states
    trajectory = []
    while parts:  # one after the other, so that a part's pieces go before the next is joined
        trajectory.append(torch.cat(parts.pop(0)))
    if reverse:
        own = None if lengths is None else lengths + len(x)
        trajectory = [flip(part, own) for part in trajectory]
    return type(state)(*trajectory), state


class Segment(nn.Module):
    """One segment as a function of tensors, with all else that decides its result as it was when it was first run."""

    outputs: Any  # the tree of what it returns: the parts of the trajectory, then the final state

    def __init__(self, implementation: Scan, cell: Cell, lengths: Tensor | None, start: int):
        super().__init__()
        self.cell = cell
        self.implementation = implementation
        self.lengths = lengths
        self.start = start
        self.training_flags = [module.training for module in cell.modules()]

    def forward(self, x: Tensor, state: Any, weights: Any, constants: dict[str, Tensor]) -> list[Tensor]:
        trajectory, last = self.implementation(
            self.cell, x, state, weights, lengths=self.lengths, start=self.start, constants=constants
        )
        leaves, self.outputs = _pytree.tree_flatten([*trajectory, last])
        return leaves

    def first(self, arguments: Any, parameters: dict[str, Tensor]) -> list[Tensor]:
        """Run, and remember what random numbers and which precision it ran with."""
        device = arguments[0].device
        self.autocast = (device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
        before = _random_state(device)
        leaves: list[Tensor] = torch.func.functional_call(self, parameters, arguments)
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_state(device), strict=True))
        self.random_state = before if drew else None
        return leaves

    def again(self, arguments: Any, parameters: dict[str, Tensor]) -> list[Tensor]:
        """Run once more as the first time, whatever has been set since."""
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
                leaves: list[Tensor] = torch.func.functional_call(self, parameters, arguments)
            finally:
                _set_training(modules, flags)
        return leaves


class Recomputed(torch.autograd.Function):
    """A segment that keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, tree: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.segment, ctx.tree = segment, tree
        ctx.save_for_backward(*leaves)
        return tuple(segment.first(*_pytree.tree_unflatten(leaves, tree)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        twice = torch.is_grad_enabled()  # a second derivative is asked for
        with torch.enable_grad():
            # New nodes, so that a gradient goes back to the inputs of this segment and not past them.
            leaves = [
                leaf.view_as(leaf) if twice else leaf.detach().requires_grad_(leaf.requires_grad) for leaf in ctx.saved_tensors
            ]
            outputs = ctx.segment.again(*_pytree.tree_unflatten(leaves, ctx.tree))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        tracked = [i for i, output in enumerate(outputs) if output.requires_grad]
        found = iter(
            torch.autograd.grad(
                [outputs[i] for i in tracked],
                wanted,
                [gradients[i] for i in tracked],
                create_graph=twice,
                allow_unused=True,
            )
        )
        return (None, None, *(next(found) if leaf.requires_grad else None for leaf in leaves))


def _random_state(device: torch.device) -> list[Tensor]:
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]


def _set_training(modules: list[nn.Module], flags: list[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
