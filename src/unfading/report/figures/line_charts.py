"""Line charts over steps, lags or inner steps, with one colour per layer."""

from typing import Any

from unfading.report.figures.charts import COLOURS, decades

# Plain numbers where they are short, powers of ten elsewhere.
TICKS = "datum.value >= 0.01 && datum.value < 1000 ? format(datum.value, '.3~g') : format(datum.value, '.0e')"


def lines(alt: Any, data: str, layers: list[str], x: tuple[str, str], title: str, *, parts: bool = False) -> Any:
    """Lines over time or lag on a logarithmic axis, with one colour per layer."""
    name, x_title = x
    ticks = decades(alt, True)
    ticks.labelExpr = TICKS
    fields = ["layer:N", *(["part:N"] if parts else []), f"{name}:Q", alt.Tooltip("value:Q", format=".3~e")]
    legend = alt.Legend(title=None, symbolType="stroke", columns=3)
    across = alt.Axis(format=",d", grid=False, tickCount=6, tickMinStep=1)
    encoding = {
        "x": alt.X(f"{name}:Q", title=x_title, scale=alt.Scale(nice=False), axis=across),
        "y": alt.Y("value:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=8), axis=ticks),
        "color": alt.Color("layer:N", scale=alt.Scale(domain=layers, range=colours(len(layers))), legend=legend),
        "tooltip": [alt.Tooltip(each) if isinstance(each, str) else each for each in fields],
    }
    if parts:
        encoding["strokeDash"] = alt.StrokeDash("part:N", legend=alt.Legend(title=None, symbolType="stroke"), sort=None)
    return alt.Chart(alt.NamedData(data), name=data).mark_line(strokeWidth=2, clip=True).encode(**encoding)


def colours(n: int) -> list[str]:
    """A colour per layer from the input up: distinct colours for up to four layers, a ramp for more."""
    if n <= 4:
        return list(COLOURS[:n])
    ends = [[int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in ("#e69f00", "#0072b2")]
    return ["#" + "".join(f"{round(a + (b - a) * i / (n - 1)):02x}" for a, b in zip(*ends, strict=True)) for i in range(n)]
