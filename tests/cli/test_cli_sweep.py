"""`unfading sweep`: a sweep from the first trial to its page, and what it refuses."""

import json

import numpy as np
import pytest

from tests.helpers.command import run

pytest.importorskip("optuna")
from unfading.training.sweep.queue import Queue
from unfading.training.sweep.storage import open_storage

TINY = ["--steps", "8", "--valid-every", "4", "--batch", "4", "--valid-batches", "1", "--backend", "reference", "--no-recipe"]
SWEEP = ["sweep", "run", "--task", "adding,T=6", "--cell", "STAR", "--name", "tiny", *TINY]


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return ["--storage", "journal:sweep.log"]


def test_a_sweep_is_run_extended_listed_and_reported(storage, tmp_path):
    search = ["--search", "rate=1e-3..1e-1:log", "hidden=2,3"]
    first = run(*SWEEP, *storage, *search, "--trials", "2")
    assert first.returncode == 0, first.stderr
    assert "tiny: 2 trials; 2 complete" in first.stdout
    assert "2 of 2 trials have ended" in first.stderr
    more = run(*SWEEP, *storage, *search, "--trials", "11", "--quiet")
    assert more.returncode == 0, more.stderr
    assert more.stderr == ""
    # Equal: the same command asks for nothing new.
    assert run(*SWEEP, *storage, *search, "--trials", "4").stdout == more.stdout
    (listed,) = json.loads(run("sweep", "list", *storage, "--json").stdout)
    assert sum(listed["trials"].values()) == 11
    page = run("sweep", "report", *storage, "--name", "tiny", "--png", "--json")
    assert page.returncode == 0, page.stderr
    rows = json.loads(page.stdout)
    text = (tmp_path / "sweep.html").read_text()
    for caption in ("Score of each trial", "Settings of the complete trials", "Validation curves", "Best trials"):
        assert caption in text
    assert ("Importance of each setting" in text) == bool(rows["importance"])
    best = min(trial["value"] for trial in rows["trials"] if trial["value"] is not None)
    assert f"validation mse {best:.4g}" in text
    assert "://" not in text.partition("<script")[0]  # it works offline
    assert all((tmp_path / name).stat().st_size > 1000 for name in rows["files"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--search", "learning=1..2"], "unknown setting 'learning'"),
        (["--search", "rate=high"], "rate=high cannot be trained"),
        (["--search", "hidden=1..2", "--trials", "0"], "--trials must be at least 1"),
        (["--search", "hidden=1..2", "--lease", "0"], "--lease must be above 0"),
        (["--search", "hidden=1..2", "--name", "a/b"], "--name is the name of one folder"),
        (["--search", "hidden=1..2", "--storage", "redis://x"], "a storage is sqlite:///FILE"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence_and_nothing_is_stored(arguments, words, storage, tmp_path):
    answer = run(*SWEEP, *storage, *arguments)
    assert answer.returncode == 2
    assert words in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["journal:sweeep.log", "sqlite:///sweeep.db", "sqlite:///nowhere/sweep.db"])
@pytest.mark.parametrize("command", [["list"], ["report", "--name", "tiny"], ["work"]])
def test_a_storage_that_does_not_exist_is_named_and_not_created(command, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = run("sweep", *command, "--storage", address)
    assert answer.returncode == 2
    assert f"there is no storage {address}: the file" in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_named(storage):
    open_storage(storage[1])
    assert "has no study" in run("sweep", "work", *storage).stderr
    assert "has no study 'other'" in run("sweep", "report", *storage, "--name", "other").stderr
    assert "has no study" in run("sweep", "list", *storage).stdout


@pytest.mark.long
def test_compare_takes_a_storage(storage, tmp_path):
    cells = ["compare", "--task", "adding,T=6", "--cells", "STAR", "Elman", "--seeds", "1", "--quiet", *TINY]
    answer = run(*cells, *storage, "--processes", "1", "--json")
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.splitlines()) == 2
    (listed,) = json.loads(run("sweep", "list", *storage, "--json").stdout)
    assert listed["trials"]["COMPLETE"] == 2
    (page,) = [run("sweep", "report", *storage, "--name", listed["name"])]
    assert "a queue of given runs" in page.stderr


def write_lines(path):
    """Rising and falling lines with noise, in a wide table."""
    draw = np.random.default_rng(0)
    rows = [[*(sign * np.arange(6) + draw.standard_normal(6)).round(3), "up" if sign > 0 else "down"] for sign in [1, -1] * 20]
    lines = [[f"t{i}" for i in range(6)] + ["label"], *rows]
    path.write_text("\n".join(",".join(map(str, line)) for line in lines) + "\n")


SEARCH = ["--search", "rate=1e-3..1e-1:log", "hidden=2,3"]
OWN = ["sweep", "run", "--data", "lines.csv", "--name", "lines", "--epochs", "2", *SEARCH]


def test_a_sweep_over_a_file_improves_its_validation_score(storage, tmp_path):
    write_lines(tmp_path / "lines.csv")
    answer = run(*OWN, *storage, "--trials", "3", "--prune", "none")
    assert answer.returncode == 0, answer.stderr
    assert "classification, 2 classes (down, up)" in answer.stderr
    assert "lines: 3 trials; 3 complete" in answer.stdout
    records = [json.loads(path.read_text()) for path in tmp_path.glob("runs/lines/*/record.json")]
    scores = [record["best"]["valid"]["loss"] for record in records]
    assert len({record["run"]["task_options"]["content"] for record in records}) == 1
    assert f"best on validation: {min(scores):.5g}" in answer.stdout


def test_a_sweep_over_a_file_of_series_forecasts_it(storage, tmp_path):
    values = np.sin(np.arange(80) / 3).round(3)
    (tmp_path / "wave.csv").write_text("a\n" + "\n".join(map(str, values)) + "\n")
    flags = ["--data", "wave.csv", "--forecast", "--horizon", "2", "--context", "8", "--name", "wave", "--epochs", "1"]
    answer = run("sweep", "run", *flags, *storage, "--search", "hidden=2,3", "--trials", "2", "--prune", "none")
    assert answer.returncode == 0, answer.stderr
    assert "wave: 2 trials; 2 complete" in answer.stdout
    assert {json.loads(path.read_text())["run"]["task"] for path in tmp_path.glob("runs/wave/*/record.json")} == {"forecasting"}


def test_a_worker_without_the_file_ends_and_leaves_the_trials(storage, tmp_path):
    """Another machine may have the file: the trials wait for it."""
    write_lines(tmp_path / "lines.csv")
    assert run(*OWN, *storage, "--trials", "1", "--quiet").returncode == 0
    text = (tmp_path / "lines.csv").read_text()
    for broken, words in ((None, "does not exist here"), (text.replace("0.", "1.", 1), "these data are not those of the run")):
        (tmp_path / "lines.csv").unlink(missing_ok=True)
        if broken is not None:
            (tmp_path / "lines.csv").write_text(broken)
        Queue(open_storage(storage[1]), "lines").fill(2)
        answer = run("sweep", "work", *storage, "--runs", "elsewhere")
        assert answer.returncode == 2
        assert words in answer.stderr
    (tmp_path / "lines.csv").write_text(text)
    assert run("sweep", "work", *storage).returncode == 0
    (listed,) = json.loads(run("sweep", "list", *storage, "--json").stdout)
    assert (listed["trials"]["COMPLETE"], listed["trials"]["FAIL"]) == (2, 0)


def test_a_sweep_needs_a_task_or_a_file(storage):
    command = ["sweep", "run", *storage, "--name", "x", "--search", "hidden=2,3"]
    answer = run(*command)
    assert answer.returncode == 2
    assert "or --data FILE" in answer.stderr
    answer = run(*command, "--task", "adding", "--cell", "STAR", "--horizon", "2")
    assert "--horizon: for forecasts of series only" in answer.stderr


def scores(folder):
    """The results of all runs in a folder."""
    records = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/record.json")}
    return {key: {part: record[part] for part in ("run", "steps", "best", "test")} for key, record in records.items()}


@pytest.mark.parametrize(("rows", "count"), [(["--rows", "adding 100 FastRNN"], 1), ([], 3)])
@pytest.mark.long  # `compare` on workers, in test_sweep.py, takes the same way
def test_reproduce_trains_each_run_once_through_a_storage_and_gets_the_same_results(rows, count, storage, tmp_path):
    item = ["reproduce", "run", "incremental/fig5", "--budget", "smoke", *rows]
    through = [*item, "-o", "out", "--runs", "out/runs", *storage, "--processes", "1"]
    answer = run(*through)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count(": ran") == count
    got = scores(tmp_path / "out/runs")

    def trials():
        return [study["trials"] for study in json.loads(run("sweep", "list", *storage, "--json").stdout)]

    # The workers of the queue have trained them, and nobody else: each run that has a record was a trial, once.
    assert sum(trial["COMPLETE"] for trial in trials()) == sum(sum(trial.values()) for trial in trials()) == len(got) == count
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/runs/*/record.json")}
    again = run(*through)
    assert again.returncode == 0, again.stderr
    assert sum(sum(trial.values()) for trial in trials()) == count
    assert {path: path.stat().st_mtime_ns for path in before} == before
    here = run(*item, "-o", "here", "--runs", "here/runs")
    assert here.returncode == 0, here.stderr
    assert got == scores(tmp_path / "here/runs")


def test_the_password_of_a_storage_is_not_recorded(monkeypatch):
    from unfading.cli.flags import typed_command

    monkeypatch.setattr("sys.argv", ["unfading", "sweep", "--storage", "postgresql://me:secret@host/db"])
    assert typed_command() == "unfading sweep --storage postgresql://me:***@host/db"
