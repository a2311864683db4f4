"""Write the GPU table of docs/benchmarks.md from a results file of `unfading bench --device cuda`.

    python benchmarks/gpu_table.py benchmarks/results/cuda-MACHINE.jsonl [--into docs/benchmarks.md]

The table is printed or, with --into, replaces the text between the two marks of a page.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unfading.bench import cases, gpu_cases
from unfading.bench.display import milliseconds
from unfading.bench.results import Pass, PeerPass, Result, read

BEGIN, END = "<!-- benchmarks/gpu_table.py begins -->", "<!-- benchmarks/gpu_table.py ends -->"
COLUMNS = ("cell", "T, B, units", "precision", "us a forward step", "forward + backward ms")
PEERS = {
    "the same captured": ("fused, captured",),
    "cuDNN LSTM": ("cuDNN LSTM",),
    "cuDNN LSTM captured": ("cuDNN LSTM, captured",),
    "cuDNN, same cell": ("cuDNN GRU", "cuDNN RNN"),
    "eager loop": ("eager loop",),
    "graphed loop": ("graphed loop",),
}


def markdown(results: Sequence[Result], records: Sequence[dict[str, Any]]) -> str:
    """The results of the headline cases that were measured, below a sentence about the machine."""
    by_case = {result.case: result for result in results}
    shown = [by_case[case.key] for case in gpu_cases.headline() if case.key in by_case]
    about = records[-1]
    versions = about["versions"]
    head = (
        f"{about['machine']['gpu']}, torch {versions['torch']}, Triton {versions['triton']}, cuDNN {versions['cudnn']}. Input "
        f"size 1 and one layer where no other is named, loss on the last step, medians, in one process after the results were "
        f"compared with the float64 reference (`{about['command']}`). Times of the other implementations are forward + backward"
        f' in ms. "Captured" means replayed from a CUDA graph, as training does. The error is the largest distance of an output'
        f" or gradient from the float64 reference, relative to its norm."
    )
    headings = [*COLUMNS, *PEERS, "error"]
    lines = [head, "", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    lines += [f"| {' | '.join(columns(result))} |" for result in shown]
    reasons = dict.fromkeys(f"{result.title}: {result.reason}" for result in shown if result.reason)
    if reasons:
        lines += ["", "Not timed: " + "; ".join(reasons) + "."]
    return "\n".join(lines)


def columns(result: Result) -> list[str]:
    name = result.label if result.models == 1 else f"{result.models} {result.name} together"
    name += "" if result.input_size == cases.GPU_INPUT else f", input size {result.input_size}"
    step = "-" if result.forward is None else f"{1e3 * result.forward.ms / result.T:.2f}"
    peers = [next((peer.both for peer in result.peers if peer.name in names), None) for names in PEERS.values()]
    error = "-" if result.error is None else f"{result.error:.0e}"
    return [name, f"{result.T}, {result.B}, {result.H}", result.dtype, step, ms(result.both), *map(ms, peers), error]


def ms(timing: Pass | PeerPass | None) -> str:
    return "-" if timing is None else milliseconds(timing.ms)


def put_into(page: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with the table between its marks."""
    return page[: page.index(begin) + len(begin)] + f"\n{table}\n" + page[page.index(end) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--into", type=Path, help="a page with both marks")
    arguments = parser.parse_args()
    table = markdown(*read(arguments.results))
    if arguments.into is None:
        print(table)
        return
    page = arguments.into.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        parser.error(f"{arguments.into} lacks the marks {BEGIN} and {END}.")
    arguments.into.write_text(put_into(page, table), encoding="utf-8")


if __name__ == "__main__":
    main()
