"""Draw the figure of docs/guide/loop-scan-newton.md from the results of lanes.py and newton.py.

    python benchmarks/lanes_figure.py

Times over T on logarithmic axes, for two batch sizes: above, a linear step by the sequential loop and by the scan;
below, a step with tanh by the sequential loop and by Newton's method.
"""

import math
from statistics import median
from typing import NamedTuple

from lanes_table import GRAPH, PYTHON, ROOT, Line, lanes, machine, newton

from unfading.bench.speed_figure import text

FIGURE = ROOT / "docs" / "img" / "loop-scan-newton.svg"
BATCHES = (1, 16)
LENGTHS, TIMES = (1024, 4096, 16_384, 65_536), (0.1, 1.0, 10.0, 100.0)  # the lines of the grid
PANEL, LABELS, HEIGHT = 270, 190, 220  # widths of the axes and of the names at the right; height of the axes
LEFT, TOP, GAP, BOTTOM = 56, 96, 84, 56
FUSED, SCAN, NEWTON = "#3b6ea8", "#e08a2e", ("#6fb068", "#35884a", "#14532d")
FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"


class Series(NamedTuple):
    """Times over T."""

    name: str
    colour: str
    dashed: bool
    points: list[tuple[int, float]]


def linear(B: int) -> list[Series]:
    shown = sorted(
        (line for line in lanes() if (line["cell"], line["B"]) == ("MinGRU", B) and line["T"] >= LENGTHS[0]), key=length
    )
    return [
        Series(
            f"{name}{', Python' * (way == PYTHON)}",
            colour,
            way == PYTHON,
            [(line["T"], line[f"{name} {way}"]) for line in shown],
        )
        for name, colour in (("fused", FUSED), ("scan", SCAN))
        for way in (GRAPH, PYTHON)
    ]


def nonlinear(B: int) -> list[Series]:
    shown = sorted((line for line in newton() if line["B"] == B and line["newton ms"] is not None), key=length)
    fused = [(T, median(line["fused ms"] for line in shown if line["T"] == T)) for T in sorted(set(map(length, shown)))]
    series = [Series("fused", FUSED, False, fused)]
    for u, colour in zip(sorted({line["u"] for line in shown}), NEWTON, strict=True):
        chosen = [line for line in shown if line["u"] == u]
        points = [(line["T"], line["newton ms"]) for line in chosen]
        series.append(Series(f"Newton, {chosen[-1]['corrections']} corrections", colour, False, points))
    return series


def length(line: Line) -> int:
    return int(line["T"])


def svg() -> str:
    width, height = LEFT + len(BATCHES) * (PANEL + LABELS), TOP + 2 * HEIGHT + GAP + BOTTOM
    about = lanes()[-1]
    rows = (
        (linear, "MinGRU, forward + backward", TOP),
        (nonlinear, "tanh(u h + a), forward, from Python", TOP + HEIGHT + GAP),
    )
    size = f"width='{width}' height='{height}'"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} viewBox='0 0 {width} {height}' {FONT}>",
        f"<rect {size} fill='white'/>",
        text(16, 28, "Milliseconds over the number of time steps T", size=17, weight="bold"),
        text(16, 50, "256 units. Above, solid lines are CUDA graphs and dashed lines are calls from Python.", size=13),
    ]
    for series, title, top in rows:
        for i, B in enumerate(BATCHES):
            parts += panel(series(B), LEFT + i * (PANEL + LABELS), top, f"{title}, B = {B}")
    parts.append(text(16, height - 12, f"{machine(lanes())}; {about['date'][:10]}.", size=11, fill="#666"))
    return "\n".join([*parts, "</svg>", ""])


def panel(series: list[Series], left: int, top: int, title: str) -> list[str]:
    parts = [text(left, top - 12, title, size=14, weight="bold")]
    for T in LENGTHS:
        x = left + across(T)
        parts += [
            line(x, top, x, top + HEIGHT),
            text(x, top + HEIGHT + 16, f"{T:,}", size=11, anchor="middle", fill="#666"),
        ]
    for ms in TIMES:
        y = top + down(ms)
        parts += [line(left, y, left + PANEL, y), text(left - 6, y + 4, f"{ms:g}", size=11, anchor="end", fill="#666")]
    lowest = float(top)  # of the next name at the right, so that names do not overlap
    for one in sorted(series, key=lambda one: one.points[-1][1], reverse=True):
        points = [(left + across(T), top + down(ms)) for T, ms in one.points]
        dashes = " stroke-dasharray='5 4'" if one.dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{one.colour}' stroke-width='2'{dashes}/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{one.colour}'/>" for x, y in points]
        x, y = points[-1]
        lowest = max(y + 4, lowest + 14)
        parts.append(text(x + 8, lowest, one.name, size=12, fill=one.colour))
    return parts


def across(T: int) -> float:
    return PANEL * math.log(T / LENGTHS[0]) / math.log(LENGTHS[-1] / LENGTHS[0])


def down(ms: float) -> float:
    return HEIGHT * math.log(TIMES[-1] / ms) / math.log(TIMES[-1] / TIMES[0])


def line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f"<line x1='{x:.1f}' y1='{y:.1f}' x2='{to_x:.1f}' y2='{to_y:.1f}' stroke='#e4e4e4'/>"


def main() -> None:
    FIGURE.write_text(svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
