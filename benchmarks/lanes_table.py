"""Write the tables of docs/guide/loop-scan-newton.md and two of docs/benchmarks.md.

    python benchmarks/lanes_table.py

They are made from the results of lanes.py, newton.py and rivals.py. Each table replaces the text between its two marks.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_table import put_into

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GUIDE, BENCHMARKS = ROOT / "docs" / "guide" / "loop-scan-newton.md", ROOT / "docs" / "benchmarks.md"
PYTHON, GRAPH = "ms", "graph ms"  # the two ways of a call
LINEAR, DIAGONAL = ("MinGRU", "MinLSTM"), ("IndRNN", "UnICORNN")
REQUIRED_SPEEDUP, REQUIRED_SHARE = 20.0, 0.15  # of the scan over the sequential loop; of the time of cuDNN's LSTM
REQUIRED_OVER_AUTHORS = {"CoRNN": 60.0, "LEM": 60.0}  # of compiled cells over loops like their authors'

Line = dict[str, Any]


def read(name: str, *case: str) -> list[Line]:
    """The last line of each case of a results file."""
    lines = [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]
    return list({tuple(line[field] for field in case): line for line in lines}.values())


def lanes() -> list[Line]:
    return read("lanes-nvidia-h200.jsonl", "cell", "T", "B", "H")


def newton() -> list[Line]:
    return read("newton-nvidia-h200.jsonl", "T", "B", "H", "u")


def counts() -> list[Line]:
    return read("newton-amd-epyc-2core.jsonl", "T", "B", "H", "u", "dtype")


def rivals() -> list[Line]:
    return read("rivals-nvidia-h200.jsonl", "cell", "T", "B", "H")


def machine(lines: Sequence[Line]) -> str:
    """The GPU, the versions, and the commits at which the lines were measured."""
    about, commits = lines[-1], sorted({line["commit"] for line in lines})
    versions = about["versions"]
    return (
        f"{about['machine']['gpu']}, torch {versions['torch']}, Triton {versions['triton']}, "
        f"cuDNN {versions['cudnn']}, commit {' and '.join(commits)}"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def number(value: object, digits: int = 3) -> str:
    return f"{value:#.{digits}g}".rstrip(".") if isinstance(value, float) else "-"


def pair(line: Line, name: str) -> str:
    """Milliseconds of a call from Python, and of its CUDA graph."""
    values = [number(line.get(f"{name} {way}")) for way in (PYTHON, GRAPH)]
    return joined(values)


def joined(values: list[str]) -> str:
    return "-" if values == ["-", "-"] else " / ".join(values)


def ratio(line: Line, over: str, under: str, way: str) -> float | None:
    """How many times as long one takes as the other."""
    times = line.get(f"{over} {way}"), line.get(f"{under} {way}")
    return times[0] / times[1] if isinstance(times[0], float) and isinstance(times[1], float) else None


def ratios(line: Line, over: str, under: str) -> str:
    values = [ratio_text(ratio(line, over, under, way)) for way in (PYTHON, GRAPH)]
    return joined(values)


def ratio_text(value: float | None) -> str:
    """A ratio with two digits, or three from 10 on."""
    return "-" if value is None else number(value, 2 if value < 10 else 3)


def linear_table() -> str:
    """The scan against the sequential loop, for steps that are linear in the state."""
    shown = [line for line in lanes() if line["cell"] in LINEAR]
    rows = [
        [
            line["cell"], f"{line['T']:,}", str(line["B"]), f"{line['B'] * line['H']:,}", pair(line, "fused"),
            pair(line, "scan"), ratios(line, "fused", "scan"), pair(line, "auto"), pair(line, "project"),
            pair(line, "cudnn lstm"), line["commit"][:7],
        ]
        for line in shown
    ]  # fmt: skip
    headings = ["cell", "T", "B", "B H", "fused", "scan", "fused : scan", "auto", "projection alone", "cuDNN LSTM", "commit"]
    return f"{machine(shown)}; H = {shown[0]['H']}, products in {shown[0]['matmul']}.\n\n{table(headings, rows)}"


def diagonal_table() -> str:
    """Steps that are not linear: their backward pass may be a scan."""
    shown = [line for line in lanes() if line["cell"] in DIAGONAL]
    rows = [
        [
            line["cell"], f"{line['T']:,}", str(line["B"]), f"{line['B'] * line['H']:,}", line["matmul"],
            pair(line, "fused"), pair(line, "auto"), ratios(line, "fused", "auto"), pair(line, "project"),
            pair(line, "cudnn lstm"),
        ]
        for line in shown
    ]  # fmt: skip
    headings = ["cell", "T", "B", "B H", "products", "fused", "auto", "fused : auto", "projection alone", "cuDNN LSTM"]
    return f"{machine(shown)}; H = {shown[0]['H']}.\n\n{table(headings, rows)}"


def exponents() -> dict[float, tuple[float, float]]:
    """For each u, the mean of log |J| along the exact states and along the first guess, of the longest sequence."""
    longest = sorted((line for line in counts() if line["dtype"] == "float64"), key=lambda line: line["T"])
    return {line["u"]: (line["lyapunov"], line["lyapunov guess"]) for line in longest}


def newton_table() -> str:
    """Newton's method against the sequential loop."""
    shown, known = newton(), exponents()
    rows = []
    for line in shown:
        exponent = known[line["u"]][0] if line["lyapunov"] is None else line["lyapunov"]
        rows.append(
            [
                f"{line['T']:,}", str(line["B"]), str(line["u"]), f"{exponent:.2f}", corrections(line, ""),
                number(line["fused ms"]), number(line["newton ms"]), ratio_text(ratio(line, "fused", "newton", PYTHON)),
                number(line["one correction ms"]),
            ]
        )  # fmt: skip
    headings = [
        "T",
        "B",
        "u",
        "Lyapunov exponent",
        "corrections",
        "fused",
        "Newton",
        "fused : Newton",
        "one correction",
    ]
    return f"{machine(shown)}; H = {shown[0]['H']}.\n\n{table(headings, rows)}"


