"""Measure how a sweep scales: `python benchmarks/sweep.py journal:/tmp/s.log` (a few minutes).

Prints as JSON the milliseconds of each call to the storage, and trials per minute with one and with two worker processes. The
sweeps alternate, so that other load on the machine falls on both. Start-up is left out: time runs from the start of the first
trial to the end of the last one.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from unfading import Run
from unfading.training.options import ProgressUpdate
from unfading.training.sweep.local_workers import work_in_processes
from unfading.training.sweep.queue import Queue, create_queue
from unfading.training.sweep.storage import open_storage
from unfading.training.sweep.sweep import Sweep
from unfading.training.sweep.work import TrialListener, WorkOptions

RUN = Run(task="adding", task_options={"T": 50}, cell="STAR", hidden=64, batch=32, steps=300, valid_every=30, rate=0.003)
SWEEP = Sweep(RUN, ("rate=1e-3..1e-2:log", "cell.max_lag=10..100"), prune="none", sampler="random")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("storage", help="sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        calls = measure_calls(new_queue(arguments.storage, 200))
        for _ in range(arguments.repeats):
            for workers, values in rates.items():
                queue = new_queue(arguments.storage, arguments.trials)
                options = WorkOptions(arguments.storage, Path(folder), (queue.name,), quiet=True)
                work_in_processes(options, workers, print)
                values.append(per_minute(queue))
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    answer = {"trials_per_minute": rates, "median_ratio": statistics.median(ratios), "milliseconds": calls}
    print(json.dumps({**answer, "load": os.getloadavg(), "cores": os.cpu_count()}, indent=2))


def new_queue(storage: str, trials: int) -> Queue:
    """A queue under a new name."""
    queue = create_queue(open_storage(storage), f"bench-{time.time_ns()}", SWEEP.to_json(), maximise=False)
    queue.fill(trials)
    return queue


def per_minute(queue: Queue) -> float:
    """Trials per minute, from the first start to the last end."""
    trials = queue.trials()
    starts = [trial.datetime_start for trial in trials if trial.datetime_start is not None]
    ends = [trial.datetime_complete for trial in trials if trial.datetime_complete is not None]
    assert len(ends) == len(trials)
    return round(60 * len(trials) / (max(ends) - min(starts)).total_seconds(), 2)


def measure_calls(queue: Queue, count: int = 20) -> dict[str, float]:
    """Milliseconds of each call of a worker, medians over `count` trials."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = action()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    for _ in range(count):
        taken = timed("take", queue.take)
        study = queue.study(sampler=SWEEP.make_sampler(taken.number), pruner=SWEEP.make_pruner())
        trial, _ = timed("settings", partial(taken.settings, SWEEP.space, study))
        listener = TrialListener(taken, RUN, trial)
        update = ProgressUpdate(RUN, 30, 300, 1.0, 0.5, {"mse": 0.5})
        timed("report", partial(listener.listen, update))
        timed("renew", taken.renew)
        timed("finish", partial(taken.finish, "COMPLETE", 0.5, {"status": "finished"}))
    return {name: round(1e3 * statistics.median(values), 2) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
