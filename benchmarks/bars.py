"""Compare a results file of `unfading bench` with the speed and precision required of the fused loops, on a CPU or a GPU.

    unfading bench --all --save benchmarks/results                    # or --device cuda
    python benchmarks/bars.py benchmarks/results/cpu-MACHINE.jsonl    # or cuda-MACHINE.jsonl

A bar is one requirement. It is held if every case that it names was measured and meets it. The exit code is 0 if all bars are
held, else 1.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from unfading.bench import cases, gpu_cases
from unfading.bench.cases import Case, Dtype
from unfading.bench.precision import TOLERANCES
from unfading.bench.results import Result, read

MAY_BE_REFUSED = {"EquilibriumRNN"}  # its step searches for a fixed point

PASSES = {"forward": "forward", "both": "fwd+bwd"}
ON_GPU = ("last", "fleet")  # kinds of cases

Numbers = dict[str, float | None]  # by pass, "forward" or "both", or by another name


class Value(NamedTuple):
    """A number with its result and pass."""

    number: float
    result: Result
    of: str


@dataclass(frozen=True)
class Bar:
    """A requirement: which cases it concerns, which numbers it compares, and the limits of the worst and of the median."""

    against: str
    setting: str
    asks: Callable[[Case], bool]
    values: Callable[[Result], Numbers]
    worst: float
    median: float | None = None
    at_most: bool = False  # smaller is better
    dense_only: bool = False
    fused_only: bool = False  # a refused cell is exempt

    def limits(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{sign} {self.worst:g}" + ("" if self.median is None else f", median {sign} {self.median:g}")

    def meets(self, value: float, limit: float) -> bool:
        return value <= limit if self.at_most else value >= limit


@dataclass(frozen=True)
class Verdict:
    """The result of a bar."""

    bar: Bar
    values: list[Value]
    faults: list[str]  # cases that were refused or gave wrong results
    missing: list[str]  # cases that were not measured, or cannot be measured on this machine

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
    def status(self) -> str:
        slow = self.bar.median is not None and self.values and not self.bar.meets(self.median, self.bar.median)
        if self.short or self.faults or slow:
            return "missed"
        return "held" if self.values and not self.missing else "incomplete"


def reading(name: str, *passes: str) -> Callable[[Result], Numbers]:
    """A function that reads one number of a result for these passes, "forward" or "both"."""
    return lambda result: {one: getattr(getattr(result, one), name, None) for one in passes}


def layers(names: Sequence[str], batches: Sequence[int], sizes: Sequence[int] = (64, 128)) -> Callable[[Case], bool]:
    return lambda case: case.kind == "layer" and case.variant.name in names and case.B in batches and case.H in sizes


def cpu_bars() -> list[Bar]:
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
        Bar(
            "torch.nn", "LSTM, GRU reset after and Elman, the same, T=200, H=64/128/256/512, on any number of threads",
            lambda case: case.T == 200 and layers(cases.AGAINST_TORCH, cases.BATCHES, (64, 128, *cases.WIDE))(case),
            reading("x_torch", "forward", "both"), 1.0, median=1.5,
        ),
        Bar("nn.RNN", "Elman, the same", layers(("Elman",), torch_batches), reading("x_torch", "forward", "both"), 1.5),
        Bar(
            "nn.LSTM, one step a call", "stream() of STAR and incremental K=1, B=1, H=128",
            lambda case: case.kind == "stream", reading("x_torch", "forward"), 4.0,
        ),
        Bar(
            "full-length batch", "lengths with mean T/2, fwd+bwd",
            lambda case: case.kind == "lengths", reading("of_full", "both"), 0.6, at_most=True,
        ),
    ]  # fmt: skip


def of_peer(name: str) -> Callable[[Result], Numbers]:
    """Our time divided by a peer's, forward and backward."""

    def read(result: Result) -> Numbers:
        peer = result.peer(name)
        return {"both": None if peer is None or peer.both is None else peer.both.of}

    return read


