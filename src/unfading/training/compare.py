"""Train many runs and select learning rates by validation.

On a GPU, runs of one shape are trained in one pass; they may differ in seed, learning rate, factors on it, schedule, clipping,
steps, `stop_at`, `select_by` and retries. Runs of other shapes get their own pass. Several passes, each in its own process,
share a GPU through NVIDIA's MPS. On a CPU each run is trained alone, two processes at a time: a pass of several would not be
faster. With a storage, the passes become trials of a queue, which workers on any machine serve (`sweep/jobs.py`).
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfading.errors import check_type
from unfading.training.data_parallel import refuse
from unfading.training.earlier_source import with_earlier_source
from unfading.training.loop import shared_fields, train_pass
from unfading.training.options import Listener, TrainOptions, displayed
from unfading.training.record import data_changed
from unfading.training.rescore import with_metrics
from unfading.training.run import Run
from unfading.training.run_dir import clear, finished, stopped_at
from unfading.training.sweep.jobs import train_on_workers
from unfading.training.user_metrics import Metric
from unfading.training.workers import train_apart


def compare(
    runs: Sequence[Run],
    where: Path | str,
    *,
    resume: bool = False,
    again: bool = False,
    processes: int | None = None,
    together: int = 16,
    storage: str | None = None,
    listen: Listener | None = None,
    say: Callable[[str], None] = print,
    save_every: float = 60.0,
    command: str = "",
    metrics: Sequence[str | Metric] = (),
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Train all runs and return their records, in order. Finished runs are not trained again.

    Args:
        runs: the runs, all different.
        where: parent of their folders, e.g. runs/adding.
        resume: continue from checkpoints, with the source of a user's own task and cells with which the runs began.
        again: discard earlier results and start again.
        processes: number of processes; None for two on a CPU and one on a GPU.
        together: largest number of runs in one pass on a GPU.
        storage: give the runs to workers through this storage (sqlite:///FILE, journal:FILE, postgresql://USER@HOST/DATABASE).
            `unfading sweep work` starts workers on any machine that sees the folder `where`; `processes` are started here.
        listen: called with a `ProgressUpdate` of any run.
        say: called with messages for the user.
        save_every: seconds between checkpoints.
        command: the command line, for the records.
        metrics: further metrics of every evaluation, as `train` takes them. A function cannot be given if there are several
            processes: name it by its file, my.py:function.
        progress: show a progress bar, on a terminal or in a notebook.
    """
    refuse("unfading compare")
    for i, run in enumerate(runs):
        check_type(f"runs[{i}]", run, Run)
    folder = Path(where)
    options = TrainOptions(
        folder,
        resume=resume,
        again=again,
        listen=listen,
        say=say,
        save_every=save_every,
        command=command,
        processes=processes,
        runs_per_pass=together,
        metrics=metrics,
        progress=progress,
        storage=storage,
    )
    runs = with_earlier_source(runs, folder, resume=resume, again=again, say=say)
    if len({run.key for run in runs}) < len(runs):
        raise ValueError("two of these runs are the same. Give each run once.")
    records = {} if again else {run.key: record for run in runs if (record := finished(folder, run)) is not None}
    if records:
        say(f"{len(records)} of {len(runs)} runs are already finished.")
        for sentence in filter(None, map(data_changed, records.values())):
            say(sentence)
        for run in runs:
            if run.key in records:
                records[run.key] = with_metrics(records[run.key], run, folder, options.user_metrics, say)
    unfinished = [run for run in runs if run.key not in records]
    _check(unfinished)
    _clear_or_refuse(unfinished, folder, options)
    # Everything in the folder now belongs to this comparison.
    with displayed(unfinished, replace(options, again=False)) as options:
        _train(unfinished, folder, options)
    for run in unfinished:
        record = finished(folder, run)
        if record is None:
            raise ValueError(
                f"{folder / run.key / 'record.json'} was removed while the other runs were trained. Resume (--resume)."
            )
        # Workers of a queue know nothing of the metrics of this comparison.
        records[run.key] = with_metrics(record, run, folder, options.user_metrics, say)
    return [records[run.key] for run in runs]


