"""Newton's method in time against the fused loop: `python benchmarks/newton.py --out FILE [--device cpu]`

A step with independent units that is not linear, h_t = tanh(u h_{t-1} + a_t), has a diagonal Jacobian J_t = u (1 - h_t^2).
Newton's method guesses all states at once and corrects them together (DEER, ParaRNN):

    f_t = tanh(u g_{t-1} + a_t),   J_t = u (1 - f_t^2),   h_t = J_t h_{t-1} + (f_t - J_t g_{t-1})      for a guess g

Each correction is a linear recurrence, which backend="scan" runs. The first guess is zero. How fast the network forgets
is measured by the Lyapunov exponent, the mean of log |J_t| along the exact states; the first correction multiplies the
J_t along the guess. Forward pass only, without a gradient. Prints one JSON line per case: times on a GPU; on a CPU, the
number of corrections in float32 and in float64, also with every guess clipped to the range of tanh.
"""

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from lanes import milliseconds, write
from torch import Tensor

import unfading
from unfading import machine

TOLERANCE = 1e-5  # of the largest correction, and of the difference from the fused loop
MOST = 40  # corrections
H = 256


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


def newton(u: Tensor, a: Tensor, scan: unfading.Recurrent, *, clip: bool = False) -> tuple[Tensor, int]:
    """The states and the number of corrections."""
    h, count, change = torch.zeros_like(a), 0, math.inf
    while change > TOLERANCE and count < MOST:
        new = corrected(h, u, a, scan)
        new = new.clamp(-1, 1) if clip else new
        h, count, change = new, count + 1, (new - h).abs().max().item()
    return h, count


def lyapunov(u: Tensor, h: Tensor) -> float:
    """The mean of log |J_t| along the states h."""
    return (u * (1 - h * h)).abs().clamp_min(1e-30).log().mean().item()


def finite(value: float) -> float | None:
    """None for infinity and NaN, which corrections give when they overflow."""
    return value if math.isfinite(value) else None


class Loops(NamedTuple):
    """The cell, its exact loop, and the linear recurrence of a correction."""

    cell: unfading.IndRNNCell
    exact: unfading.Recurrent
    scan: unfading.Recurrent


def loops(device: str, dtype: torch.dtype) -> Loops:
    """A CPU has no scan; there the linear recurrence runs one step after another."""
    cell = unfading.IndRNNCell(H, H, activation="tanh")
    exact = unfading.Recurrent(lambda size: cell, H, backend="fused").to(device, dtype)
    scan = unfading.Recurrent(AffineCell, 2 * H, backend="scan" if device == "cuda" else "fused").to(device, dtype)
    cell.from_input.weight.copy_(torch.eye(H))
    cell.from_input.bias.zero_()
    return Loops(cell, exact, scan)


def timed(loops: Loops, T: int, B: int, u: float) -> dict[str, Any]:
    """The line of a case on a GPU."""
    cell, loop, scan = loops
    torch.manual_seed(0)
    cell.u.fill_(u)
    a = 0.3 * torch.randn(T, B, H, device=cell.u.device)
    h, count = newton(cell.u, a, scan)
    exact = loop(a)[0]
    error = (h - exact).abs().max().item()
    line = {"T": T, "B": B, "H": H, "u": u, "corrections": count, "error": finite(error)}
    line |= {"lyapunov": lyapunov(cell.u, exact), "lyapunov guess": lyapunov(cell.u, torch.tanh(a))}
    line["fused ms"] = milliseconds(lambda: loop(a))
    line["newton ms"] = milliseconds(lambda: newton(cell.u, a, scan)) if error < 100 * TOLERANCE else None
    line["one correction ms"] = milliseconds(lambda: corrected(h, cell.u, a, scan))
    return line | machine.about("newton")


def counted(loops: Loops, T: int, u: float) -> dict[str, Any]:
    """The line of a case on a CPU."""
    cell, loop, scan = loops
    torch.manual_seed(0)
    cell.u.fill_(u)
    a = 0.3 * torch.randn(T, 1, H, dtype=torch.float64).to(cell.u)
    exact = loop(a)[0]
    line = {"T": T, "B": 1, "H": H, "u": u, "dtype": str(cell.u.dtype).removeprefix("torch.")}
    line |= {"lyapunov": lyapunov(cell.u, exact), "lyapunov guess": lyapunov(cell.u, torch.tanh(a))}
    line["largest"] = finite(corrected(torch.zeros_like(a), cell.u, a, scan).abs().max().item())
    for clip, name in ((False, ""), (True, " clipped")):
        h, count = newton(cell.u, a, scan, clip=clip)
        line |= {f"corrections{name}": count, f"error{name}": finite((h - exact).abs().max().item())}
    return line | machine.about("newton --device cpu")


@torch.no_grad()
def main(out: Path | None = None, device: Literal["cuda", "cpu"] = "cuda") -> None:
    """Time both on a GPU, or count corrections on a CPU.

    Args:
        out: A file to which the lines are appended.
        device: "cuda" for times, "cpu" for counts in two precisions.
    """
    if device == "cuda":
        both = loops(device, torch.float32)
        cases = [(T, B, u) for B in (1, 16) for T in (1024, 16384, 65536) for u in (0.5, 0.9, 0.99, 1.2)]
        lines = (timed(both, T, B, u) for T, B, u in cases)
    else:
        exact = [loops(device, dtype) for dtype in (torch.float32, torch.float64)]
        scales = (0.5, 0.9, 0.99, 1.1, 1.2, 1.5)
        lines = (counted(both, T, u) for both in exact for u in scales for T in (64, 256, 1024, 4096, 8192))
    for line in lines:
        write(line, out)


if __name__ == "__main__":
    tyro.cli(main)
