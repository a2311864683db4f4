"""Models on their way through training, for figures that look into them."""

from collections.abc import Iterator

import torch

from unfading.member import Member
from unfading.model import Model
from unfading.run import Run
from unfading.tasks.base import Batch, Task
from unfading.training import Training


def on_the_way(run: Run, every: int) -> Iterator[tuple[int, Model]]:
    """The model of a run before its first step, after every so many, and at its end; the next is asked for, then trained."""
    with torch.random.fork_rng(devices=[]):
        member = Member(run, run.make_task())
        training = Training([member], None, float("inf"), "", together=False)
        training.fleet.train()
        model = training.fleet.models[0]
        assert isinstance(model, Model)
        yield 0, model
        while not member.done:
            training.advance([0])
            if training.step % every == 0 or member.done:
                yield training.step, model


def layer_norms(model: Model, task: Task, batch: Batch) -> tuple[list[float], float]:
    """The norm of the loss's gradient in each layer's parameters, and the loss, of a batch."""
    prediction, _ = model(batch.x, lengths=batch.lengths)
    loss = task.loss(prediction, batch)
    cells = [list(cell.parameters()) for cell in model.rnn.cells]
    found = iter(torch.autograd.grad(loss, [parameter for cell in cells for parameter in cell]))
    norms = [torch.cat([next(found).flatten() for _ in cell]).norm() for cell in cells]
    return [float(norm) for norm in norms], float(loss.detach())
