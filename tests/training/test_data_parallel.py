"""Several processes that train one run together, as torchrun starts them: the numbers of one process, and one writer."""

import itertools
import os
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch

import unfading
from tests.helpers.pair import KILL, STOP, Pair, weights
from tests.helpers.paths import ROOT
from tests.helpers.small_tasks import TASKS, frame_of
from tests.helpers.small_tasks import small as small_task
from tests.helpers.trained import KINDS, changed, outcome, small, untimed
from unfading.own_data.preparation import Preparation
from unfading.tasks.base import Batch
from unfading.training.data_parallel import check_divisible
from unfading.training.run_dir import read_record

RAGGED = ROOT / "tests" / "user" / "ragged.py"
# Each process draws the noise of its own rows, so that another number of processes has other noise.
NOISY = {"noise", "carried with noise"}
CASES = {
    **{name: fields for name, fields in KINDS.items() if name not in NOISY},
    "classification": {"task": "random_labels", "task_options": {"T": 5}, "batch": 7},
    "lengths and masks": {"task": f"{RAGGED}:Ragged", "task_options": {}, "batch": 5, "cell": "LSTM"},
    "masks by row": {"task": "variable_copying", "task_options": {"T": 5, "items": 2}, "batch": 3},
    "clipping": {"clip_norm": 0.01},
    "clipping by value": {"clip_norm": None, "clip_value": 0.005},
    "patience": {"patience": 1, "valid_every": 2, "rate": 0.3, "valid_batches": 3},
    "penalty": {"cell": "SpectralRNN"},
    "one step between evaluations": {"valid_every": 1, "valid_batches": 2},
}

# The other cases differ from these in parts of training that follow the sum of gradients.
SAMPLE = {"carried", "returns", "enough", "classification", "lengths and masks", "clipping", "patience", "penalty"}


@pytest.fixture(scope="module")
def pair():
    with Pair() as processes:
        yield processes


def close(got, want):
    """Whether two JSON values are the same, numbers up to 1e-10."""
    if isinstance(want, float) and isinstance(got, float):
        return abs(got - want) <= 1e-10 * max(1.0, abs(want))
    if isinstance(want, dict) and isinstance(got, dict):
        return want.keys() == got.keys() and all(close(got[name], want[name]) for name in want)
    if isinstance(want, list) and isinstance(got, list):
        return len(want) == len(got) and all(map(close, got, want))
    return got == want


def results(record):
    fields = {name: record[name] for name in ("key", "status", "steps", "returns", "best", "test")}
    return {**fields, "curve": untimed(record["curve"])}


def agree(runs, pair, where):
    """Two processes must have the records and weights of one, and the first alone writes."""
    expected, w = weights(runs, where / "one")
    answers = pair.train(*runs, where=where)
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    for records, own in answers:
        assert [records[e]["about"]["processes"] for e in range(len(runs))] == [2] * len(runs)
        for got, want in zip(records, expected, strict=True):
            assert close(results(got), results(want))
        numpy.testing.assert_allclose(own, w, rtol=1e-10, atol=1e-10)
    assert (answers[0][1] == answers[1][1]).all()
    assert {path.name for path in (where / "0").iterdir()} == {run.key for run in runs}
    assert not (where / "1").exists()


