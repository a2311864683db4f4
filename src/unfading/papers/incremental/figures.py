"""Kag, Zhang & Saligrama 2020, "RNNs incrementally evolving on an equilibrium manifold": figures 2, 3b, 6 to 9, and noise.

The form of the theorem is eq. 5 with a full Gaussian U scaled to norm 0.6 alpha; the form of the experiments is eq. 9 with
P = U = I + V H, ReLU, and eta = 0.01 at the start. Where the paper leaves a setting open, the caption states ours.

Figures 3b and 9 are about gradients through time while the adding problem is learnt, on sequences outside the training data:

    ratio    ||dh_T/dh_1|| / ||dh_T/dh_{T-1}||       Fig. 3b; 1 if every step passes a gradient on unchanged
    last     ||dh_T/dh_{T-1}||                       Fig. 9b
    loss     ||dL/dh_1||                             Fig. 9a; small also when the loss is small

There ||J|| is the gain of a random cotangent v, sqrt(E ||v J||^2 / E ||v||^2), which is 1 for J = I or -I and the Frobenius
norm over sqrt(H) for any J; the mean is over 16 draws of v.
"""

import math
import statistics
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Generator, Tensor

from unfading import catalogue
from unfading.cells.base import Activation, Cell
from unfading.cells.elman import ElmanCell
from unfading.cells.fast import FastRNNCell
from unfading.cells.incremental import IncrementalRNNCell
from unfading.diagnostics.equilibrium import trajectory
from unfading.diagnostics.equilibrium.analysis import eigenvalue_shares, histogram
from unfading.diagnostics.equilibrium.fixed_point import Convergence, convergence, equilibria, pull_norms, scipy_root
from unfading.diagnostics.equilibrium.inner_path import end_points, inner_path, matrix_norm
from unfading.diagnostics.equilibrium.inner_steps import conditions
from unfading.diagnostics.measure.lag import norms_of_rows
from unfading.diagnostics.measure.noise import after_noise
from unfading.diagnostics.measure.observe import observe
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent
from unfading.papers.during_training import snapshots, snapshots_together
from unfading.papers.incremental.curves import ablation
from unfading.papers.incremental.runs import HAR2, har2
from unfading.papers.item import Item
from unfading.report.figures import equilibrium_figures as figures
from unfading.report.figures.panels import Panel, panels
from unfading.tasks.base import Batch, Task
from unfading.tasks.sensors import HAR2 as HAR2Task

PlainRow = dict[str, Any]

# Figures 3b and 9.
ADDING_LENGTH = 200
MOMENTS = 20  # of a training run, at which gradients are measured
DRAWS = 16  # of v, for each sequence
TINY = 1e-300


