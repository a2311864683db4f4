"""What the measures say, in words: where the gradient vanishes, explodes or is cut, what saturates, what is dead.

The bars, all on g_l(lag) = ||dL/ds_{T-lag}|| in layer l:

    vanishes in time    g_l falls under 1e-3 of its largest value in every layer; where some keep it, that is a note
    explodes in time    g_l rises over 1e3 of its value at the loss, g_top(0)
    fades with depth    sqrt(sum over lags of g_l^2), of h alone, is under 1e-3 of the top layer's; explodes: over 1e3 of it
    cut                 the graph does not lead there at all: no gradient, however small

L is the loss where one was given, else the end: a random direction of the top layer's last output. Where every step has a loss
of its own each gets a gradient even if nothing is remembered; a fall of the end's gradient is then a note, not a fault.
"""

import math
from typing import NamedTuple

from unfading.diagnostics.measure.lag import Gradient
from unfading.diagnostics.measures import Measures

BAR = 1e-3
# Share of an activation's units beyond which it is a fault.
MUCH = 0.5
# A feature that moves h by less than this share of what the strongest does is not used.
UNUSED = 1e-6


class Finding(NamedTuple):
    """One thing that was found."""

    kind: str  # one or two words, the same for every model
    fault: bool  # or a note: to be known, and fine for some tasks
    layer: str | None
    lag: int | None
    sentence: str


def findings(measures: Measures) -> list[Finding]:
    """All that is wrong or worth knowing, most serious first."""
    if measures.broken:
        names = ", ".join(measures.broken[:3]) + (" and more" if len(measures.broken) > 3 else "")
        return [Finding("not finite", True, None, None, f"Not finite: {names}. Nothing behind it can be measured.")]
    cut = _cuts(measures)
    activations = _activations(measures)
    found = [*cut, *activations]
    # Nothing passes dead units, the input neither: that is one fault.
    if not any(finding.kind == "dead ReLUs" for finding in activations):
        found += _unused(measures)
    # What is cut off has no gradient that could fade.
    if not cut:
        found += [*_time(measures), *_depth(measures)]
    return sorted(found, key=lambda finding: not finding.fault)


def headline(measures: Measures, found: list[Finding]) -> str:
    """The verdict in one sentence."""
    faults = [finding for finding in found if finding.fault]
    if found and not faults:
        return f"Clean, with {len(found)} note{'s' if len(found) > 1 else ''}: {', '.join(each.kind for each in found)}."
    if not faults:
        far = f"over {measures.steps} steps and {len(measures.layers)} layer{'s' if len(measures.layers) > 1 else ''}"
        return f"Clean: the gradient stays within a factor of 1,000 {far}."
    kinds = list(dict.fromkeys(finding.kind for finding in faults))
    return f"{len(faults)} fault{'s' if len(faults) > 1 else ''}: {', '.join(kinds)}."


def at_loss(measures: Measures, *, loss: bool) -> float:
    """g_top at the shortest lag where it is not zero."""
    curves = [measures.curve(layer, loss=loss) for layer in measures.top]
    return max((next((each.norm for each in curve if each.norm > 0), 0.0) for curve in curves), default=0.0)


def falls(curve: list[Gradient]) -> int | None:
    """The lag from which on the gradient is under the bar of its peak, behind the peak; None where it never is."""
    peak = max(range(len(curve)), key=lambda i: curve[i].norm)
    under = [each.lag for each in curve[peak:] if each.norm < BAR * curve[peak].norm]
    return under[0] if under else None


def rises(curve: list[Gradient], value: float) -> int | None:
    """The first lag at which the gradient is over its bar, or no number any more."""
    return next((each.lag for each in curve if not each.norm <= value / BAR), None)


def _time(measures: Measures) -> list[Finding]:
    loss = measures.loss is not None
    found = []
    judged = _worst(measures, loss=loss)
    found += [finding for finding in judged if finding]
    if loss and not any(finding.kind == "vanishes in time" for finding in found):
        for finding in _worst(measures, loss=False):
            if finding.kind == "vanishes in time":
                said = (
                    f"Every step has a loss of its own and gets a gradient; but the last output remembers little: its "
                    f"gradient in {finding.layer} is under 1e-3 of its largest from lag {finding.lag} on. Fine if nothing "
                    f"has to be remembered longer."
                )
                found.append(Finding("short memory", False, finding.layer, finding.lag, said))
    return found


