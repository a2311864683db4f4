"""Progress of training: a bar for each run, with steps per second, loss, score and remaining time.

rich draws bars in a notebook only where ipywidgets is installed. Here the display of a notebook cell is replaced by a new text,
which every notebook can do.
"""

import time
from collections.abc import Sequence
from html import escape
from io import StringIO
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from unfading.report.groups import labels
from unfading.training.options import UPDATES_PER_SECOND, ProgressUpdate
from unfading.training.run import Run

# With no more runs than this, bars of finished runs stay on the screen.
FEW = 12
NOTEBOOK_WIDTH = 110  # characters of a line in a notebook


class NotebookOutput:
    """The bars in the output of a notebook cell, drawn again at most as often as on a terminal.

    Args:
        progress: the bars, which draw nothing themselves.
    """

    def __init__(self, progress: Progress):
        from IPython.display import display

        self.progress = progress
        self._handle = display(self._content(), raw=True, display_id=True)
        self._drawn = time.monotonic()

    def draw_if_due(self) -> None:
        """Replace the output, unless it is recent."""
        if time.monotonic() - self._drawn >= 1 / UPDATES_PER_SECOND:
            self.draw()

    def draw(self) -> None:
        """Replace the output by the present bars."""
        self._handle.update(self._content(), raw=True)
        self._drawn = time.monotonic()

    def _content(self) -> dict[str, str]:
        console = Console(file=StringIO(), width=NOTEBOOK_WIDTH, color_system=None, force_terminal=False, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.progress.get_renderable())
        text = capture.get().rstrip()
        return {"text/plain": text, "text/html": f'<pre style="line-height: normal">{escape(text)}</pre>'}


class Display:
    """Progress bars on a terminal or in a notebook; elsewhere, one line for each run that has ended.

    Args:
        runs: all runs that will be trained.
        console: the console to draw on.
        metrics: names of the scores that are shown beside the task's own.
    """

    def __init__(self, runs: Sequence[Run], console: Console, metrics: Sequence[str] = ()):
        self.console = console
        self.metrics = metrics
        names = labels([run.to_json() for run in runs])
        self.labels = {run.key: f"{name} seed {run.seed}" for run, name in zip(runs, names, strict=True)}
        self.bars: dict[str, TaskID] = {}
        self.scores: dict[str, str] = {}
        self.few = len(runs) <= FEW
        self.cell: NotebookOutput | None = None
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
        self.progress = Progress(
            *columns, console=console, refresh_per_second=UPDATES_PER_SECOND, disable=not console.is_terminal
        )

    def __enter__(self) -> Self:
        self.progress.start()
        if self.console.is_jupyter:
            self.cell = NotebookOutput(self.progress)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()
        if self.cell is not None:
            self.cell.draw()

    def say(self, message: str) -> None:
        """Print a message above the bars."""
        self.progress.console.print(message, highlight=False)

    def listen(self, update: ProgressUpdate) -> None:
        """Update the bar of a run."""
        key = update.run.key
        if key not in self.bars:
            self.bars[key] = self.progress.add_task(self.labels[key], total=update.total, pace="", loss="", score="")
        texts: dict[str, Any] = {
            "pace": f"{update.step / update.seconds:.3g}/s" if update.seconds else "",
            "loss": "" if update.loss is None else f"{update.loss:.4g}",
        }
        if update.valid is not None:
            names = dict.fromkeys([next((name for name in update.valid if name != "loss"), "loss"), *self.metrics])
            scores = {name: update.valid[name] for name in names if name in update.valid}
            words = [f"{name} {'not finite' if score is None else f'{score:.4g}'}" for name, score in scores.items()]
            self.scores[key] = texts["score"] = f"valid {', '.join(words)}"
        self.progress.update(self.bars[key], completed=update.step, **texts)
        if self.cell is not None:
            self.cell.draw_if_due()
        if update.status is not None:
            if not self.console.is_terminal and self.cell is None:
                words = [update.status, f"after {update.step} steps", self.scores.get(key, "")]
                self.console.print(f"{self.labels[key]}: {' '.join(words).strip()}", highlight=False)
            # A run that ended early has no remaining time.
            self.progress.update(self.bars[key], total=update.step, visible=self.few)
