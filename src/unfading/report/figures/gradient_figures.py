"""Figures of a diagnosis from its plain rows: gradients over time and depth, Jacobians, activations, states, memory.

Each figure can be read on its own: the caption says what is drawn, the note what to look for. Values of 0 are left out on a
logarithmic axis.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unfading.report.figures import inner_figures, lattice_figures
from unfading.report.figures.charts import COLOURS, INK, Figure, needed, wide_chart
from unfading.report.figures.line_charts import lines

Rows = Sequence[Mapping[str, Any]]

# Squares across a map: more cannot be seen, and each makes the page larger.
ACROSS = 120
# Decades on either side of the value at the loss; beyond them the colour of a map is constant.
DECADES = 6
BARS = 24  # activations shown: the most saturated ones


def figures(rows: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure for which a diagnosis has data, by name."""
    layers, top = list(rows["layers"]), list(rows["top"])
    candidates = {
        "gradient": _gradient(rows["end"], layers, top, "the last output"),
        "loss": _gradient(rows["gradients"], layers, top, "the loss"),
        "map": _map(rows["gradients"] or rows["end"], layers, top, "loss" if rows["gradients"] else "last output"),
        "lags": _lags(rows["lags"], layers),
        "spectra": _spectra(rows["spectra"], layers),
        "activations": _activations(rows["activations"]),
        "states": _sizes(rows["sizes"], layers),
        "written": _memory(rows["memory"], "write"),
        "read": _memory(rows["memory"], "read"),
    }
    drawn = {name: figure for name, figure in candidates.items() if figure is not None}
    return drawn | lattice_figures.of_diagnosis(rows) | inner_figures.of_diagnosis(rows)


def _gradient(rows: Rows, layers: list[str], top: list[str], of: str) -> Figure | None:
    value = _at_loss(rows, top)
    shown = [
        {"layer": row["layer"], "lag": row["lag"], "value": row["norm"] / value} for row in rows if _drawn(row["norm"], value)
    ]
    if len({row["lag"] for row in shown}) < 2:
        return None
    alt = needed("altair")
    values = [row["value"] for row in shown]
    bars = [{"value": bar} for bar in (1e-3, 1e3) if min(values) < 10 * bar and max(values) > bar / 10]
    drawn = lines(alt, "gradient", layers, ("lag", "steps before the end"), f"gradient of {of}, at the end = 1")
    rule = alt.Chart(alt.NamedData("bars"), name="guess").mark_rule(strokeDash=[5, 4], strokeWidth=1.2, color=INK)
    rule = rule.encode(y=alt.Y("value:Q", scale=alt.Scale(type="log")))
    chart = wide_chart(alt.layer(*([rule] if bars else []), drawn), 300, {"gradient": shown, "bars": bars})
    note = (
        "Where a line falls, steps so far back get no signal; where it rises, training jumps. A flat line is what one wants. "
        "Dashed: 1/1,000 and 1,000 times."
    )
    return Figure(f"How far back the gradient of {of} reaches, layer by layer", note, chart)


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
        scale=alt.Scale(domain=[-DECADES, 0, DECADES], range=["#0072b2", "#f2efe6", "#d55e00"], interpolate="rgb"),
        legend=_ramp(alt),
    )
    marks = alt.Chart(alt.NamedData("map"), name="map").mark_rect(clip=True)
    marks = marks.encode(
        x=alt.X(
            "lag:Q",
            title="steps before the end",
            scale=alt.Scale(domain=[0, T], nice=False, reverse=True),
            axis=alt.Axis(grid=False),
        ),
        x2="next:Q",
        y=alt.Y("layer:N", title=None, sort=layers[::-1], axis=alt.Axis(labelLimit=160)),
        color=colour,
        tooltip=[alt.Tooltip("layer:N"), alt.Tooltip("lag:Q"), alt.Tooltip("power:Q", format=".2f", title="decades")],
    )
    note = "The end of the sequence is at the right, the input's layer at the bottom. Blue has faded, orange has grown."
    chart = wide_chart(alt.layer(marks), max(90, 24 * len(layers)), {"map": shown})
    return Figure(f"Gradient of the {of} in every layer at every step", note, chart)


