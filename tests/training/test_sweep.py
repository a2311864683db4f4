"""Sweeps: what is searched, how trials are taken, kept and given back, and the runs of `compare` on workers."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.sweeps import address, queue, sweep
from tests.helpers.trained import OWN, outcome, small
from unfading import compare
from unfading.training.run_dir import FolderInUse, read_record
from unfading.training.stopping import Stopped
from unfading.training.sweep import work as working
from unfading.training.sweep.queue import create_queue
from unfading.training.sweep.search_space import check_space, parse_space, with_settings
from unfading.training.sweep.storage import open_storage
from unfading.training.sweep.sweep import Sweep
from unfading.training.sweep.sweep_results import results
from unfading.training.sweep.work import WorkOptions, work

pytest.importorskip("optuna")


def silent(sentence):
    pass


@pytest.fixture(params=["journal", "sqlite"])
def storage(request, tmp_path):
    with address(request.param, tmp_path) as place:
        yield place


@pytest.fixture
def journal(tmp_path):
    return f"journal:{tmp_path / 'sweep.log'}"


# What is searched.


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("rate=1e-4..1e-2:log", (1e-4, 1e-2, True, None)),
        ("rate=1..2", (1.0, 2.0, False, None)),
        ("hidden=32..256:32", (32, 256, False, 32)),
        ("cell.dropout=0..0.5", (0.0, 0.5, False, None)),
        ("rates.eta=1..10:log", (1.0, 10.0, True, None)),
    ],
)
def test_intervals_are_read(text, values):
    (distribution,) = parse_space([text]).values()
    step = None if distribution.step == 1 else distribution.step
    assert (distribution.low, distribution.high, distribution.log, step) == values
    assert type(distribution.low) is type(values[0])


def test_choices_are_json_values_or_text():
    space = parse_space(["layers=1,2", "schedule=constant,cosine", "clip_norm=None,1.0"])
    assert [each.choices for each in space.values()] == [(1, 2), ("constant", "cosine"), (None, 1.0)]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "says what to search"),
        (["rate"], "NAME=VALUES"),
        (["rate="], "NAME=VALUES"),
        (["rate=1..x"], "with numbers"),
        (["rate=1e-2..1e-4"], "high"),
        (["rate=0..1:log"], "low"),
        (["hidden=4,4"], "each value once"),
        (["rate=0.1,0.2", "rate=1,2"], "twice"),
        (["learning_rate=0.1,0.2"], "unknown setting 'learning_rate'"),
        (["hiden=1..2"], "Did you mean 'hidden'"),
        (["layer.size=1,2"], "unknown setting"),
        (["seed=0..9"], "luck"),
        (["cell=STAR,LSTM"], "one sweep per cell"),
        (["task.T=10,20"], "cannot be compared"),
    ],
)
def test_a_wrong_search_is_refused_in_one_sentence(texts, words):
    with pytest.raises(ValueError, match=words) as error:
        parse_space(texts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["hidden=0..4", "cell.nonsense=1,2", "schedule=constant,wavy", "layers=0.5..2", "rates.nothing=1..2"]
)
def test_values_that_no_run_can_have_are_refused_before_anything_is_stored(text):
    with pytest.raises(ValueError, match=f"--search: {text.partition('=')[0]}"):
        check_space(small(), parse_space([text]))


def test_settings_reach_the_run():
    run = with_settings(small(), {"rate": 0.5, "hidden": 7, "cell.dropout": 0.25, "cell.zoneout": 0.5, "optimiser.l2": 0.1})
    assert (run.rate, run.hidden, run.optimiser_options) == (0.5, 7, {"l2": 0.1})
    assert run.cell_options == {"dropout": 0.25, "zoneout": 0.5}


# How trials are taken.


def test_each_trial_is_taken_once_and_as_many_as_were_asked_for(storage):
    workers = [queue(storage, 3) for _ in range(5)]
    taken = [worker.take() for worker in workers]
    assert [trial and trial.number for trial in taken] == [0, 1, 2, None, None]
    workers[0].fill(4)
    assert [trial and trial.number for trial in (worker.take() for worker in workers[3:])] == [3, None]


def test_a_trial_whose_worker_is_silent_is_taken_over_and_its_late_result_is_not_stored(storage):
    slow, quick = queue(storage, 1, lease=0.3), queue(storage, 1)
    late = slow.take()
    assert quick.take() is None  # not before the lease is over
    time.sleep(0.4)
    trial = quick.take()
    assert trial.number == late.number
    assert not late.finish("COMPLETE", 1.0, {})
    assert trial.finish("COMPLETE", 2.0, {})
    assert [each.value for each in quick.trials()] == [2.0]


def test_a_trial_whose_lease_is_renewed_is_not_taken_over(storage):
    slow, quick = queue(storage, 1, lease=2.0), queue(storage, 1)
    with slow.take() as trial:
        for _ in range(5):
            assert quick.take() is None
            time.sleep(0.5)
        assert not trial.lost
        assert trial.finish("COMPLETE", 1.0, {})


def test_a_worker_notices_that_its_trial_was_taken_over(storage):
    slow, quick = queue(storage, 1, lease=0.4), queue(storage, 1)
    trial = slow.take()
    quick.take()
    time.sleep(0.5)
    assert quick.take().number == trial.number
    with trial:
        deadline = time.monotonic() + 30
        while not trial.lost and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(working.LostTrial):
            trial.check()
    assert quick.counts()["RUNNING"] == 1  # and does not give back what is not its own


def test_the_same_settings_are_drawn_wherever_a_trial_is_stored(tmp_path):
    found = []
    for kind in ("journal", "sqlite"):
        with address(kind, tmp_path) as place:
            trials = queue(place, 3, sampler="random")
            trial = trials.take()
            study = trials.study(sampler=sweep().make_sampler(0))
            _, settings = trial.settings(sweep().space, study)
            assert trial.settings(sweep().space, study)[1] == settings  # and stay when it is taken over
            found.append(settings)
    assert found[0] == found[1]


def test_the_incomplete_line_of_a_killed_writer_is_removed(journal, tmp_path):
    trials = queue(journal, 2)
    with open(tmp_path / "sweep.log", "ab") as file:
        file.write(b'{"op_code":4,"worker_id":"x","study')
    assert queue(journal, 3).counts()["WAITING"] == 3
    assert trials.take().number == 0
    lines = (tmp_path / "sweep.log").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


# How trials end.


def test_the_score_is_the_best_validation_score_and_bad_curves_are_stopped(journal, tmp_path):
    trials = queue(journal, 8)
    work(WorkOptions(journal, tmp_path / "runs"), silent)
    rows = results(trials)
    assert rows["counts"]["COMPLETE"] + rows["counts"]["PRUNED"] == 8
    assert rows["counts"]["PRUNED"] >= 1
    for trial in rows["trials"]:
        folder = tmp_path / "runs" / "tiny" / trial["key"]
        if trial["state"] == "COMPLETE":
            record = read_record(folder / "record.json")
            assert trial["value"] == record["best"]["valid"]["mse"]
            assert [value for _, value in trial["curve"]] == [row["valid"]["mse"] for row in record["curve"] if "valid" in row]
        else:
            assert not (folder / "record.json").exists()
            assert len(trial["curve"]) < 4


def test_without_pruning_every_trial_is_complete(journal, tmp_path):
    trials = queue(journal, 6, prune="none")
    work(WorkOptions(journal, tmp_path / "runs"), silent)
    assert trials.counts()["COMPLETE"] == 6


@pytest.mark.parametrize("error", [Stopped(signal.SIGTERM, 3), KeyboardInterrupt(), RuntimeError("CUDA"), OSError("no data")])
def test_a_worker_that_stops_gives_its_trial_back(error, journal, tmp_path, monkeypatch):
    def train_pass(runs, options):
        raise error

    trials = queue(journal, 2)
    monkeypatch.setattr(working, "train_pass", train_pass)
    with pytest.raises(type(error)):
        work(WorkOptions(journal, tmp_path), silent)
    assert trials.counts()["WAITING"] == 2


def test_a_trial_that_ends_its_workers_fails_at_last(journal, tmp_path, monkeypatch):
    trials = queue(journal, 1)
    monkeypatch.setattr(working, "train_pass", raising(RuntimeError("killed")))
    for _ in range(3):
        with pytest.raises(RuntimeError):
            work(WorkOptions(journal, tmp_path, attempts=3), silent)
    work(WorkOptions(journal, tmp_path, attempts=3), silent)
    assert trials.counts()["FAIL"] == 1
    assert "ended 3 times" in results(trials)["trials"][0]["reason"]


def test_a_trial_that_cannot_be_trained_fails_and_the_others_go_on(journal, tmp_path, monkeypatch):
    trials, real = queue(journal, 3), working.train_pass
    faults = iter([ValueError("too large")])

    def train_pass(runs, options):
        for error in faults:
            raise error
        real(runs, options)

    monkeypatch.setattr(working, "train_pass", train_pass)
    said = []
    work(WorkOptions(journal, tmp_path), said.append)
    assert trials.counts()["FAIL"] == 1
    assert trials.counts()["WAITING"] == 0
    assert "too large" in said[0]


def test_a_folder_that_another_process_writes_makes_the_trial_wait(journal, tmp_path, monkeypatch):
    trials, real = queue(journal, 1, lease=0.1), working.train_pass
    faults = iter([FolderInUse("in use")])

    def train_pass(runs, options):
        for error in faults:
            raise error
        real(runs, options)

    monkeypatch.setattr(working, "train_pass", train_pass)
    work(WorkOptions(journal, tmp_path), silent)
    assert trials.counts()["COMPLETE"] == 1


def raising(error):
    def train_pass(runs, options):
        raise error

    return train_pass


# What is refused.


def test_another_definition_under_the_same_name_is_refused(storage):
    queue(storage, 1)
    other = Sweep(small(steps=16, valid_every=4), ("rate=1e-4..1e-2:log", "hidden=2,3,4"))
    with pytest.raises(ValueError, match=r"study 'tiny' with another search: .*1e-1:log.*1e-2:log"):
        create_queue(open_storage(storage), "tiny", other.to_json(), maximise=False)
    with pytest.raises(ValueError, match="another kind"):
        create_queue(open_storage(storage), "tiny", {"kind": "runs"}, maximise=False)


def test_a_study_of_another_program_is_refused(journal):
    optuna = pytest.importorskip("optuna")
    storage = open_storage(journal)
    optuna.create_study(storage=storage.trials, study_name="tiny").optimize(lambda trial: 0.0, n_trials=1)
    with pytest.raises(ValueError, match="not made by unfading"):
        queue(journal, 1)


def test_code_of_a_user_is_executed_only_if_it_is_allowed(journal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN.read_text())
    run = small(task="mine.py:Same", task_options={}, steps=8, valid_every=4)
    definition = Sweep(run, ("rate=0.001,0.01",)).to_json()
    trials = create_queue(open_storage(journal), "own", definition, maximise=False)
    trials.fill(1)
    with pytest.raises(ValueError, match=r"mine\.py.*--allow-code"):
        work(WorkOptions(journal, tmp_path), silent)
    assert trials.counts()["WAITING"] == 1
    Path("mine.py").unlink()
    work(WorkOptions(journal, tmp_path, allow_code=True), silent)
    assert trials.counts()["COMPLETE"] == 1


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("mysql://host/x", "a storage is sqlite:///FILE"),
        ("sqlite://", "a storage is"),
        ("journal:", "a storage is"),
        ("journal:/nowhere/sweep.log", "no folder /nowhere"),
        ("sqlite:////nowhere/sweep.db", "no folder /nowhere"),
        ("postgresql://me:secret@localhost:1/none", r"postgresql://me:\*\*\*@localhost:1/none cannot be used"),
    ],
)
def test_a_storage_that_cannot_be_used_is_refused_in_one_sentence(place, words):
    with pytest.raises((ValueError, OSError), match=words) as error:
        open_storage(place)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / "text.log").write_text("words\nand more\nwords\n")
    with pytest.raises(ValueError, match="not a journal"):
        open_storage(f"journal:{tmp_path / 'text.log'}")


# Runs of `compare` on workers.


def test_compare_on_workers_gives_the_records_of_compare(journal, tmp_path):
    runs = [small(seed=seed, cell=cell) for cell in ("STAR", "Elman") for seed in (0, 1)]
    expected = compare(runs, tmp_path / "here" / "adding", processes=1, say=silent)
    said = []
    records = compare(runs, tmp_path / "there" / "adding", processes=1, storage=journal, say=said.append)
    assert [record["key"] for record in records] == [record["key"] for record in expected]
    for run in runs:
        assert outcome(tmp_path / "there" / "adding" / run.key) == outcome(tmp_path / "here" / "adding" / run.key)
    assert said[-1] == "adding: 4 of 4 trials have ended"
    # A second comparison finds its records and asks nobody.
    assert compare(runs, tmp_path / "there" / "adding", processes=0, storage=journal, say=silent) == records


def test_a_run_that_waits_is_not_given_to_workers_twice(journal):
    trials = create_queue(open_storage(journal), "jobs", {"kind": "runs"}, maximise=False)
    assert trials.add([{"keys": ["a"]}, {"keys": ["b", "c"]}]) == {"a": 0, "b": 1, "c": 1}
    assert trials.add([{"keys": ["c"]}, {"keys": ["d"]}]) == {"a": 0, "b": 1, "c": 1, "d": 2}
    assert trials.take().finish("COMPLETE", 0.0, {})
    assert trials.add([{"keys": ["a"]}])["a"] == 3  # it has ended, and is asked for again
