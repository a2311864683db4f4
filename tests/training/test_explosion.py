"""A loss that explodes and stays finite ends a run, and one that recovers by itself does not."""

import json
import math
from pathlib import Path

import pytest

from tests.helpers.trained import OWN, outcome, small, stopped_after, train_outcome
from unfading import train
from unfading.training.explosion import LIMIT, Explosion

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def diverged_at(losses, total=None, guess=1.0):
    """The row at which a curve of one row per step counts as diverged, or None."""
    explosion = Explosion(total or len(losses))
    explosion.guess = guess
    return next((step for step, loss in enumerate(losses, 1) if explosion.update(step, loss)), None)


def spike(start, length, height, total=200, level=0.5):
    return [height if start <= step < start + length else level for step in range(total)]


CURVES = {
    "flat": ([1.0] * 200, None),
    "falling": ([1.0 / step for step in range(1, 201)], None),
    "a spike that ends": (spike(50, 20, 1e6), None),
    "many spikes": ([1e9 if step % 3 else 0.1 for step in range(200)], None),
    "a spike in the last row": (spike(199, 1, 1e9), None),
    "rows without a step": ([1.0, *[math.nan] * 199], None),
    "worse than the best, better than a guess": ([1e-9, *[0.9] * 199], None),
    "a bad start that recovers": ([429.0, 40.0, 3.0, 1.4e6, *[2.0] * 196], None),
    "negative": ([-5.0, *[-1.0] * 199], None),
    "exploded to the end": (spike(100, 100, 1e6), 150),
    "never better than its start": ([1e6] * 200, None),
    "exploded near the end": (spike(185, 15, 1e6), 200),
    "growing": ([math.exp(step / 4) for step in range(200)], 69),
}


@pytest.mark.parametrize(("losses", "step"), CURVES.values(), ids=CURVES)
def test_a_curve_diverges_where_it_should(losses, step):
    assert diverged_at(losses) == step


def test_an_unknown_guess_is_the_first_loss():
    assert diverged_at([50.0, *[60.0] * 199], guess=None) is None
    assert diverged_at([50.0, *[6000.0] * 199], guess=None) == 51


def test_of_the_committed_runs_only_one_that_never_recovered_is_affected():
    """It ends with a loss of 5e17 and the accuracy of a guess, and it had a retry left, so that it would not have ended."""
    affected, curves = [], 0
    for path in sorted(RESULTS.glob("*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            if record.get("status") != "finished" or not record.get("curve"):
                continue
            curves += 1
            rows = [(row["step"], row["loss"]) for row in record["curve"] if "loss" in row]
            explosion = Explosion(rows[-1][0])
            # For most of these tasks the loss of a guess is near 2.3; the lower it is taken, the more runs the rule affects.
            explosion.guess = record["guess"] if record["measure"] in ("mse", "cross_entropy") else 1.0
            if any(explosion.update(step, math.nan if loss is None else loss) for step, loss in rows):
                affected.append((record["run"]["retries"] - record["returns"], rows[-1][1] / (LIMIT * explosion.guess)))
    assert curves > 600
    assert len(affected) == 1
    retries_left, excess = affected[0]
    assert retries_left == 1
    assert excess > 1e12


def exploding(**fields):
    options = {"at": 7, "times": 1000, **fields.pop("task_options", {})}
    return small(task=f"{OWN}:Explodes", task_options=options, **{"dtype": "float64", **fields})


def test_a_run_whose_loss_explodes_has_diverged():
    record = train(exploding())
    assert record["status"] == "diverged"
    assert record["steps"] == 13
    assert record["reason"].startswith("loss above ")
    assert record["reason"].endswith("from step 8 to step 13")
    assert all(math.isfinite(row["loss"]) for row in record["curve"])
    assert record["best"]["step"] == 8


def test_a_run_that_recovers_is_finished():
    assert train(exploding(task_options={"times": 5}))["status"] == "finished"


def test_a_run_with_retries_returns_to_better_weights():
    record = train(exploding(task_options={"times": 6}, retries=2, steps=24))
    assert record["status"] == "finished"
    assert record["returns"] == 1
    assert record["curve"][-1]["rate"] == record["run"]["rate"] / 2


@pytest.mark.parametrize("steps", [5, 9, 12])
@pytest.mark.sample(1)
def test_a_resumed_run_diverges_at_the_same_step(steps, tmp_path, monkeypatch):
    run = exploding()
    expected = train_outcome(run, tmp_path / "whole")
    stopped_after(steps, monkeypatch, lambda: train(run, tmp_path))
    train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected
