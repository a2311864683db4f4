"""Changes worth trying, each with the measurement that speaks for it.

A change of the recurrence is tried: a stack of the same sizes with that change, at its start, runs on the same input, and what
is left at the first step of the first layer of the gradient at the end of the top one,

    left = ||d(end)/ds_1|| in layer 1 / ||d(end)/ds_T|| in the top layer,

is set beside the model's own. That is what a fresh network keeps: training can make it better or worse. Nothing is advised that
did not measure at least ten times nearer to 1.
"""

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from unfading.diagnostics.measure.lag import Gradient, gradients, swept
from unfading.diagnostics.measure.observe import Chain, observe
from unfading.diagnostics.measures import Measures
from unfading.diagnostics.verdict import BAR, Finding, depth
from unfading.layers.factory import Layer
from unfading.layers.recurrent import Recurrent
from unfading.tasks.base import Batch
from unfading.training.names import layer_class

# Made against fading, each in its own way: gates with spread forgetting times, small steps that are stable by construction.
TRIED = ("STAR", "LSTM", "StableIncrementalRNN")
NEARER = 10.0
# Rows of the batch on which a change is tried.
ROWS = 8


class Advice(NamedTuple):
    """A change, and what was measured for it."""

    change: str
    evidence: str


def end(chains: list[Chain], generator: Generator) -> Tensor:
    """A random direction of the last output of the top layer (of the stack that ran last), summed over rows."""
    last = chains[-1].position
    total = torch.zeros(())
    for chain in chains:
        if (chain.position.stack, chain.position.layer) == (last.stack, last.layer):
            output = chain.cell.output(chain.states[-1])
            direction = torch.randn(output.shape, generator=generator, dtype=torch.float64) / math.sqrt(output.shape[-1])
            total = total.to(output) + (direction.to(output) * output).sum()
    return total


def advice(measures: Measures, found: list[Finding], stack: Recurrent, first: Chain, generator: Generator) -> list[Advice]:
    """Two or three changes, best first; none where nothing is wrong."""
    kinds = {finding.kind for finding in found}
    given: list[Advice] = []
    if kinds & {"vanishes in time", "explodes in time", "fades with depth", "explodes with depth", "short memory", "saturated"}:
        given += _tried(measures, stack, first, generator)
    if "fades with depth" in kinds or "explodes with depth" in kinds:
        given += _shallower(measures)
    if "explodes in time" in kinds or "explodes with depth" in kinds:
        given += _clipping(measures)
    for finding in found:
        given += _by_kind(measures, finding)
    return given[:3]


def left(curves: tuple[Gradient, ...] | list[Gradient], bottom: str, top: tuple[str, ...]) -> float | None:
    """||d(end)/ds_1|| in layer 1 by ||d(end)/ds_T|| in the top layer."""
    begun = [each.norm for each in curves if each.layer == bottom]
    ended = max(each.norm for each in curves if each.layer in top and each.lag == 0)
    return begun[-1] / ended if ended > 0 else None


def _tried(measures: Measures, stack: Recurrent, first: Chain, generator: Generator) -> list[Advice]:
    mine = left(measures.end, measures.layers[0], measures.top)
    if mine is None:
        return []
    same, others = [], []
    hidden = stack.output_size // stack.directions
    if isinstance(stack, Layer):
        hidden = stack.hidden_size
        if "max_lag" in layer_options(type(stack)) and (stack.options.get("max_lag") or 0) < measures.steps:
            options = {**stack.options, "max_lag": max(2, measures.steps)}
            kept = _trial(type(stack), stack, hidden, options, first, generator)
            same = [
                (kept, f"{type(stack).__name__} with a chrono bias, max_lag={options['max_lag']} (the steps of your input)")
            ]
    for name in TRIED:
        kind = layer_class(name)
        if not isinstance(stack, kind):
            options = {"max_lag": max(2, measures.steps)} if "max_lag" in layer_options(kind) else {}
            said = ", ".join([name, *(f"{option}={value}" for option, value in options.items())])
            others.append((_trial(kind, stack, hidden, options, first, generator), f"another cell: {said}"))
    better = [pair for pair in same if _nearer(pair[0], mine)]
    better += sorted([pair for pair in others if _nearer(pair[0], mine)], key=lambda pair: _off(pair[0]))[:2]
    # The smaller change first, where it suffices.
    better.sort(key=lambda pair: _off(pair[0]) > -math.log10(BAR))
    where = f"of the gradient at the end is left at the first step of {measures.layers[0]}"
    return [
        Advice(f"Try {what}.", f"A fresh one of the same sizes on your input: {kept:.1e} {where}; yours: {mine:.1e}.")
        for kept, what in better
    ]


