"""The overview figure: for every row of the papers that was run and is in per cent, the gap to the published number.

    gap = mean over our seeds - published       in points; a bar from one standard deviation below to one above

The grey band is the tolerance of a row, two standard errors of its test set. The axis is linear between -1 and 1 and
logarithmic beyond, so that gaps of 0.3 and of 30 can both be read.
"""

from collections.abc import Iterable
from typing import Any

from unfading.report.figures.charts import COLOURS, Spec, needed
from unfading.report.figures.panels import styled
from unfading.report.verdicts import BEATEN, HELD, MISSED, Line, Outcome

VERDICTS = {BEATEN: COLOURS[2], HELD: COLOURS[0], MISSED: COLOURS[1]}
TICKS = [-30, -10, -3, -1, 0, 1, 3]
LETTER = 6.5  # pixels of a letter of a label in a wide font


def gaps(answers: Iterable[tuple[Line, Outcome]]) -> list[dict[str, Any]]:
    """Name, gap, spread, tolerance and verdict of every row, each row once."""
    rows: dict[str, dict[str, Any]] = {}
    for row, outcome in answers:
        # The gap says nothing about a claim that a model does not train.
        if row["unit"] != "%" or row["fails"] or outcome.mean is None or outcome.verdict not in VERDICTS:
            continue
        gap, spread = outcome.mean - row["published"], outcome.spread or 0.0
        rows.setdefault(
            row["row"],
            {
                "row": row["row"],
                "gap": gap,
                "low": gap - spread,
                "high": gap + spread,
                "tolerance": row["tolerance"],
                "least": -row["tolerance"],
                "verdict": outcome.verdict,
            },
        )
    return list(rows.values())


def overview(rows: list[dict[str, Any]]) -> Spec:
    """The figure, with one line per row."""
    alt = needed("altair")
    data = alt.Data(values=rows)
    scale = alt.Scale(type="symlog", constant=1, nice=False, padding=8)
    axis = alt.Axis(values=TICKS, grid=True, labelExpr="datum.value ? format(datum.value, '+d') : '0'")
    title = "points above what is published"
    names = [row["row"] for row in rows]
    # The labels are measured in a font of this machine, and drawn in one of the reader's, which may be wider.
    room = LETTER * max(map(len, names), default=0)
    y = alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=0, minExtent=room, grid=False))
    colour = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())),
        legend=alt.Legend(title=None, orient="top"),
    )
    band = alt.Chart(data).mark_bar(color="#e4e4e4", height=13)
    band = band.encode(alt.X("least:Q", scale=scale, axis=axis, title=title), alt.X2("tolerance:Q"), y)
    spread = alt.Chart(data).mark_rule(strokeWidth=2).encode(alt.X("low:Q", scale=scale), alt.X2("high:Q"), y, colour)
    dots = alt.Chart(data).mark_point(filled=True, size=70, opacity=1).encode(alt.X("gap:Q", scale=scale), y, colour)
    return styled(alt.layer(band, spread, dots).properties(width=520, height=alt.Step(19)))
