"""Findings from the measurements: where the gradient vanishes, explodes or is cut, which activations saturate or are dead.

The thresholds apply to g_l(lag) = ||dL/ds_{T-lag}|| in layer l:

    vanishes in time    g_l falls below 1e-3 of its maximum in the bottom layer; if it does so above alone, that is a note
    explodes in time    g_l rises above 1e3 times its value at the loss, g_top(0)
    fades with depth    sqrt(sum over lags of g_l^2), of h alone, or the gradient of the bottom layer's parameters, is below
                        1e-3 of the top layer's; explodes: above 1e3 times it
    cut                 the autograd graph does not reach the state, so there is no gradient at all

The bottom layer decides on time, since an early input acts through its state alone. Layers above may forget it without harm:
the bottom layer's gradient already contains every path through them.

L is the loss if one was given, else the end: a random direction of the top layer's last output. If every step has its own loss,
each step gets a gradient even if the model remembers nothing. A decay of the end's gradient is then a note, not a fault.
"""

import math
from typing import NamedTuple

from unfading.diagnostics.measure.lag import GradientNorm
from unfading.diagnostics.measures import Measures

THRESHOLD = 1e-3
# An activation is a fault if more than this share of it is saturated or dead.
FAULTY_SHARE = 0.5
# A feature is unused if its effect on h is below this share of the strongest feature's.
UNUSED_SHARE = 1e-6


class Finding(NamedTuple):
    """A fault or a note."""

    kind: str  # one or two words, the same for every model
    fault: bool  # False for a note, which is no problem for some tasks
    layer: str | None
    lag: int | None
    sentence: str


def findings(measures: Measures) -> list[Finding]:
    """All faults, then all notes."""
    if measures.broken:
        names = ", ".join(measures.broken[:3]) + (" and more" if len(measures.broken) > 3 else "")
        return [Finding("not finite", True, None, None, f"Not finite: {names}. Nothing else was measured.")]
    cuts = _cuts(measures)
    of_activations = _activations(measures)
    results = [*cuts, *of_activations]
    # Dead units also hide the input, so an unused input would be the same fault again.
    if not any(finding.kind == "dead ReLUs" for finding in of_activations):
        results += _unused_input(measures)
    # A cut graph has no gradient that could vanish.
    if not cuts:
        results += [*_time(measures), *_depth(measures)]
    return sorted(results, key=lambda finding: not finding.fault)


def headline(measures: Measures, findings: list[Finding]) -> str:
    """The verdict in one sentence."""
    faults = [finding for finding in findings if finding.fault]
    if findings and not faults:
        kinds = ", ".join(finding.kind for finding in findings)
        return f"Clean, with {len(findings)} note{'s' if len(findings) > 1 else ''}: {kinds}."
    if not faults:
        extent = f"over {measures.steps} steps and {len(measures.layers)} layer{'s' if len(measures.layers) > 1 else ''}"
        return f"Clean: the gradient stays within a factor of 1,000 {extent}."
    kinds = ", ".join(dict.fromkeys(finding.kind for finding in faults))
    return f"{len(faults)} fault{'s' if len(faults) > 1 else ''}: {kinds}."


def norm_at_loss(measures: Measures, *, loss: bool) -> float:
    """g_top at the shortest lag where it is not zero."""
    curves = [measures.curve(layer, loss=loss) for layer in measures.top]
    return max((next((point.norm for point in curve if point.norm > 0), 0.0) for curve in curves), default=0.0)


def vanishing_lag(curve: list[GradientNorm]) -> int | None:
    """The first lag after the maximum at which the gradient is below the threshold; None if it never is."""
    peak = max(range(len(curve)), key=lambda i: curve[i].norm)
    return next((point.lag for point in curve[peak:] if point.norm < THRESHOLD * curve[peak].norm), None)


def exploding_lag(curve: list[GradientNorm], at_loss: float) -> int | None:
    """The first lag at which the gradient is above its threshold or not a number; None if it never is."""
    return next((point.lag for point in curve if not point.norm <= at_loss / THRESHOLD), None)


def depth_shares(measures: Measures) -> dict[str, float]:
    """By layer: the norm of dL/dh over all steps, as a share of the top layer's; empty for one layer, or without a gradient."""
    loss = measures.loss is not None
    totals = {layer: math.hypot(*(point.h for point in measures.curve(layer, loss=loss))) for layer in measures.layers}
    top = max((totals[layer] for layer in measures.top), default=0.0)
    usable = top > 0 and all(math.isfinite(total) for total in totals.values())
    return {layer: total / top for layer, total in totals.items()} if usable and len(totals) > 1 else {}


