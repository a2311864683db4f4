"""The report of a diagnosis: one HTML page with the verdict, what to try, the figures and the numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unfading.report import html
from unfading.report.figures import gradient_figures, inner_figures
from unfading.report.figures.charts import Figure
from unfading.report.figures.inner_figures import number
from unfading.report.html import PlacedFigure
from unfading.report.number_table import NumberTable


def write(rows: Mapping[str, Any], output: Path, *, png: bool = False) -> list[Path]:
    """Write the page of a diagnosis, given as plain rows, and return the paths written, the page first.

    With `png` its figures are written beside it as NAME-gradient.png and so on.
    """
    html.check(output)
    figures = gradient_figures.figures(rows)
    return html.write(output, _page(rows, figures), figures if png else {})


def _page(rows: Mapping[str, Any], figures: Mapping[str, Figure]) -> str:
    loss = rows["loss"] or "none given; a random direction of the last output stands for it"
    size = f"{rows['parameters']:,} parameters, {rows['steps']} steps, {rows['rows']} rows"
    return html.render(
        "diagnosis.html",
        rows["verdict"],
        [figure.chart for figure in figures.values()],
        subtitle=f"{rows['model']}: {size}. Loss: {loss}.",
        findings=rows["findings"],
        advice=rows["advice"],
        figures=[PlacedFigure(i, figure.caption, figure.note) for i, figure in enumerate(figures.values(), 1)],
        tables=[_layers(rows), *_lattices(rows), *_equilibria(rows)],
        limits=rows["capped"],
    )


def _layers(rows: Mapping[str, Any]) -> NumberTable:
    """One row per layer."""
    columns = {
        "layer": "",
        "gradient over all steps": "size of dL/dh over all steps, as a share of the top layer's",
        "at the first step": "||dL/ds_1||, as a share of its value at the loss",
        "ratio": "||dh_T/dh_1|| / ||dh_T/dh_(T-1)||: 1 where nothing fades",
        "largest singular value": "of ds_t/ds_(t-1), whole state, median over steps",
        "spectral radius": "of the same",
        "saturated": "share of sigmoids and tanhs",
        "state": "root mean square of h at the last step",
    }
    source = rows["gradients"] or rows["end"]
    totals = {layer: sum(r["h"] ** 2 for r in source if r["layer"] == layer) ** 0.5 for layer in rows["layers"]}
    most = max((totals[layer] for layer in rows["top"]), default=0.0)
    value = max((r["norm"] for r in source if r["layer"] in rows["top"] and r["lag"] == 0), default=0.0)
    lines = []
    for layer in rows["layers"]:
        first = [r["norm"] for r in source if r["layer"] == layer][-1:]
        part = "all" if any(r["layer"] == layer and r["part"] == "all" for r in rows["spectra"]) else "h"
        steps = [r for r in rows["spectra"] if r["layer"] == layer and r["part"] == part]
        gates = [r["low"] + r["high"] for r in rows["activations"] if r["layer"] == layer and r["kind"] != "relu"]
        state = [r["rms"] for r in rows["sizes"] if r["layer"] == layer][-1:]
        cells = [
            number(totals[layer] / most if most else None),
            number(first[0] / value if first and value else None),
            number(rows["ratios"].get(layer)),
            number(_median([r["largest"] for r in steps])),
            number(_median([r["radius"] for r in steps if r["radius"] is not None])),
            "-" if not gates else f"{sum(gates) / len(gates):.0%}",
            number(state[0] if state else None),
        ]
        lines.append((layer, cells))
    return NumberTable(columns, lines)


def _lattices(rows: Mapping[str, Any]) -> Iterator[NumberTable]:
    """One row per loss, for a model of several layers."""
    columns = {
        "lattice": "gradient of the parameters that each layer used at each step",
        "bottom / top": "sum over steps, of the lowest layer and of the highest",
        "first / last": "lowest layer at the first step, highest layer at the last",
        "within ten": "share of points within a factor of ten of the highest layer at the last step",
        "a layer down": "by what it is multiplied from a layer to the one below, fitted",
        "a step back": "by what it is multiplied from a step to the one before, fitted",
    }
    lines = []
    for row in rows["flat"] if len(rows["layers"]) > 1 else []:
        cells = [number(row[name]) for name in ("bottom_to_top", "first_to_last")]
        cells += [f"{row['share_within_ten']:.0%}", *(number(row[name]) for name in ("gain_per_layer", "gain_per_step"))]
        lines.append(("of the loss" if row["of"] == "loss" else "of the last output", cells))
    if lines:
        yield NumberTable(columns, lines)


def _equilibria(rows: Mapping[str, Any]) -> Iterator[NumberTable]:
    """One row per number, one column per layer that takes inner steps."""
    if rows["equilibria"]:
        columns = {"equilibrium of inner steps": "s* with F(s*) = phi(P U s* + u) - alpha s* = 0"}
        columns |= {each["layer"]: "" for each in rows["equilibria"]}
        by_layer = [inner_figures.numbers(each) for each in rows["equilibria"]]
        yield NumberTable(columns, [(name, [numbers[name] for numbers in by_layer]) for name in by_layer[0]])


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
