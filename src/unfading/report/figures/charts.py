"""Figures of a task, drawn with Altair from its records alone.

`curves` and `loss` show a metric over steps: a thin line per seed, a thick line for the median. `test` and `seconds` show a dot
per seed and a bar at the mean or median. The wheel zooms, dragging moves, a click in the legend selects a setting, and the
pointer shows the values of a point. Every part of a chart has a name: names that Altair chooses count up over the life of a
process, and a page would not be the same when it is made again.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from unfading.report.groups import Setting, TaskGroup
from unfading.report.records import Record
from unfading.report.summary import metric_name, score

Spec = dict[str, Any]

# Okabe and Ito's colours, which can be distinguished with any colour vision, and two of Tol's. Their yellow and black are left
# out: they cannot be seen on a white or a dark page.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#aa4499", "#999933")
# From the ninth setting on the colours repeat with dashes.
DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3))
MOST = 400  # points of one line: more cannot be seen, and each makes the page larger
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, GRID = "#444444", "#dddddd"
TEXT = {"labelFontSize": 12, "titleFontSize": 13, "labelColor": INK, "titleColor": INK, "titleFontWeight": 500}


class Figure(NamedTuple):
    """A chart with its caption and a note."""

    caption: str
    note: str
    chart: Spec


def figures(task: TaskGroup) -> dict[str, Spec]:
    """Every figure for which the records have data, by name."""
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
    """The figure as PNG on white, with twice the resolution of a screen."""
    # A picture has no pointer, so the points that react to it would only take time.
    params = [param for param in spec.get("params", []) if param["name"] != "pointed"]
    still = {**spec, "params": params, "background": "white"}
    # A chart of several panels has a fixed size.
    if spec.get("width") == "container":
        still |= {"layer": [layer for layer in spec["layer"] if layer["name"] != "dots"], "width": 720}
    return bytes(needed("vl_convert").vegalite_to_png(still, vl_version=vega_lite_version(), scale=2))


def svg(spec: Spec) -> bytes:
    """The figure as SVG on white."""
    still = {**spec, "background": "white"}
    return str(needed("vl_convert").vegalite_to_svg(still, vl_version=vega_lite_version())).encode()


def vega_lite_version() -> str:
    """The version of Vega-Lite that Altair uses, as vl_convert expects it, e.g. "6.1"."""
    return ".".join(needed("altair").SCHEMA_VERSION.removeprefix("v").split(".")[:2])


PACKAGES = ("altair", "jinja2", "vl_convert")  # of the extra `report`


def needed(name: str) -> Any:
    """Import a package of the extra `report`; if it is missing, the error names the extra."""
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # Altair imports Jinja2. If another dependency is missing, the installation is broken: the original error says it best.
        if error.name not in PACKAGES:
            raise
        package = error.name.replace("_", "-")
        raise ValueError(
            f"a report needs {package}, which is not installed. Get it with: pip install 'unfading[report]'"
        ) from None


# A curve: steps and values.
Curve = list[tuple[int, float]]


def _valid(name: str | None) -> Callable[[Record], Curve]:
    def curve(record: Record) -> Curve:
        scores = [(row.step, (row.valid or {}).get(name or "")) for row in record.curve]
        points = [(step, value) for step, value in scores if value is not None]
        # Each score is a measurement of its own, so some are left out, but never the last.
        every = math.ceil(len(points) / MOST)
        return points[::-every][::-1] if every > 1 else points

    return curve


def _loss(record: Record) -> Curve:
    points = [(row.step, row.loss) for row in record.curve if row.loss is not None]
    # Each loss is a mean since the previous log row, so neighbours can be averaged into a mean over a longer interval.
    every = max(1, math.ceil(len(points) / MOST))
    groups = [points[i : i + every] for i in range(0, len(points), every)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def _median(curves: Sequence[Curve]) -> Curve:
    """The median at steps that more than half of the runs have; at other steps it would jump as runs come and go."""
    at: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            at.setdefault(step, []).append(value)
    return [(step, statistics.median(values)) for step, values in sorted(at.items()) if len(values) > len(curves) / 2]


def _over_steps(task: TaskGroup, curve: Callable[[Record], Curve], title: str, *, guess: float | None, error: bool) -> Spec:
    alt = needed("altair")
    seeds: list[dict[str, Any]] = []
    middle: list[dict[str, Any]] = []
    for setting in task.settings:
        curves = {record.seed: points for record in setting.records if (points := curve(record))}
        for seed, points in curves.items():
            seeds += [_point(setting, str(seed), step, value) for step, value in points]
        name = f"median of {len(curves)}" if len(curves) > 1 else "".join(map(str, curves))
        middle += [_point(setting, name, step, value) for step, value in _median(list(curves.values()))]
    log, scale = _scale(alt, [point["value"] for point in seeds], guess, error)
    steps = alt.Scale(domain=[0, max(point["step"] for point in seeds)], nice=False)
    common = {
        "x": alt.X("step:Q", title="step", scale=steps, axis=alt.Axis(format=",d", grid=False, tickCount=6)),
        "y": alt.Y("value:Q", title=title, scale=scale, axis=decades(alt, log)),
        **_colours(alt, task),
    }
    chosen = alt.selection_point("chosen", fields=["setting"], bind="legend")
    # Not `nearest`: with it Vega-Lite 6.4 shows "undefined" for every field that is not a number. Wide points serve as well.
    pointed = alt.selection_point("pointed", on="pointerover", clear="pointerout", empty=False)
    zoom = alt.selection_interval("zoom", bind="scales")
    thin = alt.Chart(alt.NamedData("seeds"), name="seeds").mark_line(strokeWidth=1, clip=True)
    thin = thin.encode(detail="seed:N", opacity=alt.when(chosen).then(alt.value(0.45)).otherwise(alt.value(0.05)), **common)
    strong = alt.Chart(alt.NamedData("middle"), name="middle").mark_line(strokeWidth=2.5, clip=True)
    strong = strong.encode(opacity=alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.1)), **common)
    dots = alt.Chart(alt.NamedData("dots"), name="dots").mark_point(filled=True, size=130, clip=True)
    opacity = alt.when(pointed).then(alt.value(1)).otherwise(alt.value(0))
    dots = dots.encode(opacity=opacity, tooltip=_tooltip(alt, title, steps=True), **common)
    rule, words = _guess(alt, guess, "y", "right")
    layers = [*rule, thin.add_params(chosen, zoom), strong, *words, dots.add_params(pointed)]
    medians = [point for point in middle if point["seed"].startswith("median")]
    return wide_chart(alt.layer(*layers), 320, {"seeds": seeds, "middle": middle, "dots": [*seeds, *medians]})


def _per_seed(task: TaskGroup, values: Mapping[str, tuple[Any, Any]], title: str, *, guess: float | None, error: bool) -> Spec:
    alt = needed("altair")
    ((name, (value, middle)),) = values.items()
    seeds: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    for setting in task.settings:
        numbers = {record.seed: number for record in setting.records if (number := value(record)) is not None}
        seeds += [{"setting": setting.label, "seed": str(seed), "value": number} for seed, number in numbers.items()]
        if numbers:
            bars.append({"setting": setting.label, "seed": f"{name} of {len(numbers)}", "value": middle(numbers.values())})
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
    # The label is beside the rule, on the side away from the scores.
    rule, words = _guess(alt, guess, "x", "left" if error else "right")
    layers = [*rule, dots.add_params(zoom), marks, *words]
    return wide_chart(alt.layer(*layers), 36 * len(labels) + 24, {"seeds": seeds, "middle": bars})


def _point(setting: Setting, seed: str, step: int, value: float) -> dict[str, Any]:
    return {"setting": setting.label, "seed": seed, "step": step, "value": value}


def _tooltip(alt: Any, title: str, *, steps: bool) -> list[Any]:
    value = alt.Tooltip("value:Q", title=title, format=".4~g")
    return [alt.Tooltip("setting:N"), alt.Tooltip("seed:N"), *([alt.Tooltip("step:Q", format=",d")] if steps else []), value]


def _scale(alt: Any, values: Sequence[float], guess: float | None, error: bool) -> tuple[bool, Any]:
    """The scale of an axis, and whether it is logarithmic: for an error that spans more than a decade and is never 0.

    A logarithmic axis ends a decade above the guess and nine tenths of the values, since a few spikes would flatten everything
    else. Spikes are cut off at the top; zooming out shows them.
    """
    everything = [*values, *([] if guess is None else [guess])]
    if not (error and min(everything) > 0 and max(everything) > 10 * min(everything)):
        return False, alt.Scale(zero=False, nice=False, padding=10)
    most = sorted(values)[9 * len(values) // 10]
    top = 10 * max(most, guess or 0.0)
    return True, alt.Scale(type="log", nice=False, padding=10, **({"domainMax": top} if max(values) > top else {}))


def decades(alt: Any, log: bool) -> Any:
    """An axis with few ticks; a logarithmic one has faint grid lines between its decades."""
    if not log:
        return alt.Axis(tickCount=5)
    # Lines between decades show that the scale is logarithmic; they are faint because there are many.
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
    """A dashed rule below the marks, and its label above them with a background of its own, so that no line crosses it."""
    if guess is None:
        return [], []
    data = alt.Data(values=[{"value": guess, "label": f"guess {score(guess)}"}])
    at = {axis: alt.Y("value:Q") if axis == "y" else alt.X("value:Q")}
    rule = alt.Chart(data, name="guess").mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color=INK).encode(**at)
    if axis == "y":
        place, style = {"x": alt.value("width")}, {"align": "right", "dx": -4, "dy": -9}
    else:
        place, style = {"y": alt.value(8)}, {"align": "right" if side == "left" else "left", "dx": -6 if side == "left" else 6}
    words = [
        alt.Chart(data, name=name).mark_text(fontSize=12, color=colour, **more, **style).encode(text="label:N", **at, **place)
        for name, colour, more in (("paper", "white", {"stroke": "white", "strokeWidth": 5}), ("guessed", INK, {}))
    ]
    return [rule], words


def wide_chart(chart: Any, height: int, rows: Mapping[str, Any]) -> Spec:
    """A chart over named data in the style of all figures, as wide as its container, with the rows of those data."""
    chart = _styled(chart.properties(width="container", height=height), padding=5)
    chart = chart.configure_legend(
        orient="top", direction="horizontal", columns=2, labelLimit=250, labelFontSize=12, labelColor=INK, symbolStrokeWidth=3,
        symbolSize=220, columnPadding=24, offset=10,
    )  # fmt: skip
    return _with_rows(chart, rows)


def panel_chart(chart: Any, rows: Mapping[str, Any]) -> Spec:
    """The same for charts side by side, each with a fixed size."""
    chart = _styled(chart, padding=8).configure_title(fontSize=14, color=INK, fontWeight=600)
    return _with_rows(chart.configure_legend(**TEXT, labelLimit=420, symbolStrokeWidth=3), rows)


def _styled(chart: Any, padding: int) -> Any:
    chart = chart.configure(font=FONT, background="transparent", padding=padding).configure_view(stroke=None)
    return chart.configure_axis(**TEXT, gridColor=GRID, domainColor=INK, tickColor=INK)


def _with_rows(chart: Any, rows: Mapping[str, Any]) -> Spec:
    spec: Spec = chart.to_dict()
    # The rows are added after Altair has validated the rest: it would validate and copy every row, which takes seconds.
    spec["datasets"] = {**spec.get("datasets", {}), **{name: list(values) for name, values in rows.items()}}
    return drawable(spec)


# Control characters, line separators, halves of surrogate pairs, what XML does not allow, and the backslash.
UNDRAWABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff\\ufffe\\uffff\\\\]")


def drawable(value: Any) -> Any:
    """The same value, the undrawable characters of its texts replaced by their numbers, e.g. U+2028.

    Names of metrics, cells and tasks are the user's. Vega draws no figure whose title has a line break, and evaluates what
    follows a backslash; the library that writes PNG ends the process at a control character.
    """
    if isinstance(value, str):
        return UNDRAWABLE.sub(lambda match: f"U+{ord(match[0]):04X}", value)
    if isinstance(value, dict):
        return {name: drawable(part) for name, part in value.items()}
    return [drawable(part) for part in value] if isinstance(value, list | tuple) else value
