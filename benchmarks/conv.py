"""Time convolutional layers against the loops that people write: `python benchmarks/conv.py [--device cuda] [--batch 16]`.

    ours        the layer as it is, backend="auto"
    reference   the layer on the reference loop
    [x, h]      one convolution of torch.cat([x_t, h], 1) at every step, in eager PyTorch

All three have the same weights. First, outputs and all gradients of the layer are compared with the reference loop in float64,
on the CPU; a wrong result is not timed. Then all are timed in turns, forward without gradients, and forward and backward with
the gradients of all weights, and of x with `--gradient-of-x`. `memory` is the peak of what torch allocates in a training call,
beyond what was allocated before. Prints one JSON line per cell and precision.
"""

import argparse
import copy
import json
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

import unfading
from unfading.bench.agreement import all_results, relative_error
from unfading.bench.timing import EVENTS, WALL, time_in_turns
from unfading.machine import about
from unfading.torch_state import float32_products

CELLS = ["ConvSTAR", "ConvLSTM", "ConvForgetLSTM", "ConvGRU"]
# How far a result may be from float64, as a norm, in each precision: rounding of the factors of a convolution, over T steps.
LIMITS = {"float32": 1e-4, "tf32": 1e-2, "bf16": 1e-1}


class PlainLoop(nn.Module):
    """A convolutional layer as it is usually written, with the weights of one of ours."""

    def __init__(self, layer: Any):
        super().__init__()
        cell = layer.cells[0]
        H, W_x, W_h = cell.output_size, cell.from_input.weight.detach(), cell.W_h.detach()
        self.H, self.step = H, getattr(self, type(cell).__name__)
        self.bias = nn.Parameter(cell.from_input.bias.detach().clone())
        if type(cell).__name__ == "ConvSTARCell":  # the candidate reads x alone
            self.of_x = nn.Parameter(W_x[:H].clone())
            W_x = W_x[H:]
        self.weight = nn.Parameter(torch.cat([W_x, W_h], 1))

    def ConvSTARCell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(conv2d(x, self.of_x, self.bias[: self.H], padding=1))
        k = torch.sigmoid(conv2d(torch.cat([x, h], 1), self.weight, self.bias[self.H :], padding=1))
        return torch.tanh((1 - k) * h + k * z), c

    def ConvLSTMCell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, z, o = conv2d(torch.cat([x, h], 1), self.weight, self.bias, padding=1).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
        return torch.sigmoid(o) * torch.tanh(c), c

    def ConvForgetLSTMCell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        f, z = conv2d(torch.cat([x, h], 1), self.weight, self.bias, padding=1).chunk(2, 1)
        f = torch.sigmoid(f)
        return torch.tanh(f * h + (1 - f) * torch.tanh(z)), c

    def ConvGRUCell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        H = self.H
        rz = conv2d(torch.cat([x, h], 1), self.weight[: 2 * H], self.bias[: 2 * H], padding=1)
        r, z = torch.sigmoid(rz).chunk(2, 1)
        n = torch.tanh(conv2d(torch.cat([x, r * h], 1), self.weight[2 * H :], self.bias[2 * H :], padding=1))
        return z * h + (1 - z) * n, c

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = c = x.new_zeros(x.shape[1], self.H, *x.shape[3:])
        outputs = []
        for x_t in x:
            h, c = self.step(x_t, h, c)
            outputs.append(h)
        return torch.stack(outputs), h


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """The most memory that torch allocates during a call, beyond what is allocated before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
            run()
        profiler.export_chrome_trace(str(path))
        events = [event["args"] for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    totals = [event["Total Allocated"] for event in events]
    return max(totals) - (totals[0] - events[0]["Bytes"])


def largest_error(layer: Any, x: Tensor, context: Callable[[], AbstractContextManager[Any]]) -> dict[str, float]:
    """The relative error of every result of the layer against the reference loop in float64 on the CPU."""
    double = copy.deepcopy(layer).cpu().double()
    with unfading.use_backend("reference"):
        exact = all_results(double, x.cpu().double())
    with context():
        got = all_results(layer, x)
    return {name: relative_error(got[name].cpu(), tensor) for name, tensor in exact.items()}


def measure(name: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device, T, B, n, size = options.device, options.steps, options.batch, options.channels, options.frame
    layer = getattr(unfading, name)(n, n, kernel_size=3, device=device)
    plain = PlainLoop(layer).to(device)
    x = torch.randn(T, B, n, size, size, device=device)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if precision == "bf16":
        context = partial(torch.autocast, device, torch.bfloat16)
    elif device == "cuda":
        context = partial(float32_products, "tf32" if precision == "tf32" else "ieee")
    line: dict[str, Any] = {
        "cell": name, "T": T, "B": B, "channels": n, "frame": size, "precision": precision, "device": device,
        "gradient_of_x": options.gradient_of_x, "threads": torch.get_num_threads(),
    }  # fmt: skip
    errors = largest_error(layer, x[: min(T, 8), : min(B, 2)], context)
    worst = max(errors, key=lambda each: errors[each])
    line |= {"error": errors[worst], "error_of": worst}
    if not errors[worst] <= LIMITS[precision]:
        return line | {"status": "wrong"}
    with context():
        got, expected = layer(x)[0], plain(x)[0]
    line["plain_differs"] = relative_error(expected.detach().cpu(), got.detach().cpu().double())
    x.requires_grad_(options.gradient_of_x)

    def forward(module: nn.Module, backend: str) -> None:
        with torch.no_grad(), context(), unfading.use_backend(backend):
            module(x)

    def both(module: nn.Module, backend: str) -> None:
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        with context(), unfading.use_backend(backend):
            module(x)[0].sum().backward()

    contenders = {"ours": (layer, "auto"), "reference": (layer, "reference"), "plain": (plain, "auto")}
    runs = {f"{kind.__name__} {who}": partial(kind, *given) for kind in (forward, both) for who, given in contenders.items()}
    runs["both control"] = runs["both ours"]
    timer = EVENTS if device == "cuda" else WALL
    timings = time_in_turns(
        runs, timer, rounds=options.rounds, seconds=dict.fromkeys(runs, options.seconds), order=random.Random(0)
    )
    for kind in ("forward", "both"):
        ours = f"{kind} ours"
        line[kind] = {"ms": 1e3 * timings.median(ours), "rounds": timings.rounds(ours)}
        for who in ("reference", "plain"):
            line[kind][f"x_{who}"] = timings.ratio(f"{kind} {who}", ours)
    line["control"] = timings.ratio("both control", "both ours")
    line["memory"] = {who: peak_bytes(runs[f"both {who}"], device) for who in contenders}
    return line | {"status": "measured"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--precisions", nargs="+", choices=list(LIMITS), help="float32 on a CPU; tf32 and bf16 on a GPU")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--channels", type=int, default=64, help="of the input and of the state")
    parser.add_argument("--frame", type=int, default=32, help="height and width")
    parser.add_argument("--threads", type=int, help="of torch; its own number unless given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="for one contender")
    parser.add_argument("--gradient-of-x", action="store_true")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    for precision in options.precisions or (["tf32", "bf16"] if options.device == "cuda" else ["float32"]):
        for name in options.cells:
            line = measure(name, precision, options)
            print(json.dumps(line | about("python " + " ".join(sys.argv))), flush=True)


if __name__ == "__main__":
    main()
