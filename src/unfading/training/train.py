"""Train a run, or many that go together; nothing that was done is lost.

Batches, weights and noise are pure in the run and the step, so a checkpoint holds parameters, what the optimiser keeps and a
few numbers, and a run that is resumed is bit for bit the run that was never stopped. A checkpoint is written at every
evaluation, every `save_every` seconds, and when the process is asked to stop (Ctrl-C, SIGTERM).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from unfading.torch_state import float32_products
from unfading.training.active_run import Member
from unfading.training.loop import Listener, Training, Watch
from unfading.training.run import Run
from unfading.training.run_dir import finished
from unfading.training.stopping import Stopped, asked_to_stop, stop_if_late

# What runs of one pass may differ in.
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
    """Train a run and return its record; one that is done already is returned as it is.

    Args:
        run: everything that decides the result.
        where: folder of the run's folder, e.g. runs/adding; None keeps nothing.
        resume: go on where a checkpoint is.
        again: throw away what is there and begin anew.
        listen: called with a `Moment` for every line of the curve, and between them at most four times a second.
        save_every: seconds between checkpoints.
        command: what was typed, for the record.
        watch: called with the model, its task and the batch of the step that comes, before the first step and every hundred
            steps; what it returns, of JSON values, stands in the curve as `watched`. It must leave the model as it was.
    """
    return train_together(
        [run],
        where,
        resume=resume,
        again=again,
        listen=listen,
        save_every=save_every,
        command=command,
        watch=watch,
        together=False,
    )[0]


def train_together(
    runs: Sequence[Run],
    where: Path | str | None = None,
    *,
    resume: bool = False,
    again: bool = False,
    listen: Listener | None = None,
    save_every: float = 60.0,
    command: str = "",
    watch: Watch | None = None,
    together: bool = True,
) -> list[dict[str, Any]]:
    """Train runs side by side, one pass for all, and return their records, in order.

    They may differ in what `MAY_DIFFER` names; `compare` finds which runs go together.
    Arguments as `train`'s; with `together=False` each step goes from model to model.
    """
    where = None if where is None else Path(where)
    for run in runs:
        for name, value in alike(run).items():
            if value != getattr(runs[0], name):
                raise ValueError(
                    f"runs that are trained together must agree in {name}; got {getattr(runs[0], name)!r} and {value!r}. Train "
                    "them apart."
                )
    task = runs[0].make_task()
    with ExitStack() as stack, torch.random.fork_rng(devices=_gpus(runs[0])):
        stack.enter_context(float32_products("tf32" if runs[0].dtype == "tf32" else "ieee"))
        records = [None if where is None or again else finished(where, run) for run in runs]
        left = [Member(run, task) for run, record in zip(runs, records, strict=True) if record is None]
        if left:
            stop_if_late()
            # Before their folders are made: a run that cannot be built leaves none.
            training = Training(left, listen, save_every, command, together=together, watch=watch)
            if where is not None:
                for member in left:
                    stack.callback(member.open(where).close)
            training.start(resume=resume, again=again)
            with asked_to_stop() as asked:
                training.go(asked)
                number = asked()
            if number is not None and where is not None:  # in the last step: whoever asked wants no further run
                raise Stopped(number, training.step)
            done = iter(training.records)
            records = [next(done) if record is None else record for record in records]
        return [record for record in records if record is not None]


def train_pass(
    runs: list[Run], where: Path, listen: Listener | None, say: Callable[[str], None], options: dict[str, Any]
) -> None:
    """Train runs of one shape in one pass, or in several where the memory of the GPU is too small."""
    try:
        train_together(runs, where, listen=listen, **options)
        return
    except torch.OutOfMemoryError:
        if len(runs) == 1:
            raise ValueError(
                f"{runs[0].cell} with batch {runs[0].batch} does not fit the memory of the GPU. A smaller batch does, cell "
                "option checkpoint_every, or fewer processes on it."
            ) from None
    # Outside the handler, which would keep the tensors of the failed pass alive.
    torch.cuda.empty_cache()
    half = len(runs) // 2
    say(f"{len(runs)} runs do not fit the memory of the GPU together; going on with {half} and {len(runs) - half}.")
    for part in (runs[:half], runs[half:]):
        train_pass(part, where, listen, say, {**options, "resume": True})


def alike(run: Run) -> dict[str, Any]:
    """Of a run, what the others of its pass must have too."""
    return {name: value for name, value in run.to_json().items() if name not in MAY_DIFFER}


def _gpus(run: Run) -> list[int]:
    return [torch.cuda.current_device()] if run.device == "cuda" and torch.cuda.is_available() else []
