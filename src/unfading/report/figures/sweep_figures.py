"""Figures of a sweep: scores over trials, validation curves, importance of settings, and parallel coordinates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unfading.report.figures.charts import COLOURS, GRID, INK, Figure, decades, needed, wide_chart

Trials = Sequence[Mapping[str, Any]]

COMPLETE, PRUNED = COLOURS[0], "#999999"
# The colours of lines from the worst to the best trial, which can be seen on a white and on a dark page.
RAMP = ("#bbbbbb", COLOURS[5], COLOURS[1])


def figures(rows: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure for which there are data, by name."""
    complete = [trial for trial in rows["trials"] if trial["value"] is not None]
    by_name = {}
    if complete:
        by_name["history"] = Figure(
            "Score of each trial",
            "The line is the best score so far. Grey: the last score of trials that were stopped early.",
            _history(rows, complete),
        )
    if rows["importance"]:
        by_name["importance"] = Figure(
            "Importance of each setting",
            "How much each setting alone separates the best tenth of the complete trials from all of them (PED-ANOVA). The "
            "values sum to 1.",
            _importance(rows["importance"]),
        )
    if len(complete) > 1:
        by_name["parallel"] = Figure(
            "Settings of the complete trials",
            "One line per trial, through its settings to its score on the right. The best trials are orange, the worst grey.",
            _parallel(rows, complete),
        )
    if any(trial["curve"] for trial in rows["trials"]):
        by_name["curves"] = Figure(
            "Validation curves",
            "One line per trial. A trial that was stopped early ends where its line does.",
            _curves(rows),
        )
    return by_name


def _score_axis(alt: Any, rows: Mapping[str, Any], values: Sequence[float]) -> Any:
    """The axis of the score; logarithmic for an error that spans more than a decade."""
    log = _is_logarithmic(rows, values)
    scale = alt.Scale(type="log" if log else "linear", zero=False, nice=False, padding=10)
    return {"title": f"validation {rows['score']}", "scale": scale, "axis": decades(alt, log)}


def _is_logarithmic(rows: Mapping[str, Any], values: Sequence[float]) -> bool:
    return not rows["higher_is_better"] and min(values) > 0 and max(values) > 10 * min(values)


def _history(rows: Mapping[str, Any], complete: Trials) -> Any:
    alt = needed("altair")
    dots = [{"trial": trial["number"], "value": trial["value"], "kind": "complete"} for trial in complete]
    for trial in rows["trials"]:
        scores = [value for _, value in trial["curve"] if value is not None]
        if trial["state"] == "PRUNED" and scores:
            dots.append({"trial": trial["number"], "value": scores[-1], "kind": "stopped early"})
    better = max if rows["higher_is_better"] else min
    best, line = complete[0]["value"], []
    for trial in sorted(complete, key=lambda trial: trial["number"]):
        best = better(best, trial["value"])
        line.append({"trial": trial["number"], "value": best})
    axis = _score_axis(alt, rows, [dot["value"] for dot in dots])
    across = alt.X("trial:Q", title="trial", scale=alt.Scale(nice=False, padding=10), axis=alt.Axis(format="d", grid=False))
    kinds = alt.Scale(domain=["complete", "stopped early"], range=[COMPLETE, PRUNED])
    points = alt.Chart(alt.NamedData("trials"), name="trials").mark_point(filled=True, size=60, opacity=0.7)
    points = points.encode(
        x=across,
        y=alt.Y("value:Q", **axis),
        color=alt.Color("kind:N", scale=kinds, legend=alt.Legend(title=None)),
        tooltip=[alt.Tooltip("trial:Q"), alt.Tooltip("value:Q", format=".5~g"), alt.Tooltip("kind:N")],
    )
    steps = alt.Chart(alt.NamedData("best"), name="best").mark_line(interpolate="step-after", strokeWidth=2, color=COLOURS[1])
    steps = steps.encode(x=across, y=alt.Y("value:Q", **axis))
    return wide_chart(alt.layer(steps, points), 260, {"trials": dots, "best": line})


def _importance(importance: Mapping[str, float]) -> Any:
    alt = needed("altair")
    names = sorted(importance, key=lambda name: -importance[name])
    rows = [{"setting": name, "importance": importance[name]} for name in names]
    place = {
        "x": alt.X("importance:Q", title="importance", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(tickCount=5)),
        "y": alt.Y("setting:N", title=None, sort=names, scale=alt.Scale(domain=names), axis=alt.Axis(labelLimit=240)),
    }
    bars = alt.Chart(alt.NamedData("importance"), name="bars").mark_bar(color=COMPLETE, opacity=0.85).encode(**place)
    words = alt.Chart(alt.NamedData("importance"), name="numbers").mark_text(align="left", dx=5, color=INK)
    words = words.encode(text=alt.Text("importance:Q", format=".2f"), **place)
    return wide_chart(alt.layer(bars, words), 30 * len(names) + 20, {"importance": rows})


