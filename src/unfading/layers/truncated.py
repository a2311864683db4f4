"""Truncated backpropagation through time: run a long sequence in chunks, pass the state on, and stop gradients between them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from unfading.errors import check_count, check_type
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent, detach, split_resets


class Chunk(NamedTuple):
    """The result of running one chunk of the sequence."""

    output: Tensor  # output of the layer, or prediction of the model, for the steps of the chunk
    state: Any  # after the last step, with its history in the autograd graph
    start: int  # absolute index of the first step
    stop: int  # absolute index after the last step


def truncated(
    network: Recurrent | Model, x: Tensor, every: int, *, state: Any = None, resets: Tensor | None = None, start: int = 0
) -> Iterator[Chunk]:
    """Run `network` over x in chunks of `every` steps, with a backward pass and an optimiser step in between.

        for chunk in truncated(model, x, 150):
            loss(chunk.output, target[chunk.start : chunk.stop]).backward()
            optimiser.step()
            optimiser.zero_grad()

    A chunk is run when the loop asks for it, with the parameters of that moment. Gradients do not flow from chunk to chunk.

    Args:
        network: a layer or model that is not bidirectional, since a reverse direction would begin at the end.
        x: input in the network's layout, batched or unbatched.
        every: steps per chunk; the last chunk may be shorter.
        state: the state before the first step; None starts from the initial state.
        resets: bool, for all steps of x: steps before which the state is set to the initial state, as in a call of the network.
        start: absolute index of the first step of x.
    """
    rnn = network.rnn if isinstance(network, Model) else network
    check_count("every", every)
    check_type("x", x, Tensor)
    if x.dim() < 2:
        raise ValueError(f"x must have a time axis and features, [T, B, I] or [T, I]; got shape {list(x.shape)}.")
    if rnn.bidirectional:
        raise ValueError("a bidirectional network cannot pass its state from chunk to chunk; got one. Use one direction.")
    time = 1 if rnn.batch_first and x.dim() == 3 + rnn.frame_axes else 0
    rnn.check_chunks(x.shape[time], every)
    return _chunks(network, x.split(every, dim=time), split_resets(resets, x, every, time), time, state, start)


def _chunks(
    network: Recurrent | Model,
    xs: Sequence[Tensor],
    resets: Sequence[Tensor | None],
    time: int,
    state: Any,
    start: int,
) -> Iterator[Chunk]:
    for x, own in zip(xs, resets, strict=True):
        output, state = network(x, state, resets=own, start=start)
        stop = start + x.shape[time]
        yield Chunk(output, state, start, stop)
        state, start = detach(state), stop
