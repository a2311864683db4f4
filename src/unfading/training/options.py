"""How runs are trained, apart from what decides their result: folder, checkpoints, callbacks, processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from unfading.errors import check_count, check_flag, check_number, check_type
from unfading.layers.model import Model
from unfading.tasks.base import Batch, Task
from unfading.training.callbacks import Callback, check_callbacks
from unfading.training.run import Run
from unfading.training.user_metrics import Metric, UserMetrics, read_metrics

# Between log rows, a listener gets this many progress updates a second at most.
UPDATES_PER_SECOND = 4


class ProgressUpdate(NamedTuple):
    """The progress of a run."""

    run: Run
    step: int  # number of steps taken
    total: int
    seconds: float  # of training so far
    loss: float | None  # mean training loss of the last interval
    valid: Mapping[str, float] | None  # validation scores, after an evaluation
    status: str | None = None  # "finished" or "diverged", at the end


Listener = Callable[[ProgressUpdate], None]
# Called with a model, its task and a batch; returns JSON values for the log.
Watch = Callable[[Model, Task, Batch], dict[str, Any]]


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train`, `train_together`, `compare` and the workers. They do not change the result of a run.

    Args:
        folder: parent of the runs' folders, e.g. runs/adding; None writes nothing.
        resume: continue from checkpoints.
        again: discard earlier results and start again.
        save_every: seconds between checkpoints.
        command: the command line, for the records.
        listen: called with a `ProgressUpdate` for every log row, and between them at most four times a second.
        say: called with messages for the user.
        watch: called before the first step and every hundred steps with the model, its task and the next batch. The log
            stores the JSON values that it returns as `watched`. It must not change the model.
        metrics: further metrics of every evaluation: names (accuracy, f1, confusion_matrix, mae, rmse, mase, my.py:function)
            and functions of predictions and targets.
        callbacks: called with a `TrainingEvent` after every step and evaluation, and at the end; see `training/callbacks.py`.
        progress: show a progress bar, on a terminal or in a notebook.
        processes: number of processes of a comparison; None for two on a CPU and one on a GPU.
        runs_per_pass: most runs that a comparison trains in one pass on a GPU.
        storage: address of the storage through which a comparison gives its runs to workers, which may be on other machines;
            None trains them here. With a storage `processes` may be 0.
    """

    folder: Path | None = None
    resume: bool = False
    again: bool = False
    save_every: float = 60.0
    command: str = ""
    listen: Listener | None = None
    say: Callable[[str], None] = print
    watch: Watch | None = None
    metrics: Sequence[str | Metric] = ()
    callbacks: Sequence[Callback] = ()
    progress: bool = False
    processes: int | None = None
    runs_per_pass: int = 16
    storage: str | None = None

    def __post_init__(self) -> None:
        check_flag("resume", self.resume)
        check_flag("again", self.again)
        check_type("command", self.command, str)
        check_number("save_every", self.save_every)
        if self.save_every < 0:
            raise ValueError(f"save_every must be at least 0 seconds; got {self.save_every}.")
        if self.processes is not None:
            check_count("processes", self.processes, least=1 if self.storage is None else 0)
        check_count("together", self.runs_per_pass)
        check_flag("progress", self.progress)
        check_callbacks(self.callbacks)
        self.user_metrics  # noqa: B018, raises for a metric that does not exist

    @cached_property
    def user_metrics(self) -> UserMetrics:
        """The functions of `metrics`."""
        return read_metrics(self.metrics)

    def to_json(self) -> dict[str, Any]:
        """The options that a worker process needs, without callbacks."""
        assert self.folder is not None
        functions = [metric for metric in self.metrics if not isinstance(metric, str)]
        if functions:
            raise ValueError(
                f"the metric {functions[0]!r} is a function of this process, which other processes cannot call. Name it by its "
                "file, my.py:function, or train in one process (processes=1)."
            )
        names = ("resume", "save_every", "command", "metrics")
        return {"folder": str(self.folder), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, listen: Listener, say: Callable[[str], None]) -> "TrainOptions":
        """The options of a worker process."""
        return cls(**{**values, "folder": Path(values["folder"])}, listen=listen, say=say)


@contextmanager
def displayed(runs: Sequence[Run], options: TrainOptions) -> Iterator[TrainOptions]:
    """The options with a progress bar as listener, if they ask for one; it is closed at the end of the block."""
    if not options.progress or not runs:
        yield options
        return
    from rich.console import Console

    from unfading.training.progress import Display  # imports this module

    with Display(runs, Console(stderr=True), options.user_metrics.numbers) as display:

        def listen(update: ProgressUpdate) -> None:
            display.listen(update)
            if options.listen is not None:
                options.listen(update)

        say = display.say if options.say is print else options.say
        yield replace(options, progress=False, listen=listen, say=say)
