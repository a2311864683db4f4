"""Figures of a diagnosis, from its plain rows alone: gradients over time and depth, steps, activations, states, memory.

Each is readable without a paper at hand: its caption says what is drawn, its note what to look for. Values of 0 have no place on a
logarithmic axis and are left out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unfading.report.figures import COLOURS, INK, Spec, decades, finished, needed

Rows = Sequence[Mapping[str, Any]]

# Squares across a map: more cannot be seen, and each is an element of the page.
ACROSS = 120
# Decades on either side of the value at the loss; beyond them a map has one colour.
DECADES = 6
BARS = 24


class Figure(NamedTuple):
    """A chart with its words."""

    caption: str
    note: str
    chart: Spec


def figures(rows: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure for which the rows of a diagnosis have something to show, by name."""
    layers, top, T = list(rows["layers"]), list(rows["top"]), int(rows["steps"])
    made = {
        "gradient": _gradient(rows["end"], layers, top, "the last output"),
        "loss": _gradient(rows["gradients"], layers, top, "the loss"),
        "map": _map(rows["gradients"] or rows["end"], layers, top, "loss" if rows["gradients"] else "last output"),
        "lags": _lags(rows["lags"], layers, T),
        "spectra": _spectra(rows["spectra"], layers),
        "activations": _activations(rows["activations"]),
        "states": _sizes(rows["sizes"], layers),
        "written": _memory(rows["memory"], "write"),
        "read": _memory(rows["memory"], "read"),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _gradient(rows: Rows, layers: list[str], top: list[str], of: str) -> Figure | None:
    value = _at_loss(rows, top)
    shown = [{"layer": row["layer"], "lag": row["lag"], "value": row["norm"] / value} for row in rows if _drawn(row["norm"], value)]
    if len({row["lag"] for row in shown}) < 2:
        return None
    alt = needed("altair")
    bars = [{"value": 1e-3, "label": "1/1,000"}, {"value": 1e3, "label": "1,000 times"}]
    values = [row["value"] for row in shown]
    bars = [bar for bar in bars if min(values) < 10 * bar["value"] and max(values) > bar["value"] / 10]
    layers_of = [_rule(alt), _lines(alt, "gradient", layers, "lag", "steps before the end", f"gradient of {of}, its own size at the end = 1")]
    chart = alt.layer(*(layers_of if bars else layers_of[1:]))
    note = "Where a line falls, that many steps back get no signal; where it rises, training jumps. A flat line is what one wants."
    return Figure(f"How far back the gradient of {of} reaches, layer by layer", note, finished(chart, 300, {"gradient": shown, "bars": bars}))


def _map(rows: Rows, layers: list[str], top: list[str], of: str) -> Figure | None:
    value = _at_loss(rows, top)
    if len(layers) < 2 or value == 0 or max(row["lag"] for row in rows) < 1:
        return None
    alt = needed("altair")
    T = max(row["lag"] for row in rows) + 1
    wide = math.ceil(T / ACROSS)
    squares: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        squares.setdefault((row["layer"], row["lag"] // wide * wide), []).append(row["norm"])
    shown = []
    for (layer, lag), norms in squares.items():
        mean = sum(norms) / len(norms) / value
        power = -math.inf if mean == 0 else math.log10(mean) if math.isfinite(mean) else math.inf
        shown.append({"layer": layer, "lag": lag, "next": min(lag + wide, T), "power": max(-DECADES, min(DECADES, power))})
    colour = alt.Color(
        "power:Q",
        title="decades above or below the value at the loss",
        scale=alt.Scale(domain=[-DECADES, 0, DECADES], range=["#0072b2", "#f2efe6", "#d55e00"]),
        legend=alt.Legend(gradientLength=260, titleLimit=400, direction="horizontal", orient="top"),
    )
    marks = alt.Chart(alt.NamedData("map"), name="map").mark_rect(clip=True)
    marks = marks.encode(
        x=alt.X("lag:Q", title="steps before the end", scale=alt.Scale(domain=[0, T], nice=False, reverse=True), axis=alt.Axis(grid=False)),
        x2="next:Q",
        y=alt.Y("layer:N", title=None, sort=layers[::-1], axis=alt.Axis(labelLimit=160)),
        color=colour,
        tooltip=[alt.Tooltip("layer:N"), alt.Tooltip("lag:Q"), alt.Tooltip("power:Q", format=".2f", title="decades")],
    )
    note = "The end of the sequence is at the right, the input's layer at the bottom. Blue has faded, orange has grown."
    chart = finished(alt.layer(marks), max(90, 24 * len(layers)), {"map": shown})
    return Figure(f"Gradient of the {of} in every layer at every step", note, chart)


def _lags(rows: Rows, layers: list[str], T: int) -> Figure | None:
    shown = [
        {
            "layer": row["layer"], "part": row["part"], "lag": row["lag"], "value": row["spectral"],
            "low": max(row["spectral_low"], 1e-300), "high": max(row["spectral_high"], 1e-300), "frobenius": row["frobenius"],
        }
        for row in rows
        if _drawn(row["spectral"], 1.0)
    ]  # fmt: skip
    if len({row["lag"] for row in shown}) < 2:
        return None
    alt = needed("altair")
    lines = _lines(alt, "lags", layers, "lag", "lag T - t", "largest singular value of dh_T/dh_t", parts=True)
    drawn = [lines]
    if any(row["high"] > 1.001 * row["low"] for row in shown):
        band = alt.Chart(alt.NamedData("lags"), name="band").mark_area(opacity=0.25, clip=True)
        drawn.insert(0, band.encode(x="lag:Q", y=alt.Y("low:Q", scale=alt.Scale(type="log")), y2="high:Q", color=lines.encoding.color, detail="part:N"))
    note = "1 keeps a gradient's size over that many steps of one layer. h: the other parts of the state are held; all: the whole state."
    if len(drawn) > 1:
        note += " The band holds the true value: the state is large, and random probes were used."
    return Figure("How strongly the last state depends on earlier ones", note, finished(alt.layer(*drawn), 300, {"lags": shown}))


def _spectra(rows: Rows, layers: list[str]) -> Figure | None:
    # Of the whole state where it has several parts: that is what goes round.
    wholes = {row["layer"] for row in rows if row["part"] == "all"}
    names = {"largest": "largest singular value", "radius": "spectral radius", "smallest": "smallest singular value"}
    shown = [
        {"layer": row["layer"], "part": label, "step": row["step"], "value": row[name]}
        for row in rows
        for name, label in names.items()
        if (row["part"] == "all" or row["layer"] not in wholes) and row[name] is not None and _drawn(row[name], 1.0)
    ]
    if len({row["step"] for row in shown}) < 2:
        return None
    alt = needed("altair")
    lines = _lines(alt, "spectra", layers, "step", "step", "ds_t/ds_(t-1)", parts=True)
    note = "What one step does to a gradient that goes back through it. Above 1 it can grow, below 1 it shrinks; near 1 all the way is rare."
    return Figure("Singular values and spectral radius of every step", note, finished(alt.layer(lines), 300, {"spectra": shown}))


def _activations(rows: Rows) -> Figure | None:
    worst = sorted(rows, key=lambda row: -max(row["dead"], row["low"] + row["high"] if row["kind"] != "relu" else 0.0))[:BARS]
    shown, labels = [], []
    for row in [row for row in rows if any(row is kept for kept in worst)]:
        name = row["name"] if len(row["name"]) <= 44 else f"{row['name'][:43]}…"
        labels.append(f"{row['layer']}: {name}")
        kinds = {"dead": row["dead"]} if row["kind"] == "relu" else {"at the lower end": row["low"], "at the upper end": row["high"]}
        shown += [{"label": labels[-1], "kind": kind, "share": share} for kind, share in kinds.items()]
    if not shown:
        return None
    alt = needed("altair")
    kinds = ["at the lower end", "at the upper end", "dead"]
    bars = alt.Chart(alt.NamedData("activations"), name="activations").mark_bar().encode(
        x=alt.X("share:Q", title="share saturated, or dead", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=5)),
        y=alt.Y("label:N", title=None, sort=labels, scale=alt.Scale(domain=labels), axis=alt.Axis(labelLimit=330, labelFont="monospace")),
        color=alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=list(COLOURS[:3])), legend=alt.Legend(title=None, symbolType="square")),
        tooltip=[alt.Tooltip("label:N"), alt.Tooltip("kind:N"), alt.Tooltip("share:Q", format=".1%")],
    )  # fmt: skip
    note = "Saturated: the slope is under 1/1000 of its largest. Dead: 0 at every step of every row. The names are the words of the cell's own source."
    return Figure("Gates that saturate and ReLUs that are dead", note, finished(alt.layer(bars), 20 * len(labels) + 20, {"activations": shown}))


