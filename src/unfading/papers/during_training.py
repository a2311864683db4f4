"""Models on their way through training, for figures that look into them."""

from collections.abc import Iterator, Sequence

import torch

from unfading.layers.model import Model
from unfading.tasks.base import Batch, Task
from unfading.training.active_run import Member
from unfading.training.loop import Training
from unfading.training.run import Run


def on_the_way(run: Run, every: int) -> Iterator[tuple[int, Model]]:
    """The model of a run before its first step, after every so many, and at its end; the next is asked for, then trained."""
    return ((step, models[0]) for step, models in all_on_the_way([run], every))


def all_on_the_way(runs: Sequence[Run], every: int) -> Iterator[tuple[int, list[Model]]]:
    """The models of runs that differ in their seeds, as `on_the_way` gives one; on a GPU they are trained in one pass.

    They are the same objects each time. One whose run has ended, or diverged, stays as it was then.
    """
    with torch.random.fork_rng(devices=[]):
        task = runs[0].make_task()
        members = [Member(run, task) for run in runs]
        training = Training(members, None, float("inf"), "", together=runs[0].device == "cuda")
        training.fleet.train()
        yield 0, training.fleet.models
        while running := [e for e, member in enumerate(members) if not member.done]:
            training.advance(running)
            if training.step % every == 0 or all(member.done for member in members):
                yield training.step, training.fleet.models


def layer_norms(model: Model, task: Task, batch: Batch) -> tuple[list[float], float]:
    """The norm of the loss's gradient in each layer's parameters, and the loss, of a batch."""
    prediction, _ = model(batch.x, lengths=batch.lengths)
    loss = task.loss(prediction, batch)
    cells = [list(cell.parameters()) for cell in model.rnn.cells]
    found = iter(torch.autograd.grad(loss, [parameter for cell in cells for parameter in cell]))
    norms = [torch.cat([next(found).flatten() for _ in cell]).norm() for cell in cells]
    return [float(norm) for norm in norms], float(loss.detach())
