"""Figures from the gradients that `train --watch gradients` logs: of each layer over training, and of the states through time.

Lines show the median over the seeds of a setting. Dashes distinguish settings, colours layers or training steps.
"""

import statistics
from collections.abc import Iterator
from typing import Any

from unfading.report.figures.charts import DASHES, Spec, needed, wide_chart
from unfading.report.groups import Setting, TaskGroup
from unfading.report.records import WatchedGradients

MOST = 8  # lines of one setting through time: more are hard to distinguish


def figures(task: TaskGroup) -> dict[str, Spec]:
    """Both figures by name, if gradients were logged."""
    layers = [row for setting in task.settings for row in _layers(setting)]
    times = [row for setting in task.settings for row in _times(setting)]
    specs = {}
    if layers:
        specs["gradients"] = _lines(layers, ("step", "step"), "gradient of a layer's parameters", ("layer", "layer"))
    if times:
        title = "gradient of the top layer's state"
        specs["through_time"] = _lines(times, ("time", "step t of the sequence"), title, ("step", "step of training"))
    return specs


def _by_step(setting: Setting) -> dict[int, list[WatchedGradients]]:
    """The gradients logged at each training step, of all seeds that have them."""
    gradients: dict[int, list[WatchedGradients]] = {}
    for record in setting.records:
        for row in record.curve:
            if row.watched is not None:
                gradients.setdefault(row.step, []).append(row.watched)
    return dict(sorted(gradients.items()))


def _layers(setting: Setting) -> Iterator[dict[str, Any]]:
    for step, gradients in _by_step(setting).items():
        for l, values in enumerate(zip(*(each.layers for each in gradients), strict=True), start=1):
            yield from _row(values, setting=setting.label, step=step, layer=l)


def _times(setting: Setting) -> Iterator[dict[str, Any]]:
    gradients = _by_step(setting)
    steps = list(gradients)
    some = {steps[round(i * (len(steps) - 1) / (MOST - 1))] for i in range(MOST)} if steps else set()
    for step in sorted(some):
        tops = zip(*(each.states[-1] for each in gradients[step]), strict=True)
        for t, values in zip(gradients[step][0].times, tops, strict=True):
            yield from _row(values, setting=setting.label, step=step, time=t)


def _row(values: tuple[float | None, ...], **names: Any) -> Iterator[dict[str, Any]]:
    """A row with the median of the positive values: a logarithmic axis cannot show zeros."""
    positive = [value for value in values if value is not None and value > 0]
    if positive:
        yield {**names, "value": statistics.median(positive)}


def _lines(rows: list[dict[str, Any]], x: tuple[str, str], title: str, colour: tuple[str, str]) -> Spec:
    alt = needed("altair")
    labels = list(dict.fromkeys(row["setting"] for row in rows))
    values = sorted({row[colour[0]] for row in rows})
    scale = alt.Scale(scheme="viridis", domain=values)
    legend = alt.Legend(
        title=colour[1], orient="right", direction="vertical", columns=1, symbolType="stroke", values=values[:24]
    )
    encoding = {
        "x": alt.X(f"{x[0]}:Q", title=x[1], axis=alt.Axis(format=",d", grid=False, tickCount=6), scale=alt.Scale(nice=False)),
        "y": alt.Y("value:Q", title=title, scale=alt.Scale(type="log", nice=False), axis=alt.Axis(format=".0e", tickCount=6)),
        "color": alt.Color(f"{colour[0]}:O", scale=scale, legend=legend, sort=values),
        "tooltip": ["setting:N", f"{colour[0]}:O", f"{x[0]}:Q", alt.Tooltip("value:Q", format=".3~g")],
    }
    if len(labels) > 1:
        dashes = [DASHES[i % len(DASHES)] for i in range(len(labels))]
        encoding["strokeDash"] = alt.StrokeDash(
            "setting:N", scale=alt.Scale(domain=labels, range=dashes), legend=alt.Legend(title=None)
        )
    lines = alt.Chart(alt.NamedData("watched"), name="watched").mark_line(strokeWidth=2, clip=True)
    lines = lines.encode(detail="setting:N", **encoding)
    return wide_chart(alt.layer(lines.add_params(alt.selection_interval("zoom", bind="scales"))), 320, {"watched": rows})
