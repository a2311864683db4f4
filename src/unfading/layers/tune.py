"""`unfading.tune(layer)`: the fastest way to cut a layer's loops on the GPU it is on, searched for and remembered."""

from typing import Any

import torch

from unfading.errors import check_count
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.probe import tune_cell
from unfading.layers.recurrent import Recurrent


def tune(layer: Recurrent, *, steps: int = 200, batch: int = 128) -> dict[str, list[Any]]:
    """Time the loops of every cell with other numbers of warps and other tiles; later processes take what was best.

    Minutes at most, for each way is compiled. Nothing need be tuned: without it the settings are those that were best on an
    H200 over many cells and sizes. Autocast, and whether torch allows tf32, count as they are now.

    Args:
        layer: on a GPU.
        steps: of the sequence that is timed.
        batch: its rows.
    """
    check_count("steps", steps)
    check_count("batch", batch)
    device = next(layer.parameters()).device
    if device.type != "cuda":
        raise ValueError(f"tune times kernels on a GPU; the layer is on {device}. Move it there first: layer.cuda().")
    found: dict[str, list[Any]] = {}
    with torch.cuda.device(device):
        for i, cell in enumerate(layer.runners):
            try:
                found[f"cells.{i}"] = tune_cell(cell, T=steps, B=batch)
            except NotFusable as error:
                raise ValueError(f"{type(cell).__name__} has no loops to tune, for it does not run fused: {error}.") from None
    return found
