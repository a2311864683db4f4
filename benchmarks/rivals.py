"""Compiled coRNN, LEM and UnICORNN against loops like their authors': `python benchmarks/rivals.py --device cuda --out FILE`

The loops here are plain PyTorch, one step after the other, in the parametrisation of the released code, with the sizes of the
authors' runs on permuted MNIST. Before a cell is timed, its output and the gradient of its input are compared with those of the
loop in float64, with the same weights; tests/cells/test_released_loops.py compares all gradients. The times are medians of
forward and backward pass with the gradients of all parameters, and calls of the two take turns: "ms" of calls from Python, and
on a GPU "graph ms" of the same call replayed as a CUDA graph, where Python launches no kernel of the loop. Prints one JSON line
per cell. The authors of UnICORNN, and of LEM in a second version, also wrote CUDA kernels, which are not timed here.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal, Protocol, cast

import torch
import tyro
from lanes import captured, write
from torch import Tensor, nn

import unfading
from unfading import machine

T = 784
TOLERANCE = 1e-5  # relative to the largest entry, over 50 steps in float32


class ReleasedLoop(Protocol):
    """A loop in the parametrisation of the authors' code."""

    def ours(self) -> dict[str, Tensor]:
        """Its parameters, cut and stacked as those of our cell."""


class CoRNN(nn.Module):
    """One linear layer of the input, the velocities and the positions, in this order."""

    def __init__(self, inputs: int, hidden: int, dt: float, gamma: float, epsilon: float):
        super().__init__()
        self.inputs, self.hidden, self.dt, self.gamma, self.epsilon = inputs, hidden, dt, gamma, epsilon
        self.i2h = nn.Linear(inputs + 2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        hy = hz = x.new_zeros(x.shape[1], self.hidden)
        outputs = []
        for x_t in x:
            force = torch.tanh(self.i2h(torch.cat([x_t, hz, hy], dim=1)))
            hz = hz + self.dt * (force - self.gamma * hy - self.epsilon * hz)
            hy = hy + self.dt * hz
            outputs.append(hy)
        return torch.stack(outputs)

    def ours(self) -> dict[str, Tensor]:
        of_input, V, W = self.i2h.weight.split([self.inputs, self.hidden, self.hidden], dim=1)
        return {"from_input.weight": of_input, "V": V, "W": W, "from_input.bias": self.i2h.bias}


class LEM(nn.Module):
    """Rows of inp2hid: the steps of y and z, the terms of y and z; of hid2hid: both steps, the term of z."""

    def __init__(self, inputs: int, hidden: int, dt: float):
        super().__init__()
        self.hidden, self.dt = hidden, dt
        self.inp2hid, self.hid2hid = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 3 * hidden)
        self.transform_z = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = z = x.new_zeros(x.shape[1], self.hidden)
        outputs = []
        for x_t in x:
            i_1, i_2, i_z, i_y = self.inp2hid(x_t).chunk(4, 1)
            h_1, h_2, h_y = self.hid2hid(y).chunk(3, 1)
            step_1, step_2 = self.dt * torch.sigmoid(i_1 + h_1), self.dt * torch.sigmoid(i_2 + h_2)
            z = (1 - step_2) * z + step_2 * torch.tanh(i_y + h_y)
            y = (1 - step_1) * y + step_1 * torch.tanh(self.transform_z(z) + i_z)
            outputs.append(y)
        return torch.stack(outputs)

    def ours(self) -> dict[str, Tensor]:
        weight, bias = (torch.cat([t.chunk(4)[i] for i in (1, 0, 3, 2)]) for t in (self.inp2hid.weight, self.inp2hid.bias))
        W, second = (torch.cat([t.chunk(3)[i] for i in (1, 0, 2)]) for t in (self.hid2hid.weight, self.hid2hid.bias))
        # Our one bias of each line is the sum of their two.
        bias = bias + torch.cat([second, self.transform_z.bias])
        return {"from_input.weight": weight, "from_input.bias": bias, "W": W, "W_y": self.transform_z.weight}