def _train(runs: Sequence[Run], folder: Path, options: TrainOptions) -> None:
    """Train runs on a CPU one by one, and those on a GPU in passes."""
    passes = _passes([run for run in runs if run.device == "cuda"], folder, options.runs_per_pass)
    if len(passes) > 1:
        options.say(_summary(passes, options.runs_per_pass))
    for jobs, usual in (([[run] for run in runs if run.device == "cpu"], 2), (passes, 1)):
        processes = usual if options.processes is None else options.processes
        if options.storage is not None and jobs:
            train_on_workers(jobs, replace(options, processes=processes))
        elif len(jobs) > 1 and processes > 1:
            train_apart(jobs, replace(options, processes=processes))
        else:
            for job in jobs:
                train_pass(job, options)


def _check(runs: Sequence[Run]) -> None:
    """Raise for settings that cannot be trained. Of runs that differ only in numbers, one is checked."""
    for run in {(shape(run), *run.rates): run for run in runs}.values():
        run.factors(run.make_model().trainable)


def _clear_or_refuse(runs: Sequence[Run], folder: Path, options: TrainOptions) -> None:
    """Remove earlier results if asked to start again; raise if there are stopped runs and no instruction."""
    if options.again:
        for run in runs:
            clear(folder, run)
    elif not options.resume:
        steps = {run.key: step for run in runs if (step := stopped_at(folder, run))}
        if steps:
            key = next(iter(steps))
            raise ValueError(
                f"{len(steps)} of {len(runs)} runs stopped before their end, {folder / key} at step {steps[key]}. Continue "
                "them with resume (--resume), or start again with again (--again)."
            )


def _summary(passes: Sequence[Sequence[Run]], most: int) -> str:
    shapes, count = len({shape(runs[0]) for runs in passes}), sum(map(len, passes))
    return (
        f"{count} runs of {shapes} {'shape' if shapes == 1 else 'shapes'} in {len(passes)} passes, each of one shape, from one "
        f"step and with at most {most} runs: {', '.join(str(len(runs)) for runs in passes)}."
    )


def shape(run: Run) -> str:
    """A text that is equal for runs that can be trained in one pass."""
    return json.dumps(shared_fields(run), sort_keys=True)


def _passes(runs: Iterable[Run], folder: Path, most: int) -> list[list[Run]]:
    """Groups of at most `most` runs of one shape that are at one step."""
    groups: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        groups[shape(run), stopped_at(folder, run)].append(run)
    return [group[i : i + most] for group in groups.values() for i in range(0, len(group), most)]


def chosen(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each setting, the records of all seeds at the learning rate that is best on validation.

    The rate at which the fewest seeds diverged is best; in a tie the mean validation score decides. Test scores are not used.
    """
    settings: dict[str, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        # Not by `Run`, which would import the code that a record names.
        others = {name: value for name, value in record["run"].items() if name not in ("seed", "rate")}
        sources = record.get("about", {}).get("sources")
        settings[json.dumps([others, sources], sort_keys=True)][record["run"]["rate"]].append(record)
    best: list[dict[str, Any]] = []
    for by_rate in settings.values():
        best += by_rate[min(by_rate, key=lambda rate: badness(by_rate[rate]))]
    return best


def by_last(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its last validation score as its best, for a selection whose last weights will be tested."""
    scores = [row["valid"] for row in record["curve"] if "valid" in row]
    return {**record, "best": {"valid": scores[-1]} if scores else None}


def badness(records: list[dict[str, Any]]) -> tuple[int, float]:
    """Of runs of one setting: how many diverged, and the mean validation score, with the sign that makes lower better."""
    diverged = sum(record["status"] == "diverged" for record in records)
    scores = [_validation(record) for record in records]
    return diverged, sum(scores) / len(scores)


def _validation(record: dict[str, Any]) -> float:
    """The best validation score, with the sign that makes lower better; infinite if there is none."""
    score = None if record["best"] is None else record["best"]["valid"][record["measure"]]
    if score is None:
        return math.inf
    return -score if record["rising"] else score
