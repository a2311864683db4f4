"""Truncated backpropagation through time: a long sequence in pieces, the state carried, the graph cut between them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from unfading.errors import check_count
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent, detach


class Piece(NamedTuple):
    """A stretch of the sequence that has been run."""

    output: Tensor  # of the layer, or prediction of the model, for these steps
    state: Any  # after the last of them, still in its graph
    start: int  # absolute index of the first step
    stop: int  # and past the last


def truncated(network: Recurrent | Model, x: Tensor, every: int, *, state: Any = None, start: int = 0) -> Iterator[Piece]:
    """Run `network` over x in pieces of `every` steps; take a backward pass and an optimiser step between them as you like.

        for piece in truncated(model, x, 150):
            loss(piece.output, target[piece.start : piece.stop]).backward()
            optimiser.step()
            optimiser.zero_grad()

    Each piece runs with the parameters as they are when it is asked for. Gradients do not cross from piece to piece.

    Args:
        network: one direction only, since a reverse one would have to begin at the end.
        x: as the network takes it, batched or unbatched.
        every: steps per piece; the last may be shorter.
        state: to begin with; None starts anew.
        start: absolute index of x's first step.
    """
    rnn = network.rnn if isinstance(network, Model) else network
    check_count("every", every)
    if rnn.bidirectional:
        raise ValueError("a bidirectional network reads each piece from its end and cannot carry state; wanted one direction.")
    time = 1 if rnn.batch_first and x.dim() == 3 else 0
    return _pieces(network, x.split(every, dim=time), time, state, start)


def _pieces(network: Recurrent | Model, xs: tuple[Tensor, ...], time: int, state: Any, start: int) -> Iterator[Piece]:
    for x in xs:
        output, state = network(x, state, start=start)
        stop = start + x.shape[time]
        yield Piece(output, state, start, stop)
        state, start = detach(state), stop
