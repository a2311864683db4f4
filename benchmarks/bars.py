"""The bars that the fused CPU loops are held to, beside what a results file says of them.

    unfading bench --all --save benchmarks/results
    python benchmarks/bars.py benchmarks/results/cpu-MACHINE.jsonl [--threads 1]

A bar is held when every line that it asks for was measured and meets it. The exit code is 0 if all bars are held, else 1.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from unfading.bench import cases
from unfading.bench.rows import Row, read

MAY_BE_REFUSED = {"EquilibriumRNN"}  # its step looks for a fixed point

PASSES = {"forward": "forward", "both": "fwd+bwd"}

Size = tuple[str, str, int, int, int]  # kind, name, T, B, H


class Value(NamedTuple):
    """A number, and where it stands."""

    number: float
    row: Row
    of: str  # "forward" or "both"


@dataclass(frozen=True)
class Bar:
    """A bar: which lines it asks for, what it reads off them, and the limits of the worst and of the median."""

    against: str
    setting: str
    asks: Callable[[Size], bool]
    values: Callable[[Row], dict[str, float | None]]
    worst: float
    median: float | None = None
    at_most: bool = False  # small is good
    dense_only: bool = False

    def limits(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{sign} {self.worst:g}" + ("" if self.median is None else f", median {sign} {self.median:g}")

    def meets(self, value: float, limit: float) -> bool:
        return value <= limit if self.at_most else value >= limit


@dataclass(frozen=True)
class Verdict:
    """What a bar came to."""

    bar: Bar
    values: list[Value]
    faults: list[str]  # lines that were refused or computed something wrong
    missing: list[str]  # lines that nobody has measured, or that could not be on this machine

    @property
    def worst(self) -> Value:
        pick = max if self.bar.at_most else min
        return pick(self.values, key=lambda value: value.number)

    @property
    def median(self) -> float:
        return statistics.median(value.number for value in self.values)

    @property
    def short(self) -> list[Value]:
        """The values that do not meet the bar's limit."""
        return [value for value in self.values if not self.bar.meets(value.number, self.bar.worst)]

    @property
    def said(self) -> str:
        slow = self.bar.median is not None and self.values and not self.bar.meets(self.median, self.bar.median)
        if self.short or self.faults or slow:
            return "missed"
        return "held" if self.values and not self.missing else "incomplete"


def reading(name: str, *passes: str) -> Callable[[Row], dict[str, float | None]]:
    """What a bar reads off a row: one number of these passes, "forward" or "both"."""
    return lambda row: {one: getattr(getattr(row, one), name) for one in passes}


def layers(names: Sequence[str], batches: Sequence[int], sizes: Sequence[int] = (64, 128)) -> Callable[[Size], bool]:
    return lambda size: size[0] == "layer" and size[1] in names and size[3] in batches and size[4] in sizes


def bars() -> list[Bar]:
    """The table of the issue that asked for these loops."""
    torch_batches = (1, 32, 128)
    return [
        Bar(
            "reference loop", "every dense cell, fwd+bwd, B=1, H=64 and 128",
            layers(tuple(cases.variants()), (1,)), reading("x_reference", "both"), 6.0, dense_only=True,
        ),
        Bar(
            "own GEMMs", "Elman, LSTM, GRU, STAR, JANET, incremental K=1, fwd+bwd, B=32 and 128, H=128",
            layers(cases.AGAINST_PRODUCTS, (32, 128), (128,)), reading("of_products", "both"), 2.0, at_most=True,
        ),
        Bar(
            "reference loop", "NRU, RecurrentHighway depth 4, incremental K=3, fwd+bwd, B=32",
            layers(cases.HEAVY, (32,)), reading("x_reference", "both"), 4.0,
        ),
        Bar(
            "nn.LSTM", "LSTM, forward and fwd+bwd, B=1/32/128, H=64/128",
            layers(("LSTM",), torch_batches), reading("x_torch", "forward", "both"), 1.0, median=1.3,
        ),
        Bar(
            "nn.GRU", "GRU reset after, the same",
            layers(("GRU reset after",), torch_batches), reading("x_torch", "forward", "both"), 2.0,
        ),
        Bar("nn.RNN", "Elman, the same", layers(("Elman",), torch_batches), reading("x_torch", "forward", "both"), 1.5),
        Bar(
            "nn.LSTM, one step a call", "stream() of STAR and incremental K=1, B=1, H=128",
            lambda size: size[0] == "stream", reading("x_torch", "forward"), 4.0,
        ),
        Bar(
            "full-length batch", "lengths with mean T/2, fwd+bwd",
            lambda size: size[0] == "lengths", reading("of_full", "both"), 0.6, at_most=True,
        ),
    ]  # fmt: skip