def _lags(rows: Rows, layers: list[str]) -> Figure | None:
    shown = [
        {
            **{name: row[name] for name in ("layer", "part", "lag", "frobenius")},
            "value": row["spectral"],
            "low": max(row["spectral_low"], 1e-300),
            "high": max(row["spectral_high"], 1e-300),
        }
        for row in rows
        if _drawn(row["spectral"], 1.0)
    ]
    if len({row["lag"] for row in shown}) < 2:
        return None
    alt = needed("altair")
    line = lines(alt, "lags", layers, ("lag", "lag T - t"), "largest singular value of dh_T/dh_t", parts=True)
    note = (
        "1 keeps a gradient's size over so many steps of a layer. h: other parts of the state are held; all: the whole state."
    )
    drawn = [line]
    if any(row["high"] > 1.001 * row["low"] for row in shown):
        band = alt.Chart(alt.NamedData("lags"), name="band").mark_area(opacity=0.25, clip=True)
        low = alt.Y("low:Q", scale=alt.Scale(type="log"))
        drawn.insert(0, band.encode(x="lag:Q", y=low, y2="high:Q", color=line.encoding.color, detail="part:N"))
        note += " The band holds the true value: the state is large, and random probes were used."
    chart = wide_chart(alt.layer(*drawn), 300, {"lags": shown})
    return Figure("How strongly the last state depends on earlier ones", note, chart)


def _spectra(rows: Rows, layers: list[str]) -> Figure | None:
    # Of the whole state if it has several parts: its Jacobian is the one that is multiplied over time.
    wholes = {row["layer"] for row in rows if row["part"] == "all"}
    names = {"largest": "largest", "radius": "radius", "median": "median"}
    shown = [
        {"layer": row["layer"], "part": label, "step": row["step"], "value": row[name]}
        for row in rows
        for name, label in names.items()
        if (row["part"] == "all" or row["layer"] not in wholes) and row[name] is not None and _drawn(row[name], 1.0)
    ]
    if len({row["step"] for row in shown}) < 2:
        return None
    alt = needed("altair")
    drawn = lines(alt, "spectra", layers, ("step", "step"), "of ds_t/ds_(t-1)", parts=True)
    note = (
        "What one step does to a gradient that goes back through it: above 1 it can grow, below 1 it shrinks. Largest and "
        "median singular value, and the radius: the largest absolute eigenvalue."
    )
    chart = wide_chart(alt.layer(drawn), 300, {"spectra": shown})
    return Figure("Singular values and spectral radius of every step", note, chart)


def _activations(rows: Rows) -> Figure | None:
    worst = sorted(rows, key=lambda row: -max(row["dead"], 0.0 if row["kind"] == "relu" else row["low"] + row["high"]))[:BARS]
    shown: list[dict[str, Any]] = []
    labels: list[str] = []
    for row in [row for row in rows if any(row is each for each in worst)]:
        name = row["name"] if len(row["name"]) <= 44 else f"{row['name'][:43]}…"
        labels.append(f"{row['layer']}: {name}")
        ends = {"at the lower end": row["low"], "at the upper end": row["high"]}
        shares = {"dead": row["dead"]} if row["kind"] == "relu" else ends
        shown += [{"label": labels[-1], "kind": kind, "share": share} for kind, share in shares.items()]
    # Bars of length 0 add nothing to the table.
    if not any(row["share"] > 0 for row in shown):
        return None
    alt = needed("altair")
    share = alt.X("share:Q", title="share saturated, or dead", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    label = alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(labelLimit=330, labelFont="monospace"))
    scale = alt.Scale(domain=["at the lower end", "at the upper end", "dead"], range=list(COLOURS[:3]))
    kind = alt.Color("kind:N", scale=scale, legend=alt.Legend(title=None, symbolType="square", columns=2))
    tooltip = [alt.Tooltip("label:N"), alt.Tooltip("kind:N"), alt.Tooltip("share:Q", format=".1%")]
    bars = alt.Chart(alt.NamedData("activations"), name="activations").mark_bar()
    bars = bars.encode(x=share, y=label, color=kind, tooltip=tooltip)
    note = (
        "Saturated: the slope is under 1/1000 of its largest. Dead: 0 at every step of every row. The names are the words of "
        "the cell's own source."
    )
    chart = wide_chart(alt.layer(bars), 20 * len(set(labels)) + 20, {"activations": shown})
    return Figure("Gates that saturate and ReLUs that are dead", note, chart)