def _sizes(rows: Rows, layers: list[str]) -> Figure | None:
    shown = [{"layer": r["layer"], "part": r["part"], "step": r["step"], "value": r["rms"]} for r in rows if _drawn(r["rms"], 1.0)]
    if len({row["step"] for row in shown}) < 2:
        return None
    alt = needed("altair")
    lines = _lines(alt, "states", layers, "step", "step", "root mean square of the state", parts=True)
    note = "Growing without end: the state overflows on longer sequences. Going to 0: what came in is forgotten."
    return Figure("Size of the state over time", note, finished(alt.layer(lines), 260, {"states": shown}))


def _memory(rows: Rows, which: str) -> Figure | None:
    most = max((row[which] for row in rows), default=0.0)
    steps = sorted({row["step"] for row in rows})
    if most == 0.0 or len(steps) < 2:
        return None
    alt = needed("altair")
    following = dict(zip(steps, [*steps[1:], 2 * steps[-1] - steps[-2]], strict=True))
    entries = sorted({row["entry"] for row in rows})
    above = dict(zip(entries, [*entries[1:], 2 * entries[-1] - entries[-2] if len(entries) > 1 else 1], strict=True))
    shown = [
        {"step": r["step"], "next": following[r["step"]], "entry": r["entry"], "above": above[r["entry"]], "value": r[which]} for r in rows
    ]
    part, layer = rows[0]["part"], rows[0]["layer"]
    say = {
        "write": (f"|{part}_t - {part}_(t-1)|", f"When the memory is written: change of every entry of {part} in {layer}"),
        "read": (f"||dh_t/d{part}_(t-1)||", f"When the memory is read: how strongly h depends on every entry of {part} in {layer}"),
    }[which]
    colour = alt.Color("value:Q", title=say[0], scale=alt.Scale(domain=[0, most], range=["#f2efe6", "#0072b2", "#03121c"]),
                       legend=alt.Legend(gradientLength=200, titleLimit=300, direction="horizontal", orient="top"))  # fmt: skip
    marks = alt.Chart(alt.NamedData("memory"), name="memory").mark_rect(clip=True).encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(domain=[steps[0], following[steps[-1]]], nice=False), axis=alt.Axis(grid=False)),
        x2="next:Q", y=alt.Y("entry:Q", title=f"entry of {part}", scale=alt.Scale(nice=False), axis=alt.Axis(grid=False, tickCount=4)), y2="above:Q",
        color=colour, tooltip=[alt.Tooltip("step:Q"), alt.Tooltip("entry:Q"), alt.Tooltip("value:Q", format=".3~g")],
    )  # fmt: skip
    note = "Dark columns are steps at which much is stored." if which == "write" else "Dark columns are steps at which the memory is consulted."
    return Figure(say[1], note, finished(alt.layer(marks), 220, {"memory": shown}))


