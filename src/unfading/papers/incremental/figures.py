"""Kag, Zhang & Saligrama 2020, "RNNs incrementally evolving on an equilibrium manifold": figures 2, 6, 7, 8 and noise.

Where the paper leaves a setting open, the caption says ours.
"""

import math
import statistics
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor

from unfading import catalogue
from unfading.cells.base import Cell
from unfading.diagnostics.equilibrium import trajectory
from unfading.diagnostics.equilibrium.analysis import histogram, spectrum
from unfading.diagnostics.equilibrium.inner_path import matrix_norm, reached, walk
from unfading.diagnostics.equilibrium.inner_steps import conditions
from unfading.diagnostics.measure.lag import norms
from unfading.diagnostics.measure.noise import after_noise
from unfading.diagnostics.measure.observe import observe
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent
from unfading.papers.during_training import snapshots
from unfading.papers.incremental.measurements import HAR2, approached, grid, har2, pulls, same_weights, theorem_cell
from unfading.papers.item import Item
from unfading.report.figures import equilibrium_figures as figures
from unfading.tasks.base import Batch
from unfading.tasks.sensors import HAR2 as HAR2Task

Row = dict[str, Any]


def fig2(steps: int = 1000) -> Item:
    """Phase portraits: plain RNN, FastRNN and incremental RNN of two units under a random walk, and the equilibrium curve."""
    walks = {"steps of variance 10": math.sqrt(10), "steps of variance 0.01": 0.1}
    paths: list[Row] = []
    curves: list[Row] = []
    findings = []
    h = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    slow, fast = (theorem_cell(2, eta=eta) for eta in (0.01, 0.5))
    plain, residual = same_weights(slow)
    for name, deviation in walks.items():
        x = trajectory.random_walk(steps, deviation, seed=0)
        curve = trajectory.equilibrium_curve(slow, grid(x))
        found = {label: trajectory.states(cell, x, h) for label, cell in (("RNN", plain), ("FastRNN", residual))}
        found["incremental, h"] = trajectory.states(slow, x, h)
        found["incremental, h + old h"] = trajectory.sums(slow, found["incremental, h"])
        for label, path in found.items():
            paths += [{"walk": name, "panel": label, "step": m, "a": a, "b": b} for m, (a, b) in enumerate(path.tolist())]
            curves += [{"walk": name, "panel": label, "order": i, "a": a, "b": b} for i, (a, b) in enumerate(curve.tolist())]
        off = [float(trajectory.distance_to(curve, path[steps // 5 :]).mean()) for path in found.values()]
        turns = [trajectory.portrait(trajectory.states(cell, x, h))["median_turn"] for cell in (slow, fast)]
        findings.append(
            f"Walk with {name}, mean distance to the curve after the first fifth: RNN {off[0]:.2g}, FastRNN {off[1]:.2g}, "
            f"incremental RNN {off[2]:.2g}, its sums {off[3]:.2g}. The incremental state turns by {turns[0]:.2g} degrees a "
            f"step (median) at eta = 0.01, and by {turns[1]:.3g} at eta = 0.5."
        )
    findings += [
        "The curve is not special to the incremental RNN: RNN and FastRNN share its equation, h = phi(U h + W x + b), and are "
        "drawn to it too. The incremental state is not on the curve but about half way to it, since two of them make a sum.",
        "The smooth path belongs to a small eta, not to the equilibrium: near it the state goes to and fro from step to step, "
        "as the Jacobian -I of Theorem 1 demands.",
    ]
    return Item(
        title="Fig. 2: phase portraits under a random walk",
        caption=f"Two tanh units and one input that walks at random for {steps:,} steps: the path of the state from the black "
        "dot, coloured by step. Blue: the equilibrium curve, all solutions of s = phi(U s + W x + b) for the inputs met. All "
        "cells have the same U (norm 0.6), W and b; FastRNN has alpha = 0.05 and beta = 0.95, the incremental RNN K = 5 and "
        "eta = 0.01, its published start. Its equilibrium is one of sums, h_m + h_(m-1), shown last. The paper says variance "
        "10 and not of what: above it is that of each step, below that of the end of the walk.",
        chart=figures.portraits(paths, curves),
        rows=[*paths, *({**row, "curve": True} for row in curves)],
        findings=findings,
    )


def fig6(seeds: int = 20) -> Item:
    """Linear convergence to the fixed point: distance over inner steps, fitted rate, spectral radius, Proposition 2's bound."""
    rows: list[Row] = []
    distances: list[Row] = []
    for activation in ("tanh", "relu", "sigmoid"):
        for eta in (0.1, 0.5, 1.0):
            for seed in range(seeds):
                found, gap = approached(activation, eta, seed)
                numbers = {name: getattr(found, name) for name in ("fitted_rate", "spectral_radius", "bound", "bound_holds")}
                rows.append({"activation": activation, "eta": eta, "seed": seed, "scipy_gap": gap, **numbers})
                if activation == "tanh" and seed == 0:
                    distances += figures.scaled(found._asdict())
    forms = ("theorem: full U, norm 0.6", "experiments: P = U = I + V H")
    pulled = [row for form in forms for row in pulls(form)]
    off = [abs(row["fitted_rate"] / row["spectral_radius"] - 1) for row in rows]
    under = all(row["bound_holds"] and row["fitted_rate"] <= row["bound"] for row in rows)
    slack = statistics.median((1 - row["bound"]) / (1 - row["spectral_radius"]) for row in rows)
    last = [[row["pull"] for row in pulled if row["form"] == form][-1] for form in forms]
    return Item(
        title="Fig. 6: linear convergence to the fixed point",
        caption="Left: distance of the inner iterate g_k from the equilibrium (scipy's root agrees with ours) when the inner "
        "step is repeated with one eta, from g_0 = 0 and a random h; 32 tanh units and a full U of norm 0.6 alpha, as the "
        "propositions ask. Right: the size of the pull F = phi(.) - alpha s, which is zero at an equilibrium, at eta = 0.1 "
        "with 128 ReLU units, for such a U and for the published start of the experiments (rank 16, V and H ~ N(0, 0.1^2)); "
        "median over 16 inputs.",
        chart=figures.approach(distances, pulled),
        rows=[*rows, *distances, *pulled],
        findings=[
            f"Over {len(rows)} cells (three activations, three eta, {seeds} seeds) the fitted rate is within "
            f"{100 * max(off):.2g} % of the spectral radius (median {100 * statistics.median(off):.2g} %), and Proposition 2's "
            f"bound, with its exponent, {'holds at every step' if under else 'is broken'}. scipy's roots differ from ours by "
            f"at most {max(row['scipy_gap'] for row in rows):.1g}.",
            f"The bound is loose: it promises {100 * slack:.0f} % of the speed, 1 - rate, in the median.",
            f"In the form of the experiments the pull does not vanish: after {pulled[-1]['k']} inner steps it is {last[1]:.2g} "
            f"times its first size, against {last[0]:.1g} in the form of the theorem. U = I + V H has a norm of at least 1 = "
            "alpha, and no proposition covers it.",
        ],
    )


def fig7(steps: int = 400, windows: int = 16) -> Item:
    """Eigenvalues of phi' P U - alpha I over HAR-2, before and after training; reads the dataset har."""
    rows: list[Row] = []
    bins: list[Row] = []
    for setting in list(HAR2)[1:]:
        for step, model in snapshots(har2(setting, steps), every=steps):
            rnn, x = _in_double(model, windows)
            path = walk(cast(Cell, rnn.cells[0]), x)
            values = conditions(path, reached(path)).eigenvalues
            label = f"{setting}, {f'after {step} steps' if step else 'at its start'}"
            eta = {"eta_least": float(path.eta.min()), "eta_most": float(path.eta.max())}
            rows.append({"setting": label, "norm": matrix_norm(path), **eta, **spectrum(values, path.cell.alpha)})
            bins += [{"setting": label, **row} for row in histogram(values.real.flatten(), 0.1)]
    return Item(
        title="Fig. 7: eigenvalues of phi' P U - alpha I on HAR-2",
        caption="The matrix that Theorem 1 and local stability speak of, at the point where each of 128 time steps ends, for "
        f"{windows} test windows of HAR-2: real parts of its 80 eigenvalues, counted; alpha = 1. The paper plots one histogram "
        "and says that all are negative, as stability asks. Grey: exactly zero; there the matrix has no inverse. Orange: "
        "positive; such a direction leads away from an equilibrium.",
        chart=figures.eigenvalues(bins),
        rows=[*rows, *bins],
        findings=[
            f"{row['setting']}: {100 * row['negative']:.1f} % negative ({100 * row['minus_alpha']:.1f} % exactly -1: units "
            f"that are off), {100 * row['zero']:.1f} % zero, {100 * row['positive']:.1f} % positive; real parts "
            f"{row['least']:.2f} to {row['largest']:.2g}, ||P U|| {row['norm']:.2f}, eta {row['eta_least']:.3f} to "
            f"{row['eta_most']:.3f}. All negative at {100 * row['points_all_negative']:.1f} % of the points."
            for row in rows
        ],
    )


def fig8(steps: int = 400, windows: int = 8) -> Item:
    """||dh_T/dh_1|| while RNN and incremental RNN are trained on HAR-2; reads the dataset har."""
    rows: list[Row] = []
    for setting in HAR2:
        for step, model in snapshots(har2(setting, steps), every=max(1, steps // 20)):
            logs = _first_to_last(*_in_double(model, windows)).clamp_min(1e-300).log10()
            numbers = {"median": logs.median(), "least": logs.min(), "most": logs.max()}
            rows.append({"setting": setting, "step": step, **{name: float(number) for name, number in numbers.items()}})
    rates = ", ".join(str(each["rate"]) for each in HAR2.values())
    return Item(
        title="Fig. 8: how much of a gradient comes from the last step to the first, on HAR-2",
        caption=f"Largest singular value of dh_T/dh_1, T = 128, during {steps} steps of training (80 units, Adam, batch 128, "
        f"clipped at norm 1, seed 0; rates {rates}): median over {windows} test windows, and their range. 0, dashed, is a norm "
        "of 1: a gradient that neither fades nor grows. -10 means that a ten-billionth is left.",
        chart=figures.gradients(rows),
        rows=rows,
        findings=[_range(setting, [row for row in rows if row["setting"] == setting]) for setting in HAR2],
    )


def _range(setting: str, rows: list[Row]) -> str:
    low, high = min(row["least"] for row in rows), max(row["most"] for row in rows)
    return (
        f"{setting}: log10 ||dh_T/dh_1|| is {rows[0]['median']:.2f} at the start and {rows[-1]['median']:.2f} at the end "
        f"(medians), and lies between {low:.2f} and {high:.2f} over all windows and {len(rows)} measurements."
    )


def _in_double(model: Model, windows: int) -> tuple[Recurrent, Tensor]:
    """A copy of the model's stack in float64, and test windows of HAR-2 for it."""
    return deepcopy(model.rnn).double(), HAR2Task().batch(0, windows, split="test", seed=0, device="cpu").x.double()


def _first_to_last(rnn: Recurrent, x: Tensor) -> Tensor:
    """||dh_T/dh_1|| of the first layer for every row of x, [B]."""
    chain = observe(rnn, Batch(x, x)).chains[0]
    found = norms(chain, list(range(x.shape[1])), [len(x) - 1])["h", len(x) - 1]
    return torch.tensor([spectral for spectral, _ in found], dtype=torch.float64)


def noise(steps: int = 972) -> Item:
    """Is noise suppressed? Every cell at its start: a signal of 28 steps, then 972 steps of zeros or of noise."""
    rows: list[Row] = []
    for kind in catalogue.cells():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            cell, signal = kind(28, 128), torch.randn(28, 8, 28)
        for row in after_noise(cell, signal, steps=steps):
            before, after = row["norm_before"], row["norm_after"]
            growth = after / before if after is not None and before else None
            rows.append({"state": f"{kind.__name__.removesuffix('Cell')}, {row['part']}", **row, "growth": growth})
    at = {(row["state"], row["after"]): row for row in rows}
    still, noisy = at["EquilibriumRNN, h", "zeros"], at["EquilibriumRNN, h", "noise"]
    stable = at["StableIncrementalRNN, h", "noise"]
    grown = at["IncrementalRNN, h", "zeros"]["growth"] or math.inf
    kept = sorted(row["state"].split(",")[0] for row in rows if row["after"] == "noise" and 0.5 < (row["kept"] or 0) < 2)
    return Item(
        title="Section 4.3.3: is noise suppressed?",
        caption="Each cell of the library at its default start, 128 units, reads 28 steps of a standard normal signal of 28 "
        f"features, then {steps} steps of zeros or of standard normal noise. Left: cosine of the state at the end with the "
        "state when the signal ended. Middle: its norm relative to then. Right: the distance between two states whose signals "
        "differed and whose noise was the same, relative to then; 1 means that the signal is still there, whatever the noise "
        "has done to the state. What lies beyond an axis is drawn at its end.",
        chart=figures.noise(rows),
        rows=rows,
        findings=[
            f"An exactly solved incremental RNN keeps its state under zeros (norm {still['norm_before']:.3g} to "
            f"{still['norm_after']:.3g}, cosine {still['cosine']:.2f}) and does not suppress noise, it adds it up: norm "
            f"{noisy['norm_before']:.3g} to {noisy['norm_after']:.3g}, cosine {noisy['cosine']:.2f}. Signals stay apart "
            f"({noisy['kept']:.2f}).",
            f"Stopped early, at its default start and with zeros alone, IncrementalRNN (K = 5) grows {grown:.1g} times: the "
            f"growth that ||P U|| > alpha brings. The stable form grows {stable['growth']:.1f} times under noise (cosine "
            f"{stable['cosine']:.2f}).",
            f"Two signals are as far apart after the noise as before, within a factor of two, in {', '.join(kept)}.",
        ],
    )
