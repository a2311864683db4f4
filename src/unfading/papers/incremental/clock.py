"""Noisy MNIST by position: is what carries the incremental RNN a table of step sizes that knows where the image is?

The paper's cell has one learnt step size per time step. On noisy MNIST the image is always in the first 28 of 1,000 steps, so
that such a table can be a clock: large steps where the image is, almost none afterwards. The rows of `clock` take the clock
away in three ways, for the paper's form and for our stable form, beside an LSTM with chrono initialisation and STAR, which
have no table:

    one eta            a single step size for all time steps
    eta >= 0           a table whose entries cannot be negative
    random position    the image starts at a step that is drawn anew for every sequence

None of these rows is in the paper. All have the units of the noisy rows of Table 2, ten epochs in the place of 52, and the same
three learning rates to choose from. Our form starts at eta = 2 / (K T): from 0.01 one of three seeds breaks. Where eta is the
sigmoid of its parameter, this parameter has the full learning rate: from 0.01 to 0.1 it moves by 2.4.

`step_sizes` draws the tables of trained models and what is left of their accuracy when the image starts later.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unfading.cells.incremental import InnerStepsCell
from unfading.layers.model import Model
from unfading.papers.incremental.runs import baseline, incremental, stable
from unfading.papers.item import Item
from unfading.papers.row import Row
from unfading.report.figures.panels import Panel, panels
from unfading.tasks.images import Noisy
from unfading.training import weights
from unfading.training.run import Run

T, HEIGHT = 1_000, 28
EPOCHS = 10
RATES = (1e-3, 3e-3, 1e-2)
SHORT = f"{EPOCHS} epochs in the place of 52"
# How the cell and the task differ from the rows of Table 2.
VARIANTS: dict[str, dict[str, Any]] = {
    "a table of eta": {},
    "one eta": {"steps": 1},
    "eta >= 0": {"bounded_eta": True},
    "a table of eta, random position": {"start": "random"},
    "one eta, random position": {"steps": 1, "start": "random"},
}
# Files of `weights/`, by what the figure calls them.
MODELS = {
    "noisy MNIST, the paper's form": "incremental-table2-noisy-mnist-irnn-k-1-rank-5",
    "noisy MNIST, ours, K = 3": "incremental-table2-noisy-mnist-ours-k-3-rank-8",
    "copying 500, ours": "incremental-fig4-copying-500-ours-k-1",
}
STARTS = (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50)


def clock() -> list[Row]:
    """Noisy MNIST with a table of step sizes, one step size, step sizes >= 0, and the image at a random position."""
    rows = []
    for name, variant in VARIANTS.items():
        own = {field: value for field, value in variant.items() if field != "start"}
        options = {"start": variant["start"]} if "start" in variant else {}
        paper = incremental("noisy_mnist", options, T=T, K=1, rank=5, epochs=EPOCHS)
        ours = stable("noisy_mnist", options, T=T, K=1, rank=8, eta=2 / T, epochs=EPOCHS)
        rows += [_row(f"iRNN, {name}", _changed(paper, own)), _row(f"ours, {name}", _changed(ours, own))]
    for label, cell in (("LSTM, chrono", "LSTM"), ("STAR, chrono", "STAR")):
        for name, options in (("", {}), (", random position", {"start": "random"})):
            run = baseline(cell, "noisy_mnist", options, {"max_lag": T}, epochs=EPOCHS)
            rows.append(_row(f"{label}{name}", run))
    return rows


def _changed(run: Run, own: dict[str, Any]) -> Run:
    """The run with other options of its cell; an eta that is a sigmoid learns at the full rate."""
    rates = {} if own.get("bounded_eta") else run.rates
    return replace(run, cell_options={**run.cell_options, **own}, rates=rates)


def _row(name: str, run: Run) -> Row:
    return Row(run, None, 0.0, f"ours; {SHORT}", name=name, rates=RATES)


def step_sizes(folder: str = "weights", images: int = 2_000) -> Item:
    """The learnt step sizes of trained models over time, and their accuracy when the image starts later."""
    eta: list[dict[str, Any]] = []
    shifted: list[dict[str, Any]] = []
    findings = []
    for name, stem in MODELS.items():
        path = Path(folder) / f"{stem}.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing. Run this in the library's repository, which has the trained models.")
        model, run = weights.load(path), Run.from_json({**weights.card(path)["run"], "device": "cpu", "dtype": "float32"})
        (cell,) = model.rnn.cells
        assert isinstance(cell, InnerStepsCell)
        table = cell.step_sizes(0, len(cell.eta))[:, 0].detach()
        sizes = table.abs().mean(dim=1)
        eta += [{"setting": name, "x": step, "value": float(size)} for step, size in enumerate(sizes)]
        task = run.make_task()
        negative = f"{100 * (table < 0).double().mean():.0f} % of its step sizes are negative"
        if not isinstance(task, Noisy):
            ends = [sizes[:10].mean(), sizes[10:-10].mean(), sizes[-10:].mean()]
            findings.append(
                f"{name}: the mean of |eta| is {ends[0]:.3g} on the first ten steps, {ends[2]:.3g} on the last ten and "
                f"{ends[1]:.2g} between them; {negative}."
            )
            continue
        scores = {start: _accuracy(model, replace(task, start=start), images) for start in STARTS}
        shifted += [{"setting": name, "x": start, "value": 100 * score} for start, score in scores.items()]
        everywhere = _accuracy(model, replace(task, start="random"), images)
        findings.append(
            f"{name}: the mean of |eta| is {sizes[:HEIGHT].mean():.3g} on the 28 steps of the image and "
            f"{sizes[HEIGHT:].mean():.2g} on the noise; {negative}. On {images:,} test images the accuracy is "
            f"{100 * scores[0]:.1f} %, with the image 5 steps later {100 * scores[5]:.1f} %, 10 steps later "
            f"{100 * scores[10]:.1f} %, 50 steps later {100 * scores[50]:.1f} %, at random positions {100 * everywhere:.1f} %."
        )
    signal = [row for row in eta if row["setting"].startswith("noisy") and row["x"] < 3 * HEIGHT]
    return Item(
        title="The table of step sizes is a clock",
        caption="Trained models of the library. Left: the mean of |eta| over the inner steps, at each of the first 84 of 1,000 "
        "steps of noisy MNIST; the image is in the first 28, the rest is noise. Middle: the same on copying, 520 steps; the "
        "symbols are in the first ten steps, their copies are due in the last ten. Right: test accuracy when the image starts "
        "some steps later than in training, with noise before it. A guess has 11.35 %.",
        chart=panels(
            {
                Panel("mean of |eta|", "time step, noisy MNIST"): signal,
                Panel("mean of |eta|", "time step, copying"): [row for row in eta if row["setting"].startswith("copying")],
                Panel("test accuracy in %", "steps by which the image is late"): shifted,
            }
        ),
        rows=[*({**row, "what": "eta"} for row in eta), *({**row, "what": "accuracy"} for row in shifted)],
        findings=findings,
    )


@torch.no_grad()
def _accuracy(model: Model, task: Noisy, images: int, size: int = 250) -> float:
    """Share of the first test images that the model classifies correctly."""
    right = count = 0
    for index in range(-(-images // size)):
        batch = task.batch(index, size, split="test", seed=0, device="cpu")
        right += int((model(batch.x)[0].argmax(dim=-1) == batch.target).sum())
        count += len(batch.target)
    return right / count
