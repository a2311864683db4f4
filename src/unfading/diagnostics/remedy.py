"""Changes worth trying, each with the measurement that supports it.

A change of the recurrence is tried before it is advised. A newly initialised stack of the same sizes with that change runs on
the same input, and its

    share = ||d(end)/ds_1|| in layer 1 / ||d(end)/ds_T|| in the top layer

is compared with the model's own. This describes the network at initialisation; training can improve or worsen it. A change is
advised only if its share is at least ten times closer to 1.
"""

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Generator

from unfading.diagnostics.measure.lag import GradientNorm, gradient_norms, random_end_loss, state_gradients
from unfading.diagnostics.measure.observe import Chain, observe
from unfading.diagnostics.measures import Measures
from unfading.diagnostics.verdict import THRESHOLD, Finding, depth_shares
from unfading.layers.factory import Layer
from unfading.layers.recurrent import Recurrent
from unfading.tasks.base import Batch
from unfading.training.names import layer_class, sizes

# Cells designed against vanishing gradients: by gates with a range of forgetting times, or by small steps that are stable.
TRIED_CELLS = ("STAR", "LSTM", "StableIncrementalRNN")
TRIED_OVER_FRAMES = ("ConvSTAR", "ConvForgetLSTM")
# Options of a convolutional layer that every other one has too.
GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "groups")
# A change must come this many times closer to a share of 1 than the model.
IMPROVEMENT = 10.0
# Rows of the batch on which a change is tried.
ROWS = 8
# Findings for which a change of the recurrence is tried.
OF_RECURRENCE = {"vanishes in time", "explodes in time", "fades with depth", "explodes with depth", "short memory", "saturated"}
# Advice that depends on the finding alone.
CHANGES = {
    "not finite": "Load earlier weights that are finite, or train with a smaller learning rate and clip_norm=1.0.",
    "cut": "Pass the state on without detach, and use no_grad only for evaluation.",
    "unused input": "Reinitialise the input matrix, or remove these features.",
    "dead ReLUs": "Initialise the bias at 0 and train with a smaller learning rate, or use tanh instead of ReLU.",
    "saturated": "Initialise its bias and matrix with smaller values, and scale the input to variance 1.",
}


class Advice(NamedTuple):
    """A change and the measurement that supports it."""

    change: str
    evidence: str


class TriedChange(NamedTuple):
    """A change of the recurrence and the share that its stack has at initialisation."""

    share: float
    change: str


def advice(measures: Measures, findings: list[Finding], stack: Recurrent, first: Chain, generator: Generator) -> list[Advice]:
    """At most three changes, the best first; none if there is no finding."""
    kinds = {finding.kind for finding in findings}
    changes: list[Advice] = []
    if kinds & OF_RECURRENCE:
        changes += _other_recurrences(measures, stack, first, generator)
    if "fades with depth" in kinds or "explodes with depth" in kinds:
        changes += _fewer_layers(measures)
    if "explodes in time" in kinds or "explodes with depth" in kinds:
        changes += _clipping(measures)
    changes += [Advice(CHANGES[finding.kind], finding.sentence) for finding in findings if finding.kind in CHANGES]
    return changes[:3]


def remaining_share(curves: tuple[GradientNorm, ...] | list[GradientNorm], bottom: str, top: tuple[str, ...]) -> float | None:
    """||d(end)/ds_1|| in layer 1 divided by ||d(end)/ds_T|| in the top layer; None if the latter is zero."""
    of_bottom = [point.norm for point in curves if point.layer == bottom]
    at_end = max(point.norm for point in curves if point.layer in top and point.lag == 0)
    return of_bottom[-1] / at_end if at_end > 0 else None