class UnICORNN(nn.Module):
    """A linear layer over time, then a loop without a matrix."""

    def __init__(self, inputs: int, hidden: int, dt: float, alpha: float):
        super().__init__()
        self.hidden, self.dt, self.alpha = hidden, dt, alpha
        self.fc = nn.Linear(inputs, hidden)
        self.weight_hh, self.c_ = nn.Parameter(torch.rand(hidden)), nn.Parameter(0.2 * torch.rand(hidden) - 0.1)

    def forward(self, x: Tensor) -> Tensor:
        hy = hz = x.new_zeros(x.shape[1], self.hidden)
        outputs = []
        for u in self.fc(x):
            hz = hz - self.dt * torch.sigmoid(self.c_) * (torch.tanh(hy * self.weight_hh + u) + self.alpha * hy)
            hy = hy + self.dt * torch.sigmoid(self.c_) * hz
            outputs.append(hy)
        return torch.stack(outputs)

    def ours(self) -> dict[str, Tensor]:
        return {"from_input.weight": self.fc.weight, "from_input.bias": self.fc.bias, "w": self.weight_hh, "c": self.c_}


LOOPS: dict[str, Callable[..., nn.Module]] = {"CoRNN": CoRNN, "LEM": LEM, "UnICORNN": UnICORNN}
# Units, batch and options of the authors' runs on permuted MNIST.
RUNS: dict[str, tuple[int, int, dict[str, float]]] = {
    "CoRNN": (256, 120, {"dt": 0.076, "gamma": 0.4, "epsilon": 8.0}),
    "LEM": (128, 128, {"dt": 0.31}),
    "UnICORNN": (256, 32, {"dt": 0.19, "alpha": 30.65}),
}


def copy_weights(loop: nn.Module, cell: unfading.Cell[Any, Any, Any]) -> None:
    """Give a cell the parameters of a loop."""
    with torch.no_grad():
        for key, tensor in cast(ReleasedLoop, loop).ours().items():
            cell.get_parameter(key).copy_(tensor)


def error(loop: nn.Module, layer: nn.Module, x: Tensor) -> float:
    """The largest difference of output and gradient of x from the loop in float64, relative to the largest entry of each.

    With exact products, whatever the precision in which both are timed.
    """
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "ieee"
    results = []
    for model, given in ((layer, x), (copy.deepcopy(loop).double(), x.double())):
        given = given.detach().requires_grad_()
        output = _output(model, given)
        results.append([output.detach(), *torch.autograd.grad(output.square().mean(), given)])
    torch.backends.cuda.matmul.fp32_precision = before
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(*results, strict=True))


def _output(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return output[0] if isinstance(output, tuple) else output


def both(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """A forward and a backward pass, with the gradients of all parameters."""
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(_output(model, x)[-1].square().mean(), parameters)


def milliseconds(runs: Sequence[Callable[[], object]], x: Tensor, rounds: int) -> list[float]:
    """The median times of calls, which take turns."""
    times = []
    for _ in range(rounds + 2):  # the first two warm up
        moments = [_now(x)]
        for run in runs:
            run()
            moments.append(_now(x))
        times.append([1e3 * (after - before) for before, after in pairwise(moments)])
    return [median(each) for each in zip(*times[2:], strict=True)]


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    return perf_counter()


def main(
    device: Literal["cpu", "cuda"] = "cpu", rounds: int = 7, matmul: Literal["tf32", "ieee"] = "tf32", out: Path | None = None
) -> None:
    """Time the cells.

    Args:
        device: Where both run.
        rounds: Timed calls of each.
        matmul: Precision of float32 products on a GPU, for both.
        out: A file to which the lines are appended.
    """
    torch.backends.cuda.matmul.fp32_precision = matmul
    for name, (hidden, batch, options) in RUNS.items():
        torch.manual_seed(0)
        loop = LOOPS[name](1, hidden, **options).to(device)
        layer = getattr(unfading, name)(1, hidden, **options).to(device)
        copy_weights(loop, layer.runners[0])
        x = torch.rand(T, batch, 1, device=device)
        line: dict[str, Any] = {"cell": name, "T": T, "B": batch, "H": hidden, "matmul": matmul}
        line["error"] = error(loop, layer, x[:50, :8])
        if line["error"] < TOLERANCE:
            runs = [both(model, x) for model in (loop, layer)]
            line["loop ms"], line["unfading ms"] = milliseconds(runs, x, rounds)
            if x.is_cuda:
                graphs = [captured(run) for run in runs]
                line["loop graph ms"], line["unfading graph ms"] = milliseconds(graphs, x, rounds)
        write({**line, **machine.about(f"python benchmarks/rivals.py --device {device} --matmul {matmul}")}, out)


if __name__ == "__main__":
    tyro.cli(main)
