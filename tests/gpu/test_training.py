"""Training on a GPU: steps replayed from a CUDA graph equal steps that are run one by one."""

from dataclasses import replace

import pytest
import torch

import unfading
from unfading.backends.cuda_graph import backend
from unfading.training import captured_step as step_graph
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")

RUN = unfading.Run(
    task="adding",
    task_options={"T": 20},
    cell="STAR",
    hidden=16,
    batch=8,
    steps=14,
    rate=1e-2,
    schedule="cosine",
    valid_every=7,
    device="cuda",
)


def curves(records):
    return [[(line["step"], line["loss"], line.get("valid")) for line in record["curve"]] for record in records]


def runs(**changes):
    return [replace(RUN, seed=seed, rate=rate, **changes) for seed, rate in ((0, 1e-2), (1, 3e-3), (2, 1e-3))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cell": "IncrementalRNN"},
        {"cell_options": {"zoneout": 0.2}},
        {"retries": 1},
        {"schedule_options": {"warmup": 0.3}},
        {"compress": {"sparsity": 0.5, "bits": 8}},
    ],
    ids=str,
)
@pytest.mark.parametrize("together", [True, False])
def test_captured_steps_are_the_steps_that_would_have_run(options, together, monkeypatch):
    first = curves(train_together(runs(**options), together=together))
    assert len({str(curve) for curve in first}) == 3
    monkeypatch.setattr(step_graph, "WARM_UP", 10**9)
    assert curves(train_together(runs(**options), together=together)) == first


@pytest.mark.parametrize("compress", [{}, {"sparsity": 0.5, "bits": 8}], ids=str)
@pytest.mark.parametrize("cell", ["STAR", "StatisticalRNN", "NRU", "IncrementalRNN", "EURNN"])
def test_every_step_after_the_first_is_captured(cell, compress, monkeypatch):
    troubles = []
    capture = step_graph.CapturedStep._capture

    def noted(self):
        capture(self)
        troubles.append(self.trouble)

    monkeypatch.setattr(step_graph.CapturedStep, "_capture", noted)
    train_together(runs(cell=cell, compress=compress))
    assert troubles == [None]


def test_a_step_that_cannot_be_captured_is_reported(monkeypatch):
    weights = unfading.STARCell.weights

    def from_the_host(self):
        own = weights(self)
        return own._replace(**{own._fields[0]: own[0] * own[0].new_tensor([1.0])})

    monkeypatch.setattr(unfading.STARCell, "weights", from_the_host)
    said = []
    with unfading.use_backend("reference"):
        records = train_together(runs(), TrainOptions(say=said.append))
    assert [record["status"] for record in records] == ["finished"] * 3
    assert sum("cannot be captured as a CUDA graph" in sentence for sentence in said) == 1


def test_a_model_that_diverges_stands_still_and_the_others_go_on():
    wild, tame, _ = runs(cell="Elman", optimiser="sgd")
    records = train_together([replace(wild, rate=1e30), tame])
    assert [record["status"] for record in records] == ["diverged", "finished"]
    assert all(torch.isfinite(torch.tensor([line["loss"] for line in records[1]["curve"]])))


def test_a_task_that_carries_its_state(monkeypatch):
    run = replace(RUN, task="copying", task_options={"T": 10}, steps=8)
    first = curves([unfading.train(run)])
    monkeypatch.setattr(step_graph, "WARM_UP", 10**9)
    assert curves([unfading.train(run)]) == first


def test_a_captured_step_replaces_the_recordings_of_single_layers(monkeypatch):
    """They would hold memory that nothing uses again."""
    left = []
    capture = step_graph.CapturedStep._capture

    def noted(self):
        cells = self.fleet.models[0].rnn.runners
        assert any(cell in backend._recordings for cell in cells)
        capture(self)
        left.extend(cell for cell in cells if cell in backend._recordings)

    monkeypatch.setattr(step_graph.CapturedStep, "_capture", noted)
    with unfading.use_backend("graph"):
        train_together([replace(RUN, cell="Elman")])
    assert left == []
