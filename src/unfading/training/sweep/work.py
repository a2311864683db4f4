"""A worker: takes one trial after the other from the queues of a storage, trains it, and stores how it ended.

A worker may be killed at any moment. Its trial is taken over by another one, from the last checkpoint if both see one folder of
runs, or else from the first step. The result is the same: batches, weights and noise depend on the run and the step alone.
"""

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfading.training.loop import train_pass
from unfading.training.options import ProgressUpdate, TrainOptions
from unfading.training.run import Run
from unfading.training.run_dir import FolderInUse, finished, stopped_at
from unfading.training.stopping import Stopped, late, noted
from unfading.training.sweep.queue import FINISHED, UNFINISHED, LostTrial, Queue, TakenTrial, definitions
from unfading.training.sweep.search_space import with_settings
from unfading.training.sweep.storage import Storage, open_storage
from unfading.training.sweep.sweep import Sweep, evaluation_interval, objective, runs_from_json

if TYPE_CHECKING:
    from optuna.trial import Trial

# Seconds between two questions whether a trial is free.
ASK_EVERY = 2.0


class Pruned(Exception):
    """The validation curve of a trial is worse than those of others."""


@dataclass(frozen=True)
class WorkOptions:
    """How a worker works.

    Args:
        storage: address of the storage.
        runs: parent of the studies' folders. Where all workers see it, a trial that is taken over continues at its checkpoint.
        names: the studies to work on; none for all of the storage.
        attempts: a trial that has ended its worker this often at one step of its run is marked as failed.
        wait: seconds to wait for new trials after the last one has finished.
        save_every: seconds between checkpoints.
        allow_code: execute the source of users' own tasks and cells that the storage holds.
        command: the command line, for the records.
        quiet: say nothing about trials, if the worker has its own process.
    """

    storage: str
    runs: Path
    names: tuple[str, ...] = ()
    attempts: int = 5
    wait: float = 0.0
    save_every: float = 60.0
    allow_code: bool = False
    command: str = ""
    quiet: bool = False

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, for a process."""
        return {**vars(self), "runs": str(self.runs), "names": list(self.names)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "WorkOptions":
        """The options of `to_json`."""
        return cls(**{**values, "runs": Path(values["runs"]), "names": tuple(values["names"])})


def work(options: WorkOptions, say: Callable[[str], None]) -> None:
    """Train trials until all have finished. Trials of other workers are waited for, in case one has to be taken over."""
    storage = open_storage(options.storage, create=options.wait > 0)  # a worker may wait for the first sweep
    queues: dict[str, Queue] = {}
    last = time.monotonic()
    with _exit_on_sigterm():
        while True:
            if late():
                raise Stopped(signal.SIGTERM, None)
            _open_queues(queues, storage, options)
            if any(_work_once(queue, options, say) for queue in queues.values()):
                last = time.monotonic()
            elif _unfinished(queues.values()):
                last = time.monotonic()
                time.sleep(min([ASK_EVERY, *(queue.lease / 2 for queue in queues.values())]))
            elif time.monotonic() - last >= options.wait:
                return
            else:
                time.sleep(min(ASK_EVERY, options.wait))


def _open_queues(queues: dict[str, Queue], storage: Storage, options: WorkOptions) -> None:
    """Open the studies that are new."""
    present = definitions(storage)
    names = options.names or tuple(present)
    for name in names:
        if name not in queues and (name in present or not options.wait):
            queues[name] = Queue(storage, name)
    if not names and not options.wait:
        raise ValueError(f"{storage.name} has no study. Start one with `unfading sweep run`, or wait for one (--wait).")


def _unfinished(queues: Any) -> bool:
    return any(queue.counts()[state] for queue in queues for state in UNFINISHED)


def _work_once(queue: Queue, options: WorkOptions, say: Callable[[str], None]) -> bool:
    """Take and train a trial; False if there is none now."""
    _check_code(queue, queue.definition, options)
    taken = queue.take()
    if taken is None:
        return False
    try:
        with taken:
            _check_code(queue, taken.attributes, options)
            _train_taken(taken, options, say)
    except LostTrial as error:
        say(f"{queue.name}: {error}")
    except FolderInUse as error:  # its former worker is alive and will notice that the trial is not its own
        say(f"{queue.name}: trial {taken.number} waits: {error}")
        time.sleep(min(ASK_EVERY, queue.lease / 2))
    if noted():
        raise Stopped(signal.SIGTERM, None)
    return True


def _check_code(queue: Queue, values: Any, options: WorkOptions) -> None:
    if values.get("code") and not options.allow_code:
        raise ValueError(
            f"the study {queue.name!r} holds the source of {', '.join(values['code'])}, which would be executed. If you trust "
            "it, allow it with --allow-code."
        )


def _train_taken(taken: TakenTrial, options: WorkOptions, say: Callable[[str], None]) -> None:
    """Train a trial and store how it ended. An error that another machine may not have leaves the trial to others."""
    folder = options.runs / taken.queue.name
    began = time.monotonic()
    runs: list[Run] = []
    result: dict[str, Any]
    try:
        runs, trial = _runs(taken)
        attempt = taken.attempt(max(stopped_at(folder, run) for run in runs))
        if attempt > options.attempts:
            raise ValueError(f"its worker has ended {options.attempts} times at the same step")
        listener = TrialListener(taken, runs[0], trial)
        training = TrainOptions(
            folder, resume=True, save_every=options.save_every, command=options.command, say=say, listen=listener.listen
        )
        _train_to_end(runs, training)
    except FolderInUse:
        raise
    except Pruned:
        state, value, result = "PRUNED", None, {"status": "pruned"}
    except (ValueError, TypeError) as error:  # of the settings, of the task, or of the size of the model
        state, value, result = "FAIL", None, {"status": "failed", "reason": str(error)}
    else:
        state, value, result = _outcome(taken, folder, runs)
    result |= {"keys": [run.key for run in runs], "seconds": round(time.monotonic() - began, 3)}
    if not taken.finish(state, value, result):
        raise LostTrial(f"trial {taken.number} was taken over by another worker")
    say(_sentence(taken, runs, result, value))


def _runs(taken: TakenTrial) -> "tuple[list[Run], Trial | None]":
    """The runs of a trial and, in a sweep, the trial to which validation scores are reported."""
    if taken.queue.definition["kind"] == "runs":
        return runs_from_json(taken.attributes), None
    sweep = Sweep.from_json(taken.queue.definition)
    study = taken.queue.study(sampler=sweep.make_sampler(taken.number), pruner=sweep.make_pruner())
    trial, settings = taken.settings(sweep.space, study)
    return [with_settings(sweep.run, settings)], trial


def _train_to_end(runs: Sequence[Run], options: TrainOptions) -> None:
    """Train runs. If they were asked to stop during the last step, they have ended, and that is what counts."""
    try:
        train_pass(runs, options)
    except Stopped:
        assert options.folder is not None
        if any(finished(options.folder, run) is None for run in runs):
            raise


def _outcome(taken: TakenTrial, folder: Path, runs: Sequence[Run]) -> tuple[str, float | None, dict[str, Any]]:
    """State, score and result of a trial whose runs have ended. A run that diverged is no candidate for the best."""
    record = finished(folder, runs[0])
    if record is None:
        raise ValueError(f"the record in {folder / runs[0].key} was removed")
    if taken.queue.definition["kind"] == "runs":
        return "COMPLETE", 0.0, {"status": "finished"}  # the records have the scores
    score = None if record["best"] is None else record["best"]["valid"][objective(runs[0]).name]
    result = {name: record[name] for name in ("status", "reason", "steps")}
    if record["status"] == "diverged" or score is None:
        return "PRUNED", None, result
    return "COMPLETE", score, result


class TrialListener:
    """Reports the validation scores of a trial, and stops it where it is pruned or lost.

    Args:
        taken: the trial.
        run: its run, if it belongs to a sweep.
        trial: the same trial, to which Optuna's pruner adds.
    """

    def __init__(self, taken: TakenTrial, run: Run, trial: "Trial | None"):
        self.taken = taken
        self.trial = trial
        self.score = objective(run).name
        self.interval = evaluation_interval(run)

    def listen(self, update: ProgressUpdate) -> None:
        """Take a progress update of the run."""
        self.taken.check()
        if self.trial is None or update.valid is None:
            return
        score = update.valid[self.score]
        # Runs of other batches are compared epoch by epoch, so by the number of the evaluation, from 0.
        number = -(-update.step // self.interval) - 1
        if self._is_bad(self.trial, number, math.nan if score is None else score) and update.step < update.total:
            raise Pruned

    def _is_bad(self, trial: "Trial", number: int, score: float) -> bool:
        def report() -> bool:
            if number not in self.taken.stored().intermediate_values:
                trial.report(score, number)
            return trial.should_prune()

        return self.taken.queue.storage.patiently(report)


def _sentence(taken: TakenTrial, runs: Sequence[Run], result: dict[str, Any], value: float | None) -> str:
    counts = taken.queue.counts()
    done = f"{sum(counts[state] for state in FINISHED)} of {sum(counts.values())}"
    trial = taken.stored()
    words = ", ".join(f"{name} {_short(setting)}" for name, setting in trial.params.items())
    if not words:
        words = ", ".join(f"{run.cell} seed {run.seed}" for run in runs)
    score = f" {value:.5g}" if value is not None and trial.params else ""
    reason = f": {result['reason']}" if result.get("reason") else ""
    return f"{taken.queue.name}: trial {taken.number} {result['status']}{score} ({words}){reason}; {done} trials have ended"


def _short(setting: Any) -> str:
    return f"{setting:.4g}" if isinstance(setting, float) else str(setting)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Outside of training, SIGTERM ends the worker as `sys.exit` does, so that it gives its trial back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