def _sizes(rows: Rows, layers: list[str]) -> Figure | None:
    shown = [
        {"layer": row["layer"], "part": row["part"], "step": row["step"], "value": row["rms"]}
        for row in rows
        if _drawn(row["rms"], 1.0)
    ]
    if len({row["step"] for row in shown}) < 2:
        return None
    alt = needed("altair")
    drawn = lines(alt, "states", layers, ("step", "step"), "root mean square of the state", parts=True)
    note = "Growing without end: the state overflows on longer sequences. Going to 0: what came in is forgotten."
    return Figure("Size of the state over time", note, wide_chart(alt.layer(drawn), 260, {"states": shown}))


def _memory(rows: Rows, which: str) -> Figure | None:
    most = max((row[which] for row in rows), default=0.0)
    steps, entries = (sorted({row[name] for row in rows}) for name in ("step", "entry"))
    if most == 0.0 or len(steps) < 2:
        return None
    alt = needed("altair")
    after, above = _following(steps), _following(entries)
    shown = [
        {
            "step": row["step"],
            "next": after[row["step"]],
            "entry": row["entry"],
            "above": above[row["entry"]],
            "value": row[which],
        }
        for row in rows
    ]
    part, layer = rows[0]["part"], rows[0]["layer"]
    title, caption, note = {
        "write": (
            f"|{part}_t - {part}_(t-1)|",
            f"When the memory is written: change of every entry of {part} in {layer}",
            "Dark columns are steps at which much is stored.",
        ),
        "read": (
            f"||dh_t/d{part}_(t-1)||",
            f"When the memory is read: how strongly h depends on every entry of {part} in {layer}",
            "Dark columns are steps at which the memory is consulted.",
        ),
    }[which]
    time = alt.Scale(domain=[steps[0], after[steps[-1]]], nice=False)
    colour = alt.Color(
        "value:Q",
        title=title,
        scale=alt.Scale(domain=[0, most], range=["#f2efe6", "#0072b2"], interpolate="rgb"),
        legend=_ramp(alt),
    )
    marks = alt.Chart(alt.NamedData("memory"), name="memory").mark_rect(clip=True)
    marks = marks.encode(
        x=alt.X("step:Q", title="step", scale=time, axis=alt.Axis(grid=False, format=",d")),
        x2="next:Q",
        y=alt.Y("entry:Q", title=f"entry of {part}", scale=alt.Scale(nice=False), axis=alt.Axis(grid=False, tickCount=4)),
        y2="above:Q",
        color=colour,
        tooltip=[alt.Tooltip("step:Q"), alt.Tooltip("entry:Q"), alt.Tooltip("value:Q", format=".3~g")],
    )
    return Figure(caption, note, wide_chart(alt.layer(marks), 220, {"memory": shown}))


def _ramp(alt: Any) -> Any:
    return alt.Legend(gradientLength=240, titleLimit=400, direction="horizontal", orient="top")


def _following(bounds: list[int]) -> dict[int, int]:
    """The end of each interval: the start of the next one."""
    last = 2 * bounds[-1] - bounds[-2] if len(bounds) > 1 else bounds[-1] + 1
    return dict(zip(bounds, [*bounds[1:], last], strict=True))


def _at_loss(rows: Rows, top: list[str]) -> float:
    """The top layer's gradient at the shortest lag at which it is not 0."""
    positive = [row for row in rows if row["layer"] in top and row["norm"] > 0]
    return float(min(positive, key=lambda row: row["lag"])["norm"]) if positive else 0.0


def _drawn(value: float, by: float) -> bool:
    return by > 0 and math.isfinite(value) and value / by > 1e-290