def _time(measures: Measures) -> list[Finding]:
    loss = measures.loss is not None
    results = _over_time(measures, loss=loss)
    if loss and not any(finding.kind == "vanishes in time" for finding in results):
        for finding in _over_time(measures, loss=False):
            if finding.kind == "vanishes in time":
                sentence = (
                    f"Every step has its own loss and gets a gradient, but the last output depends on recent steps only: its "
                    f"gradient in {finding.layer} is below 1e-3 of its maximum from lag {finding.lag} on. This matters only if "
                    f"the task needs a longer memory."
                )
                results.append(Finding("short memory", False, finding.layer, finding.lag, sentence))
    return results


def _over_time(measures: Measures, *, loss: bool) -> list[Finding]:
    """Whether the gradient explodes, or else vanishes, in time."""
    at_loss = norm_at_loss(measures, loss=loss)
    # A backward layer processes the last step first, so a lag from the loss has no meaning there; only the end has.
    layers = [layer for layer in measures.layers if not (loss and layer.endswith(" backward"))]
    curves = {
        layer: curve for layer in layers if (curve := measures.curve(layer, loss=loss)) and max(g.norm for g in curve) > 0
    }
    # An exploding layer comes first: beside its maximum all other gradients look as if they vanished.
    exploding = {layer: lag for layer, curve in curves.items() if (lag := exploding_lag(curve, at_loss)) is not None}
    if exploding:
        return [_explodes(curves, exploding, at_loss)]
    vanishing = {layer: lag for layer, curve in curves.items() if (lag := vanishing_lag(curve)) is not None}
    # Both directions of the bottom layer, if it has two.
    bottom = {layer for layer in curves if _without_direction(layer) == _without_direction(measures.layers[0])}
    return [_vanishes(curves, vanishing, bottom, measures.steps)] if vanishing else []


def _without_direction(layer: str) -> str:
    return layer.removesuffix(" forward").removesuffix(" backward")


def _explodes(curves: dict[str, list[GradientNorm]], lags: dict[str, int], at_loss: float) -> Finding:
    """The finding for the layer that explodes first."""
    layer = min(lags, key=lambda name: lags[name])
    last = curves[layer][-1].norm / at_loss
    sentence = (
        f"The gradient explodes in time. In {layer}, ||dL/dh_t|| is above 1,000 times its value at the loss from lag "
        f"{lags[layer]} on; at the first step it is {f'{last:.1e} times that value' if math.isfinite(last) else 'not finite'}."
    )
    return Finding("explodes in time", True, layer, lags[layer], sentence)


def _vanishes(curves: dict[str, list[GradientNorm]], lags: dict[str, int], bottom: set[str], steps: int) -> Finding:
    """The fault of the bottom layer or, if it keeps the gradient, a note on the layers that do not."""
    soonest = min(lags, key=lambda name: lags[name])
    if not bottom <= set(lags):
        sentence = (
            f"In {len(lags)} of {len(curves)} layers ||dL/dh_t|| falls below 1e-3 of its maximum, first in {soonest} from lag "
            f"{lags[soonest]} on. The bottom layer keeps it above."
        )
        return Finding("fades in some layers", False, soonest, lags[soonest], sentence)
    layer = max(bottom or lags, key=lambda name: lags[name])
    share = curves[layer][-1].norm / max(point.norm for point in curves[layer])
    sentence = (
        f"The gradient vanishes in time. In {layer}, ||dL/dh_t|| is below 1e-3 of its maximum from lag {lags[layer]} on, "
        f"of {steps} steps; at the first step it is {share:.1e} of the maximum."
    )
    if len(lags) > 1:
        sentence += f" {len(lags)} of {len(curves)} layers fall below 1e-3, first {soonest} from lag {lags[soonest]} on."
    return Finding("vanishes in time", True, layer, lags[layer], sentence)


