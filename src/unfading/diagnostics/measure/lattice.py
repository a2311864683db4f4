"""The lattice of layers and time: how large the gradient is of the parameters that each layer used at each step.

A stack of L layers that runs for T steps is a lattice of L x T points (`point.py`). Give every point parameters of its own,
theta_{l,t}, all equal to theta_l. Then

    G_{l,t} = || d loss / d theta_{l,t} ||         Frobenius, over weights AND biases

shows where the gradient of a layer comes from: summed over t, the gradients of the copies are that of theta_l. All of G is
found in one sweep, from the last step of the top layer to the first of the bottom one. With s the states, y the outputs, u what
a layer reads (y of the layer below), and a bar for the derivative of the loss:

    G_{l,t}, u_bar_{l,t}, s_bar_{l,t-1} = point (l, t), backwards, at s_bar_{l,t}, y_bar_{l,t};    y_bar_{l-1,t} = u_bar_{l,t}

`run` and `sweep` are written for one stack; `torch.func.vmap` runs them for many (`draws.py`). Where the states of a model have
been observed (`observe.py`) and dL/ds_t is known, through outputs and later steps alike, `observed` needs no sweep: it takes a
point back from there with y_bar = 0, and any few of the steps will do.

Turkoglu et al. 2019 (STAR), section 3 and Fig. 2, 6, 7. The paper does not say whether biases count. They do here, and it
matters: the weights of an LSTM's upper layers read small numbers, and have small gradients for that alone, so that without the
biases the fall from top to bottom cannot be seen (1.7 for bottom / top in place of 1e-3).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import grad

from unfading.cells.base import Cell
from unfading.diagnostics.measure.lattice_step import Back, LatticeStep, Parameters
from unfading.diagnostics.measure.observe import Chain
from unfading.layers.model import Model
from unfading.tasks.base import Batch


class LatticePoint(NamedTuple):
    """G at one point of an observed model."""

    layer: str
    depth: int  # the layer's number in its stack, 1 the bottom
    step: int  # from 1, in the order of processing
    of: str  # loss, or end: a random direction of the last output
    value: float


def lattice(model: Model, batch: Batch, loss: Callable[[Tensor, Batch], Tensor]) -> Tensor:
    """G of a model on a batch: [L, T], float64. Noise (dropout, zoneout) is left out.

    Args:
        model: whose stack runs forward in time.
        batch: what the model reads, and what it should answer.
        loss: of the prediction and the batch, as `task.loss`.
    """
    measure, thetas = measured(model, batch, loss)
    return measure(thetas)


def measured(
    model: Model, batch: Batch, loss: Callable[[Tensor, Batch], Tensor]
) -> tuple[Callable[[Sequence[Parameters]], Tensor], list[Parameters]]:
    """G as a function of the parameters of every layer, and these as they are, by the names that their points know them by."""
    rnn = model.rnn
    if rnn.bidirectional:
        raise ValueError(
            "a lattice has one direction of time, and this stack is bidirectional. Measure one built with bidirectional=False."
        )
    with torch.no_grad():
        x = model.encoder(batch.x)
        initial = rnn.initial_states(x.shape[1])
    points = [LatticeStep(cast(Cell, cell), x.shape[1]) for cell in rnn.cells]

    def measure(thetas: Sequence[Parameters]) -> Tensor:
        with torch.no_grad():
            y, backs = run(points, thetas, x, initial, batch.lengths)
            y_bar = grad(lambda top: loss(model.head(top, batch.lengths), batch))(torch.stack(list(y)))
            return sweep(backs, initial, y_bar)

    return measure, [point.theta() for point in points]


def run(
    points: Sequence[LatticeStep],
    thetas: Sequence[Parameters],
    x: Tensor,
    initial: Sequence[Any],
    lengths: Tensor | None = None,
) -> tuple[Sequence[Tensor], list[list[Back]]]:
    """Up through the layers: the output of the top one at every step, and for each layer and step the way back.

    Args:
        points: one for each layer.
        thetas: their parameters.
        x: [T, B, I].
        initial: each layer's state before the first step.
        lengths: int64 [B], where rows have lengths of their own.
    """
    backs: list[list[Back]] = []
    y: Sequence[Tensor] = x.unbind(0)
    for point, theta, state in zip(points, thetas, initial, strict=True):
        outputs, row = [], []
        for t, u_t in enumerate(y):
            going = None if lengths is None else (t < lengths).unsqueeze(1)
            state, y_t, back = point.forward(theta, u_t, state, t, going)
            outputs.append(y_t)
            row.append(back)
        backs.append(row)
        y = outputs
    return y, backs


def sweep(backs: Sequence[Sequence[Back]], initial: Sequence[Any], y_bar: Tensor) -> Tensor:
    """Down through the layers: G [L, T], float64; y_bar [T, B, n] is what the loss sends back to the top layer's output."""
    rows = []
    bars: Sequence[Tensor] = y_bar.unbind(0)
    for row, state in zip(reversed(backs), reversed(initial), strict=True):
        s_bar = type(state)(*(torch.zeros_like(part) for part in state))
        magnitudes, below = [], []
        for back, y_bar_t in zip(reversed(row), reversed(bars), strict=True):
            G, u_bar, s_bar = back(s_bar, y_bar_t)
            magnitudes.append(G)
            below.append(u_bar)
        rows.append(torch.stack(magnitudes[::-1]))
        bars = below[::-1]
    return torch.stack(rows[::-1])


def observed(chain: Chain, times: Sequence[int], bars: Mapping[str, Sequence[Sequence[Tensor | None]]]) -> list[LatticePoint]:
    """G of one layer at some steps, counted from 0.

    Args:
        chain: what its cell went through.
        times: the steps.
        bars: dL/ds_t for each L by name, as `lag.swept` gives it for this chain.
    """
    point = LatticeStep(chain.cell, len(chain.x[0]))
    theta, found = point.theta(), []
    for t in times:
        u, state = chain.x[t], type(chain.states[t])(*(part.detach() for part in chain.states[t]))
        going = None if chain.lengths is None else (t < chain.lengths).unsqueeze(1)
        with torch.no_grad():
            new, y, back = point.forward(theta, u, state, chain.index[t], going)
            for of, bar in bars.items():
                given = zip(bar[t], new, strict=True)
                s_bar = type(new)(*(torch.zeros_like(part) if g is None else g for g, part in given))
                value = float(back(s_bar, torch.zeros_like(y))[0])
                found.append(LatticePoint(str(chain.position), chain.position.layer, t + 1, of, value))
    return found


def has_one(chain: Chain) -> bool:
    """Whether dL/ds_t tells the whole gradient: the cell has parameters, and none of them makes its output from its state."""
    own = [parameter for parameter in chain.cell.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        y = chain.cell.output(type(chain.states[0])(*(part.detach() for part in chain.states[0])))
        made = torch.autograd.grad(y.sum(), own, allow_unused=True) if own and y.requires_grad else []
    return bool(own) and all(gradient is None for gradient in made)
