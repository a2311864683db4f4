"""Runs of STAR's tables and figures: deep networks of one cell.

Stated in the paper: 128 units, 100 epochs, batch 100, Adam 1e-3, orthogonal initialisation, chrono biases (section C.1); the
model with the lowest validation loss is tested. Clipping at norm 5 and the first 5,000 training images for validation are those
of the released trainer. The authors' stored permutation is not public: ours is that of the incremental RNN.
"""

from typing import Any

from unfading.training.run import Run

CELLS = ("vRNN", "LSTM", "LSTM w/f", "RHN", "STAR")
PIXELS: dict[str, Any] = {"validation": "first_5000"}


def stack(cell: str, depth: int, task: str, task_options: dict[str, Any], *, lag: int = 784, **own: Any) -> Run:
    """A deep network of the paper; "RHN, L layers" is one recurrent highway network of recurrence depth L."""
    options: dict[str, Any] = {"vRNN": {}}.get(cell, {"max_lag": lag})
    kinds = {"vRNN": "Elman", "LSTM w/f": "ForgetLSTM", "RHN": "RecurrentHighway"}
    if cell == "RHN":
        options = {**options, "depth": depth, "coupled": False}
    fields: dict[str, Any] = {"rate": 1e-3, "clip_norm": 5.0, "batch": 100, "epochs": 100, "select_by": "loss", **own}
    layers = 1 if cell == "RHN" else depth
    return Run(
        task=task, task_options=task_options, cell=kinds.get(cell, cell), cell_options=options, layers=layers, **fields
    )  # fmt: skip
