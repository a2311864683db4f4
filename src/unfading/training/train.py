"""Train a run, or several runs together, with checkpoints.

Batches, weights and noise depend only on the run and the step. A checkpoint therefore holds the parameters, the state of the
optimiser and a few numbers, and a resumed run is bit for bit the run that was never stopped. Checkpoints are written at every
evaluation, every `save_every` seconds, and when the process is asked to stop (Ctrl-C, SIGTERM).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unfading.torch_state import float32_products
from unfading.training.active_run import ActiveRun
from unfading.training.loop import Training
from unfading.training.options import Listener, TrainOptions, Watch
from unfading.training.run import Run
from unfading.training.run_dir import finished
from unfading.training.stopping import Stopped, asked_to_stop, stop_if_late

# Fields in which runs of one pass may differ.
MAY_DIFFER = {
    *("seed", "rate", "rates", "schedule", "schedule_options"),
    *("clip_norm", "clip_value", "steps", "epochs", "stop_at", "retries"),
}


def train(
    run: Run,
    where: Path | str | None = None,
    *,
    resume: bool = False,
    again: bool = False,
    listen: Listener | None = None,
    save_every: float = 60.0,
    command: str = "",
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train a run and return its record. The record of a finished run is returned without training.

    Args:
        run: everything that decides the result.
        where: parent of the run's folder, e.g. runs/adding; None writes nothing.
        resume: continue from a checkpoint.
        again: discard earlier results and start again.
        listen: called with a `ProgressUpdate` for every log row, and between them at most four times a second.
        save_every: seconds between checkpoints.
        command: the command line, for the record.
        watch: called before the first step and every hundred steps with the model, its task and the next batch. The log
            stores the JSON values that it returns as `watched`. It must not change the model.
    """
    options = TrainOptions(
        None if where is None else Path(where),
        resume=resume,
        again=again,
        listen=listen,
        save_every=save_every,
        command=command,
        watch=watch,
    )
    return train_together([run], options)[0]


def train_together(runs: Sequence[Run], options: TrainOptions | None = None, *, together: bool = True) -> list[dict[str, Any]]:
    """Train runs of one shape together and return their records, in order.

    Args:
        runs: runs that differ only in the fields of `MAY_DIFFER`; `compare` groups runs in this way.
        options: see `TrainOptions`; None for the defaults, which write nothing.
        together: take each step in one pass over all models, or else model by model.
    """
    options = TrainOptions() if options is None else options
    _check_shape(runs)
    task, folder = runs[0].make_task(), options.folder
    with ExitStack() as stack, torch.random.fork_rng(devices=_gpus(runs[0])):
        stack.enter_context(float32_products("tf32" if runs[0].dtype == "tf32" else "ieee"))
        records = {run.key: record for run in runs if (record := _finished(run, options)) is not None}
        active = [ActiveRun(run, task) for run in runs if run.key not in records]
        if active:
            stop_if_late()
            # Before the folders are created: a run that cannot be built leaves none.
            training = Training(active, options, together=together)
            if folder is not None:
                for each in active:
                    stack.callback(each.open(folder).close)
            training.start()
            with asked_to_stop() as asked:
                training.go(asked)
                signal = asked()
            if signal is not None and folder is not None:  # during the last step: the caller must not start another run
                raise Stopped(signal, training.state.step)
            records |= {record["key"]: record for record in training.records}
        return [records[run.key] for run in runs]


def train_pass(runs: Sequence[Run], options: TrainOptions) -> None:
    """Train runs of one shape in one pass, or in several if the memory of the GPU is too small."""
    try:
        train_together(runs, options)
        return
    except torch.OutOfMemoryError:
        if len(runs) == 1:
            raise ValueError(
                f"{runs[0].cell} with batch {runs[0].batch} does not fit in the memory of the GPU. Use a smaller batch, the "
                "cell option checkpoint_every, or fewer processes."
            ) from None
    # Outside the handler, which would keep the tensors of the failed pass alive.
    torch.cuda.empty_cache()
    half = len(runs) // 2
    options.say(
        f"{len(runs)} runs do not fit in the memory of the GPU together; continuing with {half} and {len(runs) - half}."
    )
    for part in (runs[:half], runs[half:]):
        train_pass(part, replace(options, resume=True))


def shared_fields(run: Run) -> dict[str, Any]:
    """The fields of a run that the other runs of its pass must share."""
    return {name: value for name, value in run.to_json().items() if name not in MAY_DIFFER}


def _check_shape(runs: Sequence[Run]) -> None:
    for run in runs:
        for name, value in shared_fields(run).items():
            if value != getattr(runs[0], name):
                raise ValueError(
                    f"runs that are trained together must agree in {name}; got {getattr(runs[0], name)!r} and {value!r}. Train "
                    "them separately."
                )


def _finished(run: Run, options: TrainOptions) -> dict[str, Any] | None:
    return None if options.folder is None or options.again else finished(options.folder, run)


def _gpus(run: Run) -> list[int]:
    return [torch.cuda.current_device()] if run.device == "cuda" and torch.cuda.is_available() else []
