"""Workers that are killed at random moments: no trial of a sweep is lost, none counts twice, and no score differs."""

import json
import random
import signal
import time

import pytest

from tests.helpers.sweeps import Worker, address, queue, sweep
from unfading.training.sweep.search_space import with_settings
from unfading.training.sweep.work import WorkOptions
from unfading.training.train import train

pytest.importorskip("optuna")
WORKERS = 3
MOST_TIME = 900  # seconds


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("journal", 3),
        ("postgresql", 3),
        pytest.param("sqlite", 20, marks=pytest.mark.long),
        pytest.param("journal", 200, marks=pytest.mark.long),
        pytest.param("postgresql", 200, marks=pytest.mark.long),
    ],
)
def test_no_trial_is_lost_or_counted_twice_when_workers_are_killed(kind, kills, tmp_path):
    moments, killed, began = random.Random(kills), 0, time.monotonic()
    with address(kind, tmp_path) as storage:
        trials = queue(storage, wanted := 6)
        options = WorkOptions(storage, tmp_path / "runs", save_every=0.05, attempts=1000)
        workers = [Worker(options, tmp_path) for _ in range(WORKERS)]
        try:
            while killed < kills and time.monotonic() - began < MOST_TIME:
                time.sleep(moments.uniform(0.0, 1.5))
                index = moments.randrange(WORKERS)
                workers[index].kill()
                code = workers[index].end()
                assert code in (-signal.SIGKILL, 0)
                killed += code != 0  # it may have ended before
                if trials.counts()["WAITING"] < WORKERS:  # more are asked for, so that there is always one to kill
                    trials.fill(wanted := wanted + 2 * WORKERS)
                workers[index] = Worker(options, tmp_path)
            assert [worker.end() for worker in workers] == [0] * WORKERS
        finally:
            for worker in workers:
                worker.kill()
                worker.end()
        print(f"{kind}: {killed} kills, {trials.counts()} in {time.monotonic() - began:.0f} s, {taken_over(trials)} taken over")
        check(trials, wanted, tmp_path)
    assert killed == kills


def taken_over(trials):
    return sum(trial.user_attrs["attempts"]["count"] > 1 for trial in trials.trials())


def check(trials, wanted, folder):
    ended = trials.trials()
    # As many as were asked for, each in a final state, each with its own settings.
    assert [trial.number for trial in ended] == list(range(wanted))
    assert {trial.state.name for trial in ended} <= {"COMPLETE", "PRUNED"}
    assert len({trial.params["rate"] for trial in ended}) == wanted
    # No trial was stored by two workers. One that was killed after it had stored a trial may not have noted it.
    notes = [json.loads(line) for path in folder.glob("worker-*.jsonl") for line in path.read_text().splitlines()]
    stored = [number for number, stored, _ in notes if stored]
    assert len(stored) == len(set(stored))
    # Whoever has worked on a trial worked with its settings.
    assert all(ended[number].params == settings for number, _, settings in notes)
    # The score is that of the run without a kill.
    complete = [trial for trial in ended if trial.state.name == "COMPLETE"]
    for trial in complete[:: max(1, len(complete) // 10)]:
        run = with_settings(sweep().run, trial.params)
        assert train(run, say=str)["best"]["valid"]["mse"] == trial.value
