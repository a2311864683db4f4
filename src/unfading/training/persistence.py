"""Checkpoints of active runs: write them, and continue from them.

A checkpoint holds, of one run, all parameters and buffers (`model.`), the optimiser's state and counters (`update.`), the best
weights (`best.`), and the recurrent state where the task carries it (`state.`). Its header holds the step and the scores.
"""

import time
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from unfading.tasks.base import Batch
from unfading.training import checkpoint
from unfading.training.active_run import ActiveRun
from unfading.training.training_state import TrainingState


class Checkpoints:
    """Writes and reads the checkpoints of runs that are trained together.

    Args:
        state: of training.
    """

    def __init__(self, state: TrainingState):
        self.state = state
        self.saved = time.monotonic()  # when the last ones were written

    def load(self, *, resume: bool, again: bool) -> None:
        """Continue from the last checkpoints, if there are any; all runs must have stopped at one step."""
        checkpoints = [self._load(each, resume, again) for each in self.state.active]
        steps = {0 if each is None else each[1]["step"] for each in checkpoints}
        if len(steps) > 1:
            raise ValueError(
                f"runs that are trained together must be at one step; these are at {sorted(steps)}. Resume them separately."
            )
        for e, each in enumerate(checkpoints):
            if each is not None:
                self._restore(e, *each)
        if self.state.carried is not None and self.state.processes.size > 1:
            self.state.carried = self.state.processes.own_state(self.state.fleet, self._batch(0), self.state.carried)

    def _load(self, each: ActiveRun, resume: bool, again: bool) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint of a run, which the first process reads."""
        tensors: dict[str, Tensor] = {}

        def read() -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
            checkpoint = each.load(resume=resume, again=again)
            tensors.update({} if checkpoint is None else checkpoint[0])
            return None if checkpoint is None else checkpoint[1], each.curve()

        header, rows = self.state.processes.on_first(read)
        each.take_rows(rows)
        return None if header is None else (self.state.processes.tensors_from_first(tensors), header)

    def save(self) -> None:
        """Write a checkpoint of every run that has not ended. Processes that share batches save at the same step."""
        state = self.state
        whole = state.carried
        if whole is not None and state.processes.size > 1:
            whole = state.processes.whole_state(state.fleet, self._batch(0), whole)
        for e in state.running():
            each = state.active[e]
            if each.folder is None:
                continue
            parts = [] if whole is None else _pytree.tree_leaves(whole)
            carried = {f"state.{i}": part[e] for i, part in enumerate(parts)}
            header = {"step": state.step, "seconds": state.seconds, "time": state.time, **each.header()}
            each.folder.save("last", {**self._tensors(e), **carried}, header)
        self.saved = time.monotonic()

    def save_best(self, e: int) -> None:
        """Write the best weights of a run."""
        each = self.state.active[e]
        if each.folder is not None and each.best is not None:
            each.folder.save("best", {**self._model(e), **self._best(e, "model")}, each.best)

    def _model(self, e: int) -> dict[str, Tensor]:
        return {f"model.{name}": part for name, part in self.state.fleet.models[e].state_dict().items()}

    def _best(self, e: int, prefix: str) -> dict[str, Tensor]:
        fleet = self.state.fleet
        return {f"{prefix}.{name}": fleet.view(self.state.best_w[e], name) for name in fleet.names}

    def _tensors(self, e: int) -> dict[str, Tensor]:
        """Views of all tensors of a run that its checkpoint holds, except for a carried state."""
        each = self.state.active[e]
        rows = {f"update.{name}": part[e] for name, part in self.state.update.rows().items()}
        if not each.run.retries:
            # This run never returns to earlier weights; the rows exist for other runs of its pass.
            rows = {name: part for name, part in rows.items() if not name.startswith("update.best.")}
        return {**self._model(e), **rows, **({} if each.best is None else self._best(e, "best"))}

    def _restore(self, e: int, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        state, each = self.state, self.state.active[e]
        path = Path("last.safetensors") if each.folder is None else each.folder.path / "last.safetensors"
        each.restore(header)
        checkpoint.restore(self._tensors(e), tensors, path)
        self.save_best(e)  # the file may be missing, or of a later step
        state.step, state.seconds, state.time = header["step"], header["seconds"], header["time"]
        if any(name.startswith("state.") for name in tensors):
            self._restore_carried(e, tensors, path)

    def _restore_carried(self, e: int, tensors: dict[str, Tensor], path: Path) -> None:
        """Restore the carried state, in the structure in which the model returns it."""
        state = self.state
        if state.carried is None:
            state.fleet.eval()
            _, state.carried, _ = state.fleet.scores(self._batch(e), None, 0)
            state.fleet.train()
        parts = {f"state.{i}": part[e] for i, part in enumerate(_pytree.tree_leaves(state.carried))}
        carried = {name: part for name, part in tensors.items() if name.startswith("state.")}
        checkpoint.restore(parts, carried, path)

    def _batch(self, e: int) -> Batch:
        """A batch with the shapes of training."""
        state = self.state
        return state.task.batch(0, state.active[e].run.batch, split="train", seed=0, device=state.best_w.device)
