"""Test whether a flat start trains deeper LSTM stacks: `python benchmarks/flat_start.py` (MNIST in $UNFADING_DATA).

MNIST row by row (28 steps of 28 pixels), 32 units per layer, batch 64, Adam, clipped at norm 1. The same weights with four
initialisations:

    zero     every bias 0
    forget   forget bias 1: the default of the layer
    flat     the same, then `unfading.flat_start` on the first 8 training rows
    open     no measurement: biases of input and output gate 2, of the forget gate -2 (only with --starts)

Each start chooses between two learning rates: the first seed runs with both, the others with the one that scored better on the
first 2,000 validation rows. One JSON line per run is appended to benchmarks/results/flat-start-MACHINE.jsonl: the accuracy on
those rows, and on the training batches of the last fifty steps, each before its update.
"""

import argparse
import copy
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
WIDTH, BATCH, LAST = 32, 64, 50
RATES = (1e-3, 3e-3)
BIASES = {"zero": (0.0, 0.0, 0.0, 0.0), "open": (2.0, -2.0, 0.0, 2.0)}  # gates i, f, z, o
STARTS = ("zero", "forget", "flat", "open")


def started(task: NoisyMNIST, depth: int, seed: int, start: str) -> tuple[unfading.Model, dict[str, Any]]:
    """A model with this initialisation, and what was measured for it."""
    torch.manual_seed(seed)
    rnn = unfading.LSTM(task.input_size, WIDTH, depth)
    model = unfading.Model(task.encoder(), rnn, task.head(WIDTH))
    if start in BIASES:
        for cell in rnn.cells:
            for gate, bias in zip(cell.from_input.bias.detach().chunk(4), BIASES[start], strict=True):  # type: ignore[union-attr,operator]
                gate.fill_(bias)
    if start != "flat":
        return model, {}
    began = time.process_time()
    done = unfading.flat_start(model, task.batch(0, 8, split="train", seed=seed, device="cpu"))
    taken = {"rounds": done.rounds, "start_seconds": round(time.process_time() - began, 1)}
    gains = {f"gain_per_{way}": [getattr(f, f"gain_per_{way}") for f in (done.before, done.after)] for way in ("layer", "step")}
    return model, {"spread": done.spread, **gains, "turns": done.turns, "factors": done.factors, **taken}


def trained(task: NoisyMNIST, model: unfading.Model, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Train a model; return its accuracy and time."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
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
    seconds = round(time.process_time() - began, 1)
    batch = task.batch(0, 2000, split="valid", seed=seed, device="cpu")
    with torch.no_grad():
        valid = float(task.metrics(model(batch.x)[0], batch)["accuracy"])
    return {"accuracy": valid, "training_accuracy": sum(right[-LAST:]) / len(right[-LAST:]), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[24, 32])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS[:3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = machine.about(shlex.join(["python", *sys.argv]))
    task = NoisyMNIST(T=28)
    for depth in arguments.depths:
        for start in arguments.starts:
            rates: tuple[float, ...] = RATES
            for seed in arguments.seeds:
                model, how = started(task, depth, seed, start)
                came = {}
                for rate in rates:
                    run = trained(task, copy.deepcopy(model), rate, arguments.steps, seed)
                    came[rate] = run["accuracy"]
                    sizes = {"cell": "LSTM", "depth": depth, "hidden": WIDTH, "batch": BATCH, "steps": arguments.steps}
                    row = {**sizes, "start": start, "seed": seed, "rate": rate, **run, **how, **about}
                    with open(RESULTS / f"flat-start-{machine.slug()}.jsonl", "a", encoding="utf-8") as file:
                        print(json.dumps(row), file=file)
                    print(
                        f"{depth} layers, {start:6}, seed {seed}, rate {rate}: validation {run['accuracy']:.3f}, "
                        f"training {run['training_accuracy']:.3f}, {run['seconds']:.0f} s {how.get('spread', '')}",
                        flush=True,
                    )
                rates = (max(came, key=lambda rate: came[rate]),)


if __name__ == "__main__":
    main()