def _parallel(rows: Mapping[str, Any], complete: Trials) -> Any:
    alt = needed("altair")
    score = f"validation {rows['score']}"
    axes = {name: [trial["settings"].get(name) for trial in complete] for name in complete[0]["settings"]}
    axes[score] = [trial["value"] for trial in complete]
    ranks = _ranks([trial["value"] for trial in complete], rows["higher_is_better"])
    points, ticks = [], []
    for name, values in axes.items():
        log = _is_logarithmic(rows, values) if name == score else name in rows["log"]
        positions, marks = _positions(values, log)
        ticks += [{"axis": name, "position": position, "label": label} for position, label in marks]
        for trial, rank, position, value in zip(complete, ranks, positions, values, strict=True):
            about = {"trial": trial["number"], "value": text(value), "score": text(trial["value"])}
            points.append({**about, "axis": name, "position": position, "rank": rank, "order": list(axes).index(name)})
    points.sort(key=lambda point: (point["rank"], point["trial"], point["order"]))
    names = list(axes)
    across = alt.X(
        "axis:N", title=None, sort=names,
        scale=alt.Scale(type="point", domain=names, padding=0.35),
        axis=alt.Axis(labelAngle=0, labelLimit=200, ticks=False, domain=False),
    )  # fmt: skip
    up = alt.Y("position:Q", axis=None, scale=alt.Scale(domain=[-0.04, 1.04], nice=False))
    rules = alt.Chart(alt.NamedData("ends"), name="axes").mark_rule(color=GRID, strokeWidth=2)
    rules = rules.encode(x=across, y=alt.Y("low:Q", axis=None, scale=alt.Scale(domain=[-0.04, 1.04], nice=False)), y2="high:Q")
    lines = alt.Chart(alt.NamedData("points"), name="lines").mark_line(strokeWidth=1.6, opacity=0.8)
    lines = lines.encode(
        x=across,
        y=up,
        detail="trial:N",
        order="order:Q",
        color=alt.Color("rank:Q", scale=alt.Scale(range=list(RAMP), domain=[0, 0.5, 1]), legend=None),
    )
    dots = alt.Chart(alt.NamedData("points"), name="marks").mark_point(filled=True, size=30)
    dots = dots.encode(
        x=across,
        y=up,
        color=alt.Color("rank:Q", scale=alt.Scale(range=list(RAMP), domain=[0, 0.5, 1]), legend=None),
        tooltip=[
            alt.Tooltip("trial:N"),
            alt.Tooltip("axis:N", title="setting"),
            alt.Tooltip("value:N"),
            alt.Tooltip("score:N"),
        ],
    )
    words = [
        alt.Chart(alt.NamedData("ticks"), name=name)
        .mark_text(align="right", dx=-8, fontSize=11, color=colour, **more)
        .encode(x=across, y=up, text="label:N")
        for name, colour, more in (("paper", "white", {"stroke": "white", "strokeWidth": 4}), ("labels", INK, {}))
    ]
    data = {"points": points, "ticks": ticks, "ends": [{"axis": name, "low": 0.0, "high": 1.0} for name in names]}
    return wide_chart(alt.layer(rules, lines, dots, *words), 320, data)


def _ranks(values: Sequence[float], higher_is_better: bool) -> list[float]:
    """The place of each value from the worst, 0, to the best, 1. Colours by rank show a few outliers no better than others."""
    order = sorted(range(len(values)), key=lambda i: values[i], reverse=not higher_is_better)
    return [order.index(i) / max(1, len(values) - 1) for i in range(len(values))]


def _positions(values: Sequence[Any], log: bool) -> tuple[list[float], list[tuple[float, str]]]:
    """The height of each value on its axis, from 0 to 1, and the labels of the axis."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        known = sorted(set(map(str, values)))
        places = {each: (i + 0.5) / len(known) for i, each in enumerate(known)}
        return [places[str(value)] for value in values], [(height, each) for each, height in places.items()]
    numbers = [math.log(value) if log and value > 0 else float(value) for value in values]
    low, high = min(numbers), max(numbers)
    width = (high - low) or 1.0
    heights = [(number - low) / width if high > low else 0.5 for number in numbers]
    distinct = {height: text(value) for height, value in sorted(zip(heights, values, strict=True))}
    if len(distinct) > 6:
        middle = math.exp((low + high) / 2) if log else (low + high) / 2
        between = middle if any(isinstance(value, float) for value in values) else round(middle)
        ends = {0.0: text(min(values)), 0.5: text(between), 1.0: text(max(values))}
        return heights, list(ends.items())
    return heights, list(distinct.items())


def _curves(rows: Mapping[str, Any]) -> Any:
    alt = needed("altair")
    points = [
        {"trial": trial["number"], "evaluation": number + 1, "value": value, "kind": _kind(trial)}
        for trial in rows["trials"]
        for number, value in trial["curve"]
        if value is not None
    ]
    kinds = {"complete": COMPLETE, "stopped early": PRUNED, "other": COLOURS[1]}
    shown = [kind for kind in kinds if any(point["kind"] == kind for point in points)]
    scale = alt.Scale(domain=shown, range=[kinds[kind] for kind in shown])
    lines = alt.Chart(alt.NamedData("curves"), name="lines").mark_line(strokeWidth=1.3, opacity=0.6, clip=True)
    lines = lines.encode(
        x=alt.X(
            "evaluation:Q",
            title="evaluation",
            scale=alt.Scale(nice=False),
            axis=alt.Axis(format="d", grid=False, tickMinStep=1),
        ),
        y=alt.Y("value:Q", **_score_axis(alt, rows, [point["value"] for point in points])),
        detail="trial:N",
        color=alt.Color("kind:N", scale=scale, legend=alt.Legend(title=None, symbolType="stroke")),
        tooltip=[alt.Tooltip("trial:N"), alt.Tooltip("evaluation:Q"), alt.Tooltip("value:Q", format=".5~g")],
    )
    return wide_chart(alt.layer(lines), 280, {"curves": points})


def _kind(trial: Mapping[str, Any]) -> str:
    return {"COMPLETE": "complete", "PRUNED": "stopped early"}.get(trial["state"], "other")


def text(value: Any) -> str:
    """A setting or a score as a short text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
