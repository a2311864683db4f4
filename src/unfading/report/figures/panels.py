"""Panels of lines and heat maps from plain rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unfading.report.figures.charts import COLOURS, DASHES, FONT, GRID, INK, Spec, decades, drawable, needed

Rows = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """The axes of a panel."""

    y: str
    x: str
    log: bool = False


def panels(shown: Mapping[Panel, Rows]) -> Spec:
    """Panels side by side with one line per setting; rows: setting, x, value. A logarithmic axis leaves out 0 and less."""
    alt = needed("altair")
    names = list(dict.fromkeys(row["setting"] for rows in shown.values() for row in rows))
    colours = alt.Scale(domain=names, range=[COLOURS[i % len(COLOURS)] for i in range(len(names))])
    dashes = alt.Scale(domain=names, range=[list(DASHES[i // len(COLOURS) % len(DASHES)]) for i in range(len(names))])
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=220, labelLimit=300)
    charts = []
    for panel, rows in shown.items():
        drawable = [row for row in rows if math.isfinite(row["value"]) and (row["value"] > 0 or not panel.log)]
        scale = alt.Scale(type="log" if panel.log else "linear", zero=False, nice=False, padding=6)
        charts.append(
            alt.Chart(alt.Data(values=drawable))
            .mark_line(strokeWidth=2, clip=True, point=alt.OverlayMarkDef(size=16))
            .encode(
                alt.X("x:Q", title=panel.x, axis=alt.Axis(format="~s", grid=False, tickCount=5)),
                alt.Y("value:Q", title=panel.y, scale=scale, axis=decades(alt, panel.log)),
                alt.Color("setting:N", scale=colours, legend=legend),
                alt.StrokeDash("setting:N", scale=dashes, legend=legend),
            )
            .properties(width=300, height=240)
        )
    return styled(alt.hconcat(*charts, spacing=20))


def heat(rows: Rows, x: str, y: str, value: str) -> Spec:
    """A heat map; rows: x, y, value."""
    alt = needed("altair")
    chart = (
        alt.Chart(alt.Data(values=list(rows)))
        .mark_rect()
        .encode(
            alt.X("x:O", title=x, axis=alt.Axis(labelOverlap=True)),
            alt.Y("y:O", title=y, axis=alt.Axis(labelOverlap=True)),
            alt.Color("value:Q", title=value, scale=alt.Scale(scheme="viridis")),
        )
        .properties(width=720, height=320)
    )
    return styled(chart)


def styled(chart: Any) -> Spec:
    """The chart as Vega-Lite, with the fonts and greys of all figures."""
    text = {"labelFontSize": 11, "titleFontSize": 12, "labelColor": INK, "titleColor": INK, "titleFontWeight": 500}
    chart = chart.configure(font=FONT, padding=8).configure_view(stroke=None)
    chart = chart.configure_axis(**text, gridColor=GRID, domainColor=INK, tickColor=INK)
    chart = chart.configure_legend(labelFontSize=12, labelColor=INK, titleFontSize=12, symbolStrokeWidth=3)
    spec: Spec = drawable(chart.to_dict())
    return spec