def _depth(measures: Measures) -> list[Finding]:
    shares = depth_shares(measures)
    if not shares:
        return []
    low, high = (pick(shares, key=lambda layer: shares[layer]) for pick in (min, max))
    results = []
    if shares[low] < THRESHOLD:
        sentence = (
            f"The gradient fades with depth. Over all steps, {low} gets {shares[low]:.1e} of the top layer's gradient; "
            f"{sum(share < THRESHOLD for share in shares.values())} of {len(measures.layers)} layers get less than 1e-3 of it."
        )
        results.append(Finding("fades with depth", True, low, None, sentence))
    if shares[high] > 1 / THRESHOLD:
        sentence = (
            f"The gradient explodes with depth. Over all steps, {high} gets {shares[high]:.1e} times the top layer's gradient."
        )
        results.append(Finding("explodes with depth", True, high, None, sentence))
    return results or _depth_of_parameters(measures)


def _depth_of_parameters(measures: Measures) -> list[Finding]:
    """As `_depth`, from the gradients of parameters, which the lattice shows."""
    flat = measures.flat.get("end" if measures.loss is None else "loss")
    share, bottom = 1.0 if flat is None else flat.bottom_to_top, measures.layers[0]
    if THRESHOLD <= share <= 1 / THRESHOLD or not math.isfinite(share):
        return []
    kind, verb = ("fades with depth", "fades") if share < 1 else ("explodes with depth", "explodes")
    sentence = f"The gradient {verb} with depth. The parameters of {bottom} get {share:.1e} of the gradient of the top layer's."
    return [Finding(kind, True, bottom, None, sentence)]


def _cuts(measures: Measures) -> list[Finding]:
    for layer in reversed(measures.layers):
        curve = measures.curve(layer, loss=False)
        missing = [point.lag for point in curve if not point.reached]
        if missing and len(missing) == len(curve):
            sentence = f"The graph is cut: no gradient of the last output reaches {layer}. Look for detach or no_grad above it."
            return [Finding("cut", True, layer, 0, sentence)]
        if missing:
            lag = min(missing)
            sentence = (
                f"The graph is cut: in {layer}, no gradient of the last output goes further back than {lag - 1} steps. Look "
                f"for detach, no_grad or truncation. Ignore this if the truncation is intended."
            )
            return [Finding("cut", True, layer, lag, sentence)]
    if measures.loss is not None and not any(point.reached for point in measures.gradients):
        sentence = (
            "The graph is cut: no gradient of the loss reaches any layer. Look for detach or no_grad between the layers and "
            "the loss."
        )
        return [Finding("cut", True, None, None, sentence)]
    return []


def _unused_input(measures: Measures) -> list[Finding]:
    strongest = max(measures.features, default=0.0)
    layer = measures.layers[0]
    if strongest == 0.0:
        sentence = f"The input has no effect: dh_t/dx_t is 0 in {layer}. The input matrix is zero, or the activations are dead."
        return [Finding("unused input", True, layer, None, sentence)]
    unused = [i for i, effect in enumerate(measures.features) if effect < UNUSED_SHARE * strongest]
    if not unused:
        return []
    names = ", ".join(map(str, unused[:8])) + (" and more" if len(unused) > 8 else "")
    sentence = (
        f"{len(unused)} of {len(measures.features)} input features of {layer} have no effect: {names} (counted from 0). "
        f"Their columns of the input matrix are zero."
    )
    return [Finding("unused input", True, layer, None, sentence)]


def _activations(measures: Measures) -> list[Finding]:
    results = []
    dead = [activation for activation in measures.activations if activation.dead > FAULTY_SHARE]
    saturated = [a for a in measures.activations if a.kind != "relu" and a.saturated > FAULTY_SHARE]
    if dead:
        worst = max(dead, key=lambda activation: activation.dead)
        sentence = f"{worst.dead:.0%} of the ReLUs `{worst.name}` in {worst.layer} are dead: 0 at every step of every row."
        results.append(Finding("dead ReLUs", True, worst.layer, None, sentence))
    if saturated:
        worst = max(saturated, key=lambda activation: activation.saturated)
        low, high = ("closed", "open") if worst.kind == "sigmoid" else ("at -1", "at 1")
        sentence = (
            f"{worst.saturated:.0%} of `{worst.name}` in {worst.layer} is saturated ({worst.low:.0%} {low}, {worst.high:.0%} "
            f"{high}). Its slope there is below 1/1000 of the maximum, so almost no gradient passes."
        )
        others = len(saturated) - 1
        if others:
            sentence += f" {others} more activation{'s are' if others > 1 else ' is'} saturated."
        results.append(Finding("saturated", True, worst.layer, None, sentence))
    return results
