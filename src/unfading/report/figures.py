"""Figures of a task, as Altair charts made from its records alone.

`curves` and `loss` show a measure over steps: a thin line a seed, a strong one for their median. `test` and `seconds` show a
dot a seed and a bar at the mean or median. Wheel and drag zoom and move, a click in the legend keeps one setting, the pointer tells
the nearest point. All names inside a chart are given here: Altair counts up names of its own over the life of a process, and
no page would be made twice.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unfading.report.records import Record
from unfading.report.settings import Setting, Task
from unfading.report.tables import measure, score

if TYPE_CHECKING:
    import altair as alt

# Okabe and Ito's colours, which people with any colour vision tell apart, without the yellow and the black that a white or a
# dark page swallows, and two of Tol's.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#aa4499", "#999933")
# From the ninth setting on the colours come again, dashed.
DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3))
MOST = 400  # points of one line: more cannot be seen, and each is an element of the page
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, GRID = "#444444", "#dddddd"


def figures(task: Task) -> "dict[str, alt.LayerChart]":
    """Every figure for which the records have something to show, by name."""
    charts: dict[str, alt.LayerChart] = {}
    runs = [(setting, record) for setting in task.settings for record in setting.records]
    if any(_valid(task.measure)(record) for _, record in runs):
        title = f"Validation {measure(task)}"
        charts["curves"] = _over_steps(task, _valid(task.measure), title, guess=task.guess, error=not task.rising)
    if any(_loss(record) for _, record in runs):
        charts["loss"] = _over_steps(task, _loss, "Training loss", guess=None, error=True)
    if any(record.test is not None for _, record in runs):
        title = f"Test {measure(task)}"
        charts["test"] = _per_seed(task, lambda record: record.test, title, statistics.fmean, task.guess, not task.rising)
    if any(record.seconds is not None for _, record in runs):
        charts["seconds"] = _per_seed(
            task, lambda record: record.seconds, "Seconds of training", statistics.median, None, False
        )
    return charts


def png(chart: "alt.LayerChart") -> bytes:
    """The chart as a picture on white, twice as fine as a screen."""
    convert = needed("vl_convert")
    spec = chart.properties(width=640).to_dict() | {"background": "white"}
    return bytes(convert.vegalite_to_png(spec, vl_version=language(), scale=2))


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


def _over_steps(
    task: Task, line: Callable[[Record], Line], title: str, *, guess: float | None, error: bool
) -> "alt.LayerChart":
    alt = needed("altair")
    seeds: list[dict[str, Any]] = []
    middle: list[dict[str, Any]] = []
    for setting in task.settings:
        lines = {record.seed: line(record) for record in setting.records}
        for seed, points in lines.items():
            seeds += [_point(setting, str(seed), step, value) for step, value in points]
        present = [points for points in lines.values() if points]
        if len(present) > 1:
            middle += [_point(setting, f"median of {len(present)}", step, value) for step, value in _median(present)]
        else:
            middle += [_point(setting, str(seed), step, value) for seed, points in lines.items() for step, value in points]
    y = alt.Y("value:Q", title=title, scale=_scale(alt, [point["value"] for point in seeds], guess, error))
    tooltip = [
        alt.Tooltip("setting:N"), alt.Tooltip("seed:N"), alt.Tooltip("step:Q", format=","),
        alt.Tooltip("value:Q", title=title.lower(), format=".4~g"),
    ]  # fmt: skip
    chosen = alt.selection_point("chosen", fields=["setting"], bind="legend")
    pointed = alt.selection_point("pointed", on="pointerover", clear="pointerout", nearest=True, empty=False)
    common = {"x": alt.X("step:Q", title="step", axis=alt.Axis(format="~s", grid=False)), "y": y, **_colours(alt, task)}
    thin = alt.Chart(alt.Data(values=seeds), name="seeds").mark_line(strokeWidth=1, interpolate="linear")
    thin = thin.encode(detail="seed:N", opacity=alt.when(chosen).then(alt.value(0.4)).otherwise(alt.value(0.05)), **common)
    strong = alt.Chart(alt.Data(values=middle), name="median").mark_line(strokeWidth=2.5)
    strong = strong.encode(opacity=alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.1)), **common)
    dots = alt.Chart(alt.Data(values=seeds + [point for point in middle if point["seed"].startswith("median")]), name="dots")
    dots = dots.mark_point(filled=True, size=50).encode(
        opacity=alt.when(pointed).then(alt.value(1)).otherwise(alt.value(0)), tooltip=tooltip, **common
    )
    zoom = alt.selection_interval("zoom", bind="scales")
    layers = [*_guess(alt, guess, "y"), thin.add_params(chosen, zoom), strong, dots.add_params(pointed)]
    return _dressed(alt.layer(*layers), height=320)


def _per_seed(
    task: Task, value: Callable[[Record], float | None], title: str, middle: Any, guess: float | None, error: bool
) -> "alt.LayerChart":
    alt = needed("altair")
    dots: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    for setting in task.settings:
        found = {record.seed: number for record in setting.records if (number := value(record)) is not None}
        dots += [{"setting": setting.label, "seed": str(seed), "value": number} for seed, number in found.items()]
        if found:
            name = "mean" if middle is statistics.fmean else "median"
            bars.append({"setting": setting.label, "seed": f"{name} of {len(found)}", "value": middle(found.values())})
    labels = [setting.label for setting in task.settings]
    tooltip = [alt.Tooltip("setting:N"), alt.Tooltip("seed:N"), alt.Tooltip("value:Q", title=title.lower(), format=".4~g")]
    common = {
        "x": alt.X(
            "value:Q", title=title, scale=_scale(alt, [dot["value"] for dot in dots], guess, error), axis=alt.Axis(tickCount=5)
        ),
        "y": alt.Y("setting:N", title=None, sort=labels, axis=alt.Axis(grid=True, labelLimit=260)),
        "color": _colours(alt, task)["color"].legend(None),
        "tooltip": tooltip,
    }
    seeds = alt.Chart(alt.Data(values=dots), name="seeds").mark_point(filled=True, size=70, opacity=0.6).encode(**common)
    marks = alt.Chart(alt.Data(values=bars), name="middle").mark_tick(thickness=3, size=24).encode(**common)
    layers = [*_guess(alt, guess, "x"), seeds.add_params(alt.selection_interval("zoom", bind="scales", encodings=["x"])), marks]
    return _dressed(alt.layer(*layers), height=34 * len(labels) + 20)


def _point(setting: Setting, seed: str, step: int, value: float) -> dict[str, Any]:
    return {"setting": setting.label, "seed": seed, "step": step, "value": value}


def _scale(alt: Any, values: Sequence[float], guess: float | None, error: bool) -> Any:
    """Logarithmic for an error that spans more than a decade; None of it may be 0."""
    all_values = [*values, *([] if guess is None else [guess])]
    if error and min(all_values) > 0 and max(all_values) > 10 * min(all_values):
        return alt.Scale(type="log", nice=False, padding=8)
    return alt.Scale(zero=False, nice=False, padding=8)


def _colours(alt: Any, task: Task) -> Mapping[str, Any]:
    labels = [setting.label for setting in task.settings]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(labels))]
    legend = alt.Legend(title=None, orient="top", direction="horizontal", columns=3, labelLimit=320, symbolType="stroke")
    encoding = {"color": alt.Color("setting:N", scale=alt.Scale(domain=labels, range=colours), legend=legend)}
    if len(labels) > len(COLOURS):
        dashes = [DASHES[i // len(COLOURS) % len(DASHES)] for i in range(len(labels))]
        encoding["strokeDash"] = alt.StrokeDash("setting:N", scale=alt.Scale(domain=labels, range=dashes), legend=legend)
    return encoding


def _guess(alt: Any, guess: float | None, axis: str) -> list[Any]:
    if guess is None:
        return []
    at = alt.Y("value:Q") if axis == "y" else alt.X("value:Q")
    chart = alt.Chart(alt.Data(values=[{"value": guess, "label": f"guess {score(guess)}"}]))
    rule = chart.mark_rule(strokeDash=[5, 4], strokeWidth=1.5, color=INK).encode(**{axis: at}).properties(name="guess")
    place = {"x": alt.value(6), "align": "left", "dy": -7} if axis == "y" else {"y": alt.value(-6), "align": "center"}
    words = chart.mark_text(fontSize=12, color=INK, **{name: place[name] for name in place if name in ("align", "dy")})
    words = words.encode(text="label:N", **{axis: at}, **{name: place[name] for name in place if name in ("x", "y")})
    return [rule, words.properties(name="guessed")]


def _dressed(chart: Any, height: int) -> "alt.LayerChart":
    chart = chart.properties(width="container", height=height)
    text = {"labelFontSize": 12, "titleFontSize": 13, "labelColor": INK, "titleColor": INK, "titleFontWeight": 500}
    axis = {**text, "gridColor": GRID, "domainColor": INK, "tickColor": INK}
    chart = chart.configure(font=FONT, background="transparent", padding=5).configure_view(stroke=None)
    return chart.configure_axis(**axis).configure_legend(labelFontSize=12, labelColor=INK, symbolStrokeWidth=3, symbolSize=220)
