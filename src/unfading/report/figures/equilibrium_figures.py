"""Figures of incremental RNNs from plain rows: phase portraits, convergence to equilibrium, eigenvalues, gradients, noise.

Each function takes rows (dicts of JSON values; the docstring names their fields) and returns a Vega-Lite specification.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from unfading.report.figures.charts import COLOURS, INK, Spec, needed, panel_chart

Rows = Sequence[Mapping[str, Any]]


def portraits(paths: Rows, curves: Rows) -> Spec:
    """Paths of a two-dimensional state over the equilibrium curve, coloured by step; one panel per walk and cell.

    paths: walk, panel, step, a, b.  curves: walk, panel, order, a, b.
    """
    alt = needed("altair")
    walks, labels = _values(paths, "walk"), _values(paths, "panel")
    lines = []
    for i, walk in enumerate(walks):
        line = []
        for j, panel in enumerate(labels):
            here = {"walk": walk, "panel": panel}
            tight = alt.Scale(zero=False, nice=False, padding=8)
            place = {
                "x": alt.X("a:Q", title="first unit" if i == len(walks) - 1 else None, scale=tight),
                "y": alt.Y("b:Q", title=f"{walk}: second unit" if j == 0 else None, scale=tight),
            }
            only = " && ".join(f"datum.{name} == {value!r}" for name, value in here.items())
            curve = _chart(alt, "curves").transform_filter(only).mark_line(color=COLOURS[0], strokeWidth=6, opacity=0.35)
            path = _chart(alt, "paths").transform_filter(only).mark_line(color="#999999", strokeWidth=0.6)
            steps = _chart(alt, "paths").transform_filter(only).mark_circle(size=14, opacity=0.9)
            shade = alt.Color("step:Q", title="step", scale=alt.Scale(scheme="viridis"))
            begin = _chart(alt, "paths").transform_filter(f"{only} && datum.step == 0")
            line.append(
                alt.layer(
                    curve.encode(order="order:Q", **place),
                    path.encode(order="step:Q", **place),
                    steps.encode(color=shade, **place),
                    begin.mark_circle(size=90, color="black", opacity=1).encode(**place),
                ).properties(width=215, height=200, title=panel if i == 0 else "")
            )
        lines.append(alt.hconcat(*line, spacing=14))
    return panel_chart(alt.vconcat(*lines, spacing=14), {"paths": paths, "curves": curves})


def convergence(distances: Rows, pulls: Rows) -> Spec:
    """Convergence to the equilibrium: distance over inner steps with rate and bound, and the pull of two forms of the cell.

    distances: setting, k, distance, predicted, bound (all relative to the first distance).  pulls: form, k, pull.
    """
    alt = needed("altair")
    forms = _values(pulls, "form")
    left = _distances(alt, distances).properties(
        width=430, height=300, title="hypotheses hold: dots measured, line spectral radius, dashes the bound"
    )
    k, axis = alt.X("k:Q", title="inner step k", axis=alt.Axis(grid=False)), alt.Axis(format=".0e", tickCount=7)
    pull = _chart(alt, "pulls").mark_line(strokeWidth=2.5)
    right = pull.encode(
        k,
        alt.Y("pull:Q", title="pull ||F||, relative", scale=alt.Scale(type="log"), axis=axis),
        alt.Color("form:N", title=None, scale=_scale(alt, forms, skip=3), legend=alt.Legend(orient="bottom", columns=1)),
    ).properties(width=330, height=300, title="the form of the theorem and that of the experiments")
    chart = alt.hconcat(left, right, spacing=30).resolve_scale(color="independent")
    return panel_chart(chart, {"distances": distances, "pulls": pulls})


def inner_distances(distances: Rows) -> Spec:
    """The left half of `convergence` alone, as wide as a column of the page."""
    alt = needed("altair")
    return panel_chart(_distances(alt, distances).properties(width=440, height=260), {"distances": distances})


def _distances(alt: Any, rows: Rows) -> Any:
    log = alt.Scale(type="log", clamp=True, domain=[1e-13, 2])
    k = alt.X("k:Q", title="inner step k", axis=alt.Axis(grid=False))
    legend = alt.Legend(orient="bottom", columns=1)
    colour = alt.Color("setting:N", title=None, scale=_scale(alt, _values(rows, "setting")), legend=legend)

    def y(field: str) -> Any:
        axis = alt.Axis(format=".0e", tickCount=7)
        return alt.Y(f"{field}:Q", title="distance to the equilibrium, relative", scale=log, axis=axis)

    base = _chart(alt, "distances")
    dots = base.mark_point(size=22, filled=True, opacity=0.8).encode(k, y("distance"), colour)
    rate = base.mark_line(strokeWidth=1.5, clip=True).encode(k, y("predicted"), colour)
    bound = base.mark_line(strokeWidth=1.5, strokeDash=[5, 4], clip=True).encode(k, y("bound"), colour)
    return alt.layer(bound, rate, dots)


def distance_rows(fit: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of `convergence`: distances relative to the first. The line of the spectral radius passes the last but one.

    fit: eta, distances, fitted_rate, spectral_radius, bound; None for numbers that are not known.
    """
    if not fit["distances"][0]:
        return []
    rate, radius, bound = fit["fitted_rate"], fit["spectral_radius"], fit["bound"]
    names = {"fitted rate": rate, "spectral radius": radius, "bound": bound}
    numbers = ", ".join(f"{name} {number:.3f}" for name, number in names.items() if number is not None)
    d = [distance / fit["distances"][0] for distance in fit["distances"]]
    end = max(0, len(d) - 2)
    return [
        {
            "setting": f"eta = {fit['eta']:.3g}: {numbers}",
            "k": k,
            "distance": d[k],
            "predicted": d[end] * radius ** (k - end),
            "bound": None if bound is None else bound**k,
        }
        for k in range(end + 1)
    ]


