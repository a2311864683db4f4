"""Rows as a figure: how many times faster than the reference loop and than torch.nn, as SVG written by hand."""

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from unfading.bench.results import Row

NAMES, PLOT, VALUES = 186, 290, 60  # widths of a panel: names of cells, bars, numbers beyond the longest bar
LINE, BAR = 30, 11  # heights: one cell, one of its two bars
TOP, BOTTOM = 92, 64
SERIES = (("x_reference", "than the reference loop", "#3b6ea8"), ("x_torch", "than torch.nn", "#e08a2e"))
FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"


def svg(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """One panel for each batch size, at the shortest length and largest hidden size that the rows have; ValueError for none."""
    shown = [row for row in rows if row.kind == "layer" and row.status == "measured" and row.both is not None]
    if not shown:
        raise ValueError("a figure needs at least one measured layer; got none.")
    threads = min(row.threads for row in shown)
    shown = [row for row in shown if row.threads == threads]
    T, H = min(row.T for row in shown), max(row.H for row in shown)
    shown = [row for row in shown if (row.T, row.H) == (T, H)]
    batches = sorted({row.B for row in shown})
    panels = [sorted((row for row in shown if row.B == B), key=_speed, reverse=True) for B in batches]
    width = len(panels) * (NAMES + PLOT + VALUES) + 20
    height = TOP + LINE * max(map(len, panels)) + BOTTOM
    machine, versions = about["machine"], about["versions"]
    title = f"How many times faster: forward and backward of one layer, {T} steps, {H} units"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        _text(16, 28, title, size=17, weight="bold"),
    ]
    left = 16
    for _, label, colour in SERIES:
        parts += [f"<rect x='{left}' y='41' width='12' height='12' fill='{colour}'/>", _text(left + 18, 52, label, size=13)]
        left += 30 + 8 * len(label)
    for i, (B, panel) in enumerate(zip(batches, panels, strict=True)):
        parts += _panel(panel, i * (NAMES + PLOT + VALUES), f"batch {B}")
    count = f"{threads} torch thread{'s' if threads > 1 else ''}"
    parts.append(
        _text(
            16, height - 14, f"float32, input size {shown[0].input_size}, {count}. {machine['cpu']}, {machine['cores']} cores; "
            f"torch {versions['torch']}, {versions['compiler']}; {about['date'][:10]}.", size=11, fill="#666",
        )
    )  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Sequence[Row], left: int, title: str) -> list[str]:
    most = max(_speeds(row)[name] or 0.0 for row in panel for name, _, _ in SERIES)
    step = _step(most)
    zero, unit, bottom = left + NAMES, PLOT / most, TOP + LINE * len(panel) + 2
    parts = [_text(zero, TOP - 16, title, size=14, weight="bold")]
    for k in range(int(most / step) + 1):
        x = zero + k * step * unit
        parts += [
            _line(x, TOP - 6, bottom, "#e4e4e4"),
            _text(x, bottom + 16, f"{k * step:g}x", size=11, anchor="middle", fill="#666"),
        ]
    parts.append(_line(zero, TOP - 6, bottom, "#999"))
    # The line at which nothing is gained.
    parts.append(_line(zero + unit, TOP - 6, bottom, "#999", dashed=True))
    for i, row in enumerate(panel):
        y = TOP + i * LINE
        found = [(speed, colour) for name, _, colour in SERIES if (speed := _speeds(row)[name]) is not None]
        parts.append(_text(zero - 8, y + LINE / 2 + 2.5, row.name, size=13, anchor="end"))
        for j, (speed, colour) in enumerate(found):
            at = y + (LINE - 4 - BAR * len(found)) / 2 + j * BAR
            parts.append(f"<rect x='{zero}' y='{at:.1f}' width='{speed * unit:.1f}' height='{BAR - 1}' fill='{colour}'/>")
            parts.append(_text(zero + speed * unit + 5, at + BAR - 2, _number(speed), size=10.5))
    return parts


def _speeds(row: Row) -> dict[str, float | None]:
    assert row.both is not None
    return {"x_reference": row.both.x_reference, "x_torch": row.both.x_torch}


def _speed(row: Row) -> float:
    return _speeds(row)["x_reference"] or 0.0


def _number(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 20 else f"{speed:.1f}"


def _step(most: float) -> float:
    """A round distance between lines, for four to nine of them."""
    return next((step for step in (0.5, 1, 2, 5, 10, 20, 50) if most / step <= 8), most)


def _text(
    x: float, y: float, said: str, *, size: float, anchor: str = "start", weight: str = "normal", fill: str = "#222"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' font-weight='{weight}' fill='{fill}'>"
        f"{escape(said)}</text>"
    )


def _line(x: float, top: float, bottom: float, colour: str, *, dashed: bool = False) -> str:
    dashes = " stroke-dasharray='3 3'" if dashed else ""
    return f"<line x1='{x:.1f}' y1='{top}' x2='{x:.1f}' y2='{bottom}' stroke='{colour}'{dashes}/>"
