"""Edits of a user's files: during a run they change nothing; before a resume the user is told and chooses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.trained import OWN, outcome, small, stopped_after, train_outcome
from unfading import compare, train
from unfading.errors import TaskError
from unfading.training.earlier_source import with_earlier_source
from unfading.training.run_dir import finished, read_run, stopped_at

TEXT = Path(OWN).read_text()
# Twice the loss: other numbers, from the first step on.
OTHER = TEXT.replace(
    "return functional.mse_loss(prediction, batch.target[:, :1])", "return 2 * (prediction - 3).square().mean()"
)


def own(**fields):
    return small(task="mine.py:Same", task_options={}, **fields)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's file."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(TEXT)
    return file


def quietly(*arguments, **options):
    messages = []
    return train(*arguments, say=messages.append, **options), messages


def test_an_edit_during_a_run_changes_nothing(mine, monkeypatch):
    run = own()
    expected = train_outcome(run, Path("whole"))
    key = run.key

    def listen(update):
        mine.write_text(OTHER)
        assert update.run.key == key

    train(run, "runs", listen=listen)
    assert outcome(Path("runs") / key) == expected
    assert (Path("runs") / key / "source" / "task" / "mine.py").read_text() == TEXT
    assert train(run, "runs", say=pytest.fail)["key"] == key


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_edit_during_a_comparison_changes_nothing(processes, mine):
    runs = [own(seed=seed) for seed in range(3)]
    expected = [train(run)["test"] for run in runs]
    updates = []

    def listen(update):
        updates.append(update.run.key)
        mine.write_text(OTHER)

    records = compare(runs, "runs", processes=processes, listen=listen, say=lambda text: None)
    assert [record["test"] for record in records] == expected
    assert [record["run"]["seed"] for record in records] == [0, 1, 2]
    assert set(updates) == {run.key for run in runs}


CHANGES = {"a comment": TEXT + "\n# a comment\n", "an equation": OTHER, "removed": None}


@pytest.mark.parametrize("text", CHANGES.values(), ids=CHANGES)
@pytest.mark.sample(1)
def test_resume_continues_with_the_stored_source_and_says_so(text, mine, monkeypatch):
    run = own()
    expected = train_outcome(run, Path("whole"))
    stopped_after(5, monkeypatch, lambda: train(run, "runs"))
    if text is None:
        present = run
        mine.unlink()
    else:
        mine.write_text(text)
        present = own()
        assert present.key != run.key
        with pytest.raises(ValueError, match=r"mine.py has changed since runs/\w+ stopped at step 5. Continue with the source"):
            train(present, "runs")
    record, messages = quietly(present, "runs", resume=True)
    assert outcome(Path("runs") / run.key) == expected
    assert record["about"]["sources"] == run.sources
    assert len(list(Path("runs").iterdir())) == 1
    if text is not None:
        assert messages == [
            f"mine.py has changed since runs/{run.key} stopped at step 5; continuing with the source stored there. --again "
            "starts with the present one."
        ]


def test_again_starts_with_the_present_source_and_leaves_the_stopped_run(mine, monkeypatch):
    run = own()
    stopped_after(5, monkeypatch, lambda: train(run, "runs"))
    mine.write_text(OTHER)
    present = own()
    expected = train_outcome(present, Path("whole"))
    train(present, "runs", again=True)
    assert outcome(Path("runs") / present.key) == expected
    assert stopped_at(Path("runs"), run) == 5
    # From now on the present source has results of its own.
    assert quietly(present, "runs", resume=True)[1] == []


def test_a_run_that_failed_before_its_first_checkpoint_does_not_count(mine):
    mine.write_text(TEXT.replace("def loss(self, prediction, batch):", "def loss(self, prediction, batch):\n        oops"))
    with pytest.raises(TaskError, match="oops"):
        train(own(), "runs")
    mine.write_text(TEXT)
    assert quietly(own(), "runs")[1] == []


def test_an_edit_after_a_finished_run_is_a_new_run_and_is_told(mine):
    run = own(steps=2)
    train(run, "runs")
    mine.write_text(OTHER)
    _, messages = quietly(own(steps=2), "runs", resume=True)
    assert messages == [f"mine.py has changed since runs/{run.key} was trained; this is a new run."]


def test_a_comparison_goes_on_with_one_source(mine):
    runs = [own(seed=seed, steps=12) for seed in range(3)]
    expected = [train(run)["test"] for run in runs]
    train(runs[0], "runs")
    mine.write_text(OTHER)
    present = [own(seed=seed, steps=12) for seed in range(3)]
    with pytest.raises(ValueError, match=r"mine.py has changed since .* was trained. Continue with"):
        compare(present, "runs", say=lambda text: None)
    records = compare(present, "runs", resume=True, processes=1, say=lambda text: None)
    assert [record["test"] for record in records] == expected


def test_a_changed_or_missing_stored_source_is_not_continued(mine, monkeypatch):
    run = own()
    stopped_after(5, monkeypatch, lambda: train(run, "runs"))
    stored = Path("runs") / run.key / "source" / "task" / "mine.py"
    mine.write_text(OTHER)
    stored.write_text(TEXT + " ")
    with pytest.raises(ValueError, match=r"stopped at step 5, and its source is not stored there"):
        train(own(), "runs", resume=True)
    stored.unlink()
    with pytest.raises(ValueError, match=r"its source is not stored there. Start with the present source by again \(--again\)"):
        train(own(), "runs", resume=True)
    # The same source again: the copy is restored, and the run continues.
    mine.write_text(TEXT)
    train(own(), "runs", resume=True)
    assert stored.read_text() == TEXT
    assert finished(Path("runs"), run) is not None


def test_only_the_cells_whose_file_was_edited_go_back(mine, monkeypatch):
    Path("other.py").write_text(TEXT)
    first, second = own(), replace(own(), task="other.py:Same")
    for run in (first, second):
        stopped_after(5, monkeypatch, lambda run=run: train(run, "runs"))
    mine.write_text(OTHER)
    present = [own(), replace(own(), task="other.py:Same"), small()]
    messages = []
    runs = with_earlier_source(present, Path("runs"), resume=True, again=False, say=messages.append)
    assert runs == [first, second, small()]
    assert len(messages) == 1


def test_nothing_is_executed_to_find_an_earlier_source(mine, monkeypatch):
    run = own()
    stopped_after(5, monkeypatch, lambda: train(run, "runs"))
    stored = Path("runs") / run.key / "source" / "task" / "mine.py"
    stored.write_text("raise SystemExit('executed')")
    mine.write_text(OTHER)
    train(own(), "runs", say=lambda text: None)


def test_replaced_settings_keep_the_source(mine):
    run = own()
    mine.write_text(OTHER)
    assert replace(run, seed=3).sources == run.on_all_rows().sources == run.sources
    assert replace(run, task="adding", task_options={"T": 6}).sources == {}
    assert own().sources != run.sources


FOREIGN = "open('executed', 'w').close()\n"


@pytest.fixture
def foreign(mine):
    """The folder of a run that someone else has written: it names a file that would be executed."""
    train(own(steps=2), "runs")
    (folder,) = Path("runs").iterdir()
    (folder / "source" / "task" / "mine.py").write_text(FOREIGN + TEXT)
    mine.write_text(FOREIGN + TEXT)
    return folder


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("name", ["run.json", "record.json"])
def test_a_run_file_executes_no_code_unless_allowed(name, stored, foreign):
    if not stored:
        (foreign / "source" / "task" / "mine.py").unlink()
        (foreign / "source" / "task").rmdir()
    executed = foreign / "source" / "task" if stored else "mine.py"
    with pytest.raises(ValueError, match=rf"{name} names code of a user, and {executed} would be executed.*--allow-code"):
        read_run(foreign / name)
    assert not Path("executed").exists()
    # Allowed, it is executed, and is not what the file was written with.
    with pytest.raises(ValueError, match=r"was written with another source of mine\.py:Same"):
        read_run(foreign / name, allow_code=True)
    assert Path("executed").exists()


def test_an_allowed_run_file_gives_its_run_with_its_source(mine):
    run = own(steps=2)
    train(run, "runs")
    mine.write_text(OTHER)
    assert read_run(Path("runs") / run.key / "record.json", allow_code=True) == run


def test_a_record_of_another_run_in_the_folder_is_refused(mine, monkeypatch):
    run, other = small(), small(seed=1)
    train(other, "runs")
    (Path("runs") / other.key).rename(Path("runs") / run.key)
    for call in (lambda: train(run, "runs"), lambda: compare([run], "runs", say=lambda text: None)):
        with pytest.raises(ValueError, match=r"describes another run than the name of its folder: seed is 1, not 0"):
            call()


def test_a_record_that_names_code_of_someone_else_is_refused_and_not_executed(mine):
    train(small(), "runs")
    file = Path("runs") / small().key / "record.json"
    record = json.loads(file.read_text())
    record["run"]["cell"] = "mine.py:SortedCell"
    del record["sha256"]
    file.write_text(json.dumps(record))
    mine.write_text(FOREIGN + TEXT)
    with pytest.raises(ValueError, match=r"cell is 'mine\.py:SortedCell', not 'STAR'"):
        compare([small()], "runs", say=lambda text: None)
    assert not Path("executed").exists()


def test_workers_continue_with_the_stored_source(mine, monkeypatch):
    runs = [own(seed=seed) for seed in range(2)]
    expected = [train_outcome(run, Path("whole")) for run in runs]
    stopped_after(5, monkeypatch, lambda: train(runs[0], "runs"))
    mine.write_text(OTHER)
    compare([own(seed=seed) for seed in range(2)], "runs", resume=True, say=lambda text: None)
    assert [outcome(Path("runs") / run.key) for run in runs] == expected
