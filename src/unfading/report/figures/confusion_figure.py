"""The figure of confusion matrices: one small heat map per setting, its rows true classes and its columns predicted ones."""

from collections.abc import Mapping
from typing import Any

from unfading.report.figures.charts import INK, Spec, needed, panel_chart
from unfading.report.groups import TaskGroup
from unfading.report.metric_tables import matrices

MOST_SETTINGS = 4  # the best ones by validation; more would not fit beside each other
SMALLEST, LARGEST, NUMBERED = 22, 240, 12  # pixels of a class and of a matrix; classes up to which the counts are written


def figures(task: TaskGroup) -> dict[str, Spec]:
    """The figure, if a run of the task has a confusion matrix."""
    by_setting = dict(list(matrices(task).items())[:MOST_SETTINGS])
    if not by_setting:
        return {}
    alt = needed("altair")
    panels = [_heat_map(alt, i, label, matrix) for i, (label, matrix) in enumerate(by_setting.items())]
    rows = {f"matrix{i}": _rows(matrix) for i, matrix in enumerate(by_setting.values())}
    return {"confusion": panel_chart(alt.concat(*panels, columns=2, spacing=24), rows)}


def _rows(matrix: Mapping[str, Any]) -> list[dict[str, Any]]:
    classes = [str(name) for name in matrix["classes"]]
    rows = []
    for true, counts in zip(classes, matrix["counts"], strict=True):
        total = sum(counts) or 1
        rows += [
            {"true": true, "predicted": predicted, "count": count, "share": count / total}
            for predicted, count in zip(classes, counts, strict=True)
        ]
    return rows


def _heat_map(alt: Any, i: int, label: str, matrix: Mapping[str, Any]) -> Any:
    classes = [str(name) for name in matrix["classes"]]
    side = max(SMALLEST * len(classes), 90) if len(classes) <= NUMBERED else LARGEST
    axis = alt.Axis(labelOverlap=True, labelLimit=90)
    split = "validation" if matrix["split"] == "valid" else matrix["split"]
    base = alt.Chart(alt.NamedData(f"matrix{i}")).encode(
        x=alt.X("predicted:N", sort=classes, title="predicted", axis=axis),
        y=alt.Y("true:N", sort=classes, title="true class", axis=axis),
        tooltip=["true:N", "predicted:N", alt.Tooltip("count:Q", format=",d"), alt.Tooltip("share:Q", format=".1%")],
    )
    # Shares of a row, so that a rare class is as visible as a common one.
    colour = alt.Color("share:Q", scale=alt.Scale(scheme="blues", domain=[0, 1]), legend=None)
    layers = [base.mark_rect().encode(color=colour).properties(name=f"shares{i}")]
    if len(classes) <= NUMBERED:
        ink = alt.when("datum.share > 0.5").then(alt.value("white")).otherwise(alt.value(INK))
        numbers = base.mark_text(fontSize=11).encode(text=alt.Text("count:Q", format=",d"), color=ink)
        layers.append(numbers.properties(name=f"counts{i}"))
    return alt.layer(*layers, name=f"confusion{i}").properties(width=side, height=side, title=f"{label} ({split})")
