"""Figures of the lattice of layers and time, from plain rows; each function returns a Vega-Lite specification.

A panel is one lattice: time to the right, depth upwards. The loss is at the right of the top row, and gradients flow to the
left and down.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unfading.report.figures.charts import Figure, Spec, needed, panel_chart

Rows = Sequence[Mapping[str, Any]]
SIDE = 200  # of a panel, in points


def magnitudes(rows: Rows) -> Spec:
    """The magnitude at each point relative to that at the loss, in decades: white is equal, red larger, blue smaller.

    rows: cell, loss, layer, step, ratio, decades (its logarithm).
    """
    alt = needed("altair")
    decades = max(1.0, *(abs(row["decades"]) for row in rows))
    scale = alt.Scale(scheme="redblue", reverse=True, domain=[-min(decades, 4.0), min(decades, 4.0)], domainMid=0, clamp=True)
    labels = (
        "datum.value == 0 ? 'as at the loss' : (datum.value > 0 ? '10' : '1/10') + ['', '²', '³', '⁴'][abs(datum.value) - 1]"
    )
    legend = alt.Legend(title="gradient", labelExpr=labels, values=[-4, -3, -2, -1, 0, 1, 2, 3, 4], gradientLength=SIDE)
    return _panels(alt, rows, alt.Color("decades:Q", scale=scale, legend=legend), "ratio", ".3~g")


def deviations(rows: Rows) -> Spec:
    """The standard deviation over draws divided by the mean, at each point.

    rows: cell, loss, layer, step, deviation.
    """
    alt = needed("altair")
    legend = alt.Legend(title=["deviation", "/ mean"], gradientLength=SIDE, format=".2~g")
    top = max(row["deviation"] for row in rows)
    scale = alt.Scale(scheme="viridis", domain=[0, top])
    return _panels(alt, rows, alt.Color("deviation:Q", scale=scale, legend=legend), "deviation", ".3~g")


def of_diagnosis(rows: Mapping[str, Any]) -> dict[str, Figure]:
    """The lattice of a diagnosed model, one panel per stack and direction; none if all stacks have one layer."""
    points = rows["lattice"]
    if max((point["depth"] for point in points), default=1) < 2:
        return {}
    names = {"loss": "loss", "end": "last output"}
    values: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for point in points:
        # "rnn layer 2 backward" without its layer is the stack and its direction.
        stack = " ".join(point["layer"].replace(f"layer {point['depth']}", "").split())
        values.setdefault((stack, names[point["of"]]), {})[point["depth"], point["step"]] = point["value"]
    shown = []
    for (stack, loss), G in values.items():
        top = max(depth for depth, _ in G)
        # The value at the loss. A last step that is masked has no gradient.
        corner = next((G[at] for at in sorted(G, reverse=True) if at[0] == top and G[at] > 0), 0.0)
        for (depth, step), value in G.items() if corner > 0 else ():
            ratio = value / corner
            decades = math.log10(max(ratio, 1e-300))
            shown.append({"cell": stack, "loss": loss, "layer": depth, "step": step, "ratio": ratio, "decades": decades})
    if not shown:
        return {}
    note = (
        "A square is one layer at one step: the gradient of the weights and biases that it used there alone. The loss is at "
        "the right of the top row. White is as large as there, red larger, blue smaller. Where the colour stays from the top "
        "row down to the bottom one, all layers learn."
    )
    return {"lattice": Figure("Where the gradient of the parameters comes from", note, magnitudes(shown))}


def _panels(alt: Any, rows: Rows, colour: Any, field: str, numbers: str) -> Spec:
    cells, losses = (list(dict.fromkeys(row[name] for row in rows)) for name in ("cell", "loss"))
    steps, layers = (sorted({row[name] for row in rows}) for name in ("step", "layer"))
    lines = []
    for i, loss in enumerate(losses):
        line = []
        for j, cell in enumerate(cells):
            bottom, left = i == len(losses) - 1, j == 0
            here = alt.Chart(alt.NamedData("rows")).transform_filter(f"datum.cell == {cell!r} && datum.loss == {loss!r}")
            x = alt.X("step:O", sort=steps, title="step t" if bottom else None, axis=_axis(alt, steps, shown=bottom))
            y = alt.Y(
                "layer:O", sort=layers[::-1], title=f"{loss}: layer l" if left else None, axis=_axis(alt, layers, shown=left)
            )
            tooltip = ["cell:N", "layer:O", "step:O", alt.Tooltip(f"{field}:Q", format=numbers)]
            here = here.mark_rect().encode(x, y, colour, tooltip=tooltip)
            line.append(here.properties(width=SIDE, height=SIDE, title=cell if i == 0 else ""))
        lines.append(alt.hconcat(*line, spacing=14))
    return panel_chart(alt.vconcat(*lines, spacing=14), {"rows": rows})


def _axis(alt: Any, values: Sequence[int], *, shown: bool) -> Any:
    ends = (values[0], values[-1])
    # Steps sampled from many are not multiples of four.
    sampled = len(values) < values[-1] - values[0] + 1
    every = max(1, math.ceil(len(values) / 4))
    some = (
        list(values[::every]) if sampled else [value for value in values if value in ends or value % 4 == 0 or len(values) < 8]
    )
    return alt.Axis(values=some if shown else [], labelAngle=0, ticks=False, domain=False)