def eigenvalues(bins: Rows, width: int = 640) -> Spec:
    """Histograms of real parts on a logarithmic scale of counts, one panel per setting.

    bins: setting, low, high, count; sign: negative, zero or positive.
    """
    alt = needed("altair")
    histograms = []
    for setting in _values(bins, "setting"):
        chart = _chart(alt, "bins").transform_filter(f"datum.setting == {setting!r}").mark_bar(binSpacing=0)
        chart = chart.encode(
            alt.X("low:Q", title="real part of the eigenvalue", bin="binned", axis=alt.Axis(tickCount=10)),
            alt.X2("high:Q"),
            alt.Y(
                "count:Q",
                title="eigenvalues",
                scale=alt.Scale(type="log", domainMin=0.5),
                axis=alt.Axis(format="~s", tickCount=5),
            ),
            alt.Y2(datum=0.5),
            alt.Color(
                "sign:N",
                title=None,
                scale=alt.Scale(domain=["negative", "zero", "positive"], range=[COLOURS[0], "#555555", COLOURS[1]]),
                legend=alt.Legend(orient="top"),
            ),
        )
        histograms.append(chart.properties(width=width, height=130, title=setting))
    return panel_chart(alt.vconcat(*histograms, spacing=12).resolve_scale(x="shared"), {"bins": bins})


def gradients(rows: Rows) -> Spec:
    """A norm over training steps: the median over windows and the range.

    rows: setting, step, median, least, most, all logarithms to base 10.
    """
    alt = needed("altair")
    settings = _values(rows, "setting")
    base = _chart(alt, "rows").encode(
        alt.X("step:Q", title="training step", axis=alt.Axis(grid=False, format=",d")),
        alt.Color(
            "setting:N", title=None, scale=_scale(alt, settings), legend=alt.Legend(orient="top", columns=1, symbolOpacity=1)
        ),
    )
    title = "log10 ||dh_T/dh_1||"
    band = base.mark_area(opacity=0.2).encode(alt.Y("least:Q", title=title), alt.Y2("most:Q"))
    line = base.mark_line(strokeWidth=2.5).encode(alt.Y("median:Q", title=title))
    one = alt.Chart(alt.Data(values=[{"at": 0}])).mark_rule(strokeDash=[5, 4], color=INK).encode(alt.Y("at:Q"))
    return panel_chart(alt.layer(one, band, line).properties(width=720, height=340), {"rows": rows})


def noise(rows: Rows) -> Spec:
    """How a state changes under noise, one line per cell and part: its direction, its size, and the distance of two signals.

    rows: state (cell and part), after (zeros or noise), cosine, growth, kept; None where there is no number.
    """
    alt = needed("altair")
    names = _values(rows, "state")
    columns: list[Any] = []
    for field, title, lowest in (
        ("cosine", "cosine with the state before", None),
        ("growth", "norm, relative to before", 1e-8),
        ("kept", "distance of two signals, relative", 1e-8),
    ):
        shown = _chart(alt, "rows").transform_filter(f"isValid(datum.{field})")
        scale = alt.Scale(domain=[-1, 1]) if lowest is None else alt.Scale(type="log", domain=[lowest, 1e4], clamp=True)
        axis = alt.Axis(tickCount=5) if lowest is None else alt.Axis(format=".0e", values=[1e-8, 1e-4, 1, 1e4])
        dots = shown.mark_point(filled=True, size=60, opacity=0.85).encode(
            alt.X(f"{field}:Q", title=title, scale=scale, axis=axis),
            alt.Y("state:N", title=None, sort=names, axis=alt.Axis(labels=not columns, ticks=False, grid=True, labelLimit=200)),
            alt.Color("after:N", title="972 steps of", scale=_scale(alt, ["zeros", "noise"]), legend=alt.Legend(orient="top")),
            alt.Shape("after:N", title="972 steps of", scale=alt.Scale(domain=["zeros", "noise"], range=["circle", "diamond"])),
        )
        rule = alt.Chart(alt.Data(values=[{"at": 0 if lowest is None else 1}])).mark_rule(color=INK).encode(alt.X("at:Q"))
        columns.append(alt.layer(rule, dots).properties(width=220, height=15 * len(names)))
    return panel_chart(alt.hconcat(*columns, spacing=16), {"rows": rows})


def _values(rows: Rows, field: str) -> list[Any]:
    """The distinct values of a field, in the order of the rows."""
    return list(dict.fromkeys(row[field] for row in rows))


def _chart(alt: Any, name: str) -> Any:
    return alt.Chart(alt.NamedData(name))


def _scale(alt: Any, labels: Sequence[str], skip: int = 0) -> Any:
    return alt.Scale(domain=list(labels), range=[COLOURS[(i + skip) % len(COLOURS)] for i in range(len(labels))])