def faster_than(name: str) -> Callable[[Result], Numbers]:
    """How many times faster than a peer, forward and backward."""

    def read(result: Result) -> Numbers:
        of = of_peer(name)(result)["both"]
        return {"both": None if of is None else 1 / of}

    return read


def captured(name: str) -> Callable[[Result], Numbers]:
    """Our time divided by a peer's, forward and backward, both replayed from CUDA graphs."""

    def read(result: Result) -> Numbers:
        ours, theirs = result.peer("fused, captured"), result.peer(f"{name}, captured")
        if ours is None or theirs is None or ours.both is None or theirs.both is None:
            return {"both": None}
        return {"both": ours.both.ms / theirs.both.ms}

    return read


def captured_ms(result: Result) -> Numbers:
    ours = result.peer("fused, captured")
    return {"both": None if ours is None or ours.both is None else ours.both.ms}


def us_a_step(result: Result) -> Numbers:
    return {"forward": None if result.forward is None else 1e3 * result.forward.ms / result.T}


def captured_us_a_step(result: Result) -> Numbers:
    """Microseconds of a forward step, replayed from a CUDA graph."""
    ours = result.peer("fused, captured")
    return {"forward": None if ours is None or ours.forward is None else 1e3 * ours.forward.ms / result.T}


def lines(
    names: Sequence[str],
    sizes: Sequence[tuple[int, int, int]],
    dtype: str = "tf32",
    kind: str = "last",
    models: int = 1,
    num_layers: int = 1,
) -> Callable[[Case], bool]:
    """Cases of a GPU, by T, B and H."""
    return lambda case: (
        (case.kind, case.dtype, case.models, case.num_layers) == (kind, dtype, models, num_layers)
        and case.input_size == cases.GPU_INPUT
        and case.variant.name in names
        and (case.T, case.B, case.H) in sizes
    )


def agreement(dtype: Dtype) -> Bar:
    """How close to the float64 reference a precision must be."""
    return Bar(
        "float64 reference", f"outputs and gradients, {dtype}, 200 steps, contractive weights",
        lambda case: case.dtype == dtype and gpu_cases.CATALOGUE[0] < case.T,
        lambda result: {"furthest": result.error_contractive}, TOLERANCES[dtype], at_most=True, fused_only=True,
    )  # fmt: skip


