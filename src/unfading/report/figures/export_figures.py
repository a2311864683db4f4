"""Figures of an exported model: its memory by part, and its error over steps and by operation."""

from collections.abc import Mapping
from typing import Any

from unfading.report.figures.charts import COLOURS, DASHES, Figure, decades, needed, wide_chart

PRECISIONS = ("float32", "int8", "integer")
MOST_STEPS = 200  # points of one line


def figures(rows: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure for which there are data, by name."""
    by_name = {
        "rom": Figure(
            "ROM",
            "Weights and tables of each part of the model, and the code of all.",
            _bars("rom", [row for each in rows["precisions"] for row in _rom(each)], "bytes"),
        ),
        "ram": Figure(
            "RAM",
            "The state is kept from sample to sample, one for each sequence; the stack is free between samples.",
            _bars("ram", [row for each in rows["precisions"] for row in _ram(each)], "bytes"),
        ),
        "over_steps": Figure(
            "Error over the sequence",
            "Distance of the output of each part from the same model in float64, relative to its size, at each step.",
            _over_steps(rows),
        ),
    }
    if rows["operations"]:
        by_name["operations"] = Figure(
            "Error by operation, all-integer, in the order in which they run",
            "Bars: of this operation alone, where the error arises. Ticks: with what all earlier operations and steps did.",
            _operations(rows),
        )
    return by_name


def _rom(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = {**row["parts"], **({"code": row["code"]} if "code" in row else {})}
    return _by_part(row, parts)


def _ram(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = {"state": row["state"], "stack during a push": row.get("stack", row["scratch"])}
    return _by_part(row, parts)


def _by_part(row: Mapping[str, Any], parts: Mapping[str, int]) -> list[dict[str, Any]]:
    return [
        {"precision": row["precision"], "part": part, "bytes": count, "order": i}
        for i, (part, count) in enumerate(parts.items())
    ]


def _colour(alt: Any, field: str, names: list[str]) -> Any:
    scale = alt.Scale(domain=names, range=[COLOURS[i % len(COLOURS)] for i in range(len(names))])
    return alt.Color(f"{field}:N", scale=scale, legend=alt.Legend(title=None, columns=4))


def _bars(name: str, rows: list[dict[str, Any]], title: str) -> Any:
    alt = needed("altair")
    rows = [row for row in rows if row["bytes"]]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    precisions = [each for each in PRECISIONS if any(row["precision"] == each for row in rows)]
    bars = alt.Chart(alt.NamedData(name), name=name).mark_bar()
    chart = bars.encode(
        x=alt.X("sum(bytes):Q", title=title, axis=alt.Axis(format=",d", tickCount=5)),
        y=alt.Y("precision:N", title=None, sort=precisions, scale=alt.Scale(domain=precisions)),
        color=_colour(alt, "part", parts),
        order=alt.Order("order:Q"),
        tooltip=[alt.Tooltip("precision:N"), alt.Tooltip("part:N"), alt.Tooltip("bytes:Q", format=",d")],
    )
    return wide_chart(chart, 34 * len(precisions) + 20, {name: rows})


def _over_steps(rows: Mapping[str, Any]) -> Any:
    alt = needed("altair")
    every = max(1, rows["steps"] // MOST_STEPS)
    points = [
        {**row, "line": f"{row['precision']}, {row['stage']}"}
        for row in rows["over_steps"]
        if row["step"] % every == 0 and row["error"] > 0
    ]
    lines = list(dict.fromkeys((row["line"], row["precision"], row["stage"]) for row in points))
    names = [line for line, _, _ in lines]
    stages = list(dict.fromkeys(stage for _, _, stage in lines))
    colours = [COLOURS[PRECISIONS.index(precision)] for _, precision, _ in lines]
    dashes = [list(DASHES[stages.index(stage) % len(DASHES)]) for _, _, stage in lines]
    legend = alt.Legend(title=None, symbolType="stroke", columns=len(stages))
    chart = alt.Chart(alt.NamedData("over_steps"), name="over_steps").mark_line(strokeWidth=2, clip=True)
    chart = chart.encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(format=",d", grid=False, tickCount=6)),
        y=alt.Y("error:Q", title="relative error", scale=alt.Scale(type="log", nice=False, padding=8), axis=decades(alt, True)),
        color=alt.Color("line:N", sort=names, scale=alt.Scale(domain=names, range=colours), legend=legend),
        strokeDash=alt.StrokeDash("line:N", sort=names, scale=alt.Scale(domain=names, range=dashes), legend=legend),
        tooltip=["line:N", "step:Q", alt.Tooltip("error:Q", format=".2~e")],
    )
    return wide_chart(chart, 300, {"over_steps": points})


def _operations(rows: Mapping[str, Any]) -> Any:
    alt = needed("altair")
    points = [{**row, "label": f"{i + 1}. {row['stage']}: {row['operation']}"} for i, row in enumerate(rows["operations"])]
    labels = [point["label"] for point in points]
    stages = list(dict.fromkeys(row["stage"] for row in points))
    axis = alt.Axis(labelLimit=260)
    common = {
        "y": alt.Y("label:N", title=None, sort=labels, scale=alt.Scale(domain=labels), axis=axis),
        "tooltip": [
            alt.Tooltip("label:N"),
            alt.Tooltip("own:Q", title="alone", format=".2~e"),
            alt.Tooltip("error:Q", title="with all before", format=".2~e"),
            alt.Tooltip("cut:Q", format=",d"),
        ],
    }
    percent = alt.Axis(format=".1~%", tickCount=5)
    bars = alt.Chart(alt.NamedData("operations"), name="alone").mark_bar(opacity=0.8)
    bars = bars.encode(x=alt.X("own:Q", title="relative error", axis=percent), color=_colour(alt, "stage", stages), **common)
    ticks = alt.Chart(alt.NamedData("operations"), name="so_far").mark_tick(thickness=2, size=12, color="#888888")
    chart = alt.layer(bars, ticks.encode(x=alt.X("error:Q", axis=percent), **common))
    return wide_chart(chart, 18 * len(labels) + 20, {"operations": points})
