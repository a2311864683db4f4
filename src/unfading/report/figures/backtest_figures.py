"""Figures of a backtest: the forecasts beside what came, and the error at each step ahead."""

import math
from collections.abc import Mapping
from typing import Any

from unfading.report.figures.charts import COLOURS, INK, Figure, needed, panel_chart, wide_chart

PANELS = 4  # series and channels that are drawn
STEPS = 240  # of each, the last ones
ACTUAL = "actual"


def figures(rows: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure, by name."""
    share = "share of the naive error before the first forecast" if rows["scaled"] else "mean absolute error"
    return {
        "forecasts": Figure(
            "Forecasts",
            "Each line is the forecast of one window, which reads what came before it. The last steps of the first series and "
            "channels are shown.",
            _forecasts(rows),
        ),
        "by_step": Figure(
            "Error at each step ahead",
            "Mean absolute error over all windows, series and channels.",
            _by_step(rows, share),
        ),
    }


def _models(rows: Mapping[str, Any]) -> list[str]:
    return list(rows["scores"])


def _colour(alt: Any, names: list[str], colours: list[str]) -> Any:
    legend = alt.Legend(title=None, symbolType="stroke", orient="top", direction="horizontal")
    return alt.Color("model:N", sort=names, scale=alt.Scale(domain=names, range=colours), legend=legend)


def _forecasts(rows: Mapping[str, Any]) -> Any:
    alt = needed("altair")
    pairs = [(i, j) for i, series in enumerate(rows["series"]) for j in range(len(series[0]))]
    # The trained model is drawn last, above the naive ones.
    models = [*_models(rows)[1:], _models(rows)[0]]
    names = [ACTUAL, *reversed(models)]
    colour = _colour(alt, names, [INK, *COLOURS[: len(models)]])
    data: dict[str, list[dict[str, Any]]] = {}
    panels = []
    for number, (i, j) in enumerate(pairs[:PANELS]):
        series = rows["series"][i]
        first = max(0, len(series) - STEPS)
        actual = [{"step": t, "value": _known(series[t][j]), "model": ACTUAL} for t in range(first, len(series))]
        layers = [_line(alt, f"actual{number}", colour, 1.5)]
        data[f"actual{number}"] = actual
        for k, model in enumerate(models):
            data[f"model{k}_{number}"] = _segments(rows, i, j, model, first)
            width = 2.5 if model == _models(rows)[0] else 1.5
            # A line through a single point is not drawn.
            layers.append(_line(alt, f"model{k}_{number}", colour, width, point=rows["horizon"] == 1))
        title = {"title": f"series {i}, channel {j}"} if len(pairs) > 1 else {}
        panels.append(alt.layer(*layers).properties(width=760, height=200, **title))
    return panel_chart(alt.vconcat(*panels), data)


def _line(alt: Any, name: str, colour: Any, width: float, *, point: bool = False) -> Any:
    chart = alt.Chart(alt.NamedData(name), name=name).mark_line(strokeWidth=width, clip=True, point=point)
    return chart.encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format=",d", grid=False)),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False, nice=False, padding=8)),
        color=colour,
        detail="window:N",
        tooltip=["model:N", "step:Q", alt.Tooltip("value:Q", format=".4~g")],
    )


def _segments(rows: Mapping[str, Any], series: int, channel: int, model: str, first: int) -> list[dict[str, Any]]:
    """The forecasts of windows that do not overlap, from the last one back."""
    points: list[dict[str, Any]] = []
    end = math.inf
    own = sorted((w for w in rows["windows"] if w["series"] == series), key=lambda w: -w["first"])
    for number, window in enumerate(own):
        if window["first"] < first or window["first"] + rows["horizon"] > end:
            continue
        end = window["first"]
        values = [step[channel] for step in window["forecasts"][model]]
        points += [
            {"step": window["first"] + k, "value": value, "model": model, "window": number} for k, value in enumerate(values)
        ]
    return points


def _by_step(rows: Mapping[str, Any], title: str) -> Any:
    alt = needed("altair")
    models = _models(rows)
    points = [
        {"step": k, "value": value, "model": model}
        for model, errors in rows["errors_by_step"].items()
        for k, value in enumerate(errors, 1)
        if _known(value) is not None
    ]
    chart = alt.Chart(alt.NamedData("by_step"), name="by_step").mark_line(strokeWidth=2.5, point=True)
    chart = chart.encode(
        x=alt.X("step:Q", title="steps ahead", axis=alt.Axis(format=",d", grid=False, tickMinStep=1)),
        y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=True)),
        color=_colour(alt, models, list(COLOURS[: len(models)])),
        tooltip=["model:N", "step:Q", alt.Tooltip("value:Q", format=".4~g")],
    )
    return wide_chart(chart, 280, {"by_step": points})


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
