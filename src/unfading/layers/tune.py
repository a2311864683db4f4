"""`unfading.tune(layer)`: search for the fastest launch settings of a layer's kernels on its GPU, and store them."""

from typing import Any

import torch

from unfading.errors import check_count, check_type
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.probe import tune_cell
from unfading.layers.recurrent import Recurrent


def tune(layer: Recurrent, *, steps: int = 200, batch: int = 128) -> dict[str, list[Any]]:
    """Time the kernels of every cell with different numbers of warps and tile sizes; store the fastest for later processes.

    This takes up to some minutes, since every setting is compiled. Tuning is optional: the default settings were the fastest on
    an H200 over many cells and sizes. The result is valid for the present autocast mode and tf32 setting of torch.

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
                choices[f"cells.{i}"] = tune_cell(cell, T=steps, B=batch)
            except NotFusable as error:
                raise ValueError(
                    f"{type(cell).__name__} has no kernels to tune: it does not run fused, since {error}."
                ) from None
    return choices
