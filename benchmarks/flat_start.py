"""Whether a flat start trains deeper LSTM stacks: `python benchmarks/flat_start.py` (MNIST in $UNFADING_DATA).

MNIST row by row (28 steps of 28 pixels), 32 units a layer, batch 64, Adam 1e-3, clipped at norm 1: the same weights, with and
without `unfading.flat_start` on the first 16 training rows. One JSON line a run is appended to
benchmarks/results/flat-start-MACHINE.jsonl: the accuracy on the batches of the last hundred steps, each before it is
learnt from, and on the first 2,000 validation rows.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

import unfading
from unfading import machine
from unfading.tasks.images import NoisyMNIST

RESULTS = Path(__file__).parent / "results"
WIDTH, BATCH, LAST = 32, 64, 100


def trained(depth: int, steps: int, seed: int, *, flat: bool) -> dict[str, Any]:
    """A run: what its start was, and how far it came."""
    task = NoisyMNIST(T=28)
    torch.manual_seed(seed)
    rnn = unfading.LSTM(task.input_size, WIDTH, depth)
    model = unfading.Model(task.encoder(), rnn, task.head(WIDTH))
    start: dict[str, Any] = {}
    if flat:
        began = time.process_time()
        done = unfading.flat_start(model, task.batch(0, 16, split="train", seed=seed, device="cpu"))
        start = {
            "gain_per_layer": [done.before.gain_per_layer, done.after.gain_per_layer],
            "spread": done.spread,
            "rounds": done.rounds,
            "start_seconds": round(time.process_time() - began, 1),
        }
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    right = []
    began = time.process_time()
    for step in range(steps):
        batch = task.batch(step, BATCH, split="train", seed=seed, device="cpu")
        prediction, _ = model(batch.x)
        right.append(float(task.metrics(prediction, batch)["accuracy"]))
        optimiser.zero_grad()
        task.loss(prediction, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    batch = task.batch(0, 2000, split="valid", seed=seed, device="cpu")
    with torch.no_grad():
        valid = float(task.metrics(model(batch.x)[0], batch)["accuracy"])
    sizes = {"cell": "LSTM", "depth": depth, "hidden": WIDTH, "batch": BATCH, "steps": steps, "seed": seed, "flat": flat}
    taken = {"seconds": round(time.process_time() - began, 1)}
    return {**sizes, "training_accuracy": sum(right[-LAST:]) / len(right[-LAST:]), "accuracy": valid, **start, **taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[24])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = machine.about(shlex.join(["python", *sys.argv]))
    for depth in arguments.depths:
        for seed in arguments.seeds:
            for flat in (False, True):
                run = trained(depth, arguments.steps, seed, flat=flat)
                with open(RESULTS / f"flat-start-{machine.slug()}.jsonl", "a", encoding="utf-8") as file:
                    print(json.dumps({**run, **about}), file=file)
                print(
                    f"{depth} layers, seed {seed}, {'flat ' if flat else 'plain'} start: training accuracy "
                    f"{run['training_accuracy']:.3f}, validation {run['accuracy']:.3f}, {run['seconds']:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
