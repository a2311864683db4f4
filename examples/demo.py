"""Compare the incremental RNN, STAR, NRU and LSTM on the adding problem; write the page runs/demo/report.html.

Each sequence has T pairs (value in [0, 1], mark). Two steps are marked, one in each half. The answer, due after the last step,
is the sum of their values. Always answering 1 has a mean squared error of 1/6; a smaller error needs memory.
"""

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from unfading import Run, compare
from unfading.report import page, records
from unfading.report import summary as tables
from unfading.training.progress import Display
from unfading.training.stopping import Stopped

T, SEEDS = 200, (0, 1)
WHERE = Path("runs/demo")


def run(cell: str, seed: int, rate: float, rates: dict[str, float] | None = None, **options: Any) -> Run:
    """One run; all have the same budget."""
    return Run(
        task="adding",
        task_options={"T": T},
        cell=cell,
        cell_options=options,
        hidden=64,
        batch=32,
        rate=rate,
        rates=rates or {},
        steps=1500,
        valid_every=50,
        stop_at=0.003,
        seed=seed,
    )


def runs_of(seed: int) -> list[Run]:
    """One run per cell, at the best of a few learning rates on validation rows; eta learns at a tenth of the rate.

    NRU averages its heads, as its authors' code does: with the printed sum its error jumps during training.
    """
    return [
        run("IncrementalRNN", seed, 6e-3, {"eta": 0.1}, inner_steps=1, steps=T),
        run("STAR", seed, 1e-2, max_lag=T),
        run("NRU", seed, 4e-3, memory_size=64, heads_see_input=False, mean_over_heads=True),
        run("LSTM", seed, 1e-2),
    ]


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    console.print(f"Adding problem, T = {T}: 64 units, batch 32, at most 1500 steps, seeds {SEEDS}.", highlight=False)
    runs = [one for seed in SEEDS for one in runs_of(seed)]
    start = time.monotonic()
    try:
        with Display(runs, console) as display:
            finished = compare(runs, WHERE, resume=True, listen=display.listen, say=display.say, command="make demo")
    except Stopped:
        console.print("Stopped. The work so far is saved; the same command continues.")
        return
    console.print(tables.summary(finished), highlight=False)
    written = page.write(records.read(finished), WHERE / "report.html", png=True)
    console.print(f"{time.monotonic() - start:.0f} s. Open {written[0]} for the curves.", highlight=False)


if __name__ == "__main__":
    main()
