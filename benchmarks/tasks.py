"""Time the batches of tasks: milliseconds for one batch of pixel MNIST, adding, copying and others, on one thread.

    python benchmarks/tasks.py [--device cuda] >> benchmarks/results/tasks-MACHINE.jsonl

MNIST is read from $UNFADING_DATA; if it is not there, its tasks are skipped with a message. The first batch, which reads the
files, is timed separately. Prints one JSON line per task, with medians over the rounds.
"""

import argparse
import json
import platform
import statistics
import sys
import time

import torch

from unfading import Task
from unfading.data import store
from unfading.tasks import Adding, Copying, Denoising, NoisyMNIST, PermutedMNIST, PixelMNIST, VariableCopying

TASKS: list[Task] = [
    PixelMNIST(),
    PixelMNIST(scale="pixelwise"),
    PermutedMNIST(),
    NoisyMNIST(),
    Adding(1000),
    Copying(1000),
    VariableCopying(1000, per_row=True),
    Denoising(1000),
]


def timed(task: Task, index: int, size: int, device: str) -> float:
    started = time.perf_counter()
    task.batch(index, size, split="train", seed=0, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def measure(task: Task, size: int, rounds: int, device: str) -> dict[str, object]:
    first = timed(task, 0, size, device)
    times = [timed(task, index, size, device) for index in range(1, rounds + 1)]
    median = statistics.median(times)
    return {
        "task": repr(task),
        "batch": size,
        "ms": round(median, 3),
        "batches_per_s": round(1e3 / median),
        "fastest_ms": round(min(times), 3),
        "slowest_ms": round(max(times), 2),
        "first_ms": round(first, 1),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for task in TASKS:
        if task.dataset is not None and not store.present(task.dataset):
            print(f"{task!r} is skipped: dataset {task.dataset} is not in {store.root()}", file=sys.stderr)
            continue
        print(json.dumps(measure(task, arguments.batch, arguments.rounds, arguments.device)), flush=True)


if __name__ == "__main__":
    main()
