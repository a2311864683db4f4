"""Figures of the papers drawn from ledger lines: scores over training steps, scores over depth, steps to converge.

Each function takes lines (records of runs, each with its `row` and, as `place`, its panel) and returns Vega-Lite.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unfading.report.figures.charts import COLOURS, DASHES, INK, Spec, decades, needed
from unfading.report.figures.panels import styled

Lines = Sequence[Mapping[str, Any]]
WIDTH, HEIGHT = 420, 260


def over_steps(lines: Lines) -> Spec:
    """The validation score over steps, one panel per task: a thin line per seed, a thick line for the median, dashed a guess.

    In the median a run that stopped early, having solved its task, counts with its last score, and one that diverged counts as
    a guess. If seeds of a row are missing (`asked` is the number there should be), there is no median: runs that solve a task
    end before the others.
    """
    labels = _labels(lines)

    def panel(alt: Any, name: str, here: Lines) -> Any:
        thin = [{**point, "seed": str(line["run"]["seed"])} for line in here for point in _points(line)]
        log = not here[0]["rising"] and all(point["value"] > 0 for point in thin)
        rows = list(dict.fromkeys(line["row"] for line in here))
        x = alt.X("step:Q", title="training step", axis=alt.Axis(format="~s", grid=False, tickCount=5))
        scale = alt.Scale(type="log" if log else "linear", zero=False, nice=False, padding=6)
        y = alt.Y("value:Q", title=f"validation {here[0]['measure'].replace('_', ' ')}", scale=scale, axis=decades(alt, log))
        common = {"x": x, "y": y, **_colours(alt, rows, name, labels)}
        seeds = (
            alt.Chart(alt.Data(values=thin))
            .mark_line(strokeWidth=0.8, opacity=0.4, clip=True)
            .encode(detail="seed:N", **common)
        )
        middle = alt.Chart(alt.Data(values=_medians(here))).mark_line(strokeWidth=2.4, clip=True).encode(**common)
        guess = alt.Chart(alt.Data(values=[{"value": here[0]["guess"]}])).mark_rule(strokeDash=[5, 4], color=INK).encode(y=y)
        return alt.layer(guess, seeds, middle).properties(width=WIDTH, height=HEIGHT, title=name)

    return _panels(lines, panel)


def over_layers(lines: Lines) -> Spec:
    """The test score over the number of layers, one panel per task: a dot per seed, a line of means, dashed a guess."""
    labels = list(dict.fromkeys(line["run"]["cell"] for line in lines))

    def panel(alt: Any, name: str, here: Lines) -> Any:
        dots = [
            {"row": line["run"]["cell"], "layers": _depth(line), "value": _tested(line), "seed": line["run"]["seed"]}
            for line in here
        ]
        cells = list(dict.fromkeys(dot["row"] for dot in dots))
        x = alt.X("layers:Q", title="layers", scale=alt.Scale(type="log", base=2, nice=False, padding=12))
        y = alt.Y("value:Q", title=f"test {here[0]['measure'].replace('_', ' ')}", scale=alt.Scale(zero=False, padding=6))
        common = {"x": x, **_colours(alt, cells, name, labels)}
        seeds = alt.Chart(alt.Data(values=dots)).mark_point(filled=True, opacity=0.5, size=45).encode(y=y, **common)
        mean = alt.Y("mean(value):Q", title=y.to_dict()["title"])
        lines_ = alt.Chart(alt.Data(values=dots)).mark_line(strokeWidth=2).encode(y=mean, **common)
        guess = alt.Chart(alt.Data(values=[{"value": here[0]["guess"]}])).mark_rule(strokeDash=[5, 4], color=INK).encode(y=y)
        return alt.layer(guess, lines_, seeds).properties(width=WIDTH, height=HEIGHT, title=name)

    return _panels(lines, panel)


def to_solve(lines: Lines) -> Spec:
    """Steps until the validation error is a tenth of a guess's: a dot per seed that reaches it, a bar at the median."""
    labels = _labels(lines)

    def panel(alt: Any, name: str, here: Lines) -> Any:
        dots = [{"row": line["row"], "value": steps} for line in here if (steps := _steps_to_solve(line)) is not None]
        rows = list(dict.fromkeys(line["row"] for line in here))
        x = alt.X("value:Q", title="training steps to a tenth of a guess", axis=alt.Axis(format="~s"))
        y = alt.Y("row:N", title=None, sort=rows, scale=alt.Scale(domain=rows), axis=alt.Axis(labelLimit=260))
        colour = _colours(alt, rows, name, labels)["color"].legend(None)
        points = alt.Chart(alt.Data(values=dots)).mark_point(filled=True, size=70, opacity=0.6).encode(x, y, colour)
        middle = alt.X("median(value):Q", title="training steps to a tenth of a guess")
        ticks = alt.Chart(alt.Data(values=dots)).mark_tick(thickness=3, size=20).encode(middle, y, colour)
        return alt.layer(points, ticks).properties(width=WIDTH, height=34 * len(rows), title=name)

    return _panels(lines, panel)


