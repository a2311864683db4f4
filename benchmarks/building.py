"""Time the construction of structured matrices: `weights()` against a whole pass over T = 784 steps at 512 units, unfused.

    python benchmarks/building.py [--device cuda] >> benchmarks/results/building-MACHINE.jsonl

Both are timed alternately in one process, forward and backward. Prints one JSON line per cell, with medians over the rounds.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch.utils import _pytree

import unfading

T, HIDDEN, INPUT = 784, 512, 1
CELLS = [
    "UnitaryRNN",
    "FullUnitaryRNN",
    "EURNN",
    "GORU",
    "SpectralRNN",
    "AntisymmetricRNN",
    "IncrementalRNN",
    "StableIncrementalRNN",
]


def timed(run: Callable[[], torch.Tensor], device: str) -> float:
    started = time.perf_counter()
    run().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(name: str, options: dict[str, object], batch: int, rounds: int, device: str) -> dict[str, object]:
    layer = getattr(unfading, name)(INPUT, HIDDEN, device=device, **options)
    x = torch.randn(T, batch, INPUT, device=device)

    def build() -> torch.Tensor:
        leaves = _pytree.tree_leaves(layer.cells[0].weights())
        return torch.stack([leaf.sum() for leaf in leaves if leaf.requires_grad]).sum()

    def whole() -> torch.Tensor:
        return layer(x)[0].square().mean()

    for run in (build, whole):
        timed(run, device)
    times = [(timed(build, device), timed(whole, device)) for _ in range(rounds)]
    build_time, pass_time = (statistics.median(column) for column in zip(*times, strict=True))
    share = statistics.median(b / w for b, w in times)
    return {
        "cell": name,
        "options": options,
        "batch": batch,
        "build_ms": round(1e3 * build_time, 2),
        "pass_ms": round(1e3 * pass_time, 1),
        "share": round(share, 4),
        "T": T,
        "hidden": HIDDEN,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in CELLS:
        variants: list[dict[str, object]] = [{}]
        if name == "FullUnitaryRNN":
            variants.append({"exponential": True})
        if name == "EURNN":
            variants += [{"complex_state": True}, {"capacity": 8}, {"capacity": 32}]
        for options in variants:
            print(json.dumps(measure(name, options, arguments.batch, arguments.rounds, arguments.device)), flush=True)


if __name__ == "__main__":
    main()
