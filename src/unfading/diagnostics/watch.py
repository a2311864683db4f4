"""What is seen of the gradients while a model is trained: of each layer's parameters, and of its states back through time.

    layers      || d loss / d theta_l ||              one for each layer; theta_l its weights and biases
    times       t_1 < ... < t_k                       a few steps from the first to the last
    states      || d loss / d h_{l,t} ||              one for each layer and each of these times; h the state's first part

of a batch, its rows taken together (Frobenius), without noise, and through all of time also where training truncates it.

It must cost little beside a step of training, so the loop over time runs as it does there, compiled: up to each t_k in one
piece, and step t_k by the reference, whose state is then a node of the graph. That node's gradient is the whole derivative,
through the output of step t_k and through all later steps.

STAR (Turkoglu et al. 2019) shows the former in Fig. 3, NRU (Chandar et al. 2019) the latter in Fig. 7.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unfading.backends.choose import How, outputs
from unfading.cells.base import Cell
from unfading.diagnostics.measure.jacobian import spread
from unfading.diagnostics.measure.observe import evaluating
from unfading.layers.model import Model
from unfading.tasks.base import Batch, Task
from unfading.training.record import plain

TIMES = 8  # at most so many


def gradients(model: Model, task: Task, batch: Batch) -> dict[str, Any]:
    """`layers`, `times` and `states`, as JSON values; null for what is not finite. Leaves the model as it was."""
    rnn = model.rnn
    if rnn.bidirectional:
        raise ValueError("gradients are watched back through time, and this stack is bidirectional. Train it without --watch.")
    with evaluating(model), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        y = model.encoder(batch.x)
        T, B = y.shape[:2]
        times = spread(T, TIMES)
        nodes: list[Tensor] = []
        for cell, state in zip(rnn.runners, rnn.initial_states(B), strict=True):
            y = _through(cell, y, state, times, batch.lengths, rnn.backend, nodes)
        loss = task.loss(model.head(y, batch.lengths), batch)
        cells = [[p for p in cell.parameters() if p.requires_grad] for cell in rnn.cells]
        found = list(torch.autograd.grad(loss, [*nodes, *(p for cell in cells for p in cell)], allow_unused=True))
    sizes = iter([0.0 if g is None else float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in found])
    states = [[next(sizes) for _ in times] for _ in cells]
    layers = [sum(next(sizes) ** 2 for _ in cell) ** 0.5 for cell in cells]
    return {"layers": _finite(layers), "times": [t + 1 for t in times], "states": [_finite(row) for row in states]}


def _through(
    cell: Cell, u: Tensor, state: Any, times: Sequence[int], lengths: Tensor | None, backend: str, nodes: list[Tensor]
) -> Tensor:
    """The layer's output, [T, B, n]; its state after each of `times` goes to `nodes`."""
    pieces, start = [], 0
    for t in times:
        for begin, end, how in ((start, t, backend), (t, t + 1, "reference")):
            if begin < end:
                left = None if lengths is None else (lengths - begin).clamp(0, end - begin)
                piece, state = outputs(cell, u[begin:end], state, How(left, False, begin, how, None))
                pieces.append(piece)
        nodes.append(state[0])
        start = t + 1
    return torch.cat(pieces)


def _finite(values: Sequence[float]) -> list[float | None]:
    return list(plain({str(i): value for i, value in enumerate(values)}).values())
