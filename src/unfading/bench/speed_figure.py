"""A bar chart of results: how many times faster than the reference loop and than torch.nn. The SVG is written directly."""

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from unfading.bench.results import Result

NAMES, PLOT, VALUES = 186, 290, 60  # widths in a panel: names of cells, bars, numbers beyond the longest bar
LINE, BAR = 30, 11  # heights: one cell, one of its two bars
TOP, BOTTOM = 92, 64
SERIES = (("x_reference", "than the reference loop", "#3b6ea8"), ("x_torch", "than torch.nn", "#e08a2e"))
FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"


def svg(results: Sequence[Result], about: dict[str, Any]) -> str:
    """One panel for each batch size, at the shortest length and the hidden size that most cells were measured at.

    Of several such sizes, the largest. Raises without a measured layer.
    """
    shown = [result for result in results if result.kind == "layer" and result.status == "measured" and result.both is not None]
    if not shown:
        raise ValueError("a figure needs at least one measured layer; got none.")
    threads = min(result.threads for result in shown)
    shown = [result for result in shown if result.threads == threads]
    T = min(result.T for result in shown)
    cells = {H: {result.name for result in shown if (result.T, result.H) == (T, H)} for H in {result.H for result in shown}}
    H = max(cells, key=lambda H: (len(cells[H]), H))
    shown = [result for result in shown if (result.T, result.H) == (T, H)]
    batches = sorted({result.B for result in shown})
    panels = [sorted((result for result in shown if result.B == B), key=_speed, reverse=True) for B in batches]
    width = len(panels) * (NAMES + PLOT + VALUES) + 20
    height = TOP + LINE * max(map(len, panels)) + BOTTOM
    machine, versions = about["machine"], about["versions"]
    title = f"How many times faster: forward and backward of one layer, {T} steps, {H} units"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        text(16, 28, title, size=17, weight="bold"),
    ]
    left = 16
    for _, label, colour in SERIES:
        parts += [f"<rect x='{left}' y='41' width='12' height='12' fill='{colour}'/>", text(left + 18, 52, label, size=13)]
        left += 30 + 8 * len(label)
    for i, (B, panel) in enumerate(zip(batches, panels, strict=True)):
        parts += _panel(panel, i * (NAMES + PLOT + VALUES), f"batch {B}")
    count = f"{threads} torch thread{'s' if threads > 1 else ''}"
    parts.append(
        text(
            16, height - 14, f"float32, input size {shown[0].input_size}, {count}. {machine['cpu']}, {machine['cores']} cores; "
            f"torch {versions['torch']}, {versions['compiler']}; {about['date'][:10]}.", size=11, fill="#666",
        )
    )  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Sequence[Result], left: int, title: str) -> list[str]:
    most = max(_speeds(result)[name] or 0.0 for result in panel for name, _, _ in SERIES)
    step = _step(most)
    zero, unit, bottom = left + NAMES, PLOT / most, TOP + LINE * len(panel) + 2
    parts = [text(zero, TOP - 16, title, size=14, weight="bold")]
    for k in range(int(most / step) + 1):
        x = zero + k * step * unit
        parts += [
            _line(x, TOP - 6, bottom, "#e4e4e4"),
            text(x, bottom + 16, f"{k * step:g}x", size=11, anchor="middle", fill="#666"),
        ]
    parts.append(_line(zero, TOP - 6, bottom, "#999"))
    # The line of equal speed.
    parts.append(_line(zero + unit, TOP - 6, bottom, "#999", dashed=True))
    for i, result in enumerate(panel):
        y = TOP + i * LINE
        bars = [(speed, colour) for name, _, colour in SERIES if (speed := _speeds(result)[name]) is not None]
        parts.append(text(zero - 8, y + LINE / 2 + 2.5, result.name, size=13, anchor="end"))
        for j, (speed, colour) in enumerate(bars):
            at = y + (LINE - 4 - BAR * len(bars)) / 2 + j * BAR
            parts.append(f"<rect x='{zero}' y='{at:.1f}' width='{speed * unit:.1f}' height='{BAR - 1}' fill='{colour}'/>")
            parts.append(text(zero + speed * unit + 5, at + BAR - 2, _number(speed), size=10.5))
    return parts


def _speeds(result: Result) -> dict[str, float | None]:
    assert result.both is not None
    return {"x_reference": result.both.x_reference, "x_torch": result.both.x_torch}


def _speed(result: Result) -> float:
    return _speeds(result)["x_reference"] or 0.0


def _number(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 20 else f"{speed:.1f}"


def _step(most: float) -> float:
    """A round distance between grid lines, for four to nine of them."""
    return next((step for step in (0.5, 1, 2, 5, 10, 20, 50) if most / step <= 8), most)


def text(
    x: float, y: float, words: str, *, size: float, anchor: str = "start", weight: str = "normal", fill: str = "#222"
) -> str:
    """An element of an SVG."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' font-weight='{weight}' fill='{fill}'>"
        f"{escape(words)}</text>"
    )


def _line(x: float, top: float, bottom: float, colour: str, *, dashed: bool = False) -> str:
    dashes = " stroke-dasharray='3 3'" if dashed else ""
    return f"<line x1='{x:.1f}' y1='{top}' x2='{x:.1f}' y2='{bottom}' stroke='{colour}'{dashes}/>"
