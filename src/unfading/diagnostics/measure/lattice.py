"""The lattice of layers and time: the norm of the gradient of the parameters that each layer used at each step.

A stack of L layers that runs for T steps is a lattice of L x T points (`lattice_step.py`). Give every point its own copy of the
parameters, theta_{l,t}, all equal to theta_l. Then

    G_{l,t} = || d loss / d theta_{l,t} ||         Frobenius, over weights AND biases

shows where the gradient of a layer comes from: the sum over t of the gradients of the copies is the gradient of theta_l. One
backward sweep gives all of G, from the last step of the top layer to the first step of the bottom layer. With s the states, y
the outputs, u the input of a layer (y of the layer below), and a bar for the derivative of the loss:

    G_{l,t}, u_bar_{l,t}, s_bar_{l,t-1} = backward step (l, t) at s_bar_{l,t}, y_bar_{l,t};    y_bar_{l-1,t} = u_bar_{l,t}

`forward_pass` and `backward_pass` handle one stack; `torch.func.vmap` runs them for many (`draws.py`). If the states of a model
were recorded (`observe.py`) and dL/ds_t is known, including the dependence through outputs and later steps, no sweep is needed:
`observed_points` computes single points from dL/ds_t with y_bar = 0, at any subset of the steps.

Turkoglu et al. 2019 (STAR), section 3 and Fig. 2, 6, 7. The paper does not say whether biases count. They do here, and it
matters: the weights of the upper layers of an LSTM multiply small inputs and have small gradients for this reason alone.
Without the biases the decrease from top to bottom is hidden (bottom / top is 1.7 instead of 1e-3).

`flatness` summarises a lattice G [L, T]:

    bottom_to_top         sum_t G_{1,t} / sum_t G_{L,t}                      layers: 1 the bottom, L the top
    first_to_last         G_{1,1} / G_{L,T}                                  corner farthest from the loss / corner at the loss
    share_within_ten      share of points with G_{L,T} / 10 <= G <= 10 G_{L,T}
    gain_per_layer, gain_per_step
                          the factor of G per layer down and per step back: exp of the slopes of

                              log G_{l,t} ~ a + b (L - l) + c (T - t)        least squares over the points where G > 0

A lattice with both gains equal to 1 is flat. A gain of 1.26 is a factor of ten in ten layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import grad

from unfading.cells.base import Cell
from unfading.diagnostics.measure.lattice_step import BackwardStep, LatticeStep, Parameters
from unfading.diagnostics.measure.observe import Chain
from unfading.layers.model import Model
from unfading.tasks.base import Batch


class LatticePoint(NamedTuple):
    """G at one point of an observed model."""

    layer: str
    depth: int  # the number of the layer in its stack; 1 is the bottom
    step: int  # from 1, in the order of processing
    of: str  # loss, or end: a random direction of the last output
    value: float


class Flatness(NamedTuple):
    """Summary numbers of a lattice."""

    bottom_to_top: float
    first_to_last: float
    share_within_ten: float
    gain_per_layer: float
    gain_per_step: float


def lattice(model: Model, batch: Batch, loss: Callable[[Tensor, Batch], Tensor]) -> Tensor:
    """G of a model on a batch: [L, T], float64, without noise (dropout, zoneout).

    Args:
        model: a model whose stack runs forward in time.
        batch: input and target.
        loss: function of the prediction and the batch, such as `task.loss`.
    """
    measure, thetas = lattice_function(model, batch, loss)
    return measure(thetas)


def lattice_function(
    model: Model, batch: Batch, loss: Callable[[Tensor, Batch], Tensor]
) -> tuple[Callable[[Sequence[Parameters]], Tensor], list[Parameters]]:
    """G as a function of the parameters of every layer, and the current parameters by the names that it expects."""
    rnn = model.rnn
    if rnn.bidirectional:
        raise ValueError(
            "a lattice has one direction of time, and this stack is bidirectional. Measure one built with bidirectional=False."
        )
    with torch.no_grad():
        x = model.encoder(batch.x)
        frame = tuple(x.shape[3:])
        initial = rnn.initial_states(x.shape[1], frame)
    layers = []
    for cell in rnn.cells:
        layers.append(LatticeStep(cast(Cell, cell), x.shape[1], len(x), frame=frame))
        frame = cast(Cell, cell).state_frame(frame)

    def measure(thetas: Sequence[Parameters]) -> Tensor:
        with torch.no_grad():
            y, backward_steps = forward_pass(layers, thetas, x, initial, batch.lengths)
            y_bar = grad(lambda top: loss(model.head(top, batch.lengths), batch))(torch.stack(list(y)))
            return backward_pass(backward_steps, initial, y_bar)

    return measure, [layer.theta() for layer in layers]


def forward_pass(
    layers: Sequence[LatticeStep],
    thetas: Sequence[Parameters],
    x: Tensor,
    initial: Sequence[Any],
    lengths: Tensor | None = None,
) -> tuple[Sequence[Tensor], list[list[BackwardStep]]]:
    """Run the stack: the output of the top layer at every step, and the backward pass of every layer and step.

    Args:
        layers: the step of each layer.
        thetas: the parameters of each layer.
        x: [T, B, I], or frames [T, B, I, height, width].
        initial: the state of each layer before the first step.
        lengths: int64 [B]; None if all rows have T steps.
    """
    backward_steps: list[list[BackwardStep]] = []
    y: Sequence[Tensor] = x.unbind(0)
    for layer, theta, state in zip(layers, thetas, initial, strict=True):
        outputs, of_layer = [], []
        for t, u_t in enumerate(y):
            running = None if lengths is None else running_rows(t, lengths, u_t)
            state, y_t, backward_step = layer.forward(theta, u_t, state, t, running)
            outputs.append(y_t)
            of_layer.append(backward_step)
        backward_steps.append(of_layer)
        y = outputs
    return y, backward_steps


def backward_pass(backward_steps: Sequence[Sequence[BackwardStep]], initial: Sequence[Any], y_bar: Tensor) -> Tensor:
    """G [L, T], float64, from y_bar [T, B, n], the derivative of the loss by the outputs of the top layer."""
    G_of_layers = []
    y_bars: Sequence[Tensor] = y_bar.unbind(0)
    for of_layer, state in zip(reversed(backward_steps), reversed(initial), strict=True):
        s_bar = type(state)(*(torch.zeros_like(part) for part in state))
        G_of_steps, u_bars = [], []
        for backward_step, y_bar_t in zip(reversed(of_layer), reversed(y_bars), strict=True):
            G, u_bar, s_bar = backward_step(s_bar, y_bar_t)
            G_of_steps.append(G)
            u_bars.append(u_bar)
        G_of_layers.append(torch.stack(G_of_steps[::-1]))
        y_bars = u_bars[::-1]
    return torch.stack(G_of_layers[::-1])


def observed_points(
    chain: Chain, times: Sequence[int], gradients: Mapping[str, Sequence[Sequence[Tensor | None]]]
) -> list[LatticePoint]:
    """G of one observed layer at the given steps, counted from 0.

    Args:
        chain: the inputs and states of the layer.
        times: the steps.
        gradients: dL/ds_t of this chain for each L by name, as `lag.state_gradients` returns it.
    """
    layer = LatticeStep(chain.cell, len(chain.x[0]), chain.T, reverse=chain.position.backward, frame=chain.frame)
    theta, points = layer.theta(), []
    for t in times:
        u, state = chain.x[t], type(chain.states[t])(*(part.detach() for part in chain.states[t]))
        running = None if chain.lengths is None else running_rows(t, chain.lengths, u)
        with torch.no_grad():
            new, y, backward_step = layer.forward(theta, u, state, chain.index[t], running)
            for of, by_step in gradients.items():
                pairs = zip(by_step[t], new, strict=True)
                s_bar = type(new)(*(torch.zeros_like(part) if gradient is None else gradient for gradient, part in pairs))
                value = float(backward_step(s_bar, torch.zeros_like(y))[0])
                points.append(LatticePoint(str(chain.position), chain.position.layer, t + 1, of, value))
    return points


def running_rows(t: int, lengths: Tensor, u: Tensor) -> Tensor:
    """Whether each row of u [B, ...] has not ended before step t, with axes of size 1, so that it broadcasts with u."""
    return (t < lengths).reshape(-1, *[1] * (u.dim() - 1))


def has_lattice(chain: Chain) -> bool:
    """Whether dL/ds_t determines G: the cell has parameters, and its output does not depend on them given the state."""
    parameters = [parameter for parameter in chain.cell.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        y = chain.cell.output(type(chain.states[0])(*(part.detach() for part in chain.states[0])))
        of_output = torch.autograd.grad(y.sum(), parameters, allow_unused=True) if parameters and y.requires_grad else []
    return bool(parameters) and all(gradient is None for gradient in of_output)


def flatness(G: Tensor, steps: Sequence[int] | None = None) -> Flatness:
    """Summarise a lattice.

    Args:
        G: [L, T], the bottom layer and the first step first.
        steps: the index of the step of each column; None if the columns are consecutive steps.
    """
    G = G.double()
    corner = G[-1, -1]
    gain_per_layer, gain_per_step = _gains(G, range(G.shape[1]) if steps is None else steps)
    return Flatness(
        bottom_to_top=float(G[0].sum() / G[-1].sum()),
        first_to_last=float(G[0, 0] / corner),
        share_within_ten=float(((corner / 10 <= G) & (corner * 10 >= G)).double().mean()),
        gain_per_layer=gain_per_layer,
        gain_per_step=gain_per_step,
    )


def _gains(G: Tensor, steps: Sequence[int]) -> tuple[float, float]:
    L, T = G.shape
    down = torch.arange(L - 1, -1, -1, dtype=G.dtype).unsqueeze(1).expand(L, T)
    back = (steps[-1] - torch.tensor(list(steps), dtype=G.dtype)).expand(L, T)
    usable = (G > 0) & torch.isfinite(G)
    if not usable.any():
        return math.nan, math.nan
    terms = torch.stack([torch.ones_like(G)[usable], down[usable], back[usable]], dim=1)
    # gelsd returns the smallest slopes if the points do not determine them: one layer, or one step.
    _, b, c = torch.linalg.lstsq(terms, G[usable].log().unsqueeze(1), driver="gelsd").solution.squeeze(1).tolist()
    return math.exp(b), math.exp(c)
