"""The report of a sweep: one HTML page with its best trials, its figures and its failures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unfading.report import html
from unfading.report.figures import sweep_figures
from unfading.report.figures.charts import Figure
from unfading.report.figures.sweep_figures import text
from unfading.report.html import PlacedFigure
from unfading.report.number_table import NumberTable

SHOWN = 10  # best trials in the table
WORDS = {"COMPLETE": "complete", "PRUNED": "stopped early", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}


def write(rows: Mapping[str, Any], output: Path, *, png: bool = False) -> list[Path]:
    """Write the page of a sweep, given as plain rows, and return the paths written, the page first.

    With `png` its figures are written beside it as NAME-history.png and so on.
    """
    html.check(output)
    figures = sweep_figures.figures(rows)
    return html.write(output, _page(rows, figures), figures if png else {})


def title(rows: Mapping[str, Any]) -> str:
    """What the sweep has found."""
    best = best_trials(rows)
    where = f"{rows['cell']} on {rows['task']}"
    if not best:
        return f"{where}: no trial is complete"
    settings = ", ".join(f"{name} {text(value)}" for name, value in best[0]["settings"].items())
    return f"{where}: validation {rows['score']} {text(best[0]['value'])} with {settings}"


def best_trials(rows: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The complete trials, the best first."""
    complete = [trial for trial in rows["trials"] if trial["value"] is not None]
    return sorted(complete, key=lambda trial: -trial["value"] if rows["higher_is_better"] else trial["value"])


def _page(rows: Mapping[str, Any], figures: Mapping[str, Figure]) -> str:
    counts = ", ".join(f"{rows['counts'][state]} {word}" for state, word in WORDS.items() if rows["counts"][state])
    return html.render(
        "sweep.html",
        title(rows),
        [figure.chart for figure in figures.values()],
        subtitle=(
            f"Study {rows['name']} in {rows['storage']}: {sum(rows['counts'].values())} trials; {counts}. The score is the "
            "best on the validation rows; the test rows have no part in it."
        ),
        figures=[PlacedFigure(i, figure.caption, figure.note) for i, figure in enumerate(figures.values(), 1)],
        best=_best(rows),
        about=_about(rows),
        failures=_failures(rows),
        few=not rows["importance"],
    )


def _best(rows: Mapping[str, Any]) -> NumberTable:
    best = best_trials(rows)[:SHOWN]
    names = list(best[0]["settings"]) if best else []
    columns = {"trial": "", f"validation {rows['score']}": "best of the run", **dict.fromkeys(names, ""), "run": "its folder"}
    lines = [
        (
            str(trial["number"]),
            [text(trial["value"]), *(text(trial["settings"].get(name)) for name in names), trial["key"] or ""],
        )
        for trial in best
    ]
    return NumberTable(columns, lines)


def _about(rows: Mapping[str, Any]) -> dict[str, str]:
    options = ",".join(f"{name}={value}" for name, value in rows["task_options"].items())
    pruning = {
        "none": "no trial is stopped early",
        "median": "worse than the median of earlier trials",
        "hyperband": "Hyperband",
    }
    sampler = {"tpe": "tree-structured Parzen estimator", "random": "at random"}
    return {
        "task": ",".join(filter(None, [rows["task"], options])),
        "cell": rows["cell"],
        "search": "   ".join(rows["search"]),
        "settings are drawn": sampler[rows["sampler"]],
        "stopped early": pruning[rows["prune"]],
    }


def _failures(rows: Mapping[str, Any]) -> list[str]:
    return [
        f"Trial {trial['number']} {trial['status']}: {trial['reason']}."
        for trial in rows["trials"]
        if trial["reason"] and trial["status"] in ("failed", "diverged")
    ]