def fig2(steps: int = 1000) -> Item:
    """Phase portraits: plain RNN, FastRNN and incremental RNN of two units under a random walk, and the equilibrium curve."""
    walks = {"steps of variance 10": math.sqrt(10), "steps of variance 0.01": 0.1}
    paths: list[PlainRow] = []
    curves: list[PlainRow] = []
    findings = []
    h = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    slow, fast = (theorem_cell(2, eta=eta) for eta in (0.01, 0.5))
    plain, residual = same_weights(slow)
    for name, deviation in walks.items():
        x = trajectory.random_walk(steps, deviation, seed=0)
        curve = trajectory.equilibrium_curve(slow, grid(x))
        states = {label: trajectory.states(cell, x, h) for label, cell in (("RNN", plain), ("FastRNN", residual))}
        states["incremental, h"] = trajectory.states(slow, x, h)
        states["incremental, h + old h"] = trajectory.sums(slow, states["incremental, h"])
        for label, path in states.items():
            paths += [{"walk": name, "panel": label, "step": m, "a": a, "b": b} for m, (a, b) in enumerate(path.tolist())]
            curves += [{"walk": name, "panel": label, "order": i, "a": a, "b": b} for i, (a, b) in enumerate(curve.tolist())]
        distances = [float(trajectory.distance_to(curve, path[steps // 5 :]).mean()) for path in states.values()]
        turns = [trajectory.portrait(trajectory.states(cell, x, h))["median_turn"] for cell in (slow, fast)]
        findings.append(
            f"Walk with {name}, mean distance to the curve after the first fifth: RNN {distances[0]:.2g}, FastRNN "
            f"{distances[1]:.2g}, incremental RNN {distances[2]:.2g}, its sums {distances[3]:.2g}. The incremental state turns "
            f"by {turns[0]:.2g} degrees a step (median) at eta = 0.01, and by {turns[1]:.3g} at eta = 0.5."
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
    rows: list[PlainRow] = []
    distances: list[PlainRow] = []
    for activation in ("tanh", "relu", "sigmoid"):
        for eta in (0.1, 0.5, 1.0):
            for seed in range(seeds):
                path, gap = measure_convergence(activation, eta, seed)
                numbers = {name: getattr(path, name) for name in ("fitted_rate", "spectral_radius", "bound", "bound_holds")}
                rows.append({"activation": activation, "eta": eta, "seed": seed, "scipy_gap": gap, **numbers})
                if activation == "tanh" and seed == 0:
                    distances += figures.distance_rows(path._asdict())
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
        chart=figures.convergence(distances, pulled),
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
    rows: list[PlainRow] = []
    bins: list[PlainRow] = []
    for setting in list(HAR2)[1:]:
        for step, model in snapshots(har2(setting, steps), every=steps):
            rnn, x = _in_double(model, windows)
            path = inner_path(cast(Cell, rnn.cells[0]), x)
            values = conditions(path, end_points(path)).eigenvalues
            label = f"{setting}, {f'after {step} steps' if step else 'at its start'}"
            eta = {"eta_least": float(path.eta.min()), "eta_most": float(path.eta.max())}
            rows.append({"setting": label, "norm": matrix_norm(path), **eta, **eigenvalue_shares(values, path.cell.alpha)})
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
    rows: list[PlainRow] = []
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


def _range(setting: str, rows: list[PlainRow]) -> str:
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
    pairs = norms_of_rows(chain, list(range(x.shape[1])), [len(x) - 1])["h", len(x) - 1]
    return torch.tensor([spectral for spectral, _ in pairs], dtype=torch.float64)


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
            measured = [_gradients_through_time(model, task, batch) for model in models]
            ratios.append([each["ratio"] for each in measured])
            for panel in shown:
                if finite := _finite([each[panel] for each in measured]):
                    shown[panel].append({"setting": name, "x": step, "value": statistics.median(finite)})
        ends = f"{_spread(ratios[0])} at the start, {_spread(ratios[-1])} at the end"
        findings.append(f"{name}: the ratio ||dh_T/dh_1|| / ||dh_T/dh_(T-1)|| is {ends}.")
    whose = "seed 0" if seeds == 1 else f"the median of {seeds} seeds"
    titles = {
        "ratio": Panel("||dh_T/dh_1|| / ||dh_T/dh_(T-1)||", "training step", log=True),
        "last": Panel("||dh_T/dh_(T-1)||", "training step", log=True),
        "loss": Panel("||dL/dh_1||", "training step", log=True),
    }
    return Item(
        title="Figs. 3b and 9: gradients through time while the adding problem is learnt",
        caption=f"Gains of Jacobians of the state, and the norm of the loss's gradient in the first state, T = "
        f"{ADDING_LENGTH}, at {min(MOMENTS, steps)} moments of {steps:,} steps of training (128 units, {whose}), on {windows} "
        "sequences. A ratio of 1 is a gradient that neither fades nor grows between the last step and the first.",
        chart=panels({titles[name]: rows for name, rows in shown.items()}),
        rows=[{"panel": name, **row} for name, rows in shown.items() for row in rows],
        findings=findings,
    )


def _spread(ratios: list[float]) -> str:
    """The median and the range over seeds, and how many are not finite."""
    finite = _finite(ratios)
    if len(ratios) == 1 or not finite:
        return f"{ratios[0]:.2g}"
    lost = "" if len(finite) == len(ratios) else f", not finite in {len(ratios) - len(finite)} of {len(ratios)} seeds"
    return f"{statistics.median(finite):.2g} ({min(finite):.2g} to {max(finite):.2g}{lost})"


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _gradients_through_time(model: Model, task: Task, batch: Batch) -> dict[str, float]:
    """`ratio`, `last` and `loss` as in the module's docstring."""
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
    """The outputs after step `at`, and the state at that step, where their graph begins."""
    with torch.no_grad():
        _, state = model.rnn(x[:at])
    state = type(state)(*(part.requires_grad_() for part in state))
    output, _ = model.rnn(x[at:], state, start=at)
    return output, state[0]


def noise(steps: int = 972) -> Item:
    """Is noise suppressed? Every cell at its start: a signal of 28 steps, then 972 steps of zeros or of noise."""
    rows: list[PlainRow] = []
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
    preserving = sorted(row["state"].split(",")[0] for row in rows if row["after"] == "noise" and 0.5 < (row["kept"] or 0) < 2)
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
            f"Two signals are as far apart after the noise as before, within a factor of two, in {', '.join(preserving)}.",
        ],
    )


def theorem_cell(
    size: int, *, eta: float, activation: Activation = "tanh", inputs: int = 1, seed: int = 0
) -> IncrementalRNNCell:
    """Eq. 5 with K = 5, alpha = 1, U, W, b ~ N(0, 1), and U scaled to norm 0.6, in float64."""
    cell = IncrementalRNNCell(
        inputs, size, rank=size, projection_rank=0, inner_steps=5, eta=eta, activation=activation
    ).double()
    generator = Generator().manual_seed(seed)
    U, W, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((size, size), (size, inputs), (size,))
    )
    with torch.no_grad():
        cell.U.factors[0].copy_(0.6 / torch.linalg.matrix_norm(U, 2) * U - torch.eye(size))
        cell.from_input.weight.copy_(W)
        cell.from_input.bias.copy_(b)
    return cell


def grid(x: Tensor) -> Tensor:
    """Values from the smallest to the largest of x, dense where tanh is curved."""
    low, high = float(x.min()), float(x.max())
    wide, near = (torch.linspace(max(low, -end), min(high, end), 201, dtype=torch.float64) for end in (math.inf, 5.0))
    return torch.cat([wide, near]).sort().values


def same_weights(cell: IncrementalRNNCell) -> tuple[ElmanCell, FastRNNCell]:
    """A plain RNN and a FastRNN with the matrices of an incremental RNN of eq. 5."""
    plain, residual = ElmanCell(1, 2).double(), FastRNNCell(1, 2).double()
    with torch.no_grad():
        U = cell.weights().M
        assert isinstance(U, Tensor)
        plain.W_h.copy_(U)
        residual.U.copy_(U)
        for other in (plain, residual):
            other.from_input.load_state_dict(cell.from_input.state_dict())
    return plain, residual


def measure_convergence(activation: Activation, eta: float, seed: int) -> tuple[Convergence, float]:
    """Convergence from g_0 = 0 to the equilibrium for random h and x, and the distance of scipy's root from ours."""
    generator = Generator().manual_seed(1000 + seed)
    h, x = (torch.randn(1, size, generator=generator, dtype=torch.float64) for size in (32, 3))
    cell = theorem_cell(32, eta=eta, activation=activation, inputs=3, seed=seed)
    path = inner_path(cell, x[None])
    near = equilibria(path, h, path.u[0])
    gap = float((scipy_root(path, h[0], path.u[0, 0]) - near.s[0]).abs().max())
    return convergence(path, h[0], path.u[0, 0], near.s[0], eta), gap


@torch.no_grad()
def pulls(form: str, eta: float = 0.1, steps: int = 300) -> list[PlainRow]:
    """||F|| over the inner steps relative to the first one: the median over 16 inputs."""
    generator = Generator().manual_seed(0)
    if form.startswith("theorem"):
        cell = theorem_cell(128, eta=eta, activation="relu", inputs=3)
    else:
        cell = IncrementalRNNCell(3, 128, rank=16, eta=eta).double()
        cell.reset_parameters(generator)
    u = torch.randn(16, 128, generator=generator, dtype=torch.float64)
    sizes = pull_norms(cell, torch.zeros_like(u), u, eta, steps, cell.weights())
    return [{"form": form, "k": k, "pull": float((size / sizes[0]).median())} for k, size in enumerate(sizes)]
