"""Kag, Zhang & Saligrama 2020: figures 3b and 9, gradients through time while the adding problem is learnt.

    ratio    ||dh_T/dh_1|| / ||dh_T/dh_{T-1}||       Fig. 3b; 1 where all steps pass a gradient on unchanged
    last     ||dh_T/dh_{T-1}||                       Fig. 9b
    loss     ||dL/dh_1||                             Fig. 9a; small also where the loss is

on sequences that training does not see. ||J|| is here the gain of a random cotangent v, sqrt(E ||v J||^2 / E ||v||^2), which is
1 for J = I or -I and the Frobenius norm over sqrt(H) for any; the mean is over 16 draws of v.
"""

import math
from dataclasses import replace
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from unfading.layers.model import Model
from unfading.papers.during_training import snapshots_together
from unfading.papers.incremental.curves import ablation
from unfading.papers.item import Item
from unfading.report.figures.panels import Panel, panels
from unfading.tasks.base import Batch, Task

T = 200
MOMENTS = 20  # of a training, at which it is looked at
DRAWS = 16  # of v, for each sequence
TINY = 1e-300


def fig9(steps: int = 1_000, windows: int = 8, seeds: int = 5, device: Literal["cpu", "cuda"] = "cpu") -> Item:
    """Gradients through time while adding (T = 200) is learnt: ratio (Fig. 3b), last step, and that of the loss."""
    shown: dict[str, list[dict[str, Any]]] = {"ratio": [], "last": [], "loss": []}
    findings = []
    for name, run in ablation(steps).items():
        runs = [replace(run, device=device, seed=seed) for seed in range(seeds)]
        task = run.make_task()
        batch = task.batch(0, windows, split="test", seed=0, device=device)
        ratios = []
        for step, models in snapshots_together(runs, every=max(1, steps // MOMENTS)):
            found = [_norms(model, task, batch) for model in models]
            ratios.append([each["ratio"] for each in found])
            for panel in shown:
                if finite := _finite([each[panel] for each in found]):
                    shown[panel].append({"setting": name, "x": step, "value": median(finite)})
        ends = f"{_told(ratios[0])} at the start, {_told(ratios[-1])} at the end"
        findings.append(f"{name}: the ratio ||dh_T/dh_1|| / ||dh_T/dh_(T-1)|| is {ends}.")
    whose = "seed 0" if seeds == 1 else f"the median of {seeds} seeds"
    titles = {
        "ratio": Panel("||dh_T/dh_1|| / ||dh_T/dh_(T-1)||", "training step", log=True),
        "last": Panel("||dh_T/dh_(T-1)||", "training step", log=True),
        "loss": Panel("||dL/dh_1||", "training step", log=True),
    }
    return Item(
        title="Figs. 3b and 9: gradients through time while the adding problem is learnt",
        caption=f"Gains of Jacobians of the state, and the norm of the loss's gradient in the first state, T = {T}, at "
        f"{min(MOMENTS, steps)} moments of {steps:,} steps of training (128 units, {whose}), on {windows} sequences. A ratio "
        "of 1 is a gradient that neither fades nor grows between the last step and the first.",
        chart=panels({titles[name]: rows for name, rows in shown.items()}),
        rows=[{"panel": name, **row} for name, rows in shown.items() for row in rows],
        findings=findings,
    )


def _told(ratios: list[float]) -> str:
    """The median over seeds, and from where to where they go; those that are not finite are told apart."""
    finite = _finite(ratios)
    if len(ratios) == 1 or not finite:
        return f"{ratios[0]:.2g}"
    lost = "" if len(finite) == len(ratios) else f", not finite in {len(ratios) - len(finite)} of {len(ratios)} seeds"
    return f"{median(finite):.2g} ({min(finite):.2g} to {max(finite):.2g}{lost})"


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _norms(model: Model, task: Task, batch: Batch) -> dict[str, float]:
    many = batch.x.repeat_interleave(DRAWS, dim=1)
    v = torch.randn(many.shape[1], model.rnn.output_size, generator=torch.Generator().manual_seed(0)).to(many.device)
    first, last = (_gain(model, many, at, v) for at in (1, len(many) - 1))
    output, h = _after(model, batch.x, 1)
    loss = task.loss(model.head(output, None), batch) * batch.x.shape[1]
    (gradient,) = torch.autograd.grad(loss, [h])
    return {"ratio": first / max(last, TINY), "last": last, "loss": float(gradient.norm(dim=-1).median())}


def _gain(model: Model, x: Tensor, at: int, v: Tensor) -> float:
    """sqrt(mean ||v dh_T/dh_t||^2 / mean ||v||^2), t = `at`."""
    output, h = _after(model, x, at)
    (gradient,) = torch.autograd.grad(output[-1], [h], v)
    return float(gradient.double().norm() / v.double().norm())


def _after(model: Model, x: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """The outputs after step `at`, and the state there, from which their graph begins."""
    with torch.no_grad():
        _, state = model.rnn(x[:at])
    state = type(state)(*(part.requires_grad_() for part in state))
    output, _ = model.rnn(x[at:], state, start=at)
    return output, state[0]
