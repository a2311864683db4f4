"""Turkoglu et al. 2019, "Gating revisited: deep multi-layer RNNs that can be trained" (STAR): figures 2, 3, 6 and 7.

For figures 2, 6 and 7 the paper states the input, the initialisation and the number of draws. It does not state L, T, width and
loss: ours are 12, 12, 64 and a random cotangent (`diagnostics/measure/draws.py`).
"""

import math
from concurrent.futures import Executor
from functools import cache, partial
from typing import Any, Literal

from unfading import machine
from unfading.cells.base import Cell
from unfading.cells.elman import ElmanCell
from unfading.cells.gru import GRUCell
from unfading.cells.janet import ForgetLSTMCell
from unfading.cells.lstm import LSTMCell
from unfading.cells.star import STARCell
from unfading.diagnostics.measure.draws import SIZES, LatticeStatistics, lattice_statistics, worker_pool
from unfading.diagnostics.measure.lattice import flatness
from unfading.papers.during_training import layer_norms, snapshots
from unfading.papers.item import Item
from unfading.papers.star.runs import CELLS as STACKED_CELLS
from unfading.papers.star.runs import PIXELS, stack
from unfading.papers.star.without_output_gate import WithoutOutputGateCell
from unfading.report.figures import lattice_figures as figures
from unfading.report.figures.panels import Panel, panels

PlainRow = dict[str, Any]
DRAWS = 10_000
TRAINED_LAYERS = 12  # of figure 3
MOMENTS = 20  # of a training run, at which gradients are measured
LOSSES = {"last": "loss on the last step", "all": "loss on all steps"}
SETTING = (
    f"A stack of {SIZES.layers} layers of {SIZES.width} units runs for {SIZES.steps} steps. A square is one layer at one "
    "step; the loss is at the right of the top row. Its colour tells of the gradient of the weights and biases which this "
    "layer used at this step alone (Frobenius norm). Each draw has orthogonal matrices, biases and states of zero, an input "
    "x_t = x_{t-1} / 2 + z / 2 and a random loss of its own."
)
COLOURS = "White is as large as where the loss is, red larger, blue smaller: the mean over {draws:,} draws."
CELLS: dict[str, type[Cell]] = {
    "RNN": ElmanCell,
    "LSTM": LSTMCell,
    "LSTM, forget gate only": ForgetLSTMCell,
    "GRU": GRUCell,
    "STAR": STARCell,
}

# From LSTM to STAR, one change at a time (section 4 of the paper).
PATH: dict[str, type[Cell]] = {
    "LSTM": LSTMCell,
    "without output gate": WithoutOutputGateCell,
    "without input gate": ForgetLSTMCell,
    "STAR": STARCell,
}


def fig2(draws: int = DRAWS) -> Item:
    """Mean gradient magnitude over layers and time: plain RNN, LSTM, STAR."""
    rows, findings = _lattices(("RNN", "LSTM", "STAR"), draws)
    return Item(
        "STAR Fig. 2: where the gradient of a deep network comes from, at its start",
        f"{SETTING} {COLOURS.format(draws=draws)} To keep a deep network trainable, gradients should stay as they are from "
        "the top row to the bottom one. The paper says that in a plain RNN they grow, in an LSTM they vanish towards the lower "
        "layers, and in STAR they keep their size.",
        figures.magnitudes(rows),
        rows,
        findings,
    )


