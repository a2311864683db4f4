"""Newton's method in time against the fused loop, on a GPU: `python benchmarks/newton.py --out FILE`

A step with independent units that is not linear, h_t = tanh(u h_{t-1} + a_t), has a diagonal Jacobian J_t = u (1 - h_t^2).
Newton's method guesses all states at once and corrects them together (DEER, ParaRNN):

    f_t = tanh(u g_{t-1} + a_t),   J_t = u (1 - f_t^2),   h_t = J_t h_{t-1} + (f_t - J_t g_{t-1})      for a guess g

Each correction is a linear recurrence, which backend="scan" runs. How many are needed depends on how fast the network forgets,
which the Lyapunov exponent, the mean of log |J_t|, measures. Forward pass only, without a gradient. Prints one JSON line per
case.
"""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor

import unfading
from unfading import machine

TOLERANCE = 1e-5  # of the largest correction, and of the difference from the fused loop
MOST = 40  # corrections


class Inputs(NamedTuple):
    slope: Tensor
    offset: Tensor


class State(NamedTuple):
    h: Tensor


class Weights(NamedTuple):
    """Empty."""


class AffineCell(unfading.Cell[Inputs, State, Weights]):
    """h_t = slope_t h_{t-1} + offset_t, both of which are the input."""

    def __init__(self, input_size: int):
        super().__init__(input_size, input_size // 2)
        self.like = torch.nn.Parameter(torch.zeros(1))

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(*x.chunk(2, dim=-1))

    def weights(self) -> Weights:
        return Weights()

    def initial_state(self, batch: int) -> State:
        return State(self.like.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return State(inputs.slope * state.h + inputs.offset)


def corrected(guess: Tensor, u: Tensor, a: Tensor, scan: unfading.Recurrent) -> Tensor:
    """The states after one correction."""
    before = torch.cat([torch.zeros_like(guess[:1]), guess[:-1]])
    f = torch.tanh(u * before + a)
    J = u * (1 - f * f)
    return scan(torch.cat([J, f - J * before], dim=-1))[0]


def newton(u: Tensor, a: Tensor, scan: unfading.Recurrent) -> tuple[Tensor, int]:
    """The states and the number of corrections."""
    h, count, change = torch.zeros_like(a), 0, math.inf
    while change > TOLERANCE and count < MOST:
        new = corrected(h, u, a, scan)
        h, count, change = new, count + 1, (new - h).abs().max().item()
    return h, count


def lyapunov(u: Tensor, h: Tensor) -> float:
    """The mean of log |J_t| along the states h."""
    return (u * (1 - h * h)).abs().clamp_min(1e-30).log().mean().item()


def milliseconds(run: Any, rounds: int = 5) -> float:
    """The median time of a call."""
    run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


@torch.no_grad()
def main(out: Path | None = None) -> None:
    """Time both.

    Args:
        out: A file to which the lines are appended.
    """
    H = 256
    cell = unfading.IndRNNCell(H, H, activation="tanh")
    loop = unfading.Recurrent(lambda size: cell, H, backend="fused").cuda()
    scan = unfading.Recurrent(AffineCell, 2 * H, backend="scan").cuda()
    cell.from_input.weight.copy_(torch.eye(H))
    cell.from_input.bias.zero_()
    for B, T, scale in [(B, T, scale) for B in (1, 16) for T in (1024, 16384, 65536) for scale in (0.5, 0.9, 0.99, 1.2)]:
        torch.manual_seed(0)
        cell.u.fill_(scale)
        a = 0.3 * torch.randn(T, B, H, device="cuda")
        h, count = newton(cell.u, a, scan)
        exact = loop(a)[0]
        error = (h - exact).abs().max().item()
        line: dict[str, Any] = {"T": T, "B": B, "H": H, "u": scale, "corrections": count}
        line["error"] = error if math.isfinite(error) else None  # None: the corrections diverged
        line["lyapunov"] = lyapunov(cell.u, exact)
        line["fused ms"] = milliseconds(lambda a=a: loop(a))
        line["newton ms"] = milliseconds(lambda a=a: newton(cell.u, a, scan)) if error < 100 * TOLERANCE else None
        line["one correction ms"] = milliseconds(lambda h=h, a=a: corrected(h, cell.u, a, scan))
        line |= machine.about("newton")
        print(json.dumps(line), flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
