"""Time resets and `unfading.scan`: `python benchmarks/resets.py [--device cuda] [--features 64] [--share 0.01]`.

    resets      a layer whose state returns to its initial value before a share of the steps, over the same call without resets
    scan        an LSTM as a step function, over the layer

First, what is timed is compared: the layer with resets with the reference loop, the scan with the layer. Then both are timed in
turns, forward without gradients, and forward and backward. A CPU is timed on one thread by its own clock, which other programs
on the machine do not advance. Prints one JSON line per cell; `both` and `forward` are medians in seconds and of ratios.
"""

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import unfading
from unfading.bench.timing import EVENTS, Timer, time_in_turns
from unfading.machine import about

CELLS = ["STAR", "LSTM", "GRU", "Elman", "IncrementalRNN", "FastGRNN"]
T, B, H = 200, 32, 128
ROUNDS, SECONDS = 41, 30.0


def cpu_seconds(contender: Callable[[], object], calls: int) -> float:
    started = time.process_time()
    for _ in range(calls):
        contender()
    return (time.process_time() - started) / calls


def lstm_step(carry: tuple[Tensor, Tensor], x: Tensor, weights: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    h, c = carry
    gates = unfading.linear(x, weights["W_x"]) + unfading.linear(h, weights["W_h"]) + weights["b"]
    i, f, z, o = gates.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h, c), h


def timed(new: Callable[[], Tensor], old: Callable[[], Tensor], timer: Timer) -> dict[str, Any]:
    """Medians of both calls and of their ratio, for a forward pass and for training."""
    times: dict[str, Any] = {}
    for name, grad in (("forward", False), ("both", True)):

        def call(function: Callable[[], Tensor], grad: bool = grad) -> None:
            with torch.set_grad_enabled(grad):
                output = function()
                if grad:
                    output.sum().backward()

        contenders = {"new": lambda: call(new), "old": lambda: call(old)}
        seconds = dict.fromkeys(contenders, SECONDS)
        timings = time_in_turns(contenders, timer, rounds=ROUNDS, seconds=seconds, order=random.Random(0))
        times[name] = {each: timings.median(each) for each in contenders} | {"ratio": timings.ratio("new", "old")}
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timer = EVENTS if arguments.device != "cpu" else Timer(cpu_seconds, shortest=5e-3, warm_ups=3)
    x = torch.randn(T, B, arguments.features, device=arguments.device, requires_grad=True)
    resets = torch.rand(T, B, device=arguments.device) < arguments.share
    common = {
        "features": arguments.features,
        "share": arguments.share,
        "T": T,
        "B": B,
        "H": H,
        **about(shlex.join(["python", *sys.argv])),
    }
    for name in arguments.cells:
        layer = getattr(unfading, name)(arguments.features, H, device=arguments.device)
        with unfading.use_backend("reference"):
            exact = layer(x, resets=resets)[0]
        assert_close(layer(x, resets=resets)[0], exact, rtol=1e-3, atol=1e-4)
        times = timed(lambda: layer(x, resets=resets)[0], lambda: layer(x)[0], timer)  # noqa: B023
        print(json.dumps({"kind": "resets", "cell": name, **times, **common}), flush=True)
    layer = unfading.LSTM(arguments.features, H, device=arguments.device)
    cell: Any = layer.cells[0]
    zero = x.new_zeros(B, H).detach()

    def scanned() -> Tensor:
        weights = {"W_x": cell.from_input.weight, "W_h": cell.W_h, "b": cell.from_input.bias}
        outputs: Tensor = unfading.scan(lstm_step, (zero, zero), x, weights=weights)[1]
        return outputs

    assert_close(scanned(), layer(x)[0], rtol=1e-4, atol=1e-5)
    print(json.dumps({"kind": "scan", "cell": "LSTM", **timed(scanned, lambda: layer(x)[0], timer), **common}), flush=True)


if __name__ == "__main__":
    main()
