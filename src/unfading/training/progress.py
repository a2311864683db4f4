"""What people see of runs on their way: a bar for each, with rate, loss, score and the time that is left."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from unfading.report.groups import labels
from unfading.training.active_run import Moment
from unfading.training.loop import TOLD_PER_SECOND
from unfading.training.run import Run

# Bars of runs that are done stay on the screen where there are no more than so many runs.
FEW = 12


class Display:
    """Bars on the terminal while runs are trained; a line for each that is done where there is no terminal.

    Args:
        runs: all that will be trained.
        console: where to draw.
    """

    def __init__(self, runs: Sequence[Run], console: Console):
        self.console = console
        names = labels([run.to_json() for run in runs])
        self.labels = {run.key: f"{name} seed {run.seed}" for run, name in zip(runs, names, strict=True)}
        self.bars: dict[str, TaskID] = {}
        self.scores: dict[str, str] = {}
        self.few = len(runs) <= FEW
        width = max(map(len, self.labels.values()))
        columns = (
            TextColumn(f"{{task.description:<{min(width, 40)}}}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[pace]}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, refresh_per_second=TOLD_PER_SECOND, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def say(self, sentence: str) -> None:
        """Something worth knowing, above the bars."""
        self.progress.console.print(sentence, highlight=False)

    def listen(self, moment: Moment) -> None:
        """Bring the bar of a run up to date."""
        key = moment.run.key
        if key not in self.bars:
            self.bars[key] = self.progress.add_task(self.labels[key], total=moment.total, pace="", loss="", score="")
        told: dict[str, Any] = {
            "pace": f"{moment.step / moment.seconds:.3g}/s" if moment.seconds else "",
            "loss": "" if moment.loss is None else f"{moment.loss:.4g}",
        }
        if moment.valid is not None:
            name = next((name for name in moment.valid if name != "loss"), "loss")
            score = moment.valid[name]
            told["score"] = f"valid {name} {'not finite' if score is None else f'{score:.4g}'}"
            self.scores[key] = told["score"]
        self.progress.update(self.bars[key], completed=moment.step, **told)
        if moment.status is not None:
            if not self.console.is_terminal:
                words = [moment.status, f"after {moment.step} steps", self.scores.get(key, "")]
                self.console.print(f"{self.labels[key]}: {' '.join(words).strip()}", highlight=False)
            # A run that ended early has no time left.
            self.progress.update(self.bars[key], total=moment.step, visible=self.few)
