"""Many runs: side by side on a GPU, two processes at a time on a CPU; then the best rate of each by validation.

On a GPU, runs of one shape (they may differ in seed, rate, factors on it, schedule, clip, steps, stop and retries) are trained
in ONE pass; runs of other shapes get a pass of their own, and several passes, each in a process of its own, fill a GPU that
NVIDIA's MPS lets them share. On a CPU members of a pass would only wait for one another.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfading.training.loop import Listener
from unfading.training.run import Run
from unfading.training.run_dir import clear, finished, stopped_at
from unfading.training.train import alike, train_pass
from unfading.training.workers import train_apart


def compare(
    runs: Sequence[Run],
    where: Path | str,
    *,
    resume: bool = False,
    again: bool = False,
    processes: int | None = None,
    together: int = 16,
    listen: Listener | None = None,
    say: Callable[[str], None] = print,
    save_every: float = 60.0,
    command: str = "",
) -> list[dict[str, Any]]:
    """Train all runs and return their records, in order; those that are done are not trained again.

    Args:
        runs: each once.
        where: folder of their folders, e.g. runs/adding.
        resume: go on where checkpoints are.
        again: throw away what is there and begin anew.
        processes: so many at a time; None for two on a CPU and one on a GPU.
        together: at most so many runs in one pass on a GPU.
        listen: called with a `Moment` of any run.
        say: called with what else is worth knowing, in a sentence.
        save_every: seconds between checkpoints.
        command: what was typed, for the records.
    """
    where = Path(where)
    keys = [run.key for run in runs]
    if len(set(keys)) < len(keys):
        raise ValueError("two of these runs are the same; each can be compared once.")
    records = {} if again else {run.key: record for run in runs if (record := finished(where, run)) is not None}
    if records:
        say(f"{len(records)} of {len(runs)} runs are done already.")
    left = [run for run in runs if run.key not in records]
    _check(left)
    if again:
        for run in left:
            clear(where, run)
    elif not resume:
        _refuse_half_done(left, where)
    # Not again: what was there has gone, and what is there now belongs to this comparison.
    options: dict[str, Any] = {"resume": resume, "save_every": save_every, "command": command}
    fleets = _fleets([run for run in left if run.device == "cuda"], where, together)
    if len(fleets) > 1:
        say(_why(fleets, together))
    for jobs, usual in (([[run] for run in left if run.device == "cpu"], 2), (fleets, 1)):
        width = usual if processes is None else processes
        if len(jobs) > 1 and width > 1:
            train_apart(jobs, where, processes=width, listen=listen, say=say, options=options)
        else:
            for job in jobs:
                train_pass(job, where, listen, say, options)
    for run in left:
        record = finished(where, run)
        assert record is not None
        records[run.key] = record
    return [records[key] for key in keys]


def _check(runs: Sequence[Run]) -> None:
    """Raise for settings that cannot be trained; of runs that differ in numbers alone, one is looked at."""
    for run in {(shape(run), *run.rates): run for run in runs}.values():
        run.factors(run.make_model().trainable)


def _refuse_half_done(runs: Sequence[Run], where: Path) -> None:
    """Raise where runs stopped on their way, and nobody said what is to become of them."""
    steps = {run.key: step for run in runs if (step := stopped_at(where, run))}
    if steps:
        key = next(iter(steps))
        raise ValueError(
            f"{len(steps)} of {len(runs)} runs stopped on their way, {where / key} at step {steps[key]}: resume (--resume) "
            "goes on with them, again (--again) begins all anew."
        )


def _why(fleets: Sequence[Sequence[Run]], together: int) -> str:
    shapes, count = len({shape(fleet[0]) for fleet in fleets}), sum(map(len, fleets))
    return (
        f"{count} runs of {shapes} {'shape' if shapes == 1 else 'shapes'} in {len(fleets)} passes, each of one shape, from one "
        f"step and with at most {together} runs: {', '.join(str(len(fleet)) for fleet in fleets)}."
    )


def shape(run: Run) -> str:
    """Equal for runs that can be trained in one pass."""
    return json.dumps(alike(run), sort_keys=True)


def _fleets(runs: Iterable[Run], where: Path, together: int) -> list[list[Run]]:
    """Runs of one shape that stand at one step, at most so many together."""
    groups: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        groups[shape(run), stopped_at(where, run)].append(run)
    return [group[i : i + together] for group in groups.values() for i in range(0, len(group), together)]


def chosen(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of records that differ in rate, those of the rate that did best on validation: for each setting, over its seeds.

    A rate at which fewer seeds diverged is better; then the mean validation score decides. Tests are not looked at.
    """
    settings: dict[str, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        run = Run.from_json(record["run"])
        settings[replace(run, seed=0, rate=1.0).key][run.rate].append(record)
    kept: list[dict[str, Any]] = []
    for rates in settings.values():
        kept += rates[min(rates, key=lambda rate: badness(rates[rate]))]
    return kept


def by_last(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its last validation score as its best: what is chosen by where last weights will be tested."""
    scores = [point["valid"] for point in record["curve"] if "valid" in point]
    return {**record, "best": {"valid": scores[-1]} if scores else None}


def badness(records: list[dict[str, Any]]) -> tuple[int, float]:
    """Of runs of one setting: how many diverged, and then the mean validation score, turned so that less is better."""
    diverged = sum(record["status"] == "diverged" for record in records)
    scores = [_validation(record) for record in records]
    return diverged, sum(scores) / len(scores)


def _validation(record: dict[str, Any]) -> float:
    """Smaller is better; infinite where there is none."""
    score = None if record["best"] is None else record["best"]["valid"][record["measure"]]
    if score is None:
        return math.inf
    return -score if record["rising"] else score
