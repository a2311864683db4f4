"""The state of training: models, optimisers, best weights, and the number of steps taken."""

from collections.abc import Sequence
from typing import Any

import torch

from unfading import allocation
from unfading.layers.matrix_parameters import matrices
from unfading.layers.model import Model
from unfading.training.active_run import ActiveRun
from unfading.training.check_task import Place
from unfading.training.compress import Compression
from unfading.training.data_parallel import ALONE, Processes
from unfading.training.fleet import Fleet
from unfading.training.run import Run
from unfading.training.update import Update


class TrainingState:
    """Everything that changes while runs are trained together. A checkpoint of a run holds its share.

    Args:
        active: the runs.
        together: take each step in one pass over all models.
        processes: those that share each batch.
    """

    def __init__(self, active: Sequence[ActiveRun], *, together: bool, processes: Processes = ALONE):
        self.active = active
        self.processes = processes
        self.task = active[0].task
        device = _device(active[0].run)
        models = [each.run.make_model().to(device) for each in active]
        if len(active) == 1 or device.type == "cpu":  # a pass on a GPU that does not fit is divided
            _check_fits(models, active[0].run, device)
        self.fleet = Fleet(models, self.task, together=together and len(active) > 1)
        self.matrices = self._matrices()
        self.update = Update(self.fleet, [each.run for each in active], self._compression())
        self.best_w = torch.zeros_like(self.fleet.w)  # weights with the best validation scores
        self.step = 0  # number of steps taken
        self.seconds = 0.0
        # Recurrent state of this process's rows at the start of the next batch; None for the initial state.
        self.carried: Any = None
        self.time = 0  # number of time steps since the initial state

    def _matrices(self) -> list[str]:
        """The parameters that are matrices, where the models are compressed."""
        run = self.active[0].run
        if not run.compress:
            return []
        batch = self.task.batch(0, run.batch, split=run.split, seed=run.seed, device="cpu")
        names = matrices(self.fleet.models[0], batch.x)
        if "sparsity" in run.compress and not any(name.startswith("rnn.") for name in names):
            raise ValueError(f"compress: {run.cell} has no matrix that could be sparse. Leave sparsity out.")
        return names

    def _compression(self) -> Compression | None:
        options = self.active[0].run.compress
        if not {"sparsity", "bits"} & options.keys():
            return None
        return Compression(self.fleet, options, [each.stages for each in self.active], self.matrices)

    def running(self) -> list[int]:
        """Indices of the runs that have not ended."""
        return [e for e, each in enumerate(self.active) if not each.done]

    def place(self, e: int, step: int) -> Place:
        """The training batch of a run at a step."""
        run = self.active[e].run
        return Place(run.split, step, run.batch, run.seed, self.fleet.w.device)

    def diverged_at(self) -> list[int]:
        """For each run the step at which it diverged, or -1."""
        steps: list[int] = self.update.ended.squeeze(1).tolist()
        return steps


def _check_fits(models: Sequence[Model], run: Run, device: torch.device) -> None:
    """Raise if the matrices of training do not fit in memory: weights, gradients, best weights, and those of the optimiser."""
    held = sum(part.numel() * part.element_size() for model in models for part in model.parameters() if part.requires_grad)
    states = len(run.make_optimiser().state_names)
    copies = 3 + states + (1 + states if run.retries else 0) + bool(run.compress)
    what = f"training {run.cell} with hidden={run.hidden} and layers={run.layers}"
    allocation.check_fits(what, copies * held, "hidden size or number of layers", device)


def _device(run: Run) -> torch.device:
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device="cuda", and torch finds no GPU here. Use device="cpu", which draws other random numbers.')
    return torch.device(run.device)
