"""Measure the lattice of every cell under both losses: `python benchmarks/lattice.py` (about half an hour on one core).

Appends a JSON line for each cell and loss to benchmarks/results/lattice-MACHINE.jsonl and writes the tables of
docs/papers/lattice.md from that file. Cells that the file already holds with as many draws are skipped. `--time` measures
instead what a draw costs alone and among many, for the three cells of STAR's Fig. 2.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from unfading import catalogue, machine
from unfading.cells.base import Cell
from unfading.cells.elman import ElmanCell
from unfading.cells.lstm import LSTMCell
from unfading.cells.star import STARCell
from unfading.diagnostics.measure.draws import (
    CHUNK,
    SIZES,
    initial_parameters,
    is_bias,
    lattices,
    make_stack,
    random_signals,
    worker_pool,
)
from unfading.diagnostics.measure.lattice import flatness
from unfading.diagnostics.measure.lattice_step import StepModule
from unfading.papers.star.figures import LOSSES, PATH, measured

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "papers" / "lattice.md"
# The exactly solved cell searches its equilibria again at every point: a draw takes a second.
FEWER = {"EquilibriumRNN": 32}
HEAD = "| cell | bottom / top | (1,1) / (L,T) | within ten | a layer down | a step back | deviation |\n"
RULE = "|---|---|---|---|---|---|---|\n"


def name_of(cell: type[Cell]) -> str:
    return cell.__name__.removesuffix("Cell")


def measure(results: Path, draws: int, processes: int, about: dict[str, Any]) -> None:
    """Append the rows that the file does not have yet."""
    there = {(row["cell"], row["draws"]) for row in read(results) if row["kind"] == "lattice"}
    cells = {name_of(cell): cell for cell in [*catalogue.cells(), *PATH.values()]}
    with worker_pool(processes) as pool, open(results, "a", encoding="utf-8") as file:
        for name, cell in cells.items():
            many = min(draws, FEWER.get(name, draws))
            if (name, many) in there:
                continue
            began = time.perf_counter()
            lattices = measured(cell, many, pool)
            seconds = round(time.perf_counter() - began, 1)
            for loss, lattice in lattices.items():
                numbers = {**flatness(lattice.mean)._asdict(), "deviation": float(lattice.deviation.mean())}
                row = {"kind": "lattice", "cell": name, "loss": loss, "draws": many, "seed": 0, **SIZES._asdict(), **numbers}
                print(json.dumps({**row, "seconds": seconds, **about}), file=file, flush=True)
            print(f"{name:26} {seconds:7.1f} s", flush=True)


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def tables(rows: list[dict[str, Any]]) -> str:
    """Both losses over all cells, and the steps from LSTM to STAR; for a cell that was measured twice, the last row."""
    last = {(row["cell"], row["loss"]): row for row in rows if row["kind"] == "lattice"}
    parts = []
    for loss, words in LOSSES.items():
        here = sorted((row for (_, each), row in last.items() if each == loss), key=lambda row: -row["gain_per_layer"])
        own = [row for row in here if row["cell"] in {name_of(cell) for cell in catalogue.cells()}]
        parts.append(f"### {words.capitalize()}\n\n{HEAD}{RULE}" + "".join(line(row["cell"], row) for row in own))
    for loss, words in LOSSES.items():
        steps = "".join(line(name, last[name_of(cell), loss]) for name, cell in PATH.items())
        parts.append(f"### From LSTM to STAR, {words}\n\n{HEAD}{RULE}{steps}")
    return "\n".join(parts)


def line(name: str, row: dict[str, Any]) -> str:
    gains = f"{row['gain_per_layer']:.3g} | {row['gain_per_step']:.3g}"
    return (
        f"| {name} | {row['bottom_to_top']:.2g} | {row['first_to_last']:.2g} | {row['share_within_ten']:.0%} | {gains} | "
        f"{row['deviation']:.2g} |\n"
    )


def write(rows: list[dict[str, Any]]) -> None:
    """Write the tables into the page, between its marks."""
    head, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")
    _, end, tail = rest.partition("<!-- end of tables -->")
    PAGE.write_text(f"{head}{mark}\n{tables(rows)}\n{end}{tail}", encoding="utf-8")


def one_draw(cell: type[Cell]) -> None:
    """A draw by plain autograd: a new stack, and a copy of the parameters for every layer and step."""
    cells = make_stack(partial(cell, hidden_size=SIZES.width), SIZES)  # type: ignore[call-arg]
    for each in cells:
        for name, value in each.named_parameters():
            if is_bias(name):
                value.detach().zero_()
    x, v = random_signals(SIZES, SIZES.width, 1)
    outputs, copies = list(x[0]), []
    for each in cells:
        step, state, new = StepModule(each), each.initial_state(1), []
        for t in range(SIZES.steps):
            copy = {name: value.detach().clone().requires_grad_() for name, value in step.named_parameters()}
            copies.append(list(copy.values()))
            state, output = functional_call(step, copy, (outputs[t], state, t, None))
            new.append(output)
        outputs = new
    loss = (torch.stack(outputs) * v[0, 0]).sum()
    remaining = iter(torch.autograd.grad(loss, [part for parts in copies for part in parts], allow_unused=True))
    for parts in copies:
        gradients = [gradient for gradient in (next(remaining) for _ in parts) if gradient is not None]
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()


def times(cell: type[Cell]) -> dict[str, float]:
    """Milliseconds of one core for a draw under one loss: alone, and among many for its initialisation and its lattice."""
    cells = make_stack(partial(cell, hidden_size=SIZES.width), SIZES)  # type: ignore[call-arg]
    x, v = random_signals(SIZES, SIZES.width, CHUNK)
    thetas = [initial_parameters(each, CHUNK) for each in cells]
    actions: dict[str, tuple[Callable[[], Any], int]] = {
        "alone": (lambda: one_draw(cell), 1),
        "start": (lambda: [initial_parameters(each, CHUNK) for each in cells], CHUNK),
        "lattice": (lambda: lattices(cells, thetas, x, v[:, :1]), CHUNK),
    }
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(8):  # alternately, so that a busy machine affects all alike
        for name, (action, draws) in actions.items():
            began = time.process_time()
            action()
            taken[name].append(1e3 * (time.process_time() - began) / draws)
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=128)
    parser.add_argument("--processes", type=int, default=machine.cores())
    parser.add_argument("--time", action="store_true", help="measure the cost of a draw")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = ROOT / "benchmarks" / "results" / f"lattice-{machine.slug()}.jsonl"
    about = machine.about(shlex.join(["python", *sys.argv]))
    if arguments.time:
        for cell in (ElmanCell, LSTMCell, STARCell):
            costs = times(cell)
            many = costs["start"] + costs["lattice"]
            with open(results, "a", encoding="utf-8") as file:
                print(json.dumps({"kind": "time", "cell": name_of(cell), **SIZES._asdict(), **costs, **about}), file=file)
            print(
                f"{name_of(cell):8} a draw alone {costs['alone']:6.1f} ms; among {CHUNK}: start {costs['start']:5.2f}, lattice "
                f"{costs['lattice']:5.2f} ms: {costs['alone'] / many:.1f} x"
            )
        return
    measure(results, arguments.draws, arguments.processes, about)
    write(read(results))


if __name__ == "__main__":
    main()
