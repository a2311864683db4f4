"""`unfading sweep`: a sweep from the first trial to its page, and what it refuses."""

import json

import pytest

from tests.helpers.command import run

pytest.importorskip("optuna")
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


def test_what_is_not_there_is_named(storage):
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


def test_the_password_of_a_storage_is_not_recorded(monkeypatch):
    from unfading.cli.flags import typed_command

    monkeypatch.setattr("sys.argv", ["unfading", "sweep", "--storage", "postgresql://me:secret@host/db"])
    assert typed_command() == "unfading sweep --storage postgresql://me:***@host/db"
