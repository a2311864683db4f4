"""Runs of STAR's tables and figures: deep networks of one cell.

Stated in the paper: 128 units, 100 epochs, batch 100, Adam 1e-3, orthogonal initialisation, chrono biases (section C.1); the
model with the lowest validation loss is tested. Clipping at norm 5 and the first 5,000 training images for validation are those
of the released trainer. The authors' stored permutation is not public: ours is that of the incremental RNN.

For gestures (section C.3) the paper states 3 x 3 kernels, 64 filters, SGD with momentum 0.9, batch 8, a rate that decays
polynomially from 1e-3 to 1e-6 over 30 epochs, and L2 with weight 5e-5 for all parameters. It does not state the power of the
decay, for which ours is 1, nor a chrono initialisation, so there is none; clipping is that of the other networks.
"""

from typing import Any

from unfading.training.run import Run

CELLS = ("vRNN", "LSTM", "LSTM w/f", "RHN", "STAR")
CONVOLUTIONAL = {"convLSTM": "ConvLSTM", "convLSTM w/f": "ConvForgetLSTM", "convSTAR": "ConvSTAR"}
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


def gesture_network(cell: str, depth: int) -> Run:
    """The network of the gesture experiment: a stack of one convolutional cell, and a CNN as the task's head."""
    sgd: dict[str, Any] = {"optimiser": "sgd", "optimiser_options": {"momentum": 0.9, "l2": 5e-5}}
    decay: dict[str, Any] = {"rate": 1e-3, "schedule": "polynomial", "schedule_options": {"floor": 1e-3}}
    return frame_stack(cell, depth, "jester", {}, hidden=64, batch=8, epochs=30, **sgd, **decay)


def frame_stack(cell: str, depth: int, task: str, task_options: dict[str, Any], **own: Any) -> Run:
    """A deep network of a convolutional cell of the paper, with 3 x 3 kernels."""
    fields: dict[str, Any] = {"clip_norm": 5.0, "select_by": "loss", **own}
    return Run(task=task, task_options=task_options, cell=CONVOLUTIONAL[cell], layers=depth, **fields)