def _lines(alt: Any, data: str, layers: list[str], x: str, x_title: str, y_title: str, *, parts: bool = False) -> Any:
    """Lines over time or lag, a colour a layer, on a logarithmic axis."""
    legend = alt.Legend(title=None, symbolType="stroke", columns=4)
    encoding = {
        "x": alt.X(f"{x}:Q", title=x_title, scale=alt.Scale(nice=False), axis=alt.Axis(format=",d", grid=False, tickCount=6, tickMinStep=1)),
        "y": alt.Y("value:Q", title=y_title, scale=alt.Scale(type="log", nice=False, padding=8), axis=_powers(alt)),
        "color": alt.Color("layer:N", scale=alt.Scale(domain=layers, range=colours(len(layers))), legend=legend),
        "tooltip": [alt.Tooltip("layer:N"), *([alt.Tooltip("part:N")] if parts else []), alt.Tooltip(f"{x}:Q"), alt.Tooltip("value:Q", format=".3~e")],
    }  # fmt: skip
    if parts:
        encoding["strokeDash"] = alt.StrokeDash("part:N", legend=alt.Legend(title=None, symbolType="stroke"), sort=None)
    return alt.Chart(alt.NamedData(data), name=data).mark_line(strokeWidth=2, clip=True).encode(**encoding)


def colours(n: int) -> list[str]:
    """A colour for each layer from the input up: told apart where they are few, a ramp where they are many."""
    if n <= 4:
        return list(COLOURS[:n])
    ends = [[int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in ("#e69f00", "#0072b2")]
    return ["#" + "".join(f"{round(a + (b - a) * i / (n - 1)):02x}" for a, b in zip(*ends, strict=True)) for i in range(n)]


def _powers(alt: Any) -> Any:
    axis = decades(alt, True)
    axis.format = ".0e"
    return axis


def _rule(alt: Any) -> Any:
    rule = alt.Chart(alt.NamedData("bars"), name="guess").mark_rule(strokeDash=[5, 4], strokeWidth=1.2, color=INK)
    return rule.encode(y=alt.Y("value:Q", scale=alt.Scale(type="log")))


def _at_loss(rows: Rows, top: list[str]) -> float:
    """The top layer's gradient at the shortest lag where there is one."""
    found = [row for row in rows if row["layer"] in top and row["norm"] > 0]
    return float(min(found, key=lambda row: row["lag"])["norm"]) if found else 0.0


def _drawn(value: float, by: float) -> bool:
    return by > 0 and math.isfinite(value) and value / by > 1e-290
