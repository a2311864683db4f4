"""Turkoglu et al. 2019, "Gating revisited: deep multi-layer RNNs that can be trained" (STAR): figures 2, 6 and 7.

The paper tells the input, the start and the number of draws. L, T, width and loss it does not tell: ours are 12, 12, 64 and a
random cotangent (`diagnose/draws.py`).
"""

import math
from concurrent.futures import Executor
from functools import cache, partial
from typing import Any

from unfading import machine
from unfading.cells.base import Cell
from unfading.cells.elman import ElmanCell
from unfading.cells.gru import GRUCell
from unfading.cells.janet import ForgetLSTMCell
from unfading.cells.lstm import LSTMCell
from unfading.cells.star import STARCell
from unfading.diagnostics.measure.draws import STATED, Drawn, drawn, workers
from unfading.diagnostics.measure.flatness import flatness
from unfading.papers.item import Item
from unfading.papers.star.without_output_gate import WithoutOutputGateCell
from unfading.report.figures import lattice_figures as figures

Row = dict[str, Any]
DRAWS = 10_000
LOSSES = {"last": "loss on the last step", "all": "loss on all steps"}
SETTING = (
    f"A stack of {STATED.layers} layers of {STATED.width} units runs for {STATED.steps} steps. A square is one layer at one "
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


def measured(cell: type[Cell], draws: int, pool: Executor | None) -> dict[str, Drawn]:
    """The lattices of a cell in the setting of the figures."""
    return drawn(partial(cell, hidden_size=STATED.width), draws, pool=pool)  # type: ignore[call-arg]


@cache
def _found(names: tuple[str, ...], draws: int) -> dict[str, dict[str, Drawn]]:
    """The lattices of these cells; figures 6 and 7 show the same ones."""
    with workers(machine.cores()) as pool:
        return {name: measured(CELLS[name], draws, pool) for name in names}


def _lattices(names: tuple[str, ...], draws: int) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    findings = []
    for loss, words in LOSSES.items():
        for name, lattices in _found(names, draws).items():
            rows += _points(name, words, lattices[loss])
            findings.append(f"{name}, {words}: {_said(lattices[loss])}")
    return rows, findings


def _points(cell: str, loss: str, lattice: Drawn) -> list[Row]:
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


def _said(lattice: Drawn) -> str:
    numbers, deviation = flatness(lattice.mean), float(lattice.deviation.mean())
    return (
        f"bottom layer {numbers.bottom_to_top:.2g} of the top one; corner (1, 1) {numbers.first_to_last:.2g} of that at the "
        f"loss; {numbers.share_within_ten:.0%} of the points within a factor of ten of it; {numbers.gain_per_layer:.2f} x a "
        f"layer down, {numbers.gain_per_step:.2f} x a step back; deviation {deviation:.2f} of the mean."
    )
