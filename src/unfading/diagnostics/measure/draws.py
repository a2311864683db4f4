"""The lattice of a cell at its start, over many random stacks: its mean, and how much it differs from draw to draw.

Each draw makes a stack of L cells anew and runs it over T steps of an input of its own. With n the width, everywhere:

    x_t = alpha x_{t-1} + (1 - alpha) z_t,   z_t ~ N(0, I),   x_0 = 0,   alpha = 1/2
    v_t ~ N(0, I / n)                                           what the loss sends back to the top layer's output at step t

"last" puts the loss on the last step alone (v_t = 0 before), "all" on every step. States and biases start at zero; every other
parameter as the cell starts it, without a chrono bias. Over the draws, at each point,

    mean = E[G],   deviation = sqrt(E[G^2] - E[G]^2) / E[G]

Turkoglu et al. 2019 (STAR): zero states and biases, orthogonal matrices, that input, 10,000 draws. Their L, T, n and loss are
not told; ours are L = T = 12, n = 64 and the v above.

Many draws go at a time through `torch.func.vmap`, the starts of their parameters included; chunks of draws can be shared out
to processes. A chunk is seeded by its own index: the result does not depend on the processes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from unfading.cells.base import Cell
from unfading.diagnostics.measure.lattice import run, sweep
from unfading.diagnostics.measure.lattice_step import LatticeStep, Parameters
from unfading.errors import check_count
from unfading.tasks.draw import stream

CHUNK = 128  # draws at a time: fewer leave the processor waiting for Python, more its caches
ALPHA = 0.5
LOSSES = ("last", "all")
MakeCell = Callable[[int], Cell]


class Setup(NamedTuple):
    """The sizes of the experiment; the defaults are those of every figure and table here."""

    layers: int = 12
    steps: int = 12
    width: int = 64


STATED = Setup()


class Drawn(NamedTuple):
    """The lattice of a cell under one loss, over many draws."""

    mean: Tensor  # [L, T], float64; the bottom layer first
    deviation: Tensor  # [L, T], float64; of the mean
    draws: int


def drawn(
    make_cell: MakeCell, draws: int, setup: Setup = STATED, *, seed: int = 0, pool: Executor | None = None
) -> dict[str, Drawn]:
    """The lattices for both losses, "last" and "all".

    Args:
        make_cell: of an input size; a pool of processes needs one that can be pickled: no lambda.
        draws: how many stacks.
        seed: of everything that is drawn.
        pool: whose workers share the draws, as `workers` makes it; None draws here.
    """
    check_count("draws", draws)
    jobs = [(make_cell, setup, seed, i, min(CHUNK, draws - start)) for i, start in enumerate(range(0, draws, CHUNK))]
    share = map if pool is None else pool.map
    sums: Tensor = sum(share(_chunk, *zip(*jobs, strict=True)), start=torch.zeros(()))
    mean = sums[0] / draws
    deviation = (sums[1] / draws - mean.square()).clamp(min=0.0).sqrt() / mean
    return {loss: Drawn(mean[i], deviation[i], draws) for i, loss in enumerate(LOSSES)}


def workers(processes: int) -> Executor:
    """Processes that share draws, each with one thread of torch."""
    check_count("processes", processes)
    # Not forked: torch's threads do not survive it.
    return ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,))


def _chunk(make_cell: MakeCell, setup: Setup, seed: int, index: int, draws: int) -> Tensor:
    """The sums of G and of its square over a few draws, [2, losses, L, T]."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(stream(seed, "train", index, "cpu", purpose="lattice").initial_seed())
        cells = stack(make_cell, setup)
        thetas = [started(cell, draws) for cell in cells]
        x, v = signals(setup, cells[-1].output_size, draws)
    G = magnitudes(cells, thetas, x, v)
    return torch.stack([G.sum(0), G.square().sum(0)])


def stack(make_cell: MakeCell, setup: Setup) -> list[Cell]:
    """The cells of one stack, the bottom one first; each reads the output of the one below."""
    cells: list[Cell] = []
    for _ in range(setup.layers):
        cells.append(make_cell(cells[-1].output_size if cells else setup.width))
    return cells


class _Start(nn.Module):
    """A cell's start as a module's forward, so that `functional_call` can put other tensors in the place of its own."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self) -> None:
        self.cell.reset_parameters()  # type: ignore[operator]  # no part of the contract; `started` has looked
        for name, value in self.cell.named_parameters():
            if is_bias(name):
                value.zero_()


def is_bias(name: str) -> bool:
    """Whether a parameter of a cell is a bias, by what biases are called here: bias, b, b_heads."""
    last = name.rpartition(".")[2]
    return last in ("bias", "b") or last.startswith("b_")


def started(cell: Cell, draws: int) -> Parameters:
    """The cell's parameters and buffers, started anew for each draw, each with a first axis [draws]; biases are zero."""
    if not hasattr(cell, "reset_parameters"):
        raise TypeError(f"{type(cell).__name__} has no reset_parameters(), which starts it anew for each draw. Give it one.")
    start = _Start(cell)
    state = {**dict(start.named_parameters()), **dict(start.named_buffers())}
    # What the start does not touch stays as it is.
    many = {name: value.detach().expand(draws, *value.shape).clone() for name, value in state.items()}

    def begin(state: Parameters) -> Parameters:
        functional_call(start, dict(state), ())
        return state

    return vmap(begin, randomness="different")(many)


def signals(setup: Setup, output_size: int, draws: int) -> tuple[Tensor, Tensor]:
    """x [draws, T, 1, n], and v [draws, losses, T, 1, n]."""
    z = torch.randn(draws, setup.steps, 1, setup.width)
    x = [torch.zeros_like(z[:, 0])]
    for z_t in z.unbind(1):
        x.append(ALPHA * x[-1] + (1 - ALPHA) * z_t)
    every = torch.randn(draws, setup.steps, 1, output_size) / output_size**0.5
    last = torch.zeros_like(every)
    last[:, -1] = every[:, -1]
    return torch.stack(x[1:], dim=1), torch.stack([last, every], dim=1)


def magnitudes(cells: Sequence[Cell], thetas: Sequence[Parameters], x: Tensor, v: Tensor) -> Tensor:
    """G of every draw under every loss, [draws, losses, L, T]; arguments as `started` and `signals` give them."""
    points = [LatticeStep(cell, batch=1) for cell in cells]

    def one(thetas: list[Parameters], x: Tensor, v: Tensor) -> Tensor:
        initial = [cell.initial_state(1) for cell in cells]
        _, backs = run(points, thetas, x, initial)
        return torch.stack([sweep(backs, initial, v_loss) for v_loss in v])

    with torch.no_grad():
        return vmap(one)(list(thetas), x, v)
