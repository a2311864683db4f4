"""The report of a backtest: one HTML page with the scores of the model beside the naive ones, and the forecasts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unfading.files import write_atomically
from unfading.report import html
from unfading.report.figures import backtest_figures, charts
from unfading.report.html import PlacedFigure
from unfading.report.number_table import NumberTable


def write(rows: Mapping[str, Any], output: Path) -> Path:
    """Write the page of a backtest, given as plain rows, or its figure of forecasts as .png or .svg."""
    html.check(output)
    pictures = {".png": charts.png, ".svg": charts.svg}
    if output.suffix not in (".html", *pictures):
        raise ValueError(f"a backtest is written as .html, .png or .svg; got {output}.")
    if output.suffix in pictures:
        content = pictures[output.suffix](backtest_figures.figures(rows)["forecasts"].chart)
    else:
        content = page(rows).encode()
    write_atomically(output, content)
    return output


def page(rows: Mapping[str, Any]) -> str:
    """The page as text."""
    figures = backtest_figures.figures(rows)
    channels = len(rows["series"][0][0])
    season = f", season of {rows['season']} steps" if rows["season"] > 1 else ""
    return html.render(
        "backtest.html",
        _title(rows),
        [figure.chart for figure in figures.values()],
        subtitle=(
            f"{len(rows['windows']):,} windows of {rows['horizon']} steps ahead, in {len(rows['series'])} series of {channels} "
            f"channels{season}."
        ),
        scores=_scores(rows),
        figures=[PlacedFigure(i, figure.caption, figure.note) for i, figure in enumerate(figures.values(), 1)],
    )


def _title(rows: Mapping[str, Any]) -> str:
    """The scores in one sentence: MASE, or MAE where MASE is not defined."""
    metric = "mase" if rows["scaled"] else "mae"
    first, *others = [f"{name} {_number(scores[metric])}" for name, scores in rows["scores"].items()]
    return f"{metric.upper()} of {first}, {', '.join(others)}"


def _scores(rows: Mapping[str, Any]) -> NumberTable:
    columns = {
        "": "",
        "MAE": "mean absolute error, in the units of the series",
        "RMSE": "root of the mean squared error, in the units of the series",
        "MASE": "mean absolute error, divided by that of the seasonal naive forecast before the first forecast",
    }
    cells = {name: [_number(scores[each]) for each in ("mae", "rmse", "mase")] for name, scores in rows["scores"].items()}
    return NumberTable(columns, list(cells.items()))


def _number(value: float) -> str:
    return f"{value:.4g}" if value == value else "not defined"
