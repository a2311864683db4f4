"""One run among those that are trained together: when it is looked at, what it did best, and its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from unfading.tasks.base import Task
from unfading.training.record import better, plain
from unfading.training.run import Run
from unfading.training.run_dir import Folder

# A curve has about so many lines, and a run on an endless task so many evaluations.
LINES = 200
EVALUATIONS = 20


class Moment(NamedTuple):
    """What is told of a run while it goes on."""

    run: Run
    step: int  # steps done
    total: int
    seconds: float  # of training so far
    loss: float | None  # mean of the last stretch of training
    valid: Mapping[str, float] | None  # scores, at an evaluation
    status: str | None = None  # "finished" or "diverged", at the end


class Member:
    """A run on its way.

    Args:
        run: what is trained.
        task: on what.
    """

    def __init__(self, run: Run, task: Task):
        self.run = run
        self.task = task
        self.total = run.total()
        self.folder: Folder | None = None  # None keeps nothing
        self.schedule = run.make_schedule()
        self.line_every = max(1, self.total // LINES)
        epoch = task.length("train", run.batch)
        self.valid_every = run.valid_every or epoch or max(1, self.total // EVALUATIONS)
        self.lines: list[dict[str, Any]] = []  # of the curve, where there is no folder
        self.loss: float | None = None
        self.least: float | None = None  # the lowest mean loss of a stretch
        self.best: dict[str, Any] | None = None  # step and validation scores
        self.reached = False  # a score that is good enough
        self.done = False

    def open(self, where: Path) -> Folder:
        """Keep everything in a folder there."""
        self.folder = Folder(where, self.run)
        return self.folder

    def rate(self, step: int) -> float:
        """The rate of the step that comes after `step` of them."""
        return self.run.rate * self.schedule.factor(step, self.total)

    def line_due(self, step: int) -> bool:
        """Whether the curve gets a line when so many steps are done."""
        return not self.done and (step % self.line_every == 0 or self.valid_due(step) or step == self.total)

    def valid_due(self, step: int) -> bool:
        """Whether it is evaluated then."""
        return not self.done and self.run.split == "train" and (step % self.valid_every == 0 or step == self.total)

    def over(self, step: int) -> bool:
        """Whether it has come to its end then, by steps or by score."""
        return self.reached or step >= self.total

    def add(self, line: dict[str, Any]) -> None:
        """A line of the curve."""
        if self.folder is None:
            self.lines.append(line)
        else:
            self.folder.add(line)

    def curve(self) -> list[dict[str, Any]]:
        """The lines so far."""
        return list(self.lines) if self.folder is None else self.folder.curve()

    def improved(self, step: int, scores: Mapping[str, float]) -> bool:
        """Whether these scores are the best so far; the first that are equal stay."""
        score = scores[self.task.metric]
        best = None if self.best is None else self.best["valid"][self.task.metric]
        enough = self.run.stop_at
        self.reached = self.reached or (enough is not None and (score == enough or better(self.task, score, enough)))
        if not better(self.task, score, best):
            return False
        self.best = {"step": step, "valid": plain(scores)}
        return True

    def least_so_far(self, loss: float) -> bool:
        """Whether no stretch had a lower mean loss."""
        if not loss <= (float("inf") if self.least is None else self.least):
            return False
        self.least = loss
        return True

    def about(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {"best": self.best, "least": self.least, "loss": self.loss, "reached": self.reached}

    def restore(self, about: Mapping[str, Any]) -> None:
        """Be as `about` said."""
        self.best, self.least, self.loss, self.reached = (about[name] for name in ("best", "least", "loss", "reached"))

    def load(self, *, resume: bool, again: bool) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Where to go on, if the folder has it; what is there is never written over unasked."""
        if self.folder is None:
            return None
        if again:
            self.folder.clear()
            return None
        found = self.folder.load("last")
        if found is not None and not resume:
            raise ValueError(
                f"{self.folder.path} holds a run that stopped at step {found[1]['step']} of {self.total}: resume (--resume) "
                "goes on, again (--again) begins anew."
            )
        # Of what never came to a checkpoint nothing stays, what was seen before its first step included.
        self.folder.cut(-1 if found is None else found[1]["step"])
        return found
