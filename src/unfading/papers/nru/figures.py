"""Chandar et al. 2019 (NRU): figures 6 and 7, the memory of a trained NRU and gradient norms during training, on copying."""

from dataclasses import replace
from typing import Any, Literal

import torch

from unfading.papers.during_training import layer_norms, snapshots
from unfading.papers.item import Item
from unfading.papers.nru.runs import TOP3, recall
from unfading.report.figures.panels import Panel, heat, panels

T = 100
MOMENTS = 40  # of a training run, at which gradients are measured


def fig6(steps: int = 50_000, device: Literal["cpu", "cuda"] = "cpu") -> Item:
    """How the memory of an NRU changes along a sequence of copying, T = 100, once it is trained."""
    run = replace(recall("NRU", "copying", T, steps=steps), device=device, valid_batches=10)
    task = run.make_task()
    *_, (_, model) = snapshots(run, every=steps)
    batch = task.batch(0, 1, split="test", seed=0, device=device)
    with torch.no_grad():
        memory = model.rnn.trajectory(model.encoder(batch.x)).m[:, 0, 0]  # [T + 20, m]
        error = float(task.loss(model(batch.x)[0], batch))
    change = torch.diff(memory, dim=0, prepend=torch.zeros_like(memory[:1])).abs().cpu()
    parts = {"the ten symbols": change[:10], "the wait": change[10:-10], "the answer": change[-10:]}
    means = {name: float(part.mean()) for name, part in parts.items()}
    rows = [
        {"x": t, "y": j, "value": round(float(value), 5)} for t, line in enumerate(change, 1) for j, value in enumerate(line)
    ]
    return Item(
        title="NRU Fig. 6: change of the memory along a sequence of copying",
        caption=f"|m_t - m_(t-1)| of each of {change.shape[1]} memory cells at each of {len(change)} steps of one test "
        f"sequence of copying (T = {T}), after {steps:,} training steps. The paper's network writes while the ten symbols "
        "come, leaves the memory alone until the marker, and changes it while it answers.",
        chart=heat(rows, "step of the sequence", "memory cell", "change"),
        rows=rows,
        findings=[
            f"Cross entropy of the sequence {error:.3g}, against {task.guess:.3g} of a guess. Mean change of a memory cell: "
            + ", ".join(f"during {name} {value:.3g}" for name, value in means.items())
            + "."
        ],
    )


def fig7(steps: int = 50_000, windows: int = 100, device: Literal["cpu", "cuda"] = "cpu") -> Item:
    """Gradient norms of NRU, JANET and LSTM-chrono while copying, T = 100, is learnt."""
    norms: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    findings = []
    for cell in TOP3:
        run = replace(recall(cell, "copying", T, steps=steps), device=device, valid_batches=10)
        task = run.make_task()
        batch = task.batch(0, windows, split="valid", seed=0, device=device)
        for step, model in snapshots(run, every=max(1, steps // MOMENTS)):
            layers, loss = layer_norms(model, task, batch)
            norms.append({"setting": cell, "x": step, "value": layers[0]})
            losses.append({"setting": cell, "x": step, "value": loss})
        own = [row["value"] for row in norms if row["setting"] == cell]
        largest = max(range(len(own)), key=own.__getitem__)
        at = [row["x"] for row in norms if row["setting"] == cell][largest]
        findings.append(
            f"{cell}: norm {own[0]:.2g} at the start, largest {own[largest]:.2g} at step {at:,}, {own[-1]:.2g} at the end."
        )
    return Item(
        title="NRU Fig. 7: gradient norms while copying is learnt",
        caption=f"Norm of the gradient of the recurrent parameters and loss, on {windows} validation sequences of copying "
        f"(T = {T}), at {MOMENTS} moments of {steps:,} training steps (batch 10, Adam 1e-3; one seed).",
        chart=panels(
            {
                Panel("gradient norm", "training step", log=True): norms,
                Panel("validation cross entropy", "training step", log=True): losses,
            }
        ),
        rows=[{"panel": panel, **row} for panel, rows in (("norm", norms), ("loss", losses)) for row in rows],
        findings=findings,
    )
