"""`train --watch gradients`: the norms agree with autograd, and watching does not change training."""

import html
import json

import pytest
import torch

import unfading
from tests.helpers.trained import KINDS, outcome, small, stopped_after, train_outcome
from unfading import train
from unfading.diagnostics.watch import TIMES, gradients
from unfading.report import groups as settings
from unfading.report import page, records
from unfading.report.figures import watch_figures
from unfading.tasks import Adding
from unfading.tasks.base import Batch
from unfading.training import monitor


def by_hand(model, task, batch):
    """The same norms from a plain loop in which every state of every layer is a node of the graph."""
    y = list(model.encoder(batch.x))
    states = []
    for cell in model.rnn.cells:
        state, row, outputs = cell.initial_state(batch.x.shape[1]), [], []
        for t, u in enumerate(y):
            inputs = cell.project(u.unsqueeze(0), t)
            new = cell.step(type(inputs)(*(field[0] for field in inputs)), state, cell.weights())
            if batch.lengths is not None:
                going = (t < batch.lengths).unsqueeze(1)
                new = type(new)(*(torch.where(going, n, old) for n, old in zip(new, state, strict=True)))
            state = new
            outputs.append(cell.output(state) if batch.lengths is None else cell.output(state) * going)
            row.append(state[0])
        states.append(row)
        y = outputs
    loss = task.loss(model.head(torch.stack(y), batch.lengths), batch)
    norms = [[float(g.norm()) for g in torch.autograd.grad(loss, row, retain_graph=True)] for row in states]
    layers = []
    for cell in model.rnn.cells:
        of_parameters = torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True, allow_unused=True)
        layers.append(float(torch.cat([g.flatten() for g in of_parameters if g is not None]).norm()))
    return layers, norms


@pytest.mark.parametrize(
    "cell", ["STAR", "LSTM", "IncrementalRNN", "StatisticalRNN", pytest.param("NRU", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.sample(4)
def test_watched_norms_are_those_of_autograd(cell, T, ended):
    torch.manual_seed(0)
    task = Adding(T=20)
    rnn = getattr(unfading, cell)(2, 4, 2, dtype=torch.float64)
    model = unfading.Model(task.encoder(), rnn, task.head(rnn.output_size)).double()
    batch = task.batch(0, 3, split="train", seed=0, device="cpu")
    lengths = torch.tensor([T, 1, (T + 1) // 2]) if ended else None
    batch = Batch(batch.x[:T].double(), batch.target.double(), lengths)
    watched = gradients(model, task, batch)
    layers, norms = by_hand(model, task, batch)
    assert watched["layers"] == pytest.approx(layers, rel=1e-8)
    assert len(watched["times"]) == min(T, TIMES)
    assert (watched["times"][0], watched["times"][-1]) == (1, T)
    for row, want in zip(watched["states"], norms, strict=True):
        assert row == pytest.approx([want[t - 1] for t in watched["times"]], rel=1e-8, abs=1e-300)


def test_watching_does_not_change_the_model():
    task = Adding(T=9)
    model = unfading.Model(task.encoder(), unfading.LSTM(2, 4, 2, dropout=0.5, recurrent_dropout=0.4), task.head(4))
    model.train()
    model.head.eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    batch = task.batch(0, 3, split="train", seed=0, device="cpu")
    silent = unfading.Model(task.encoder(), unfading.LSTM(2, 4, 2), task.head(4))
    silent.load_state_dict(model.state_dict())
    assert gradients(model, task, batch) == gradients(silent, task, batch)  # without noise
    random = torch.get_rng_state()
    gradients(model, task, batch)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert all((p.grad == 2.0).all() for p in model.parameters())
    assert model.rnn.training
    assert not model.head.training


@pytest.mark.parametrize("kind", ["plain", "noise", "carried", "truncated", "returns", "diverges", "enough"])
@pytest.mark.sample(3)
def test_watching_does_not_change_training(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "WATCH_EVERY", 3)
    run = small(**KINDS[kind])
    want = train_outcome(run, tmp_path / "alone")
    for steps in (3, 4):  # at a step that is watched, and at one that is not
        stopped_after(steps, monkeypatch, lambda: train(run, tmp_path, resume=True, watch=gradients))
    train(run, tmp_path, resume=True, watch=gradients)
    record = outcome(tmp_path / run.key)
    watched = [line["step"] for line in record["curve"] if "watched" in line]
    assert watched == list(range(0, watched[-1] + 1, 3))  # each once, the first before the first step
    assert watched[-1] >= min(record["steps"], run.total()) - 3
    record["curve"] = [line for line in record["curve"] if "watched" not in line]
    assert record == want


def test_a_run_without_a_checkpoint_has_no_duplicate_rows(tmp_path):
    run = small()
    lines = tmp_path / run.key / "curve.jsonl"

    def killed(moment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path, listen=killed, watch=gradients)
    assert json.loads(lines.read_text().splitlines()[0])["watched"]
    record = train(run, tmp_path, watch=gradients)
    assert [line["step"] for line in record["curve"] if "watched" in line] == [0]


@pytest.mark.long
def test_the_report_draws_what_was_watched(tmp_path):
    curves = {}
    for cell in ("STAR", "LSTM"):
        run = small(cell=cell, layers=2, steps=250, valid_every=250)
        curves[cell] = train(run, tmp_path, watch=gradients)["curve"]
    runs = records.load([tmp_path])
    (task,) = settings.group_by_task(runs)
    specs = watch_figures.figures(task)
    rows = specs["gradients"]["datasets"]["watched"]
    by_cell = {cell: [line["watched"] for line in curve if "watched" in line] for cell, curve in curves.items()}
    for cell, watched in by_cell.items():
        for l in (1, 2):
            shown = [row["value"] for row in rows if row["layer"] == l and row["setting"].startswith(cell)]
            assert shown == [each["layers"][l - 1] for each in watched]
    through = [row for row in specs["through_time"]["datasets"]["watched"] if row["setting"].startswith("LSTM")]
    assert [row["value"] for row in through if row["step"] == 200] == by_cell["LSTM"][2]["states"][-1]
    text = page.build(runs)
    assert "Gradient of each layer's parameters over training" in html.unescape(text)
    written = page.write(runs, tmp_path / "page.html", png=True)
    assert {path.name for path in written} >= {"page-gradients.png", "page-through_time.png"}


def test_a_curve_without_watched_rows_has_no_such_figure(tmp_path):
    train(small(), tmp_path)
    (task,) = settings.group_by_task(records.load([tmp_path]))
    assert watch_figures.figures(task) == {}


def test_values_of_a_users_watch_are_stored_and_not_drawn(tmp_path):
    record = train(small(), tmp_path, watch=lambda model, task, batch: {"rows": batch.x.shape[1]})
    assert record["curve"][0] == {"step": 0, "watched": {"rows": 4}}
    (task,) = settings.group_by_task(records.load([tmp_path]))
    assert watch_figures.figures(task) == {}


def test_a_bidirectional_stack_is_rejected_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"this stack is bidirectional\. Train it without --watch"):
        train(small(cell_options={"bidirectional": True}), watch=gradients)
