"""Runs of the incremental RNN's tables and figures: settings that many rows share.

Stated in the paper: Adam, batch 128, ReLU, units per task (Table 5), eta = 0.01 at the start, 20 % of the training rows for
validation, then training on all rows. Not stated: ranks, epochs, decay, clipping. Our ranks are those that give the printed
sizes (`parameters`). Epochs, cosine decay to 0, clipping at norm 1, and at most three returns to the best weights at half the
rate when a loss is not finite are ours, for every cell. The published rate, 1e-2, diverges on long sequences; validation
chooses among the rates below.
"""

from typing import Any

from unfading.training.run import Run

Options = dict[str, Any]

# Settings that the paper leaves open.
SHARED: Options = {"batch": 128, "clip_norm": 1.0, "schedule": "cosine", "retries": 3}
RATES = (1e-3, 3e-3)
STABLE_RATES = (4e-3, 8e-3)


def incremental(task: str, task_options: Options, *, T: int, K: int, rank: int, eta_rate: float = 0.1, **own: Any) -> Run:
    """The paper's cell. `own` holds fields of the run, and eta and activation of the layer."""
    cell: Options = {name: own.pop(name) for name in ("eta", "activation") if name in own}
    rates = {} if eta_rate == 1.0 else {"eta": eta_rate}
    return Run(
        task=task,
        task_options=task_options,
        cell="IncrementalRNN",
        cell_options={"inner_steps": K, "rank": rank, "steps": T, **cell},
        rates=rates,
        **{**SHARED, "rate": 3e-3, **own},
    )


def stable(task: str, task_options: Options, *, T: int, K: int, rank: int, **own: Any) -> Run:
    """Our stable form, with a tenth of the learning rate for eta."""
    cell: Options = {name: own.pop(name) for name in ("eta", "activation") if name in own}
    return Run(
        task=task,
        task_options=task_options,
        cell="StableIncrementalRNN",
        cell_options={"inner_steps": K, "rank": rank, "steps": T, **cell},
        rates={"eta": 0.1},
        **{**SHARED, "rate": 8e-3, **own},
    )


def baseline(cell: str, task: str, task_options: Options, cell_options: Options | None = None, **own: Any) -> Run:
    """A cell that the paper compares with, at the same settings."""
    return Run(
        task=task, task_options=task_options, cell=cell, cell_options=cell_options or {}, **{**SHARED, "rate": 1e-3, **own}
    )


# Runs of figures 7 and 8.
HAR2 = {
    "RNN (tanh, orthogonal start)": {"cell": "Elman", "rate": 1e-3},
    "incremental RNN, K = 5, rank 16": {
        "cell": "IncrementalRNN", "cell_options": {"rank": 16, "steps": 128}, "rate": 1e-2,  # both rates as published
    },
    "stable incremental RNN (ours), K = 5, rank 8": {
        "cell": "StableIncrementalRNN", "cell_options": {"rank": 8, "steps": 128, "inner_steps": 5}, "rate": 3e-3,
        "rates": {"eta": 0.1},
    },
}  # fmt: skip


def har2(setting: str, steps: int) -> Run:
    """A run of figures 7 and 8: 80 units, as in the paper; Adam, batch 128, clipped at norm 1, seed 0."""
    return Run(task="har2", hidden=80, batch=128, steps=steps, seed=0, **HAR2[setting])  # type: ignore[arg-type]
