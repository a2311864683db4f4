"""Figures of a task, as Altair charts made from its records alone.

`curves` and `loss` show a metric over steps: a thin line a seed, a strong one for their median. `test` and `seconds` show a
dot a seed and a bar at the mean or median. Wheel and drag zoom and move, a click in the legend keeps one setting, the pointer
tells the point it is on. All names inside a chart are given here: Altair counts up names of its own over the life of a process,
and no page would be made twice.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from unfading.report.groups import Setting, TaskGroup
from unfading.report.records import Record
from unfading.report.summary import metric_name, score

Spec = dict[str, Any]

# Okabe and Ito's colours, which people with any colour vision tell apart, without the yellow and the black that a white or a
# dark page swallows, and two of Tol's.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#aa4499", "#999933")
# From the ninth setting on the colours come again, dashed.
DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3))
MOST = 400  # points of one line: more cannot be seen, and each is an element of the page
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, GRID = "#444444", "#dddddd"
TEXT = {"labelFontSize": 12, "titleFontSize": 13, "labelColor": INK, "titleColor": INK, "titleFontWeight": 500}


class Figure(NamedTuple):
    """A chart with its words."""

    caption: str
    note: str
    chart: Spec


def figures(task: TaskGroup) -> dict[str, Spec]:
    """Every figure for which the records have something to show, by name, as Vega-Lite."""
    specs: dict[str, Spec] = {}
    valid = _valid(task.metric)
    if any(valid(record) for record in task.records):
        specs["curves"] = _over_steps(
            task, valid, f"validation {metric_name(task)}", guess=task.guess, error=not task.higher_is_better
        )
    if any(_loss(record) for record in task.records):
        specs["loss"] = _over_steps(task, _loss, "training loss", guess=None, error=True)
    if any(record.test is not None for record in task.records):
        tested = {"mean": (lambda record: record.test, statistics.fmean)}
        specs["test"] = _per_seed(task, tested, f"test {metric_name(task)}", guess=task.guess, error=not task.higher_is_better)
    if any(record.seconds is not None for record in task.records):
        timed = {"median": (lambda record: record.seconds, statistics.median)}
        specs["seconds"] = _per_seed(task, timed, "seconds of training", guess=None, error=False)
    return specs


def png(spec: Spec) -> bytes:
    """The figure as a picture on white, twice as fine as a screen."""
    # A picture has no pointer: the points that answer it would only take time.
    params = [param for param in spec.get("params", []) if param["name"] != "pointed"]
    still = {**spec, "params": params, "background": "white"}
    # Panels have sizes of their own.
    if spec.get("width") == "container":
        still |= {"layer": [layer for layer in spec["layer"] if layer["name"] != "dots"], "width": 720}
    return bytes(needed("vl_convert").vegalite_to_png(still, vl_version=language(), scale=2))


def svg(spec: Spec) -> bytes:
    """The figure as a drawing on white."""
    still = {**spec, "background": "white"}
    return str(needed("vl_convert").vegalite_to_svg(still, vl_version=language())).encode()


def language() -> str:
    """The version of Vega-Lite that Altair speaks, as vl_convert wants it said."""
    return ".".join(needed("altair").SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def needed(name: str) -> Any:
    """A package of the extra `report`, or a sentence that names the extra."""
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # Of another package it is a broken installation, which its own words tell best.
        if error.name != name:
            raise
        package = name.replace("_", "-")
        raise ValueError(
            f"a report needs {package}, which is not installed. Get it with: pip install 'unfading[report]'"
        ) from None


Line = list[tuple[int, float]]


def _valid(name: str | None) -> Callable[[Record], Line]:
    def line(record: Record) -> Line:
        found = [(point.step, (point.valid or {}).get(name or "")) for point in record.curve]
        points = [(step, value) for step, value in found if value is not None]
        # Each is a measurement of its own: some are shown, the last always.
        every = math.ceil(len(points) / MOST)
        return points[::-every][::-1] if every > 1 else points

    return line


def _loss(record: Record) -> Line:
    points = [(point.step, point.loss) for point in record.curve if point.loss is not None]
    # Each is a mean since the one before: the mean of some is the same over a longer stretch.
    every = max(1, math.ceil(len(points) / MOST))
    groups = [points[i : i + every] for i in range(0, len(points), every)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def _median(lines: Sequence[Line]) -> Line:
    """At the steps that more than half of the runs have: at others it would jump with who is there."""
    at: dict[int, list[float]] = {}
    for line in lines:
        for step, value in line:
            at.setdefault(step, []).append(value)
    return [(step, statistics.median(values)) for step, values in sorted(at.items()) if len(values) > len(lines) / 2]


def _over_steps(task: TaskGroup, line: Callable[[Record], Line], title: str, *, guess: float | None, error: bool) -> Spec:
    alt = needed("altair")
    seeds: list[dict[str, Any]] = []
    middle: list[dict[str, Any]] = []
    for setting in task.settings:
        lines = {record.seed: points for record in setting.records if (points := line(record))}
        for seed, points in lines.items():
            seeds += [_point(setting, str(seed), step, value) for step, value in points]
        name = f"median of {len(lines)}" if len(lines) > 1 else "".join(map(str, lines))
        middle += [_point(setting, name, step, value) for step, value in _median(list(lines.values()))]
    log, scale = _scale(alt, [point["value"] for point in seeds], guess, error)
    steps = alt.Scale(domain=[0, max(point["step"] for point in seeds)], nice=False)
    common = {
        "x": alt.X("step:Q", title="step", scale=steps, axis=alt.Axis(format=",d", grid=False, tickCount=6)),
        "y": alt.Y("value:Q", title=title, scale=scale, axis=decades(alt, log)),
        **_colours(alt, task),
    }
    chosen = alt.selection_point("chosen", fields=["setting"], bind="legend")
    # Not `nearest`: there Vega-Lite 6.4 tells "undefined" for every field that is no number. Wide points do as well.
    pointed = alt.selection_point("pointed", on="pointerover", clear="pointerout", empty=False)
    zoom = alt.selection_interval("zoom", bind="scales")
    thin = alt.Chart(alt.NamedData("seeds"), name="seeds").mark_line(strokeWidth=1, clip=True)
    thin = thin.encode(detail="seed:N", opacity=alt.when(chosen).then(alt.value(0.45)).otherwise(alt.value(0.05)), **common)
    strong = alt.Chart(alt.NamedData("middle"), name="middle").mark_line(strokeWidth=2.5, clip=True)
    strong = strong.encode(opacity=alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.1)), **common)
    dots = alt.Chart(alt.NamedData("dots"), name="dots").mark_point(filled=True, size=130, clip=True)
    seen = alt.when(pointed).then(alt.value(1)).otherwise(alt.value(0))
    dots = dots.encode(opacity=seen, tooltip=_tooltip(alt, title, steps=True), **common)
    rule, words = _guess(alt, guess, "y", "right")
    layers = [*rule, thin.add_params(chosen, zoom), strong, *words, dots.add_params(pointed)]
    medians = [point for point in middle if point["seed"].startswith("median")]
    return finished(alt.layer(*layers), 320, {"seeds": seeds, "middle": middle, "dots": [*seeds, *medians]})


def _per_seed(task: TaskGroup, values: Mapping[str, tuple[Any, Any]], title: str, *, guess: float | None, error: bool) -> Spec:
    alt = needed("altair")
    ((name, (value, middle)),) = values.items()
    seeds: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    for setting in task.settings:
        found = {record.seed: number for record in setting.records if (number := value(record)) is not None}
        seeds += [{"setting": setting.label, "seed": str(seed), "value": number} for seed, number in found.items()]
        if found:
            bars.append({"setting": setting.label, "seed": f"{name} of {len(found)}", "value": middle(found.values())})
    labels = [setting.label for setting in task.settings]
    log, scale = _scale(alt, [dot["value"] for dot in seeds], guess, error)
    common = {
        "x": alt.X("value:Q", title=title, scale=scale, axis=decades(alt, log)),
        "y": alt.Y("setting:N", title=None, sort=labels, scale=alt.Scale(domain=labels), axis=alt.Axis(labelLimit=240)),
        "color": _colours(alt, task)["color"].legend(None),
        "tooltip": _tooltip(alt, title, steps=False),
    }
    dots = (
        alt.Chart(alt.NamedData("seeds"), name="seeds")
        .mark_point(filled=True, size=75, opacity=0.55, clip=True)
        .encode(**common)
    )
    marks = alt.Chart(alt.NamedData("middle"), name="middle").mark_tick(thickness=3, size=22, opacity=1).encode(**common)
    zoom = alt.selection_interval("zoom", bind="scales", encodings=["x"])
    # Beside the rule, on the side where the scores are not.
    rule, words = _guess(alt, guess, "x", "left" if error else "right")
    layers = [*rule, dots.add_params(zoom), marks, *words]
    return finished(alt.layer(*layers), 36 * len(labels) + 24, {"seeds": seeds, "middle": bars})


def _point(setting: Setting, seed: str, step: int, value: float) -> dict[str, Any]:
    return {"setting": setting.label, "seed": seed, "step": step, "value": value}


def _tooltip(alt: Any, title: str, *, steps: bool) -> list[Any]:
    value = alt.Tooltip("value:Q", title=title, format=".4~g")
    return [alt.Tooltip("setting:N"), alt.Tooltip("seed:N"), *([alt.Tooltip("step:Q", format=",d")] if steps else []), value]


def _scale(alt: Any, values: Sequence[float], guess: float | None, error: bool) -> tuple[bool, Any]:
    """Whether the axis is logarithmic, for an error that spans more than a decade and is never 0; and the scale.

    A logarithmic axis ends a decade above the guess and nine tenths of the values: a few spikes would press all else flat.
    They leave the picture at its top; zooming out shows them whole.
    """
    everything = [*values, *([] if guess is None else [guess])]
    if not (error and min(everything) > 0 and max(everything) > 10 * min(everything)):
        return False, alt.Scale(zero=False, nice=False, padding=10)
    most = sorted(values)[9 * len(values) // 10]
    top = 10 * max(most, guess or 0.0)
    return True, alt.Scale(type="log", nice=False, padding=10, **({"domainMax": top} if max(values) > top else {}))


def decades(alt: Any, log: bool) -> Any:
    """An axis with few ticks; a logarithmic one has faint lines between its decades."""
    if not log:
        return alt.Axis(tickCount=5)
    # Between the decades lines are faint: they give the scale away, and are too many.
    decade = "abs(log(datum.value) / LN10 - round(log(datum.value) / LN10)) < 1e-6"
    faint = {"condition": {"test": decade, "value": 1}, "value": 0.3}
    return alt.Axis(tickCount=5, gridOpacity=faint, tickOpacity=faint)


def _colours(alt: Any, task: TaskGroup) -> dict[str, Any]:
    labels = [setting.label for setting in task.settings]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(labels))]
    legend = alt.Legend(title=None, symbolType="stroke", symbolOpacity=1)
    encoding = {"color": alt.Color("setting:N", scale=alt.Scale(domain=labels, range=colours), legend=legend)}
    if len(labels) > len(COLOURS):
        dashes = [DASHES[i // len(COLOURS) % len(DASHES)] for i in range(len(labels))]
        encoding["strokeDash"] = alt.StrokeDash("setting:N", scale=alt.Scale(domain=labels, range=dashes), legend=legend)
    return encoding


def _guess(alt: Any, guess: float | None, axis: str, side: str) -> tuple[list[Any], list[Any]]:
    """A dashed rule below the marks, and above them its label, on paper of its own so that lines do not cross the words."""
    if guess is None:
        return [], []
    data = alt.Data(values=[{"value": guess, "label": f"guess {score(guess)}"}])
    at = {axis: alt.Y("value:Q") if axis == "y" else alt.X("value:Q")}
    rule = alt.Chart(data, name="guess").mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color=INK).encode(**at)
    if axis == "y":
        place, look = {"x": alt.value("width")}, {"align": "right", "dx": -4, "dy": -9}
    else:
        place, look = {"y": alt.value(8)}, {"align": "right" if side == "left" else "left", "dx": -6 if side == "left" else 6}
    words = [
        alt.Chart(data, name=name).mark_text(fontSize=12, color=colour, **more, **look).encode(text="label:N", **at, **place)
        for name, colour, more in (("paper", "white", {"stroke": "white", "strokeWidth": 5}), ("guessed", INK, {}))
    ]
    return [rule], words


def finished(chart: Any, height: int, rows: Mapping[str, Any]) -> Spec:
    """A chart over named data with the looks of all our figures, as wide as its place, and the rows of those data."""
    chart = _dressed(chart.properties(width="container", height=height), padding=5)
    chart = chart.configure_legend(
        orient="top", direction="horizontal", columns=2, labelLimit=250, labelFontSize=12, labelColor=INK, symbolStrokeWidth=3,
        symbolSize=220, columnPadding=24, offset=10,
    )  # fmt: skip
    return _with_rows(chart, rows)


def panels(chart: Any, rows: Mapping[str, Any]) -> Spec:
    """The same for charts beside each other, which have sizes of their own."""
    chart = _dressed(chart, padding=8).configure_title(fontSize=14, color=INK, fontWeight=600)
    return _with_rows(chart.configure_legend(**TEXT, labelLimit=420, symbolStrokeWidth=3), rows)


def _dressed(chart: Any, padding: int) -> Any:
    chart = chart.configure(font=FONT, background="transparent", padding=padding).configure_view(stroke=None)
    return chart.configure_axis(**TEXT, gridColor=GRID, domainColor=INK, tickColor=INK)


def _with_rows(chart: Any, rows: Mapping[str, Any]) -> Spec:
    spec: Spec = chart.to_dict()
    # The rows join after Altair has checked the rest: it would check and copy every one of them, for seconds.
    spec["datasets"] = {**spec.get("datasets", {}), **{name: list(values) for name, values in rows.items()}}
    return spec