def gpu_bars() -> list[Bar]:
    """Bars for layers and fleets. The time of an epoch of training is in the records of `unfading train`."""
    at_128, at_64, at_256, wide = gpu_cases.LONG, gpu_cases.SMALL, gpu_cases.LARGE, gpu_cases.WIDE
    usual = [at_128, at_64, gpu_cases.CATALOGUE]
    lstm, step = of_peer("cuDNN LSTM"), "us a forward step"
    incremental, after = ("IncrementalRNN K=1",), ("GRU reset after",)
    one_matrix, replayed = ("STAR", "FastRNN", *incremental), captured("cuDNN LSTM")

    def fused(case: Case) -> bool:
        return (case.kind, case.dtype) == ("last", "tf32") and (case.T, case.B, case.H) in usual

    def units(names: Sequence[str], H: int, dtype: str = "tf32") -> Callable[[Case], bool]:
        return lines(names, ((*at_128[:2], H),), dtype)

    def deep(name: str) -> Callable[[Case], bool]:
        return lines((name,), (at_128,), num_layers=gpu_cases.DEEP)

    def bar(against: str, setting: str, asks: Callable[[Case], bool], values: Callable[[Result], Numbers], worst: float) -> Bar:
        return Bar(against, setting, asks, values, worst, at_most=True)

    return [
        *(
            bar(f"{name}{how}", setting, asks, read(name), limit)
            for how, read in (("", of_peer), (", both captured", captured))
            for name, setting, asks, limit in (
                ("cuDNN LSTM", "STAR, H=128 and 64", lines(("STAR",), (at_128, at_64)), 0.6),
                ("cuDNN LSTM", "incremental K=1, H=128 and 64", lines(incremental, (at_128, at_64)), 0.65),
                ("cuDNN GRU", "GRU reset after, H=128", lines(after, (at_128,)), 0.8),
                ("cuDNN GRU", "GRU reset after, H=64", lines(after, (at_64,)), 0.5),
                ("cuDNN LSTM", "LSTM, H=64", lines(("LSTM",), (at_64,)), 1.2),
                ("cuDNN LSTM", "LSTM, H=128", lines(("LSTM",), (at_128,)), 1.5),
            )
        ),
        Bar("eager loop", "any cell that runs fused, B=128", fused, faster_than("eager loop"), 60.0, fused_only=True),
        Bar("graphed loop", "any cell that runs fused, B=128", fused, faster_than("graphed loop"), 4.0, fused_only=True),
        bar(step, "STAR, tf32, H=128", lines(("STAR",), (at_128,)), us_a_step, 1.3),
        bar(step, "STAR, bf16, H=128", lines(("STAR",), (at_128,), "bf16"), us_a_step, 0.9),
        bar(step, "STAR, tf32, H=64", lines(("STAR",), (at_64,)), us_a_step, 0.75),
        bar("cuDNN LSTM", "STAR, B=1024, H=128", lines(("STAR",), (wide,)), lstm, 0.2),
        bar("cuDNN LSTM", "LSTM, B=1024, H=128", lines(("LSTM",), (wide,)), lstm, 0.5),
        bar("cuDNN LSTM", "one-matrix cells, bf16, H=128", lines(gpu_cases.ONE_MATRIX, (at_128,), "bf16"), lstm, 0.12),
        bar("cuDNN LSTM", "one-matrix cells, bf16, H=256", lines(gpu_cases.ONE_MATRIX, (at_256,), "bf16"), lstm, 0.2),
        *(
            bar(how, f"{models} STAR together, H=128", lines(("STAR",), (at_128,), kind="fleet", models=models), read, limit)
            for how, read in (("ms", reading("ms", "both")), ("ms, captured", captured_ms))
            for models, limit in ((8, 5.0), (16, 7.5))
        ),
        *(
            bar(f"{peer}, both captured", f"{', '.join(names)}, H={H}", units(names, H), captured(peer), limit)
            for names, peer, limits in (
                (("LSTM",), "cuDNN LSTM", {128: 1.1, 200: 0.5, 256: 0.5, 512: 0.6, 1024: 0.9}),
                (("GRU", "GRU reset after"), "cuDNN GRU", {128: 0.9, 200: 0.5, 256: 0.5, 512: 0.6, 1024: 0.9}),
                (one_matrix, "cuDNN LSTM", {96: 0.8, 200: 0.35, 256: 0.35, 512: 0.4, 1024: 0.5}),
            )
            for H, limit in limits.items()
        ),
        *(
            bar("cuDNN LSTM, both captured", f"STAR, FastRNN, bf16, H={H}", units(one_matrix, H, "bf16"), replayed, 0.3)
            for H in (256, 512, 1024)
        ),
        bar("ms, captured", "NRU of psMNIST's size", lambda case: case.variant == gpu_cases.NRU, captured_ms, 40.0),
        bar("ms, captured", "12 layers of STAR, H=128", deep("STAR"), captured_ms, 13.0),
        bar("cuDNN LSTM, both captured", "12 layers of LSTM, H=128", deep("LSTM"), replayed, 1.0),
        bar(f"{step}, captured", "one row, H=512 and 1024", lines(("STAR", "LSTM"), gpu_cases.ALONE), captured_us_a_step, 4.0),
        agreement("float32"), agreement("tf32"), agreement("bf16"),
    ]  # fmt: skip