def judge(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Every bar over the rows of one thread count."""
    found = {(row.kind, row.name, row.T, row.B, row.H): row for row in rows}
    planned = [(case.kind, case.variant.name, case.T, case.B, case.H) for case in cases.everything()]
    for bar in bars():
        values: list[Value] = []
        faults, missing = [], []
        for size in filter(bar.asks, planned):
            row = found.get(size)
            if row is None:
                missing.append(f"{place(size)}: not measured")
            elif row.status == "measured":
                if row.dense or not bar.dense_only:
                    values += [Value(number, row, of) for of, number in bar.values(row).items() if number is not None]
            elif row.status == "unsteady":
                missing.append(f"{place(size)}: {row.reason}")
            elif row.status == "wrong" or row.cell not in MAY_BE_REFUSED:
                faults.append(f"{place(size)}: {row.status}: {row.reason}")
        yield Verdict(bar, values, faults, missing)


def place(size: Size) -> str:
    kind, name, T, B, H = size
    return f"{name} T={T} B={B} H={H}" + ("" if kind == "layer" else f" {kind}")


def table(verdicts: Sequence[Verdict]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    shown.add_column("against, setting")
    for heading in ("bar", "worst", "median", "lines", ""):
        shown.add_column(heading, no_wrap=True)
    for verdict in verdicts:
        bar = verdict.bar
        style = {"held": "green", "missed": "bold red"}.get(verdict.said, "yellow")
        numbers = [f"{verdict.worst.number:.2f}", f"{verdict.median:.2f}"] if verdict.values else ["", ""]
        lines = len({value.row.key for value in verdict.values})
        said = f"[{style}]{verdict.said}[/]"
        shown.add_row(f"[bold]{bar.against}[/]: {bar.setting}", bar.limits(), *numbers, str(lines), said)
    return shown


def notes(verdict: Verdict) -> Iterator[str]:
    """What kept a bar from being held: every line that is short of it, worst first."""
    short = sorted(verdict.short, key=lambda value: value.number, reverse=verdict.bar.at_most)
    for number, row, of in short:
        yield f"{place((row.kind, row.name, row.T, row.B, row.H))} {PASSES[of]}: {number:.2f}"
    yield from verdict.faults
    yield from verdict.missing[:3]
    if len(verdict.missing) > 3:
        yield f"and {len(verdict.missing) - 3} more lines not measured"
    if not verdict.values and not verdict.missing and not verdict.faults:
        yield "this version has nothing to measure here"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="which lines of the file to judge")
    arguments = parser.parse_args()
    try:
        rows, records = read(arguments.results)
    except (OSError, ValueError) as error:
        print(f"bars: {error}", file=sys.stderr)
        return 2
    console = Console()
    verdicts = list(judge([row for row in rows if row.threads == arguments.threads]))
    console.print(table(verdicts))
    for verdict in verdicts:
        said = list(notes(verdict))
        if said:
            console.print(f"\n{verdict.said}: {verdict.bar.against}, {verdict.bar.limits()}", style="bold", highlight=False)
            for line in said:
                console.print(f"  {line}", markup=False, highlight=False)
    commits = sorted({str(record.get("commit")) for record in records})
    machines = sorted({f"{record['machine']['cpu']}, {record['machine']['cores']} cores" for record in records})
    console.print(f"machine: {'; '.join(machines)}. commit: {', '.join(commits)}.", style="dim", markup=False)
    return 0 if all(verdict.said == "held" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
