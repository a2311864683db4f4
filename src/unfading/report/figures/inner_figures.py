"""Figures and numbers of a diagnosis for layers that take inner steps towards an equilibrium.

Letters as in the incremental RNN's paper: F(s) = phi(P U s + u) - alpha s is the pull, s* with F(s*) = 0 the equilibrium, and
A = I + eta (phi' P U - alpha I) the factor by which an inner step multiplies a small difference.
"""

from collections.abc import Mapping
from typing import Any

from unfading.report.figures import equilibrium_figures
from unfading.report.figures.charts import Figure, Spec, needed, wide_chart
from unfading.report.figures.line_charts import lines


def of_diagnosis(rows: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure for which there are data, by name."""
    layers = [each["layer"] for each in rows["equilibria"]]
    if not layers:
        return {}
    pulls, distances, jacobians, bins = [], [], [], []
    for each in rows["equilibria"]:
        name = {"layer": each["layer"]}
        pulls += [{**name, "k": k, "value": size, "part": "pull"} for k, size in enumerate(each["pulls"]) if size > 1e-290]
        if each["convergence"] is not None:
            rows_of_layer = equilibrium_figures.distance_rows(each["convergence"])
            distances += [{**row, "setting": f"{each['layer']}, {row['setting']}"} for row in rows_of_layer]
        jacobians += [{**name, "k": row["K"], "value": row["norm"], "part": "norm"} for row in each["jacobians"]]
        jacobians += [
            {**name, "k": row["K"], "value": row["from_limit"], "part": "distance from the limit"} for row in each["jacobians"]
        ]
        bins += [{"setting": each["layer"], **row} for row in each["bins"]]
    figures = {
        "pull": Figure(
            "Does it come to rest? The pull over inner steps",
            "Size of F, which is 0 at an equilibrium, when the inner step of the last time step is repeated with its last eta, "
            "relative to the first. Falling: the state goes to an equilibrium. Rising: it goes to none.",
            _over_k("pull", pulls, layers, "pull ||F||, at first = 1"),
        ),
        "inner": Figure(
            "Step Jacobian over the number of inner steps",
            "Norm of dh_m/dh_(m-1) if the cell took so many inner steps, and its distance from the limit that Theorem 1 "
            "promises (-I, or I with -h): at the limit the norm is 1 and a gradient keeps its size.",
            _over_k("inner", jacobians, layers, "||dh_m/dh_(m-1)||"),
        ),
        "eigenvalues": Figure(
            "Eigenvalues of phi' P U - alpha I",
            "Real parts at the points where time steps end. Stability asks that all be negative. Grey: exactly zero, the "
            "matrix has no inverse. Orange: positive, such a direction leads away from an equilibrium.",
            equilibrium_figures.eigenvalues(bins, width=440),
        ),
    }
    if distances:
        figures["distance"] = Figure(
            "Distance to the equilibrium over inner steps",
            "Dots: measured, with one eta. Line: the rate of the spectral radius of A. Dashes: Proposition 2's bound.",
            equilibrium_figures.inner_distances(distances),
        )
    return figures


def numbers(row: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of one layer as text, by name."""
    eta, convergence, eigenvalues, response = row["eta"], row["convergence"] or {}, row["eigenvalues"], row["input_response"]
    return {
        "norm of P U, alpha": f"{number(row['matrix_norm'])}, {number(row['alpha'])}",
        "Theorem 1's hypotheses": "hold" if row["hypotheses"] else "do not hold",
        "eta": f"{number(eta['least'])} to {number(eta['most'])}",
        "eta negative, above 1 / alpha": f"{eta['negative']:.0%}, {eta['above_1_over_alpha']:.0%}",
        "time steps with an equilibrium near": f"{row['found']:.0%}",
        "distance from it, last": number(row["distance"][-1]),
        "scipy's root differs by": number(row["scipy_gap"]),
        "fitted rate": number(convergence.get("fitted_rate")),
        "spectral radius of A": number(convergence.get("spectral_radius")),
        "Proposition 2's bound": number(convergence.get("bound")),
        "Theorem 2's condition holds at": _share(row["theorem_2"]["holds"]),
        "Corollary 1 holds at": _share(row["corollary_1"]["holds"]),
        "eigenvalues negative, zero, positive": ", ".join(f"{eigenvalues[s]:.0%}" for s in ("negative", "zero", "positive")),
        "dh_eq/dx: formula off by": number(None if response is None else response["gap"]),
    }


def _over_k(name: str, rows: list[dict[str, Any]], layers: list[str], title: str) -> Spec:
    alt = needed("altair")
    drawn = lines(alt, name, layers, ("k", "inner steps"), title, parts=len({row["part"] for row in rows}) > 1)
    return wide_chart(alt.layer(drawn), 260, {name: rows})


def number(value: float | None) -> str:
    """Three digits, or a dash for None."""
    return "-" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