def _worst(measures: Measures, *, loss: bool) -> list[Finding]:
    """What rises, or else what falls, in time."""
    value = at_loss(measures, loss=loss)
    # Against the direction of time the last step of the loss is the first of processing: only the end can be judged there.
    layers = [layer for layer in measures.layers if not (loss and layer.endswith(" backward"))]
    curves = {
        layer: curve for layer in layers if (curve := measures.curve(layer, loss=loss)) and max(g.norm for g in curve) > 0
    }
    found = []
    down = {layer: lag for layer, curve in curves.items() if (lag := falls(curve)) is not None}
    # A layer that explodes first leaves the rest below any bar.
    up = {layer: lag for layer, curve in curves.items() if (lag := rises(curve, value)) is not None}
    if up:
        layer = min(up, key=lambda name: up[name])
        last = curves[layer][-1].norm / value
        told = f"{last:.1e} times as large at the first step" if math.isfinite(last) else "no number any more at the first step"
        said = (
            f"The gradient explodes in time: ||dL/dh_t|| in {layer} is over 1,000 times its value at the loss from lag "
            f"{up[layer]} on, {told}."
        )
        found.append(Finding("explodes in time", True, layer, up[layer], said))
    elif down:
        soonest = min(down, key=lambda name: down[name])
        longest = max(down, key=lambda name: down[name])
        here = f"in {soonest} from lag {down[soonest]} on"
        if len(down) < len(curves):
            many = f"In {len(down)} of {len(curves)} layers"
            said = f"{many} ||dL/dh_t|| falls under 1e-3 of its largest, {here}; the others keep it."
            found.append(Finding("fades in some layers", False, soonest, down[soonest], said))
        else:
            left = curves[longest][-1].norm / max(g.norm for g in curves[longest])
            said = (
                f"The gradient vanishes in time: ||dL/dh_t|| in {longest} is under 1e-3 of its largest from lag "
                f"{down[longest]} on, of {measures.steps} steps; {left:.1e} is left at the first step."
            )
            if len(down) > 1:
                said += f" The other layers fall before it, {here}."
            found.append(Finding("vanishes in time", True, longest, down[longest], said))
    return found


def _depth(measures: Measures) -> list[Finding]:
    shares = depth(measures)
    if not shares:
        return []
    low, high = (pick(shares, key=lambda layer: shares[layer]) for pick in (min, max))
    found = []
    if shares[low] < BAR:
        said = (
            f"The gradient fades with depth: over all steps, {low} gets {shares[low]:.1e} of what the top layer gets; it is "
            f"under 1e-3 in {sum(share < BAR for share in shares.values())} of {len(measures.layers)} layers."
        )
        found.append(Finding("fades with depth", True, low, None, said))
    if shares[high] > 1 / BAR:
        said = (
            f"The gradient explodes with depth: over all steps, {high} gets {shares[high]:.1e} times what the top layer gets."
        )
        found.append(Finding("explodes with depth", True, high, None, said))
    return found


def depth(measures: Measures) -> dict[str, float]:
    """By layer: the size of dL/dh over all steps, as a share of the top layer's."""
    loss = measures.loss is not None
    totals = {layer: math.hypot(*(each.h for each in measures.curve(layer, loss=loss))) for layer in measures.layers}
    most = max((totals[layer] for layer in measures.top), default=0.0)
    finite = most > 0 and all(math.isfinite(total) for total in totals.values())
    return {layer: total / most for layer, total in totals.items()} if finite and len(totals) > 1 else {}


def _cuts(measures: Measures) -> list[Finding]:
    for layer in reversed(measures.layers):
        curve = measures.curve(layer, loss=False)
        missing = [each.lag for each in curve if not each.reached]
        if missing and len(missing) == len(curve):
            said = f"The graph is cut: no gradient of the last output reaches {layer}. Look for detach or no_grad above it."
            return [Finding("cut", True, layer, 0, said)]
        if missing:
            lag = min(missing)
            said = (
                f"The graph is cut: in {layer} no gradient of the last output goes further back than {lag - 1} steps. Look "
                f"for detach, no_grad or truncation; fine only if truncation is meant."
            )
            return [Finding("cut", True, layer, lag, said)]
    if measures.loss is not None and not any(each.reached for each in measures.gradients):
        said = (
            "The graph is cut: no gradient of the loss reaches any layer. Look for detach or no_grad between layers and loss."
        )
        return [Finding("cut", True, None, None, said)]
    return []


def _unused(measures: Measures) -> list[Finding]:
    most = max(measures.features, default=0.0)
    layer = measures.layers[0]
    if most == 0.0:
        said = f"The input is not used: dh_t/dx_t is 0 in {layer}. Its input matrix is zero, or its activations are dead."
        return [Finding("unused input", True, layer, None, said)]
    unused = [i for i, strength in enumerate(measures.features) if strength < UNUSED * most]
    if not unused:
        return []
    names = ", ".join(map(str, unused[:8])) + (" and more" if len(unused) > 8 else "")
    said = (
        f"Of {len(measures.features)} features of the input to {layer}, {len(unused)} move nothing: {names} (counted from 0). "
        f"Their columns of the input matrix are zero."
    )
    return [Finding("unused input", True, layer, None, said)]


def _activations(measures: Measures) -> list[Finding]:
    found = []
    dead = [each for each in measures.activations if each.dead > MUCH]
    flat = [each for each in measures.activations if each.kind != "relu" and each.saturated > MUCH]
    if dead:
        worst = max(dead, key=lambda each: each.dead)
        said = f"{worst.dead:.0%} of the ReLUs `{worst.name}` in {worst.layer} are dead: 0 at every step of every row."
        found.append(Finding("dead ReLUs", True, worst.layer, None, said))
    if flat:
        worst = max(flat, key=lambda each: each.saturated)
        ends = "closed, {:.0%} open" if worst.kind == "sigmoid" else "at -1, {:.0%} at 1"
        said = (
            f"{worst.saturated:.0%} of `{worst.name}` in {worst.layer} is saturated ({worst.low:.0%} "
            f"{ends.format(worst.high)}): its slope is under 1/1000 of the largest, and no gradient passes."
        )
        if len(flat) > 1:
            said += f" {len(flat) - 1} more activation{'s' if len(flat) > 2 else ''} like it."
        found.append(Finding("saturated", True, worst.layer, None, said))
    return found
