"""A program with convolutions evaluated in torch, differentiable any number of times: for tests of a program, and for second
derivatives."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from unfading.fuse.frames.frame_program import FrameProgram
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.ir.program import TensorKind


def next_frames(
    program: FrameProgram, inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """The states after one step: inputs and states are [B, n, height, width]."""
    B, _, height, width = states[0].shape
    values = [each.expand(B, each.shape[1], height, width) for each in (*inputs, *states)]
    for stage in program.stages:
        rows = [value.permute(0, 2, 3, 1).flatten(0, 2) for value in values]
        outputs = []
        if stage.program.stores:
            sizes = [n for (kind, _), n in sorted(stage.program.widths.items()) if kind == TensorKind.NEXT]
            like = [rows[0].new_empty((len(rows[0]), n)) for n in sizes]
            results = next_states(stage.program, rows, like, weights)
            outputs = [part.unflatten(0, (B, height, width)).permute(0, 3, 1, 2) for part in results]
        for c in stage.convolutions:
            v = values[c.source.index] if c.source.kind == TensorKind.INPUT else outputs[c.source.index]
            kernels = weights[c.weight][c.r0 : c.r1]
            values.append(functional.conv2d(v, kernels, None, 1, c.border, c.dilation, c.groups))
    return outputs


def loop_in_torch(
    program: FrameProgram,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    steps: int,
) -> list[Tensor]:
    """The states after every step, then the final states, as the compiled loop returns them."""
    state, trajectory = list(states), []
    for t in range(steps):
        new = next_frames(program, [each[t if len(each) > 1 else 0] for each in inputs], state, weights)
        if lengths is not None:
            running = (t < lengths).reshape(-1, 1, 1, 1)
            new = [torch.where(running, n, old) for n, old in zip(new, state, strict=True)]
        state = new
        trajectory.append(state)
    return [*(torch.stack(part) for part in zip(*trajectory, strict=True)), *state]
