"""Models during training, for figures that measure them at several steps."""

from collections.abc import Iterator, Sequence

import torch

from unfading.layers.model import Model
from unfading.tasks.base import Batch, Task
from unfading.training.active_run import ActiveRun
from unfading.training.loop import Training
from unfading.training.options import TrainOptions
from unfading.training.run import Run


def snapshots(run: Run, every: int) -> Iterator[tuple[int, Model]]:
    """The step and the model of a run before its first step, every `every` steps, and after its last step.

    The run is trained as the iterator advances.
    """
    return ((step, models[0]) for step, models in snapshots_together([run], every))


def snapshots_together(runs: Sequence[Run], every: int) -> Iterator[tuple[int, list[Model]]]:
    """`snapshots` of runs that differ only in their seeds; on a GPU they are trained in one pass.

    The models are the same objects each time. A model whose run has ended or diverged no longer changes.
    """
    with torch.random.fork_rng(devices=[]):
        task = runs[0].make_task()
        training = Training([ActiveRun(run, task) for run in runs], TrainOptions(), together=runs[0].device == "cuda")
        state = training.state
        state.fleet.train()
        yield 0, state.fleet.models
        while running := state.running():
            training.advance(running)
            if state.step % every == 0 or not state.running():
                yield state.step, state.fleet.models


def layer_norms(model: Model, task: Task, batch: Batch) -> tuple[list[float], float]:
    """The gradient norm of the loss in the parameters of each layer, and the loss, on one batch."""
    prediction, _ = model(batch.x, lengths=batch.lengths)
    loss = task.loss(prediction, batch)
    layers = [list(cell.parameters()) for cell in model.rnn.cells]
    gradients = iter(torch.autograd.grad(loss, [parameter for layer in layers for parameter in layer]))
    norms = [torch.cat([next(gradients).flatten() for _ in layer]).norm() for layer in layers]
    return [float(norm) for norm in norms], float(loss.detach())
