"""Turkoglu et al. 2019 (STAR): figure 3, gradients of 12-layer networks at the start and over the first epoch."""

from typing import Any, Literal

from unfading.papers.during_training import layer_norms, snapshots
from unfading.papers.item import Item
from unfading.papers.star.tables import CELLS, PIXELS, stack
from unfading.report.figures.panels import Panel, panels

LAYERS = 12
MOMENTS = 20


def fig3(steps: int = 550, windows: int = 100, device: Literal["cpu", "cuda"] = "cpu") -> Item:
    """Pixel MNIST with 12 layers: gradient norms of the layers at the start, and norm and loss over the first epoch."""
    at_start: list[dict[str, Any]] = []
    norms: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    findings = []
    for cell in CELLS:
        run = stack(
            cell, LAYERS, "pixel_mnist", PIXELS, epochs=None, steps=steps, device=device, batch=windows, valid_batches=1
        )
        task = run.make_task()
        batch = task.batch(0, windows, split="valid", seed=0, device=device)
        for step, model in snapshots(run, every=max(1, steps // MOMENTS)):
            found, loss = layer_norms(model, task, batch)
            if step == 0:
                at_start += [{"setting": cell, "x": i, "value": norm} for i, norm in enumerate(found, 1)]
            norms.append({"setting": cell, "x": step, "value": sum(norm**2 for norm in found) ** 0.5})
            losses.append({"setting": cell, "x": step, "value": loss})
        own = [row for row in norms if row["setting"] == cell]
        first = [row["value"] for row in at_start if row["setting"] == cell]
        ends = f"of all parameters {own[0]['value']:.2g} at the start and {own[-1]['value']:.2g} after {own[-1]['x']} steps"
        ratio = f"lowest layer over highest {first[0] / first[-1]:.2g}, " if len(first) > 1 and first[-1] else ""
        findings.append(f"{cell}: {ratio}{ends}; loss {losses[-1]['value']:.3g}.")
    return Item(
        title="STAR Fig. 3: gradients of 12-layer networks on pixel MNIST",
        caption=f"Networks of {LAYERS} layers of 128 units (RHN: one of recurrence depth {LAYERS}) at their start and during "
        f"{steps} steps of training, Adam 1e-3, batch {windows}, one seed. Left: norm of the gradient of each layer's "
        "parameters at the start, layer 1 is nearest the input. Middle: norm of all recurrent parameters' gradient. Right: the "
        f"loss. All on {windows} validation images.",
        chart=panels(
            {
                Panel("gradient norm at the start", "layer", log=True): at_start,
                Panel("gradient norm", "training step", log=True): norms,
                Panel("loss", "training step"): losses,
            }
        ),
        rows=[
            {"panel": panel, **row} for panel, rows in (("start", at_start), ("norm", norms), ("loss", losses)) for row in rows
        ],
        findings=findings,
    )
