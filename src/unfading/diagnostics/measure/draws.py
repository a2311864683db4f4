"""The lattice of a cell at initialisation, over many random stacks: its mean and its deviation between draws.

Each draw initialises a new stack of L cells and runs it over T steps of its own input. With n the width of every layer:

    x_t = alpha x_{t-1} + (1 - alpha) z_t,   z_t ~ N(0, I),   x_0 = 0,   alpha = 1/2
    v_t ~ N(0, I / n)                                           derivative of the loss by the top layer's output at step t

"last" has a loss on the last step only (v_t = 0 before), "all" on every step. States and biases start at zero; every other
parameter has the cell's own initialisation, without a chrono bias. Over the draws, at each point,

    mean = E[G],   deviation = sqrt(E[G^2] - E[G]^2) / E[G]

Turkoglu et al. 2019 (STAR): zero states and biases, orthogonal matrices, this input, 10,000 draws. The paper does not state its
L, T, n and loss; ours are L = T = 12, n = 64 and the v above.

`torch.func.vmap` computes many draws at a time, including the initialisation of their parameters. Chunks of draws can be
distributed over processes. The seed of a chunk depends only on its index, so the result does not depend on the processes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from unfading.cells.base import Cell
from unfading.diagnostics.measure.lattice import backward_pass, forward_pass
from unfading.diagnostics.measure.lattice_step import LatticeStep, Parameters
from unfading.errors import check_count
from unfading.tasks.draw import stream

CHUNK = 128  # draws at a time: with fewer, Python overhead dominates; with more, the data exceeds the processor's caches
ALPHA = 0.5
LOSSES = ("last", "all")
MakeCell = Callable[[int], Cell]


class StackSizes(NamedTuple):
    """The sizes of a stack; the defaults are those of every figure and table of this project."""

    layers: int = 12
    steps: int = 12
    width: int = 64


SIZES = StackSizes()


class LatticeStatistics(NamedTuple):
    """The lattice of a cell under one loss, over many draws."""

    mean: Tensor  # [L, T], float64; the bottom layer first
    deviation: Tensor  # [L, T], float64; relative to the mean
    draws: int


def lattice_statistics(
    make_cell: MakeCell, draws: int, sizes: StackSizes = SIZES, *, seed: int = 0, pool: Executor | None = None
) -> dict[str, LatticeStatistics]:
    """Mean and deviation of the lattice for both losses, "last" and "all".

    Args:
        make_cell: function from an input size to a cell. With a pool of processes it must be picklable, so no lambda.
        draws: number of random stacks.
        sizes: of each stack.
        seed: of everything that is drawn.
        pool: the workers that share the draws, from `worker_pool`; None computes them in this process.
    """
    check_count("draws", draws)
    jobs = [(make_cell, sizes, seed, i, min(CHUNK, draws - start)) for i, start in enumerate(range(0, draws, CHUNK))]
    map_jobs = map if pool is None else pool.map
    sums: Tensor = sum(map_jobs(_sums_of_chunk, *zip(*jobs, strict=True)), start=torch.zeros(()))
    mean = sums[0] / draws
    deviation = (sums[1] / draws - mean.square()).clamp(min=0.0).sqrt() / mean
    return {loss: LatticeStatistics(mean[i], deviation[i], draws) for i, loss in enumerate(LOSSES)}


def worker_pool(processes: int) -> Executor:
    """A pool of processes for `lattice_statistics`, each with one torch thread."""
    check_count("processes", processes)
    # Spawned, because torch's threads do not survive a fork.
    return ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,))


def _sums_of_chunk(make_cell: MakeCell, sizes: StackSizes, seed: int, index: int, draws: int) -> Tensor:
    """The sums of G and of its square over one chunk of draws, [2, losses, L, T]."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(stream(seed, "train", index, "cpu", purpose="lattice").initial_seed())
        cells = make_stack(make_cell, sizes)
        thetas = [initial_parameters(cell, draws) for cell in cells]
        x, v = random_signals(sizes, cells[-1].output_size, draws)
    G = lattices(cells, thetas, x, v)
    return torch.stack([G.sum(0), G.square().sum(0)])


def make_stack(make_cell: MakeCell, sizes: StackSizes) -> list[Cell]:
    """The cells of one stack, the bottom one first; each reads the output of the one below."""
    cells: list[Cell] = []
    for _ in range(sizes.layers):
        cells.append(make_cell(cells[-1].output_size if cells else sizes.width))
    if cells[0].example_frame:
        raise ValueError(
            f"draws are stacks over feature vectors; {type(cells[0]).__name__} reads frames. Measure a model of it with "
            "`lattice`."
        )
    return cells


class _Initialisation(nn.Module):
    """The initialisation of a cell as a module's forward, so that `functional_call` can apply it to other tensors."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self) -> None:
        self.cell.reset_parameters()  # type: ignore[operator]  # not part of the contract; `initial_parameters` has checked
        for name, value in self.cell.named_parameters():
            if is_bias(name):
                value.zero_()


def is_bias(name: str) -> bool:
    """Whether a parameter of a cell is a bias, by the names that cells give to biases: bias, b, b_heads."""
    last = name.rpartition(".")[2]
    return last in ("bias", "b") or last.startswith("b_")


def initial_parameters(cell: Cell, draws: int) -> Parameters:
    """The cell's parameters and buffers, initialised anew for each draw, with a first axis [draws]; biases are zero."""
    if not hasattr(cell, "reset_parameters"):
        raise TypeError(
            f"{type(cell).__name__} has no reset_parameters() method, which every draw calls to initialise it. Define one."
        )
    initialisation = _Initialisation(cell)
    state = {**dict(initialisation.named_parameters()), **dict(initialisation.named_buffers())}
    # What the initialisation does not change has the same value in every draw.
    copies = {name: value.detach().expand(draws, *value.shape).clone() for name, value in state.items()}

    def initialise(state: Parameters) -> Parameters:
        functional_call(initialisation, dict(state), ())
        return state

    return vmap(initialise, randomness="different")(copies)


def random_signals(sizes: StackSizes, output_size: int, draws: int) -> tuple[Tensor, Tensor]:
    """x [draws, T, 1, n] and v [draws, losses, T, 1, n]."""
    z = torch.randn(draws, sizes.steps, 1, sizes.width)
    x = [torch.zeros_like(z[:, 0])]
    for z_t in z.unbind(1):
        x.append(ALPHA * x[-1] + (1 - ALPHA) * z_t)
    every = torch.randn(draws, sizes.steps, 1, output_size) / output_size**0.5
    last = torch.zeros_like(every)
    last[:, -1] = every[:, -1]
    return torch.stack(x[1:], dim=1), torch.stack([last, every], dim=1)


def lattices(cells: Sequence[Cell], thetas: Sequence[Parameters], x: Tensor, v: Tensor) -> Tensor:
    """G of every draw under every loss, [draws, losses, L, T]; arguments from `initial_parameters` and `random_signals`."""
    layers = [LatticeStep(cell, batch=1, steps=x.shape[1]) for cell in cells]

    def lattices_of_draw(thetas: list[Parameters], x: Tensor, v: Tensor) -> Tensor:
        initial = [cell.initial_state(1) for cell in cells]
        _, backward_steps = forward_pass(layers, thetas, x, initial)
        return torch.stack([backward_pass(backward_steps, initial, v_loss) for v_loss in v])

    with torch.no_grad():
        return vmap(lattices_of_draw)(list(thetas), x, v)
