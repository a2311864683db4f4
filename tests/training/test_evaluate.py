"""Evaluation: scores do not depend on the size of the batches."""

import sys

import pytest
import torch
from torch.testing import assert_close

from unfading import Run
from unfading.training.evaluate import batch_size, evaluate
from unfading.training.fleet import Fleet

module = sys.modules["unfading.training.evaluate"]
HAR = Run(task="har2", cell="STAR", hidden=4, batch=8, steps=1, dtype="float64")


@pytest.mark.parametrize("split", ["valid", "test"])
def test_scores_do_not_depend_on_the_batch_size(split, made, monkeypatch):
    fleet = Fleet([HAR.make_model()], HAR.make_task(), together=False)
    evaluations = []
    for size in (3, 8, 1000):
        monkeypatch.setattr(module, "batch_size", lambda *arguments, size=size: size)
        evaluations.append(evaluate(fleet, HAR, split))
    assert len({scores.sequences for scores in evaluations}) == 1
    for scores in evaluations[1:]:
        for name, value in evaluations[0].models[0].items():
            assert_close(scores.models[0][name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("fields", "device", "size"),
    [
        ({"batch": 128}, "cpu", 128),
        ({"batch": 128}, "cuda", 512),
        ({"batch": 100}, "cuda", 500),
        ({"batch": 600}, "cuda", 600),
        ({"batch": 128, "valid_batches": 3}, "cuda", 128),
        ({"batch": 128, "task": "adding", "task_options": {"T": 9}}, "cuda", 128),
        ({"batch": 4, "task": "ptb_words", "task_options": {"steps": 7, "carry": True}}, "cuda", 4),
        ({"batch": 4, "task": "ptb_words", "task_options": {"steps": 7}}, "cuda", 4),
    ],
)
def test_a_gpu_evaluates_larger_batches_of_resident_datasets(made, fields, device, size):
    run = Run(**{"task": "har2", "cell": "STAR", "steps": 1, **fields})
    assert batch_size(run, run.make_task(), torch.device(device)) == size