def judge(bars: Sequence[Bar], planned: Sequence[Case], results: Sequence[Result]) -> Iterator[Verdict]:
    """Every bar over the results of one thread count."""
    by_case = {result.case: result for result in results}
    for bar in bars:
        values: list[Value] = []
        faults, missing = [], []
        for case in filter(bar.asks, planned):
            result = by_case.get(case.key)
            if result is None:
                missing.append(f"{case.title}: not measured")
                continue
            if bar.dense_only and result.status == "measured" and not result.dense:
                continue
            numbers = bar.values(result)
            if any(number is not None for number in numbers.values()):
                values += [Value(number, result, of) for of, number in numbers.items() if number is not None]
            elif result.status == "measured" or result.status == "unsteady":
                missing.append(f"{case.title}: {result.reason or absent(bar, result)}")
            elif result.status != "refused" or not (result.cell in MAY_BE_REFUSED or bar.fused_only):
                faults.append(f"{case.title}: {result.status}: {result.reason}")
        yield Verdict(bar, values, faults, missing)


def absent(bar: Bar, result: Result) -> str:
    """Why a measured result has no number for a bar."""
    peer = result.peer(bar.against)
    return f"no number against {bar.against}" + ("" if peer is None else f": {peer.reason}")


def shown(number: float) -> str:
    return f"{number:.2f}" if number >= 0.01 else f"{number:.1e}"


def table(verdicts: Sequence[Verdict]) -> Table:
    output = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    output.add_column("against, setting")
    for heading in ("bar", "worst", "median", "lines", ""):
        output.add_column(heading, no_wrap=True)
    for verdict in verdicts:
        bar = verdict.bar
        style = {"held": "green", "missed": "bold red"}.get(verdict.status, "yellow")
        numbers = [shown(verdict.worst.number), shown(verdict.median)] if verdict.values else ["", ""]
        count = len({value.result.case for value in verdict.values})
        status = f"[{style}]{verdict.status}[/]"
        output.add_row(f"[bold]{bar.against}[/]: {bar.setting}", bar.limits(), *numbers, str(count), status)
    return output


def notes(verdict: Verdict) -> Iterator[str]:
    """Why a bar is not held: every result that misses it, worst first."""
    short = sorted(verdict.short, key=lambda value: value.number, reverse=verdict.bar.at_most)
    for number, result, of in short:
        yield f"{result.title} {PASSES.get(of, of)}: {shown(number)}"
    yield from verdict.faults
    yield from verdict.missing[:3]
    if len(verdict.missing) > 3:
        yield f"and {len(verdict.missing) - 3} more lines not measured"
    if not verdict.values and not verdict.missing and not verdict.faults:
        yield "this version has nothing to measure here"


def machine(about: dict[str, Any]) -> str:
    gpu = about.get("gpu")
    return f"{about['cpu']}, {about['cores']} cores" + (f", {gpu}" if gpu else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="number of threads of the results to compare, for a CPU's file")
    arguments = parser.parse_args()
    try:
        results, records = read(arguments.results)
    except (OSError, ValueError) as error:
        print(f"bars: {error}", file=sys.stderr)
        return 2
    console = Console()
    if any(result.kind in ON_GPU for result in results):
        verdicts = list(judge(gpu_bars(), gpu_cases.everything(), results))
    else:
        verdicts = list(
            judge(cpu_bars(), cases.everything(), [result for result in results if result.threads == arguments.threads])
        )
    console.print(table(verdicts))
    for verdict in verdicts:
        reasons = list(notes(verdict))
        if reasons:
            console.print(f"\n{verdict.status}: {verdict.bar.against}, {verdict.bar.limits()}", style="bold", highlight=False)
            for line in reasons:
                console.print(f"  {line}", markup=False, highlight=False)
    commits = sorted({str(record.get("commit")) for record in records})
    machines = sorted({machine(record["machine"]) for record in records})
    console.print(f"machine: {'; '.join(machines)}. commit: {', '.join(commits)}.", style="dim", markup=False)
    return 0 if all(verdict.status == "held" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
