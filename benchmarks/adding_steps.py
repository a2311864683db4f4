"""Count the steps until the adding problem (T = 200, 128 units, batch 128) is solved: validation error at most 0.008.

    python benchmarks/adding_steps.py [--only NAME] [--processes 2] [--device cuda]

Every setting below is trained with five seeds. A run ends when it reaches the error, or after its budget. The weights that were
best on validation are then tested once, on 1,280 other sequences. Records are written to runs/adding-200, and one line each to
benchmarks/results/adding-<machine>.jsonl, or to the folder --results.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from unfading import Run, compare, machine
from unfading.training.progress import Display

T, SEEDS = 200, range(5)
RELEASED = {"heads_see_input": False, "mean_over_heads": True}


def run(
    seed: int,
    device: Literal["cpu", "cuda"],
    *,
    cell: str,
    options: dict[str, Any],
    rate: float,
    steps: int,
    rates: dict[str, float] | None = None,
    clip: float | None = 1.0,
) -> Run:
    """One run of the table."""
    return Run(
        task="adding",
        task_options={"T": T},
        cell=cell,
        cell_options=options,
        hidden=128,
        batch=128,
        rate=rate,
        rates=rates or {},
        clip_norm=clip,
        steps=steps,
        valid_every=20,
        valid_batches=10,
        stop_at=0.008,
        device=device,
        seed=seed,
    )


def incremental(inner: int) -> dict[str, Any]:
    """Rank 16, one step size per time step; matrices are initialised as N(0, 0.1^2), eta as 0.01."""
    return {"inner_steps": inner, "rank": 16, "steps": T}


# By name: cell, its options, learning rate and factors on it, budget.
SETTINGS: dict[str, dict[str, Any]] = {
    "incremental-1": {"cell": "IncrementalRNN", "options": incremental(1), "rate": 6e-3, "rates": {"eta": 0.1}, "steps": 1500},
    "incremental-5": {"cell": "IncrementalRNN", "options": incremental(5), "rate": 6e-3, "rates": {"eta": 0.1}, "steps": 1500},
    # As in its paper: both rates and eta 1e-2, no clipping.
    "incremental-1-published": {"cell": "IncrementalRNN", "options": incremental(1), "rate": 1e-2, "clip": None, "steps": 2000},
    "incremental-5-published": {"cell": "IncrementalRNN", "options": incremental(5), "rate": 1e-2, "clip": None, "steps": 2000},
    "star": {"cell": "STAR", "options": {"max_lag": T}, "rate": 3e-3, "steps": 2000},
    "nru": {"cell": "NRU", "options": {}, "rate": 1e-3, "steps": 2000},
    "nru-released": {"cell": "NRU", "options": {"memory_size": 64, **RELEASED}, "rate": 4e-3, "steps": 2000},
    "lstm": {"cell": "LSTM", "options": {}, "rate": 3e-3, "steps": 2000},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS, action="append")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs = {name: [run(seed, chosen.device, **SETTINGS[name]) for seed in SEEDS] for name in chosen.only or SETTINGS}
    everything = [one for group in runs.values() for one in group]
    with Display(everything, Console(stderr=True)) as display:
        records = compare(
            everything, "runs/adding-200", processes=chosen.processes, resume=True, listen=display.listen, say=display.say
        )
    by_key = {record["key"]: record for record in records}
    place = machine.slug() if chosen.device == "cpu" else machine.gpu_slug()
    with open(chosen.results / f"adding-{place}.jsonl", "a", encoding="utf-8") as file:
        for name, group in runs.items():
            group_records = [by_key[one.key] for one in group]
            for record in group_records:
                print(json.dumps({"setting": name, **{k: v for k, v in record.items() if k != "curve"}}), file=file)
            steps = [record["steps"] if record["test"] and record["test"]["mse"] < 0.01 else None for record in group_records]
            print(f"{name:14} solved {sum(s is not None for s in steps)} of {len(steps)}; steps {steps}")


if __name__ == "__main__":
    main()
