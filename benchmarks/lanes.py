"""Steps whose units are independent, on a GPU: `python benchmarks/lanes.py --out benchmarks/results/lanes-nvidia-h200.jsonl`

For each cell and size, forward and backward pass with the gradients of x and of all parameters: the sequential loop
(backend="fused"), the parallel scan (backend="scan") where the step is linear, the choice of "auto", and cuDNN's LSTM. Every
result is compared with the reference loop in float64 on a shorter sequence before it is timed. Times are medians: "ms" of calls
from Python, "graph ms" of the same call replayed as a CUDA graph, without the time in which Python launches kernels. Prints one
JSON line per case.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import unfading
from unfading import machine

CASES = [
    *(
        ("MinGRU", T, B, 256)
        for T, B in ((65_536, 1), (16_384, 1), (4_096, 1), (4_096, 16), (1_024, 16), (784, 128), (784, 512))
    ),
    *(("MinLSTM", T, B, 256) for T, B in ((65_536, 1), (784, 128))),
    *((cell, T, B, 256) for cell in ("IndRNN", "UnICORNN") for T, B in ((784, 128), (784, 32), (16_384, 1), (784, 1))),
]
TOLERANCE = 1e-5  # relative to the largest entry, over 300 steps in float32


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    output = layer(x)[0]
    loss = (output * torch.linspace(-1, 1, output.shape[-1], device=x.device, dtype=x.dtype)).sum() / x.shape[0]
    return [output.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]


def error(layer: nn.Module, backend: str, T: int, B: int, H: int) -> float:
    """The largest difference from the reference loop in float64, relative to the largest entry of each tensor.

    With exact products: in tf32, the projection alone decides on which side of zero some entries of a ReLU are.
    """
    exact, before = copy.deepcopy(layer).double(), torch.backends.cuda.matmul.fp32_precision
    x = torch.randn(T, B, H, device="cuda")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        with unfading.use_backend("reference"):
            want = gradients(exact, x.double())
        with unfading.use_backend(backend):
            got = gradients(layer, x)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    return max(((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in zip(got, want, strict=True))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """A call as a CUDA graph."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):  # a capture needs kernels that are compiled, on a stream of its own
        run(), run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        run()
    return graph.replay


def milliseconds(run: Callable[[], object], rounds: int = 5) -> float:
    """The median time of a call on a GPU."""
    run(), run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def write(line: dict[str, Any], out: Path | None) -> None:
    """Print a JSON line, and append it to a file."""
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(out: Path | None = None, rounds: int = 7, matmul: str = "tf32") -> None:
    """Time the cells.

    Args:
        out: A file to which the lines are appended.
        rounds: Timed calls of each contender.
        matmul: Precision of float32 products: tf32 or ieee.
    """
    torch.backends.cuda.matmul.fp32_precision = matmul
    torch.backends.cudnn.rnn.fp32_precision = matmul  # type: ignore[attr-defined]
    for cell, T, B, H in CASES:
        torch.manual_seed(0)
        layer, lstm = getattr(unfading, cell)(H, H).cuda(), nn.LSTM(H, H).cuda()
        x = torch.randn(T, B, H, device="cuda")
        line: dict[str, Any] = {"cell": cell, "T": T, "B": B, "H": H, "matmul": matmul, **machine.about("lanes")}
        for backend in ("fused", "scan", "auto"):
            try:
                line[f"error {backend}"] = error(layer, backend, min(T, 300), min(B, 8), H)
            except RuntimeError as refusal:
                line[f"{backend} ms"] = str(refusal)
                continue
            if line[f"error {backend}"] > TOLERANCE:
                line[f"{backend} ms"] = None
                continue
            with unfading.use_backend(backend):
                line |= _times(backend, layer, x, rounds)
        line |= _times("project", _Projection(layer), x, rounds)
        try:
            line |= _times("cudnn lstm", lstm, x, rounds)
        except RuntimeError as refusal:  # cuDNN has no loop of 65,536 steps
            line["cudnn lstm ms"] = str(refusal)
        write(line, out)


def _times(name: str, layer: nn.Module, x: Tensor, rounds: int) -> dict[str, float]:
    def run() -> object:
        return gradients(layer, x)

    return {f"{name} ms": milliseconds(run, rounds), f"{name} graph ms": milliseconds(captured(run), rounds)}


class _Projection(nn.Module):
    """The part of a layer before its loop: what no loop can save."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.from_input = layer.runners[0].from_input  # type: ignore[index, union-attr]

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.from_input(x),)


if __name__ == "__main__":
    tyro.cli(main)
