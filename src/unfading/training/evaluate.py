"""Scores on validation or test rows: models in their own mode, without noise and without gradients."""

from time import perf_counter
from typing import Any, NamedTuple

import torch

from unfading.tasks.base import Split, Task
from unfading.tasks.resident import Resident
from unfading.training.fleet import Fleet
from unfading.training.run import Run

# Validation and test draw with one seed for all runs: runs that differ in theirs are scored on the same rows.
SEED = 0
# Batches of an evaluation on a task without end, where the run does not say.
ENDLESS = 10
# Rows that a GPU reads at a time, whatever the batch of training: a small batch leaves it idle. Not by the number of models: a
# task that draws noise for each batch would draw other noise in a pass of many.
AT_ONCE = 512


class Scores(NamedTuple):
    """Of one evaluation."""

    models: list[dict[str, float]]  # loss and metrics of each, by name
    seconds: float
    sequences: int  # that each model has read


def evaluate(fleet: Fleet, run: Run, split: Split) -> Scores:
    """Loss and metrics of every model of a fleet, means over the split."""
    task, device = fleet.task, fleet.w.device
    size = batch_size(run, task, device)
    length = task.length(split, size)
    batches = run.valid_batches or length or ENDLESS
    batches = batches if length is None else min(batches, length)
    sums: dict[str, torch.Tensor] = {}
    weights, sequences, state, start = 0, 0, None, 0
    began = perf_counter()
    fleet.eval()
    try:
        for index in range(batches):
            batch = task.batch(index, size, split=split, seed=SEED, device=device)
            if not task.carried(index, size, split=split):
                state, start = None, 0
            if split == "test" and index == 0:
                # The time of a test is told: what is done once, when a model is first evaluated, is no part of it.
                fleet.scores(batch, None, 0)
                began = perf_counter()
            values, state = fleet.scores(batch, state, start)
            start += batch.x.shape[0]
            weight = task.weight(batch)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value.to(torch.float64) * weight
            weights += weight
            sequences += batch.x.shape[1]
    finally:
        fleet.train()
    means = {name: (total / weights).tolist() for name, total in sums.items()}
    models: list[dict[str, Any]] = [{name: values[e] for name, values in means.items()} for e in range(len(fleet.models))]
    return Scores(models, perf_counter() - began, sequences)


def batch_size(run: Run, task: Task, device: torch.device) -> int:
    """Rows of a batch: those of training, or more on a GPU, where all rows of a dataset are read.

    Not of a text, for which a model has thousands of answers at each step, and whose streams a size would cut elsewhere.
    """
    if device.type == "cpu" or run.valid_batches is not None or not isinstance(task, Resident):
        return run.batch
    return run.batch * max(1, AT_ONCE // run.batch)
