"""`train`: train one run, with checkpoints.

Batches, weights and noise depend only on the run and the step. A checkpoint therefore holds the parameters, the state of the
optimiser and a few numbers, and a resumed run is bit for bit the run that was never stopped. Checkpoints are written at every
evaluation, every `save_every` seconds, and when the process is asked to stop (Ctrl-C, SIGTERM).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unfading.allocation import one_sentence
from unfading.errors import check_type
from unfading.training.callbacks import Callback
from unfading.training.earlier_source import with_earlier_source
from unfading.training.loop import of_process, train_together
from unfading.training.options import Listener, TrainOptions, Watch, displayed
from unfading.training.run import Run
from unfading.training.user_metrics import Metric


def train(
    run: Run,
    where: Path | str | None = None,
    *,
    resume: bool = False,
    again: bool = False,
    listen: Listener | None = None,
    say: Callable[[str], None] = print,
    save_every: float = 60.0,
    command: str = "",
    watch: Watch | None = None,
    metrics: Sequence[str | Metric] = (),
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
) -> dict[str, Any]:
    """Train a run and return its record. The record of a finished run is returned without training.

    Args:
        run: everything that decides the result.
        where: parent of the run's folder, e.g. runs/adding; None writes nothing.
        resume: continue from a checkpoint, with the source of a user's own task and cell with which the run began.
        again: discard earlier results and start again.
        listen: called with a `ProgressUpdate` for every log row, and between them at most four times a second.
        say: called with messages for the user.
        save_every: seconds between checkpoints.
        command: the command line, for the record.
        watch: called before the first step and every hundred steps with the model, its task and the next batch. The log
            stores the JSON values that it returns as `watched`. It must not change the model.
        metrics: further metrics of every evaluation, in a list: names (accuracy, f1, confusion_matrix, mae, rmse, mase,
            my.py:function), and functions that take the predictions and the targets of all rows as NumPy arrays and return
            one number. They do not change training, nor the key of the run.
        callbacks: functions that are called with a `TrainingEvent` after every step and evaluation, and at the end. One that
            returns True ends the training; one that raises ends it with an error, after a checkpoint.
        progress: show a progress bar, on a terminal or in a notebook.
    """
    check_type("run", run, Run)
    options = TrainOptions(
        None if where is None else Path(where),
        resume=resume,
        again=again,
        listen=listen,
        say=say,
        save_every=save_every,
        command=command,
        watch=watch,
        metrics=metrics,
        callbacks=callbacks,
        progress=progress,
    )
    options = of_process(options)
    if where is not None:  # in every process, so that all have the same run
        [run] = with_earlier_source([run], Path(where), resume=options.resume, again=options.again, say=options.say)
    too_large = one_sentence(f"{run.cell} with batch {run.batch}", "batch, or give the cell option checkpoint_every")
    with too_large, displayed([run], options) as options:
        return train_together([run], options)[0]