def _other_recurrences(measures: Measures, stack: Recurrent, first: Chain, generator: Generator) -> list[Advice]:
    """A chrono bias for the model's own cell, and other cells, as far as they are an improvement."""
    own_share = remaining_share(measures.end, measures.layers[0], measures.top)
    if own_share is None:
        return []
    max_lag = max(2, measures.steps)
    hidden = stack.hidden_size if isinstance(stack, Layer) else stack.output_size // stack.directions
    chrono: list[TriedChange] = []
    if isinstance(stack, Layer) and _accepts_max_lag(type(stack)) and (stack.options.get("max_lag") or 0) < measures.steps:
        share = _share_of_new_stack(type(stack), stack, hidden, {**stack.options, "max_lag": max_lag}, first, generator)
        change = f"{type(stack).__name__} with a chrono bias, max_lag={max_lag} (the length of your input)"
        chrono.append(TriedChange(share, change))
    others: list[TriedChange] = []
    geometry = {name: value for name, value in stack.options.items() if name in GEOMETRY} if isinstance(stack, Layer) else {}
    for name in TRIED_OVER_FRAMES if first.frame else TRIED_CELLS:
        kind = layer_class(name)
        if not isinstance(stack, kind):
            options = {"max_lag": max_lag} if _accepts_max_lag(kind) else {}
            described = ", ".join([name, *(f"{option}={value}" for option, value in options.items())])
            share = _share_of_new_stack(kind, stack, hidden, {**geometry, **options}, first, generator)
            others.append(TriedChange(share, f"another cell: {described}"))
    better = [trial for trial in chrono if _improves(trial.share, own_share)]
    better += sorted([t for t in others if _improves(t.share, own_share)], key=lambda trial: _decades_from_1(trial.share))[:2]
    # The smaller change comes first if it is sufficient.
    better.sort(key=lambda trial: _decades_from_1(trial.share) > -math.log10(THRESHOLD))
    return [
        Advice(
            f"Try {trial.change}.",
            f"A new stack of the same sizes, on your input: {trial.share:.1e} of the gradient at the end remains at the first "
            f"step of {measures.layers[0]}. In your model: {own_share:.1e}.",
        )
        for trial in better
    ]


def _accepts_max_lag(kind: type[Layer]) -> bool:
    return "max_lag" in inspect.signature(kind).parameters


def _share_of_new_stack(
    kind: type[Layer], like: Recurrent, hidden: int, options: dict[str, Any], first: Chain, generator: Generator
) -> float:
    """The remaining share of a newly initialised stack of this kind; nan if it has no gradient at the end."""
    x = torch.stack(first.x)[:, :ROWS]
    lengths = None if first.lengths is None else first.lengths[:ROWS]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        stack = kind(
            **sizes(kind, like.input_size, hidden, like.num_layers),  # type: ignore[arg-type]
            bidirectional=like.bidirectional,
            device=x.device,
            dtype=x.dtype,
            **options,
        )
    chains = observe(stack, Batch(x, x, lengths)).chains
    end = random_end_loss(chains, torch.Generator().manual_seed(0))
    curves = gradient_norms(chains, state_gradients(chains, end))
    top = tuple(str(chain.position) for chain in chains if chain.position.layer == stack.num_layers)
    share = remaining_share(curves, str(chains[0].position), top)
    return math.nan if share is None else share


def _decades_from_1(share: float) -> float:
    """The distance of a share from 1, in decades."""
    return abs(math.log10(share)) if 0 < share < math.inf else math.inf


def _improves(share: float, own_share: float) -> bool:
    decades = _decades_from_1(share)
    return math.isfinite(decades) and decades + math.log10(IMPROVEMENT) <= min(_decades_from_1(own_share), 400.0)


def _fewer_layers(measures: Measures) -> list[Advice]:
    shares, L = depth_shares(measures), len(measures.layers)
    bottom = shares.get(measures.layers[0], 1.0)
    gain = bottom ** (1 / (L - 1)) if bottom > 0 and L > 1 else 1.0
    if gain == 1.0:
        return []
    layers = 1 + int(math.log(THRESHOLD if gain < 1 else 1 / THRESHOLD) / math.log(gain))
    if not 1 <= layers < L:
        return []
    words = f"{layers} layer{'s' if layers > 1 else ''}"
    evidence = f"The gradient changes by a factor of {gain:.2g} per layer. With {words} it stays within a factor of 1,000."
    return [Advice(f"Try {words} instead of {L}.", evidence)]


def _clipping(measures: Measures) -> list[Advice]:
    largest = max((spectrum.largest for spectrum in measures.spectra), default=math.nan)
    norms = [point.norm for point in (measures.gradients or measures.end)]
    evidence = f"The largest ||dL/dh_t|| is {max(norms):.1e}. One step multiplies a gradient by up to {largest:.3g}."
    return [
        Advice("Clip the gradient norm (clip_norm=1.0), and initialise the recurrent matrix with smaller values.", evidence)
    ]
