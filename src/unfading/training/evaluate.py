"""Evaluation on validation or test rows, in evaluation mode and without gradients."""

import math
from time import perf_counter
from typing import Any, NamedTuple

import torch

from unfading.fuse.triton.waiting import check_waiting
from unfading.tasks.base import Split, Task
from unfading.tasks.resident import Resident
from unfading.training import check_task
from unfading.training.check_task import Place
from unfading.training.data_parallel import ALONE, Processes
from unfading.training.fleet import Fleet
from unfading.training.run import Run
from unfading.training.user_metrics import NO_METRICS, ConfusionMatrix, Predictions, UserMetrics

# One seed for the evaluation of all runs, so that runs with different seeds are scored on the same rows.
SEED = 0
# Batches of an evaluation on a task without epochs, unless the run gives a number.
ENDLESS = 10


class Scores(NamedTuple):
    """Scores of one evaluation."""

    models: list[dict[str, float]]  # loss and metrics of each model, by name
    seconds: float
    sequences: int  # number of sequences that each model has read
    confusion: list[ConfusionMatrix | None]  # of each model, if it was asked for


def evaluate(fleet: Fleet, run: Run, split: Split, metrics: UserMetrics = NO_METRICS, processes: Processes = ALONE) -> Scores:
    """Loss and metrics of every model of a fleet, as means over the split; and the metrics of a user, over all predictions.

    Several processes take turns with the batches, because a metric need not be a mean over rows. Where the state is carried
    from batch to batch each takes its rows of all batches. The metrics of a user need all predictions: if there are any, each
    process evaluates everything.
    """
    processes = ALONE if metrics.names else processes
    task, device = fleet.task, fleet.w.device
    size = batch_size(run, task, device)
    length = check_task.length(task, split, size)
    batches = run.valid_batches or length or ENDLESS
    batches = batches if length is None else min(batches, length)
    carries = processes.size > 1 and any(task.carried(index, size, split=split) for index in range(batches))
    sums: dict[str, torch.Tensor] = {}
    predictions = Predictions(metrics, task, split, batches)
    weights, sequences, state, start, index = 0, 0, None, 0, 0
    began = perf_counter()
    fleet.eval()
    try:
        for index in range(batches) if carries else _turns(batches, processes):
            batch = task.batch(index, size, split=split, seed=SEED, device=device)
            batch = processes.rows(batch) if carries else batch
            if not task.carried(index, size, split=split):
                state, start = None, 0
            if split == "test" and index == 0:
                # The record has the time of the test. It must not include what happens once, at a model's first evaluation.
                fleet.scores(batch, None, 0)
                began = perf_counter()
            values, state, prediction = fleet.scores(batch, state, start)
            predictions.add(prediction, batch, values)
            start += batch.x.shape[0]
            weight = task.weight(batch) if carries or index % processes.size == processes.rank else 0
            if task.metric not in values or (sums and values.keys() != sums.keys()):
                raise ValueError(f"metrics must return the same names for every batch; got {', '.join(values)}.")
            for name, value in values.items():
                if value.dim() != 1:
                    raise TypeError(f"{name} must be a scalar; got shape {list(value.shape[1:])}.")
                sums[name] = sums.get(name, 0.0) + _weighted(value, weight)
            weights += weight
            sequences += batch.x.shape[1]
    except Exception as error:
        check_task.explain(error, task, fleet.models[0], [Place(split, index, size, SEED, device)])
    finally:
        fleet.train()
    weights = _summed(sums, weights, processes)
    losses = sums["loss"].tolist()
    check_waiting()
    if not any(map(math.isfinite, losses)):
        for index in range(batches):  # the first batch whose data explain it raises
            check_task.examine(task, fleet.models[0], Place(split, index, size, SEED, device))
    means = {name: (total / weights).tolist() for name, total in sums.items()}
    models: list[dict[str, Any]] = [{name: values[e] for name, values in means.items()} for e in range(len(fleet.models))]
    return Scores(models, perf_counter() - began, sequences, predictions.score(models))


def _weighted(value: torch.Tensor, weight: int) -> torch.Tensor:
    """The share of a batch in a sum of scores. Rows without a counted target have no mean, and count nothing."""
    value = value.to(torch.float64)
    return value * weight if weight else torch.zeros_like(value)


def _turns(batches: int, processes: Processes) -> range:
    """The batches of this process. If there are too few it takes the first, without weight, to learn the names of scores."""
    return range(processes.rank, batches, processes.size) or range(1)


def _summed(sums: dict[str, torch.Tensor], weights: int, processes: Processes) -> int:
    """Sum scores over the processes, in place; the sum of their weights."""
    if processes.size == 1:
        return weights
    rows = [*sums.values(), torch.full_like(sums["loss"], weights)]
    table = torch.stack(rows).to(torch.float64)
    processes.sum(table)
    sums.update(zip(sums, table, strict=False))
    return int(table[-1, 0])


def first_place(run: Run, task: Task, split: Split, device: torch.device) -> Place:
    """The first batch of an evaluation."""
    return Place(split, 0, batch_size(run, task, device), SEED, device)


def batch_size(run: Run, task: Task, device: torch.device) -> int:
    """Rows of an evaluation's batch: those of training, or more on a GPU if all rows of a dataset are evaluated.

    Texts keep the batch of training: they have thousands of answers at each step, and another size would cut them elsewhere.
    """
    if device.type == "cpu" or run.valid_batches is not None or not isinstance(task, Resident):
        return run.batch
    return run.batch * max(1, task.gpu_rows // run.batch)