def corrections(line: Line, clipped: str) -> str:
    """The number of corrections, if they came to the exact states."""
    error = line[f"error{clipped}"]
    if error is None:
        return "overflow"
    return str(line[f"corrections{clipped}"]) if error < 1e-3 else f"> {line[f'corrections{clipped}']}"


def counts_table() -> str:
    """How many corrections Newton's method needs, for sequences of growing length."""
    shown = counts()
    lengths = sorted({line["T"] for line in shown})

    def in_order(u: float, dtype: str, clipped: str = "") -> str:
        of_case = {line["T"]: line for line in shown if (line["u"], line["dtype"]) == (u, dtype)}
        return ", ".join(corrections(of_case[T], clipped) for T in lengths)

    rows = [
        [
            str(u), f"{exact:.2f}", f"{guess:+.2f}", in_order(u, "float32"), in_order(u, "float64"),
            in_order(u, "float32", " clipped"),
        ]
        for u, (exact, guess) in exponents().items()
    ]  # fmt: skip
    headings = [
        "u",
        "mean log \\|J\\|, exact states",
        "mean log \\|J\\|, first guess",
        "float32",
        "float64",
        "float32, clipped",
    ]
    return f"Corrections for T = {', '.join(f'{T:,}' for T in lengths)}.\n\n{table(headings, rows)}"


def requirements_table() -> str:
    """What we require of these loops, and what was measured."""
    by_case = {(line["cell"], line["T"], line["B"]): line for line in lanes()}
    scan = by_case["MinGRU", 65_536, 1]
    speedups = [ratio(scan, "fused", "scan", way) or 0.0 for way in (GRAPH, PYTHON)]
    held = min(speedups) >= REQUIRED_SPEEDUP
    rows = [
        [
            "MinGRU, T = 65,536, B = 1",
            "sequential loop : scan",
            f"at least {REQUIRED_SPEEDUP:g}",
            *map(ratio_text, speedups),
            verdict(held),
        ]
    ]
    for cell in DIAGONAL:
        line = by_case[cell, 784, 128]
        shares = [ratio(line, "fused", "cudnn lstm", way) or float("inf") for way in (GRAPH, PYTHON)]
        held = max(shares) <= REQUIRED_SHARE
        rows.append(
            [
                f"{cell}, T = 784, B = 128",
                "fused : cuDNN's LSTM",
                f"at most {REQUIRED_SHARE:g}",
                *map(ratio_text, shares),
                verdict(held),
            ]
        )
    total, project = scan[f"scan {GRAPH}"], scan[f"project {GRAPH}"]
    alone = (scan[f"fused {GRAPH}"] - project) / (total - project)
    return (
        f"{table(['case', 'ratio', 'required', 'CUDA graph', 'from Python', ''], rows)}\n\n"
        f"Of the {number(total)} ms of MinGRU's scan as a CUDA graph, {number(project)} are the projection, which "
        f"every loop needs. Without it, the ratio is {ratio_text(alone)}."
    )


def rivals_table() -> str:
    """Compiled cells against loops like their authors'."""
    rows = []
    for line in rivals():
        required, speedup = REQUIRED_OVER_AUTHORS.get(line["cell"]), line["loop ms"] / line["unfading ms"]
        rows.append(
            [
                line["cell"], str(line["B"]), str(line["H"]), pair(line, "loop"), pair(line, "unfading"),
                ratios(line, "loop", "unfading"), f"at least {required:g}" if required else "-",
                verdict(speedup >= required) if required else "",
            ]
        )  # fmt: skip
    headings = ["cell", "B", "H", "authors' loop", "unfading", "ratio", "required from Python", ""]
    return f"{machine(rivals())}; T = {rivals()[0]['T']}, products in {rivals()[0]['matmul']}.\n\n{table(headings, rows)}"


def verdict(held: bool) -> str:
    return "held" if held else "missed"


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "linear": (GUIDE, linear_table),
    "diagonal": (GUIDE, diagonal_table),
    "newton": (GUIDE, newton_table),
    "counts": (GUIDE, counts_table),
    "requirements": (BENCHMARKS, requirements_table),
    "rivals": (BENCHMARKS, rivals_table),
}


def pages() -> dict[Path, str]:
    """The text of each page, with its tables."""
    texts = {page: page.read_text(encoding="utf-8") for page, _ in TABLES.values()}
    for name, (page, made) in TABLES.items():
        begin, end = (f"<!-- benchmarks/lanes_table.py {name} {mark} -->" for mark in ("begins", "ends"))
        texts[page] = put_into(texts[page], f"\n{made()}\n", begin, end)
    return texts


def main() -> None:
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