def fig3(steps: int = 550, windows: int = 100, device: Literal["cpu", "cuda"] = "cpu") -> Item:
    """Pixel MNIST with 12 layers: gradient norms of the layers at the start, and norm and loss over the first epoch."""
    at_start: list[dict[str, Any]] = []
    norms: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    findings = []
    for cell in STACKED_CELLS:
        run = stack(
            cell, TRAINED_LAYERS, "pixel_mnist", PIXELS, epochs=None, steps=steps, device=device, batch=windows, valid_batches=1
        )
        task = run.make_task()
        batch = task.batch(0, windows, split="valid", seed=0, device=device)
        for step, model in snapshots(run, every=max(1, steps // MOMENTS)):
            layers, loss = layer_norms(model, task, batch)
            if step == 0:
                at_start += [{"setting": cell, "x": i, "value": norm} for i, norm in enumerate(layers, 1)]
            norms.append({"setting": cell, "x": step, "value": sum(norm**2 for norm in layers) ** 0.5})
            losses.append({"setting": cell, "x": step, "value": loss})
        own = [row for row in norms if row["setting"] == cell]
        first = [row["value"] for row in at_start if row["setting"] == cell]
        ends = f"of all parameters {own[0]['value']:.2g} at the start and {own[-1]['value']:.2g} after {own[-1]['x']} steps"
        ratio = f"lowest layer over highest {first[0] / first[-1]:.2g}, " if len(first) > 1 and first[-1] else ""
        findings.append(f"{cell}: {ratio}{ends}; loss {losses[-1]['value']:.3g}.")
    return Item(
        title="STAR Fig. 3: gradients of 12-layer networks on pixel MNIST",
        caption=f"Networks of {TRAINED_LAYERS} layers of 128 units (RHN: one of recurrence depth {TRAINED_LAYERS}) at their "
        f"start and during {steps} steps of training, Adam 1e-3, batch {windows}, one seed. Left: norm of the gradient of each "
        "layer's parameters at the start, layer 1 is nearest the input. Middle: norm of all recurrent parameters' gradient. "
        f"Right: the loss. All on {windows} validation images.",
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


def fig6(draws: int = DRAWS) -> Item:
    """Mean gradient magnitude over layers and time: LSTM with a forget gate only, GRU, STAR."""
    rows, findings = _lattices(("LSTM, forget gate only", "GRU", "STAR"), draws)
    return Item(
        "STAR Fig. 6: where the gradient of a deep network comes from, at its start: cells with fewer gates",
        f"{SETTING} {COLOURS.format(draws=draws)} The paper says that the LSTM with only a forget gate and the GRU weaken the "
        "fading of gradients to some degree.",
        figures.magnitudes(rows),
        rows,
        findings,
    )


def fig7(draws: int = DRAWS) -> Item:
    """How much the gradient magnitude differs from draw to draw: LSTM with a forget gate only, GRU, STAR."""
    rows, findings = _lattices(("LSTM, forget gate only", "GRU", "STAR"), draws)
    return Item(
        "STAR Fig. 7: how much the gradient differs from draw to draw",
        f"{SETTING} The colour is the standard deviation over {draws:,} draws, divided by the mean. The paper says that it is "
        "much higher for the LSTM with only a forget gate and for the GRU than for STAR.",
        figures.deviations(rows),
        rows,
        findings,
    )


def measured(cell: type[Cell], draws: int, pool: Executor | None) -> dict[str, LatticeStatistics]:
    """The gradient lattices of a cell in the setting of the figures."""
    return lattice_statistics(partial(cell, hidden_size=SIZES.width), draws, pool=pool)  # type: ignore[call-arg]


@cache
def _drawn_lattices(names: tuple[str, ...], draws: int) -> dict[str, dict[str, LatticeStatistics]]:
    """The gradient lattices of these cells, cached since figures 6 and 7 show the same ones."""
    with worker_pool(machine.cores()) as pool:
        return {name: measured(CELLS[name], draws, pool) for name in names}


def _lattices(names: tuple[str, ...], draws: int) -> tuple[list[PlainRow], list[str]]:
    rows: list[PlainRow] = []
    findings = []
    for loss, label in LOSSES.items():
        for name, lattices in _drawn_lattices(names, draws).items():
            rows += _rows(name, label, lattices[loss])
            findings.append(f"{name}, {label}: {_sentence(lattices[loss])}")
    return rows, findings


def _rows(cell: str, loss: str, lattice: LatticeStatistics) -> list[PlainRow]:
    corner = float(lattice.mean[-1, -1])
    pairs = zip(lattice.mean.tolist(), lattice.deviation.tolist(), strict=True)
    return [
        {
            "cell": cell, "loss": loss, "layer": l, "step": t,
            "mean": mean, "ratio": mean / corner, "decades": math.log10(mean / corner), "deviation": deviation,
        }
        for l, (means, deviations) in enumerate(pairs, start=1)
        for t, (mean, deviation) in enumerate(zip(means, deviations, strict=True), start=1)
    ]  # fmt: skip


def _sentence(lattice: LatticeStatistics) -> str:
    numbers, deviation = flatness(lattice.mean), float(lattice.deviation.mean())
    return (
        f"bottom layer {numbers.bottom_to_top:.2g} of the top one; corner (1, 1) {numbers.first_to_last:.2g} of that at the "
        f"loss; {numbers.share_within_ten:.0%} of the points within a factor of ten of it; {numbers.gain_per_layer:.2f} x a "
        f"layer down, {numbers.gain_per_step:.2f} x a step back; deviation {deviation:.2f} of the mean."
    )