def layer_options(kind: type[Layer]) -> set[str]:
    """The names of what its constructor takes."""
    return set(inspect.signature(kind).parameters)


def _trial(
    kind: type[Layer], like: Recurrent, hidden: int, options: dict[str, Any], first: Chain, generator: Generator
) -> float:
    """What a stack of that kind keeps, at its start."""
    x = torch.stack(first.x)[:, :ROWS]
    lengths = None if first.lengths is None else first.lengths[:ROWS]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        made = kind(
            like.input_size,
            hidden,
            like.num_layers,
            bidirectional=like.bidirectional,
            device=x.device,
            dtype=x.dtype,
            **options,
        )
    chains = observe(made, Batch(x, x, lengths)).chains
    found = gradients(chains, swept(chains, end(chains, torch.Generator().manual_seed(0))))
    top = tuple(str(chain.position) for chain in chains if chain.position.layer == made.num_layers)
    kept = left(found, str(chains[0].position), top)
    return math.nan if kept is None else kept


def _off(share: float) -> float:
    """How far from 1, in either direction, as a logarithm."""
    return abs(math.log10(share)) if 0 < share < math.inf else math.inf


def _nearer(share: float, mine: float) -> bool:
    return math.isfinite(_off(share)) and _off(share) + math.log10(NEARER) <= min(_off(mine), 400.0)


def _shallower(measures: Measures) -> list[Advice]:
    shares, L = depth(measures), len(measures.layers)
    bottom = shares.get(measures.layers[0], 1.0)
    gain = bottom ** (1 / (L - 1)) if bottom > 0 and L > 1 else 1.0
    if gain == 1.0:
        return []
    fit = 1 + int(math.log(BAR if gain < 1 else 1 / BAR) / math.log(gain))
    if not 1 <= fit < L:
        return []
    evidence = f"The gradient changes by a factor of {gain:.2g} from layer to layer; {fit} of them keep it within 1,000."
    return [Advice(f"Try {fit} layer{'s' if fit > 1 else ''} instead of {L}.", evidence)]


def _clipping(measures: Measures) -> list[Advice]:
    largest = max((each.largest for each in measures.spectra), default=math.nan)
    norms = [each.norm for each in (measures.gradients or measures.end)]
    evidence = f"The largest ||dL/dh_t|| is {max(norms):.1e}; one step stretches a gradient by up to {largest:.3g}."
    return [Advice("Clip the gradient's norm (clip_norm=1.0), and start the recurrent matrix smaller.", evidence)]


def _by_kind(measures: Measures, finding: Finding) -> list[Advice]:
    changes = {
        "not finite": "Load the last good weights, or train with a smaller rate and clip_norm=1.0.",
        "cut": "Pass the state on without detach, and leave no_grad to evaluation.",
        "unused input": "Start the input matrix anew, or leave these features out.",
        "dead ReLUs": "Start the bias at 0 and train with a smaller rate, or take tanh in place of ReLU.",
        "saturated": "Start its bias and matrix smaller: near 0 its slope is largest. Scale the input to variance 1.",
    }
    return [Advice(changes[finding.kind], finding.sentence)] if finding.kind in changes else []
