"""Runs of the incremental RNN's tables and figures: settings that many rows share.

Stated in the paper: Adam, batch 128, ReLU, units per task (Table 5), eta = 0.01 at the start, 20 % of the training rows for
validation, then all of them. Not stated: ranks, epochs, decay, clipping. Ranks are those that give the printed sizes
(`parameters`); epochs, cosine decay to 0, clipping at norm 1, and a return to the best weights with half the rate where a loss
is not finite (three times at most) are ours, for every cell. The published rate, 1e-2, diverges on long sequences:
the rates here are chosen from by validation.
"""

from typing import Any

from unfading.training.run import Run

Options = dict[str, Any]

# Our settings: what the paper leaves open.
SHARED: Options = {"batch": 128, "clip_norm": 1.0, "schedule": "cosine", "retries": 3}
RATES = (1e-3, 3e-3)
STABLE_RATES = (4e-3, 8e-3)


def incremental(task: str, task_options: Options, *, T: int, K: int, rank: int, eta_rate: float = 0.1, **own: Any) -> Run:
    """The paper's cell; own: fields of the run, and eta and activation of the layer."""
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
    """Our stable form, with eta's rate a tenth."""
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
    """A cell that the paper compares with, at the same budget."""
    return Run(
        task=task, task_options=task_options, cell=cell, cell_options=cell_options or {}, **{**SHARED, "rate": 1e-3, **own}
    )