@pytest.mark.parametrize("name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in CASES])
def test_two_processes_train_as_one(name, pair, tmp_path):
    agree([small(**{**CASES[name], "dtype": "float64"})], pair, tmp_path)


@pytest.mark.parametrize("name", ["clipping", "lengths and masks", "carried"])
def test_two_processes_train_a_fleet_as_one(name, pair, tmp_path):
    fields = {**CASES[name], "dtype": "float64"}
    agree([small(**fields, seed=seed) for seed in (0, 1)], pair, tmp_path)


def test_noise_differs_between_the_rows_of_two_processes(pair, tmp_path):
    run = small(**KINDS["noise"], dtype="float64")
    records = pair.train(run, where=tmp_path)[0][0]
    assert not close(untimed(records[0]["curve"]), untimed(weights([run], tmp_path / "one")[0][0]["curve"]))
    assert close(untimed(records[0]["curve"]), untimed(pair.train(run, where=tmp_path / "again")[0][0][0]["curve"]))


@pytest.mark.parametrize(("killed", "name"), [(0, "carried with noise"), (1, "plain")])
def test_a_killed_process_loses_nothing(killed, name, tmp_path):
    run = small(**KINDS[name], clip_norm=0.1)
    with Pair() as pair:
        pair.train(run, where=tmp_path / "whole")
        lost = pair.train(run, where=tmp_path, save_every=0.0, signals=[(killed, 13, KILL)])
    assert lost[killed] is None
    assert "cannot reach the others" in lost[1 - killed]
    assert not (tmp_path / "0" / run.key / "record.json").exists()
    # A restart continues, whether the command says so or not.
    with Pair(restarts=1) as pair:
        assert not isinstance(pair.train(run, where=tmp_path, again=True)[1], str)
    assert outcome(tmp_path / "0" / run.key) == outcome(tmp_path / "whole" / "0" / run.key)


def test_a_signal_to_one_process_stops_both_at_one_step(pair, tmp_path):
    run = small(**KINDS["carried"])
    pair.train(run, where=tmp_path / "whole")
    for process, step in ((1, 5), (0, 11)):
        first, second = pair.train(run, where=tmp_path, resume=True, signals=[(process, step, STOP)])
        assert first == second
        assert first[0] == signal.SIGTERM
        assert step < first[1] <= step + 2
    pair.train(run, where=tmp_path, resume=True)
    assert outcome(tmp_path / "0" / run.key) == outcome(tmp_path / "whole" / "0" / run.key)


def test_a_signal_in_the_last_step_stops_both(pair, tmp_path):
    answers = pair.train(small(), where=tmp_path, signals=[(1, 23, STOP)])
    assert answers == [(signal.SIGTERM, 24)] * 2


def test_a_run_of_two_processes_continues_in_one(pair, tmp_path):
    run = small(**{**KINDS["carried"], "dtype": "float64"})
    expected, w = weights([run], tmp_path / "one")
    pair.train(run, where=tmp_path, signals=[(0, 11, STOP)])
    records, own = weights([run], tmp_path / "0", resume=True)
    assert close(results(records[0]), results(expected[0]))
    numpy.testing.assert_allclose(own, w, rtol=1e-10, atol=1e-10)


def test_errors_reach_both_processes(pair, tmp_path):
    run = small()
    different = pair.train([run], [changed(run, seed=1)], where=tmp_path)
    assert all("processes were given different runs" in answer for answer in different)
    assert all("1 rows for 2 processes" in answer for answer in pair.train(changed(run, batch=1), where=tmp_path))
    unweighted = small(task=f"{RAGGED}:Unweighted", task_options={}, batch=5)
    assert all("with the weights Unweighted.loss_weight" in answer for answer in pair.train(unweighted, where=tmp_path))
    assert not list(tmp_path.iterdir())
    # Only the first process sees the folder.
    pair.train(run, where=tmp_path, signals=[(0, 5, STOP)])
    assert all("Continue it with resume" in answer for answer in pair.train(run, where=tmp_path))
    (tmp_path / "0" / run.key / "last.safetensors").write_bytes(b"damaged")
    assert all("is damaged" in answer for answer in pair.train(run, where=tmp_path, resume=True))


def test_a_finished_run_is_not_trained_again(pair, tmp_path):
    first = pair.train(small(), where=tmp_path)[0][0]
    assert [answer[0] for answer in pair.train(small(), where=tmp_path)] == [first, first]


def test_compare_names_the_queue_of_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun; `unfading sweep`"):
        unfading.compare([small()], tmp_path)


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("name", TASKS)
def test_the_loss_of_every_task_is_a_weighted_mean_over_rows(name, rows, made):
    task = small_task(name)
    batch = task.batch(0, rows, split="train", seed=0, device="cpu")
    cell = "ConvSTAR" if frame_of(task, batch) else "STAR"
    run = unfading.Run(task=task, cell=cell, hidden=3, steps=1, backend="reference")
    check_divisible(task, run.make_model(), batch)
    parts = [batch.rows(*bounds) for bounds in ((0, 1), (1, rows - 1), (rows - 1, rows))]
    assert sum(map(task.loss_weight, parts)) == pytest.approx(task.loss_weight(batch))
    for field in Batch._fields:
        whole = getattr(batch, field)
        axis = 0 if whole is None or whole.dim() == 1 or (field != "x" and whole.shape[:2] != batch.x.shape[:2]) else 1
        assert whole is None or torch.equal(torch.cat([getattr(part, field) for part in parts], dim=axis), whole)


def test_the_loss_of_weighted_classes_is_a_weighted_mean_over_rows():
    X, y = torch.randn(40, 5, 2), [i % 3 % 2 for i in range(40)]
    task = Preparation(class_weight="balanced", scale=False).make_task(X, y, 0)
    run = unfading.Run(task=task, cell="STAR", hidden=3, steps=1)
    check_divisible(task, run.make_model(), task.batch(0, 8, split="train", seed=0, device="cpu"))


@pytest.mark.long
def test_torchrun_restarts_after_a_kill(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--standalone", "-m", "unfading", "train", "--task", "adding,T=20", "--cell", "STAR", "--hidden", "8"]
    command += ["--batch", "7", "--steps", "600", "--dtype", "float64", "--save-every", "0.2", "--runs"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, tmp_path / "whole"], env=environment, check=True, capture_output=True)
    process = subprocess.Popen([*command, tmp_path / "killed"], env=environment, stderr=subprocess.PIPE, text=True)
    for _ in itertools.repeat(None, 600):
        time.sleep(0.1)
        if list(tmp_path.glob("killed/*/*/last.safetensors")):
            break
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, messages = process.communicate(timeout=200)
    assert process.returncode == 0, messages
    whole, killed = (next(tmp_path.glob(f"{name}/*/*/record.json")).parent for name in ("whole", "killed"))
    assert outcome(killed) == outcome(whole)
    assert read_record(killed / "record.json")["about"]["processes"] == 2