def _panels(lines: Lines, panel: Callable[[Any, str, Lines], Any]) -> Spec:
    """Panels in two columns, each with its own legend."""
    alt = needed("altair")
    if not lines:
        raise ValueError("there is nothing to draw: none of the figure's rows has been run.")
    places: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        places.setdefault(line["place"], []).append(line)
    charts = [panel(alt, name, here) for name, here in places.items()]
    columns = 1 if len(charts) == 1 else 2
    whole = alt.concat(*charts, columns=columns, spacing=24).resolve_scale(color="independent", strokeDash="independent")
    spec = styled(whole)
    spec["config"]["legend"] = {"labelColor": INK, "labelFontSize": 11, "labelLimit": 260, "symbolStrokeWidth": 3}
    return spec


def _labels(lines: Lines) -> list[str]:
    """The labels of all rows: their names without the title of the panel."""
    return list(dict.fromkeys(_label(line["row"], line["place"]) for line in lines))


def _label(name: str, place: str) -> str:
    return name.removeprefix(f"{place} ")


def _colours(alt: Any, names: Sequence[str], place: str, labels: Sequence[str]) -> dict[str, Any]:
    """Colours of the rows, and dashes if there are more labels than colours. A label has one colour in all panels."""
    at = [labels.index(_label(name, place)) for name in names]
    expression = _label_expression({name: _label(name, place) for name in names})
    legend = alt.Legend(title=None, symbolType="stroke", symbolOpacity=1, symbolSize=220, labelExpr=expression)
    colours = alt.Scale(domain=list(names), range=[COLOURS[i % len(COLOURS)] for i in at])
    dashes = alt.Scale(domain=list(names), range=[list(DASHES[i // len(COLOURS) % len(DASHES)]) for i in at])
    encoding = {"color": alt.Color("row:N", scale=colours, legend=legend)}
    if len(labels) > len(COLOURS):
        encoding["strokeDash"] = alt.StrokeDash("row:N", scale=dashes, legend=legend)
    return encoding


def _label_expression(labels: Mapping[str, str]) -> str:
    """A Vega expression that replaces a row's name by its label in a legend."""
    expression = "datum.label"
    for name, label in labels.items():
        expression = f"datum.label == {name!r} ? {label!r} : {expression}"
    return expression


def _points(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    scores = [(row["step"], (row.get("valid") or {}).get(line["measure"])) for row in line["curve"]]
    return [{"row": line["row"], "step": step, "value": value} for step, value in scores if value is not None]


def _medians(lines: Lines) -> list[dict[str, Any]]:
    medians = []
    for row in dict.fromkeys(line["row"] for line in lines):
        own = [line for line in lines if line["row"] == row]
        if len(own) < own[0].get("asked", 0):
            continue
        curves = [{point["step"]: point["value"] for point in _points(line)} for line in own]
        for step in sorted({step for curve in curves for step in curve}):
            scores = [score for line, curve in zip(own, curves, strict=True) if (score := _at(line, curve, step)) is not None]
            medians.append({"row": row, "step": step, "value": statistics.median(scores)})
    return medians


def _at(line: Mapping[str, Any], curve: Mapping[int, float], step: int) -> float | None:
    """The last score up to a step; None before the first. A run that diverged has the score of a guess from then on."""
    past = [at for at in curve if at <= step]
    if line["status"] == "diverged" and step > max(curve, default=0):
        return float(line["guess"])
    return curve[max(past)] if past else None


def _depth(line: Mapping[str, Any]) -> int:
    run = line["run"]
    return int(run["cell_options"].get("depth", run["layers"]))


def _tested(line: Mapping[str, Any]) -> float:
    score = (line["test"] or {}).get(line["measure"])
    return float(line["guess"] if score is None else score)


def _steps_to_solve(line: Mapping[str, Any]) -> int | None:
    points = [(point["step"], point["value"]) for point in _points(line)]
    return next((step for step, value in points if value <= 0.1 * line["guess"]), None)
