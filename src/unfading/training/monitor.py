"""Monitoring of training: log rows, evaluations on the validation rows, and progress updates."""

import math
import time
from typing import Any

from torch.utils import _pytree

from unfading.training.check_task import examine
from unfading.training.evaluate import evaluate
from unfading.training.options import UPDATES_PER_SECOND, ProgressUpdate, TrainOptions
from unfading.training.persistence import Checkpoints
from unfading.training.record import finite_or_none
from unfading.training.training_state import TrainingState

WATCH_EVERY = 100  # steps


class Monitor:
    """Logs and evaluates active runs, and reports their progress.

    Args:
        state: of training; only the best weights and the runs' scores are changed.
        checkpoints: writes the best weights.
        options: with the listener and the watch.
    """

    def __init__(self, state: TrainingState, checkpoints: Checkpoints, options: TrainOptions):
        self.state = state
        self.checkpoints = checkpoints
        self.listen = options.listen
        self.watch = options.watch
        self.metrics = options.user_metrics
        self.valid: dict[int, dict[str, float]] = {}  # validation scores of the present step, by run
        self._reported = time.monotonic()

    def run_watch(self) -> None:
        """Log what the watch returns for the next batch, if it is due. Training is not affected."""
        state = self.state
        if self.watch is None or state.step % WATCH_EVERY:
            return
        for e in state.running():
            each, model = state.active[e], state.fleet.models[e]
            device = state.fleet.w.device
            batch = state.task.batch(state.step, each.run.batch, split=each.run.split, seed=each.run.seed, device=device)
            each.log({"step": state.step, "watched": self.watch(model, state.task, state.fleet.cast(batch))})

    def log(self) -> bool:
        """Log and evaluate the runs that are due; True if one was evaluated or has ended, so that checkpoints are due."""
        due = self._due()
        self.valid = {}
        if not due:
            if self.listen is not None and time.monotonic() - self._reported >= 1 / UPDATES_PER_SECOND:
                self._reported = time.monotonic()
                for e in self.state.running():
                    self.report(e)
            return False
        diverged_at = self.state.diverged_at()
        self.valid = self._validate([e for e in due if self.state.active[e].valid_due(self.state.step) and diverged_at[e] < 0])
        self._reported = time.monotonic()
        scales = self.state.update.scale.squeeze(1).tolist()
        exploded = False
        for e, loss in zip(due, self.state.update.mean_losses(due), strict=True):
            ended = diverged_at[e] < 0 and self.state.active[e].explosion.update(self.state.step, loss)
            self._log_row(e, loss, scales[e], self.valid.get(e))
            if diverged_at[e] >= 0:
                # The batch may hold the reason: then its task is at fault, and the run has no result.
                examine(self.state.task, self.state.fleet.models[e], self.state.place(e, diverged_at[e]))
            elif ended:
                exploded = True
                self._end_explosion(e)
        return (
            exploded or bool(self.valid) or any(diverged_at[e] >= 0 or self.state.active[e].over(self.state.step) for e in due)
        )

    def report(self, e: int, valid: Any = None, status: str | None = None) -> None:
        """Send a progress update of a run to the listener."""
        if self.listen is not None:
            each, state = self.state.active[e], self.state
            self.listen(ProgressUpdate(each.run, state.step, each.total, state.seconds, each.loss, valid, status))

    def _due(self) -> list[int]:
        """Runs whose log gets a row now. A diverged run is noticed at once on a CPU, and at the next row on a GPU."""
        state, update = self.state, self.state.update
        due = [e for e, each in enumerate(state.active) if each.log_due(state.step)]
        if update.failed and (due or not state.fleet.w.is_cuda):
            due = sorted({*due, *(e for e in state.running() if update.ended[e] >= 0)})
            update.failed = False
        return due

    def _validate(self, due: list[int]) -> dict[int, dict[str, float]]:
        """Validation scores of these runs, by index."""
        if not due:
            return {}
        scores = evaluate(self.state.fleet, self.state.active[due[0]].run, "valid", self.metrics, self.state.processes).models
        return {e: scores[e] for e in due}

    def _end_explosion(self, e: int) -> None:
        """Return to better weights, or end, as a run whose loss is not finite."""
        state = self.state
        if state.update.fail(e, state.step):
            state.active[e].explosion.returned()
        if state.carried is not None:
            for part in _pytree.tree_leaves(state.carried):
                part[e] = 0.0

    def _log_row(self, e: int, loss: float, scale: float, scores: dict[str, float] | None) -> None:
        state, each = self.state, self.state.active[e]
        if math.isfinite(loss):
            each.loss = loss
            if each.update_lowest_loss(state.step, loss):
                state.update.remember(e)
        row: dict[str, Any] = {"step": state.step, **finite_or_none({"loss": loss, "rate": each.rate(state.step - 1) * scale})}
        row["seconds"] = round(state.seconds, 3)
        if scores is not None:
            row["valid"] = finite_or_none(scores)
            if each.update_best(state.step, scores):
                state.best_w[e] = state.fleet.w[e]
                self.checkpoints.save_best(e)
        each.log(row)
        self.report(e, row.get("valid"))
