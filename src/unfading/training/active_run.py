"""A run that is being trained: when it is logged and evaluated, its best scores, and its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from unfading.tasks.base import Task
from unfading.training import check_task
from unfading.training.compress import stages
from unfading.training.explosion import Explosion
from unfading.training.record import finite_or_none, is_better
from unfading.training.run import Run
from unfading.training.run_dir import RunFolder

# About how many rows a log has, and how many evaluations a run has on a task without epochs.
LOG_ROWS = 200
EVALUATIONS = 20


class ActiveRun:
    """A run that is being trained.

    Args:
        run: the run.
        task: its task.
    """

    def __init__(self, run: Run, task: Task):
        self.run = run
        self.task = task
        self.total = run.total()
        self.stages = stages(run.compress, self.total)
        self.folder: RunFolder | None = None  # None writes nothing
        self.schedule = run.make_schedule()
        self.log_every = max(1, self.total // LOG_ROWS)
        epoch = check_task.length(task, "train", run.batch)
        self.valid_every = run.valid_every or epoch or max(1, self.total // EVALUATIONS)
        self._rows: list[dict[str, Any]] = []  # the log, where there is no folder
        self.loss: float | None = None  # mean of the last interval
        self.lowest_loss: float | None = None  # lowest mean of an interval
        self.explosion = Explosion(self.total)
        self.best: dict[str, Any] | None = None  # step and scores of the best evaluation
        self.reached = False  # whether a score has reached `stop_at`, patience is over, or a callback has ended the run
        self.stopped_by: str | None = None  # the callback that has ended the run
        self.backends: list[dict[str, Any]] = []  # which backend ran each kind of cell, from which step
        self.done = False

    def open(self, where: Path) -> RunFolder:
        """Write everything to a folder in `where`."""
        self.folder = RunFolder(where, self.run)
        return self.folder

    def rate(self, step: int) -> float:
        """The learning rate after `step` steps."""
        return self.run.rate * self.schedule.factor(step, self.total)

    def log_due(self, step: int) -> bool:
        """Whether the log gets a row after `step` steps."""
        return not self.done and (step % self.log_every == 0 or self.valid_due(step) or step == self.total)

    def valid_due(self, step: int) -> bool:
        """Whether the run is evaluated after `step` steps."""
        return not self.done and self.run.split == "train" and (step % self.valid_every == 0 or step == self.total)

    def over(self, step: int) -> bool:
        """Whether the run ends after `step` steps: all are taken, a score has reached `stop_at`, or patience is over."""
        return self.reached or step >= self.total

    def log(self, row: dict[str, Any]) -> None:
        """Add a row to the log."""
        if self.folder is None:
            self._rows.append(row)
        else:
            self.folder.log(row)

    def curve(self) -> list[dict[str, Any]]:
        """All log rows so far."""
        return list(self._rows) if self.folder is None else self.folder.curve()

    def take_rows(self, rows: list[dict[str, Any]]) -> None:
        """Take the log rows before a checkpoint, in a process that writes nothing."""
        if self.folder is None:
            self._rows = rows

    def missing_rows(self, step: int) -> int:
        """How many rows a log of `step` steps lacks."""
        steps = {row["step"] for row in self.curve()}
        return sum(self.log_due(each) and each not in steps for each in range(1, step + 1))

    def update_best(self, step: int, scores: Mapping[str, float]) -> bool:
        """Take the scores of an evaluation; True if they are the best so far. Of equal scores the first stays the best.

        Weights before the last stage of a compression are not what the run is for.
        """
        if step <= self.stages.last:
            return False
        score, target = scores[self.task.metric], self.run.stop_at
        higher = self.task.higher_is_better
        self.reached = self.reached or (target is not None and (score == target or is_better(score, target, higher)))
        name, higher = (self.task.metric, higher) if self.run.select_by == "metric" else ("loss", False)
        if not is_better(scores[name], None if self.best is None else self.best["valid"][name], higher):
            # Scores do not improve while training sequences are shorter than those of validation.
            since = max(self.task.full_length_from, 0 if self.best is None else self.best["step"])
            without = step // self.valid_every - since // self.valid_every
            self.reached = self.reached or (self.run.patience is not None and without >= self.run.patience)
            return False
        self.best = {"step": step, "valid": finite_or_none(scores)}
        return True

    def stop(self, by: str) -> None:
        """End the run after this step."""
        self.reached, self.stopped_by = True, by

    def update_lowest_loss(self, step: int, loss: float) -> bool:
        """Take the mean loss of the interval up to `step`; True if a run whose loss is not finite later returns to its weights.

        No interval had a lower loss. While training sequences grow, losses cannot be compared: then the last interval counts,
        and after the growth the first, unless the loss has exploded.
        """
        full_from = self.task.full_length_from
        if full_from and self.explosion.present:
            return False
        if full_from and step < full_from + self.log_every:
            self.lowest_loss = None
            return True
        if not loss <= (float("inf") if self.lowest_loss is None else self.lowest_loss):
            return False
        self.lowest_loss = loss
        return True

    def header(self) -> dict[str, Any]:
        """The part of a checkpoint's header that describes this run's progress."""
        progress = {"best": self.best, "least": self.lowest_loss, "loss": self.loss, "reached": self.reached}
        return {**progress, "backends": self.backends, **self.stop_field()}

    def stop_field(self) -> dict[str, str]:
        """The field of headers and records that names the callback which has ended the run, if one has."""
        return {} if self.stopped_by is None else {"stopped_by": self.stopped_by}

    def restore(self, header: Mapping[str, Any]) -> None:
        """Take the progress from a checkpoint's header."""
        self.best, self.lowest_loss, self.loss, self.reached = (header[name] for name in ("best", "least", "loss", "reached"))
        self.stopped_by = header.get("stopped_by")
        self.backends = header.get("backends", [])  # absent in checkpoints of earlier versions

    def update_backends(self, step: int, observed: Mapping[str, Mapping[str, str | None]]) -> list[str]:
        """Take the backends that ran the first step of a process, after `step` steps; a sentence for each that changed."""
        sentences = []
        for cell, entry in observed.items():
            before = next((each for each in reversed(self.backends) if each["cell"] == cell), None)
            if before is None or before["backend"] != entry["backend"]:
                self.backends = [*self.backends, {"from": step, "cell": cell, **entry}]
            if before is not None and before["backend"] != entry["backend"]:
                why = f" ({entry['reason']})" if entry["reason"] else ""
                sentences.append(
                    f"{cell} ran on the backend {before['backend']} before and runs on {entry['backend']} now{why}; the result "
                    "is not bit for bit that of a run without a stop."
                )
        return sentences

    def replay(self, *, ended: bool) -> None:
        """Take the log rows before a checkpoint into account, after which the run had ended or not."""
        for row in self.curve():
            loss = row.get("loss")
            if self.explosion.update(row["step"], float("nan") if loss is None else loss) and not ended:
                self.explosion.returned()

    def load(self, *, resume: bool, again: bool) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, if there is one to continue from. Results are never overwritten without `resume` or `again`."""
        if self.folder is None:
            return None
        if again:
            self.folder.clear()
            return None
        checkpoint = self.folder.load("last")
        if checkpoint is not None and not resume:
            raise ValueError(
                f"{self.folder.path} holds a run that stopped at step {checkpoint[1]['step']} of {self.total}. Continue it "
                "with resume (--resume), or start again with again (--again)."
            )
        # Without a checkpoint the whole log goes, with what was logged before the first step.
        self.folder.cut_log(-1 if checkpoint is None else checkpoint[1]["step"])
        return checkpoint
