"""Train given runs through a queue that workers of any machine serve: what `compare` and `reproduce` do with a storage."""

import time
from collections.abc import Callable, Mapping, Sequence

from unfading.training.options import TrainOptions
from unfading.training.run import Run
from unfading.training.run_dir import finished
from unfading.training.stopping import Stopped, asked_to_stop
from unfading.training.sweep.local_workers import LocalWorkers
from unfading.training.sweep.queue import FINISHED, RESULT, Queue, create_queue
from unfading.training.sweep.storage import open_storage
from unfading.training.sweep.sweep import runs_to_json
from unfading.training.sweep.work import WorkOptions
from unfading.training.workers import sentences

ASK_EVERY = 1.0  # seconds between two looks at the queue


def train_on_workers(jobs: Sequence[Sequence[Run]], options: TrainOptions) -> None:
    """Train all jobs, each a run or several runs of one pass; the records are in the folders of the runs.

    The study has the name of the folder. `options.processes` workers are started here; with 0 the workers are elsewhere. A job
    that fails does not stop the others; its error is raised at the end.
    """
    assert options.folder is not None
    assert options.storage is not None
    folder, runs = options.folder, [run for job in jobs for run in job]
    queue = create_queue(open_storage(options.storage), folder.name, {"kind": "runs"}, maximise=False)
    numbers = queue.add([{**runs_to_json(list(job)), "keys": [run.key for run in job]} for job in jobs])
    work = WorkOptions(
        options.storage,
        folder.parent,
        (queue.name,),
        save_every=options.save_every,
        allow_code=True,
        command=options.command,
    )
    workers = LocalWorkers(work, min(options.processes or 0, len(jobs)), options.say)
    try:
        with asked_to_stop() as asked:
            _wait(queue, {numbers[run.key] for run in runs}, workers, asked, options)
            number = asked()
    finally:
        workers.stop()
    if number is not None:
        raise Stopped(number, None)
    _raise_failures(queue, numbers, runs, options)


def _wait(
    queue: Queue, wanted: set[int], workers: LocalWorkers, asked: Callable[[], int | None], options: TrainOptions
) -> None:
    """Wait until these trials have ended, or until asked to stop."""
    before = -1
    while asked() is None:
        # In this order: workers end after the last trial has.
        working = workers.working() or not workers.processes
        ended = sum(trial.number in wanted and trial.state.name in FINISHED for trial in queue.trials())
        if ended != before:
            options.say(f"{queue.name}: {ended} of {len(wanted)} trials have ended")
            before = ended
        if ended == len(wanted):
            return
        if not working:
            raise ValueError(f"all workers of {queue.name} ended before its trials did; their messages stand above.")
        time.sleep(ASK_EVERY)


def _raise_failures(queue: Queue, numbers: Mapping[str, int], runs: Sequence[Run], options: TrainOptions) -> None:
    assert options.folder is not None
    trials = {trial.number: trial for trial in queue.trials()}
    elsewhere = f"its record is not in {options.folder}: its worker has another folder of runs"
    failures = [
        (run, trials[numbers[run.key]].user_attrs.get(RESULT, {}).get("reason") or elsewhere)
        for run in runs
        if finished(options.folder, run) is None
    ]
    if failures:
        raise ValueError(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(sentences(failures))}")
