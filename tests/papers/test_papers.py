"""Items of the papers: the registry, figures that are computed, and the command."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from tests.helpers.command import run
from tests.helpers.paths import ROOT
from unfading.cli import reproduce_command as cli_reproduce
from unfading.data import store
from unfading.diagnostics.equilibrium.analysis import histogram
from unfading.papers import registry
from unfading.papers.during_training import snapshots, snapshots_together
from unfading.papers.incremental import figures as incremental
from unfading.papers.incremental.clock import step_sizes
from unfading.papers.incremental.figures import _spread as spread_of_ratios
from unfading.papers.item import Item
from unfading.training.run import Run
from unfading.training.train import train
from unfading.training.weights import load

SMALL = {
    "fig2": lambda: incremental.fig2(steps=30),
    "fig6": lambda: incremental.fig6(seeds=1),
    "noise": lambda: incremental.noise(steps=2),
}


def test_the_registry_lists_items_with_docstrings():
    items = registry.items()
    assert {f"incremental/{name}" for name in ("fig2", "fig6", "fig7", "fig8", "noise")} <= set(items)
    for function in items.values():
        assert function.__doc__


@pytest.mark.parametrize("name", [pytest.param("fig2", marks=pytest.mark.long), "fig6", "noise"])
@pytest.mark.sample(1)
def test_a_figure_is_computed_and_saved(name, tmp_path):
    figure = SMALL[name]()
    assert figure.title
    assert len(figure.caption) > 100
    assert figure.findings
    assert not any("nan" in each or "None" in each for each in figure.findings)
    files = figure.save(f"incremental/{name}", tmp_path / "new")
    assert [path.name for path in files] == [f"incremental-{name}.{ending}" for ending in ("png", "svg", "json")]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files[1].read_text()
    assert json.loads(files[2].read_text())["rows"] == figure.rows
    assert figure.findings[0][:30] in figure.text(width=1000)


def test_numbers_that_are_not_finite_are_saved_as_null(tmp_path):
    chart = {"data": {"values": [{"x": 1}]}, "mark": "point", "encoding": {"x": {"field": "x", "type": "quantitative"}}}
    figure = Item("t", "c", chart, [{"loss": math.nan, "norms": [1.0, math.inf]}], [])
    text = figure.save("star/fig3", tmp_path)[2].read_text()
    assert json.loads(text, parse_constant=pytest.fail)["rows"] == [{"loss": None, "norms": [1.0, None]}]


def test_figure_six_agrees_with_theory():
    rows = [row for row in incremental.fig6(seeds=1).rows if "fitted_rate" in row]
    assert len(rows) == 9
    for row in rows:
        assert abs(row["fitted_rate"] / row["spectral_radius"] - 1) < 0.02
        assert row["fitted_rate"] <= row["bound"]
        assert row["bound_holds"]
        assert row["scipy_gap"] < 1e-10


@pytest.mark.parametrize("name", ["fig7", pytest.param("fig8", marks=pytest.mark.long)])
def test_figures_during_training_are_drawn(name, made, tmp_path):
    """On random data: only that the figures can be drawn is tested, not what they show."""
    item = getattr(incremental, name)(steps=2, windows=2)
    assert len(item.findings) == {"fig7": 4, "fig8": 3}[name]
    assert item.save(f"incremental/{name}", tmp_path)


@pytest.mark.usefixtures("made")
def test_step_sizes_are_those_of_the_trained_models(tmp_path):
    """On random images, so that the accuracies mean nothing."""
    figure = step_sizes(str(ROOT / "weights"), images=4)
    assert figure.save("incremental/step_sizes", tmp_path)
    path = ROOT / "weights" / "incremental-table2-noisy-mnist-irnn-k-1-rank-5.safetensors"
    eta = load(path).rnn.cells[0].eta.abs().mean(dim=1)
    rows = [row for row in figure.rows if row["what"] == "eta" and row["setting"].startswith("noisy MNIST, the paper")]
    assert [row["value"] for row in rows] == pytest.approx(eta.tolist())
    assert f"{eta[:28].mean():.3g} on the 28 steps of the image" in figure.findings[0]


def test_step_sizes_name_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="Run this in the library's repository"):
        step_sizes(str(tmp_path))


@pytest.mark.long
def test_figure_seven_on_real_data(real):
    real("har")
    rows = {row["setting"]: row for row in incremental.fig7(steps=20, windows=4).rows if "zero" in row}
    plain, stable = (next(row for label, row in rows.items() if label.startswith(kind)) for kind in ("incremental", "stable"))
    assert plain["positive"] > 0
    assert stable["largest"] < 1e-7


def test_a_dataset_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
    assert not store.present("har")
    with pytest.raises(FileNotFoundError, match="dataset 'har' is not in"):
        incremental.fig8(steps=1)


def test_snapshots_end_with_the_model_that_train_trains():
    run = Run(task="adding", task_options={"T": 8}, cell="Elman", hidden=6, batch=4, rate=1e-2, steps=7, valid_every=7, seed=3)
    steps = []
    for step, model in snapshots(run, every=3):
        steps.append(step)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        if step == 0:
            start = run.make_model().state_dict()
            assert all(torch.equal(weights[name], start[name]) for name in start)
    assert steps == [0, 3, 6, 7]
    x = run.make_task().batch(0, 4, split="test", seed=0, device="cpu")
    again = run.make_model()
    again.load_state_dict(weights)
    score = train(run)["test"]["mse"]
    whole = [run.make_task().batch(i, 4, split="test", seed=0, device="cpu") for i in range(10)]
    with torch.no_grad():
        want = torch.stack([run.make_task().loss(again(b.x)[0], b) for b in whole]).mean()
    assert score == pytest.approx(float(want), rel=1e-5)
    assert x.x.shape[1] == 4


def test_snapshots_together_equal_those_of_single_runs():
    """Also if one run ends before the other: its model no longer changes."""
    short = Run(task="adding", task_options={"T": 8}, cell="Elman", hidden=6, batch=4, rate=1e-2, steps=4, valid_every=9)
    runs = [short, replace(short, steps=7, seed=3)]
    together = [(step, [parameters(model) for model in models]) for step, models in snapshots_together(runs, every=3)]
    assert [step for step, _ in together] == [0, 3, 6, 7]
    for e, each in enumerate(runs):
        alone = {step: parameters(model) for step, model in snapshots(each, every=3)}
        for step, weights in together:
            assert torch.equal(weights[e], alone[min(step, max(alone))])


def parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_ratios_that_are_not_finite_are_counted_separately():
    assert spread_of_ratios([0.5, math.inf, 2.0, math.nan, 1.0]) == "1 (0.5 to 2, not finite in 2 of 5 seeds)"
    assert spread_of_ratios([0.25]) == "0.25"
    assert spread_of_ratios([math.nan, math.nan]) == "nan"


def test_histogram_bins_do_not_cross_zero():
    values = torch.tensor([-1.0, -0.95, -0.01, 0.0, 1e-9, 0.02, 0.31])
    rows = histogram(values, 0.1)
    assert sum(row["count"] for row in rows) == len(values)
    assert {row["sign"]: row["count"] for row in rows if row["sign"] == "zero"} == {"zero": 2}
    for row in rows:
        if row["sign"] != "zero":
            inside = ((values >= row["low"] - 1e-6) & (values < row["high"] - 1e-6) & (values.abs() > 1e-7)).sum()
            assert inside == row["count"]
            assert (row["low"] < -1e-6) == (row["sign"] == "negative")
    assert not math.isnan(rows[0]["low"])


def test_the_command_lists_all_items_in_80_columns(capsys):
    cli_reproduce.list_items()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.partition(" ")[0] in registry.items()] == list(registry.items())
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)  # nothing is cut


def test_the_command_reproduces_an_item(tmp_path, monkeypatch, capsys):
    def small() -> Item:
        return SMALL["noise"]()

    small.__module__ = incremental.__name__
    monkeypatch.setattr(incremental, "small", small, raising=False)
    monkeypatch.setattr(incremental, "_part", small, raising=False)
    assert "incremental/_part" not in registry.items()
    cli_reproduce.run_items(("incremental/small",), output=tmp_path)
    output = capsys.readouterr().out
    assert "is noise suppressed" in output
    assert f"wrote {tmp_path / 'incremental-small.png'}" in output
    assert (tmp_path / "incremental-small.json").exists()


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ((), "name an item, e.g. unfading reproduce run incremental/fig6"),
        (("incremental/fig66",), "unknown item 'incremental/fig66'. Did you mean 'incremental/fig6'?"),
        (("incremental/fig6", "moon"), "unknown item 'moon'. Known: incremental/causes"),
    ],
)
def test_a_wrong_item_gives_one_sentence(items, sentence, tmp_path):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        cli_reproduce.run_items(items, output=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_line_reports_an_unknown_item():
    answer = run("reproduce", "run", "incremental/fig66", "-o", "nowhere")
    assert answer.returncode == 2
    assert answer.stderr.startswith("unfading: unknown item 'incremental/fig66'. Did you mean 'incremental/fig6'?")


def test_the_error_names_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be created"):
        Item("t", "c", {}, [], []).save("incremental/fig2", tmp_path / "file" / "below")
