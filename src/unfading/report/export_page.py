"""The report of an exported model: one HTML page with its memory, its speed, its accuracy, and where its error arises."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unfading.files import write_atomically
from unfading.report import html
from unfading.report.figures import export_figures
from unfading.report.html import PlacedFigure
from unfading.report.number_table import NumberTable

CLOCK = 64  # MHz, of many small devices
NAMES = {"float32": "float32", "int8": "int8 matrices", "integer": "all-integer"}
POINTS, SHARE = 0.003, 0.03  # of accuracy, and of another score, that may be lost where the title calls a form near
LARGE = 0.01  # a relative error of one operation that is worth a sentence


def write(rows: Mapping[str, Any], output: Path) -> Path:
    """Write the page of an exported model, given as plain rows."""
    html.check(output)
    write_atomically(output, page(rows).encode())
    return output


def page(rows: Mapping[str, Any]) -> str:
    """The page as text."""
    figures = export_figures.figures(rows)
    placed = {name: PlacedFigure(i, figure.caption, figure.note) for i, (name, figure) in enumerate(figures.items(), 1)}
    return html.render(
        "export.html",
        _title(rows),
        [figure.chart for figure in figures.values()],
        subtitle=(
            f"{rows['name']}: {rows['parameters']:,} parameters, sequences of {rows['steps']:,} steps. Scores on "
            f"{rows['test_rows']:,} test rows; integers were calibrated on {rows['calibration_rows']:,} training rows."
        ),
        notes=_notes(rows),
        fit=_fit(rows),
        memory=[placed["rom"], placed["ram"]],
        parts=_parts(rows),
        losses=[placed[name] for name in ("over_steps", "operations") if name in placed],
        operations=_operations(rows),
    )


def _title(rows: Mapping[str, Any]) -> str:
    """What the smallest form that loses little takes."""
    first, *others = rows["precisions"]
    near = [row for row in others if _loses_little(rows, first["score"], row["score"])]
    small = min(near or [first], key=lambda row: row["constants"] + row.get("code", 0))
    size = f"{(small['constants'] + small.get('code', 0)) / 1000:.1f} kB"
    memory = f"{(small['state'] + small.get('stack', small['scratch'])) / 1000:.1f} kB"
    what = "weights and code" if "code" in small else "weights"
    end = _change(rows, small["score"] - first["score"]) if near else "and with int8 it loses more than a little"
    return f"{rows['model']} on {rows['task']}, {NAMES[small['precision']]}: {size} of {what}, {memory} of memory, {end}"


def _loses_little(rows: Mapping[str, Any], score: float, other: float) -> bool:
    loss = score - other if rows["higher_is_better"] else other - score
    return loss <= (POINTS if _is_share(rows) else SHARE * abs(score))


def _is_share(rows: Mapping[str, Any]) -> bool:
    return rows["metric"] == "accuracy"


def _score(rows: Mapping[str, Any], score: float) -> str:
    return f"{100 * score:.2f} %" if _is_share(rows) else f"{score:.4g}"


def _change(rows: Mapping[str, Any], change: float) -> str:
    if not _is_share(rows):
        return f"{change:+.3g} in {rows['metric']}"
    points = 100 * change
    return f"{abs(points):.2f} points {'lost' if points < 0 else 'gained'}"


def _fit(rows: Mapping[str, Any]) -> NumberTable:
    columns = {
        "": "",
        rows["metric"]: "on the test rows",
        "change": "from float32",
        "ROM": "bytes of code and constants",
        "code": "bytes, compiled for a Cortex-M4 with -Os",
        "constants": "bytes of weights and tables",
        "RAM": "bytes of state and stack",
        "state": "bytes that are kept from sample to sample, for each sequence",
        "stack": "bytes that a push takes at most; without a compiler, its buffers alone",
        "multiply-adds": "of the matrix products of a sample",
        "instructions": "of a sample, counted on an emulated Cortex-M4",
        f"ms at {CLOCK} MHz": "of a sample, if each instruction takes one cycle; devices take one to two",
    }
    lines = []
    first = rows["precisions"][0]["score"]
    for row in rows["precisions"]:
        stack = row.get("stack", row["scratch"])
        instructions = row.get("instructions")
        cells = [
            _score(rows, row["score"]),
            "" if row is rows["precisions"][0] else _change(rows, row["score"] - first),
            f"{row['constants'] + row['code']:,}" if "code" in row else "-",
            f"{row['code']:,}" if "code" in row else "-",
            f"{row['constants']:,}",
            f"{row['state'] + stack:,}",
            f"{row['state']:,}",
            f"{stack:,}",
            f"{row['multiply_adds']:,}",
            "-" if instructions is None else f"{instructions:,.0f}",
            "-" if instructions is None else f"{instructions / (1000 * CLOCK):.2g}",
        ]
        lines.append((NAMES[row["precision"]], cells))
    return NumberTable(columns, lines)


def _parts(rows: Mapping[str, Any]) -> NumberTable:
    """Multiply-adds and bytes of each part."""
    columns = {"part": "", "multiply-adds": "of its matrix products, for a sample"}
    columns |= {f"bytes, {row['precision']}": "of weights and tables" for row in rows["precisions"]}
    columns |= {f"code, {row['precision']}": "bytes" for row in rows["precisions"] if "functions" in row}
    adds = {stage["stage"]: stage["multiply_adds"] for stage in rows["stages"]}
    kinds = [row["parts"] for row in rows["precisions"]] + [
        row["functions"] for row in rows["precisions"] if "functions" in row
    ]
    names = list(dict.fromkeys([*adds, *(name for parts in kinds for name in parts)]))
    lines = []
    for name in names:
        cells = [f"{adds[name]:,}" if name in adds else "", *(f"{parts[name]:,}" if parts.get(name) else "" for parts in kinds)]
        if any(cells):
            lines.append((name, cells))
    return NumberTable(columns, lines)


def _operations(rows: Mapping[str, Any]) -> NumberTable | None:
    if not rows["operations"]:
        return None
    columns = {
        "operation": "",
        "part": "",
        "result": "what is stored",
        "entries": "",
        "bits": "behind the binary point",
        "error alone": "relative to its size, on exact arguments",
        "error with all before": "of the integers as they run",
        "cut": "entries that exceeded 16 bits, on the first batch of test rows",
    }
    lines = []
    for i, row in enumerate(rows["operations"], 1):
        cells = [
            row["stage"],
            row["stored"],
            f"{row['entries']:,}",
            str(row["bits"]),
            f"{row['own']:.2%}",
            f"{row['error']:.2%}",
        ]
        lines.append((f"{i}. {row['operation']}", [*cells, f"{row['cut']:,} of {row['count']:,}" if row["cut"] else "0"]))
    return NumberTable(columns, lines)


def _notes(rows: Mapping[str, Any]) -> list[str]:
    notes = []
    if rows["missing"]:
        tools = " and ".join(rows["missing"])
        lacks = (
            "the size of the code, the stack and the instructions" if "arm-none-eabi-gcc" in rows["missing"] else "instructions"
        )
        notes.append(f"Not measured: {lacks}. {tools} {'is' if len(rows['missing']) == 1 else 'are'} not installed here.")
    if rows["not_in_integers"]:
        notes.append(f"There is no all-integer form: {rows['not_in_integers']}")
    if rows["operations"]:
        worst = max(rows["operations"], key=lambda row: row["own"])
        where = f"`{worst['operation']}` of {worst['stage']}"
        if worst["own"] >= LARGE:
            notes.append(f"All-integer: most of the error arises in {where}, {worst['own']:.1%} of its size.")
        else:
            notes.append(
                f"All-integer: the largest error of a single operation is that of {where}, {worst['own']:.2%} of its size."
            )
        cut, count = (sum(row[name] for row in rows["operations"]) for name in ("cut", "count"))
        notes.append(f"Saturation: {cut:,} of {count:,} entries exceeded 16 bits on the first batch of test rows and were cut.")
    return notes
