"""Gradient norms during training: of the parameters of each layer, and of its states back through time.

    layers      || d loss / d theta_l ||              one for each layer; theta_l its weights and biases
    times       t_1 < ... < t_k                       a few steps from the first to the last
    states      || d loss / d h_{l,t} ||              one for each layer and each of these times; h is the state's first part

The norms are of a whole batch (Frobenius, over all rows), without noise, and through all time steps even if training truncates
them.

The cost must be small beside a training step, so the loop over time runs on the training backend. It runs up to each t_k as one
chunk, and step t_k on the reference backend, whose state is then a node of the graph. The gradient of that node is the full
derivative, through the output of step t_k and through all later steps.

STAR (Turkoglu et al. 2019) shows the norms of parameters in Fig. 3, NRU (Chandar et al. 2019) those of states in Fig. 7.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unfading.backends.choose import outputs
from unfading.cells.base import Cell
from unfading.diagnostics.measure.jacobian import evenly_spaced
from unfading.diagnostics.measure.observe import evaluation_mode
from unfading.layers.model import Model
from unfading.loop_options import LoopOptions
from unfading.tasks.base import Batch, Task
from unfading.training.record import finite_or_none

TIMES = 8  # the largest number of time steps


def gradients(model: Model, task: Task, batch: Batch) -> dict[str, Any]:
    """`layers`, `times` and `states` as JSON values, with null for what is not finite. The model is left unchanged."""
    rnn = model.rnn
    if rnn.bidirectional:
        raise ValueError(
            "gradients are watched in one direction of time, and this stack is bidirectional. Train it without --watch."
        )
    with evaluation_mode(model), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        y = model.encoder(batch.x)
        T, B = y.shape[:2]
        times = evenly_spaced(T, TIMES)
        nodes: list[Tensor] = []
        for cell, state in zip(rnn.runners, rnn.initial_states(B, tuple(y.shape[3:])), strict=True):
            y = _run_layer(cell, y, state, times, batch.lengths, rnn.backend, nodes)
        loss = task.loss(model.head(y, batch.lengths), batch)
        parameters = [[p for p in cell.parameters() if p.requires_grad] for cell in rnn.cells]
        leaves = [*nodes, *(p for of_cell in parameters for p in of_cell)]
        results = torch.autograd.grad(loss, leaves, allow_unused=True)
    norms = iter([0.0 if g is None else float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in results])
    states = [[next(norms) for _ in times] for _ in parameters]
    layers = [sum(next(norms) ** 2 for _ in of_cell) ** 0.5 for of_cell in parameters]
    return {"layers": _finite(layers), "times": [t + 1 for t in times], "states": [_finite(row) for row in states]}


def _run_layer(
    cell: Cell, u: Tensor, state: Any, times: Sequence[int], lengths: Tensor | None, backend: str, nodes: list[Tensor]
) -> Tensor:
    """The output of a layer, [T, B, n]; its state after each of `times` is appended to `nodes`."""
    chunks, start = [], 0
    for t in times:
        for begin, end, name in ((start, t, backend), (t, t + 1, "reference")):
            if begin < end:
                remaining = None if lengths is None else (lengths - begin).clamp(0, end - begin)
                chunk, state = outputs(cell, u[begin:end], state, LoopOptions(remaining, start=begin, backend=name))
                chunks.append(chunk)
        nodes.append(state[0])
        start = t + 1
    return torch.cat(chunks)


def _finite(values: Sequence[float]) -> list[float | None]:
    return list(finite_or_none({str(i): value for i, value in enumerate(values)}).values())
