"""`unfading.tune(layer)`: search for the fastest way to run a layer on its GPU, and store it."""

from typing import Any, NamedTuple

import torch

from unfading.backends.choose import run
from unfading.backends.cuda_graph.backend import graph_refusal
from unfading.cells.base import Cell
from unfading.errors import check_count, check_type
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.probe import remember_graphs, tune_cell
from unfading.fuse.triton.search import milliseconds_of
from unfading.layers.recurrent import Recurrent
from unfading.loop_options import LoopOptions


class AgainstGraphs(NamedTuple):
    """The time of a cell by its kernels and by CUDA graphs of the reference loop. "auto" takes the shorter one."""

    gradient: bool  # whether it is that of a forward and a backward pass
    fused: float  # milliseconds
    graph: float


def tune(layer: Recurrent, *, steps: int = 200, batch: int = 128) -> dict[str, list[Any]]:
    """Time the kernels of every cell with other settings, and CUDA graphs; store the fastest for later processes.

    The settings are the rows and units of a program, or all units in one, the number of warps, and the width of a tile. This
    takes up to some minutes, since every setting is compiled. Tuning is optional: the default settings have the least time by
    estimates that were fitted to an H200. The result is valid for the present autocast mode and tf32 setting of torch, and for
    about as many rows.

    Args:
        layer: a layer on a GPU.
        steps: length of the timed sequence.
        batch: number of its rows.
    """
    check_type("layer", layer, Recurrent)
    check_count("steps", steps)
    check_count("batch", batch)
    device = layer.initial_states(1)[0][0].device
    if device.type != "cuda":
        raise ValueError(f"tune times kernels on a GPU; the layer is on {device}. Move it there first: layer.cuda().")
    choices: dict[str, list[Any]] = {}
    with torch.cuda.device(device):
        for i, cell in enumerate(layer.runners):
            try:
                choices[f"cells.{i}"] = [*tune_cell(cell, T=steps, B=batch), *_against_graphs(cell, steps, batch)]
            except NotFusable as error:
                raise ValueError(
                    f"{type(cell).__name__} has no kernels to tune: it does not run fused, since {error}."
                ) from None
    return choices


def _against_graphs(cell: Cell, steps: int, batch: int) -> list[AgainstGraphs]:
    """The times of a cell without and with a gradient. Nothing where its step cannot be recorded."""
    if graph_refusal(cell) is not None:
        return []
    times: list[AgainstGraphs] = []
    for gradient in (False, True):
        try:
            fused, graph = (_milliseconds(cell, backend, steps, batch, gradient) for backend in ("fused", "graph"))
        except RuntimeError:  # the step cannot be recorded
            return times
        remember_graphs(cell, batch, keep=gradient, faster=graph < fused)
        times.append(AgainstGraphs(gradient, fused, graph))
    return times


def _milliseconds(cell: Cell, backend: str, steps: int, batch: int, gradient: bool) -> float:
    parameters = [parameter for parameter in cell.parameters() if parameter.requires_grad]
    device = parameters[0].device
    x = torch.zeros(steps, batch, cell.input_size, device=device, dtype=parameters[0].dtype)

    def call() -> None:
        with torch.set_grad_enabled(gradient):
            trajectory, _ = run(cell, x, cell.initial_state(batch), LoopOptions(backend=backend))
            if gradient:
                torch.autograd.grad(trajectory[0].sum(), parameters, allow_unused=True)

    return milliseconds_of(call, device)
