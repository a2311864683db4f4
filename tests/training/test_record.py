"""The record of a run: its fields, its log, and valid JSON."""

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

import unfading
from tests.helpers.trained import OWN, small, stopped_after, untimed
from unfading import Run, compare, machine, train, use_backend
from unfading.training.run_dir import read_curve

FIELDS = {
    *("version", "key", "run", "status", "reason", "steps", "returns", "measure", "rising", "guess", "best", "test"),
    *("seconds", "milliseconds_per_sequence", "parameters", "kilobytes", "about", "curve", "together"),
}


def strict(text):
    """The content of strict JSON, which has no NaN, without its checksum."""
    content = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    del content["sha256"]
    return content


def test_a_record_has_all_its_fields(tmp_path):
    run = small(steps=24)
    before = datetime.now(UTC) - timedelta(seconds=1)
    record = train(run, tmp_path, command="unfading train ...")
    assert set(record) == FIELDS
    assert strict((tmp_path / run.key / "record.json").read_text()) == record
    assert (record["version"], record["key"], record["together"]) == (1, run.key, 1)
    assert Run.from_json(record["run"]) == run
    assert (record["status"], record["reason"], record["steps"], record["returns"]) == ("finished", None, 24, 0)
    assert (record["measure"], record["rising"], record["guess"]) == ("mse", False, 1 / 6)
    assert record["best"]["valid"] in [row["valid"] for row in record["curve"] if "valid" in row]
    assert record["test"].keys() == record["best"]["valid"].keys() == {"loss", "mse"}
    assert record["curve"] == read_curve(tmp_path / run.key / "curve.jsonl")
    about = record["about"]
    assert about["versions"]["unfading"] == unfading.__version__
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["python"] == platform.python_version()
    assert about["machine"]["cores"] >= 1
    assert about["machine"]["cpu"]
    assert about["command"] == "unfading train ..."
    assert before <= datetime.fromisoformat(about["date"]) <= datetime.now(UTC)
    assert "sources" not in about


def test_a_commit_is_dirty_only_if_the_package_differs_from_it(tmp_path, monkeypatch):
    """Results that are written into the checkout do not count."""
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    for path in (package / "machine.py", tmp_path / "results.jsonl"):
        path.write_text("1\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "A commit")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    clean = machine.about("")["commit"]
    assert len(clean) == 10
    (tmp_path / "results.jsonl").write_text("2\n")
    assert machine.about("")["commit"] == clean
    (package / "new.py").write_text("")
    assert machine.about("")["commit"] == f"{clean}-dirty"
    (package / "new.py").unlink()
    (package / "machine.py").write_text("2\n")
    assert machine.about("")["commit"] == f"{clean}-dirty"


def test_a_record_names_the_commit_of_the_checkout():
    root = Path(unfading.__file__).parent
    answer = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
    if answer.returncode:
        pytest.skip("no git checkout")
    commit = train(small(steps=1))["about"]["commit"]
    assert answer.stdout.startswith(commit.removesuffix("-dirty"))


def test_the_record_is_the_same_with_and_without_a_folder(tmp_path):
    run = small()
    with_folder, without = train(run, tmp_path), train(run)
    timed = {"seconds", "milliseconds_per_sequence", "about", "curve"}
    assert {name: with_folder[name] for name in FIELDS - timed} == {name: without[name] for name in FIELDS - timed}
    assert untimed(with_folder["curve"]) == untimed(without["curve"])


def test_parameters_are_counted_with_and_without_head_and_embedding(made):
    """Counted by hand: an LSTM has four gates, each with matrices for input and state and a bias."""
    record = train(small(cell="LSTM", hidden=5, layers=2, steps=1, cell_options={"bidirectional": True}))
    lstm = 2 * 4 * 5 * (2 + 5 + 1) + 2 * 4 * 5 * (10 + 5 + 1)
    assert record["parameters"] == {"all": lstm + 10 + 1, "recurrent": lstm}
    assert record["kilobytes"] == round((lstm + 11) * 4 / 1024, 2)
    text = Run(
        task="ptb_words", task_options={"steps": 7, "embedding": 3}, cell="LSTM", hidden=5, steps=1, dtype="float64", batch=2
    )
    model = text.make_model()
    lstm = 4 * 5 * (3 + 5 + 1)
    words = model.encoder.weight.shape[0]
    record = train(text)
    assert record["parameters"] == {"all": 3 * words + lstm + 6 * words, "recurrent": lstm}
    # Kilobytes of float32, whatever the dtype of training.
    assert record["kilobytes"] == round(record["parameters"]["all"] * 4 / 1024, 2)
    assert record["guess"] == text.make_task().guess


def test_the_record_says_that_higher_accuracy_is_better(made):
    record = train(Run(task="digits", cell="STAR", hidden=3, batch=5, steps=3, valid_every=1))
    task = Run(task="digits", cell="STAR", steps=1).make_task()
    assert (record["measure"], record["rising"], record["guess"]) == ("accuracy", True, task.guess)
    scores = [row["valid"]["accuracy"] for row in record["curve"]]
    assert record["best"]["valid"]["accuracy"] == max(scores)
    assert record["best"]["step"] == 1 + scores.index(max(scores))


def test_the_record_has_the_hash_of_a_users_files():
    quiet = OWN.with_name("quiet.py")
    record = train(small(task=f"{OWN}:Same", task_options={}, cell=f"{quiet}:QuietCell", steps=1))
    hashes = {f"{OWN}:Same": OWN, f"{quiet}:QuietCell": quiet}
    assert record["about"]["sources"] == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in hashes.items()}


def test_the_log_has_about_two_hundred_rows_with_mean_losses():
    run = small(steps=610, task_options={"T": 2}, hidden=2, valid_every=100)
    record = train(run)
    steps = [row["step"] for row in record["curve"]]
    assert steps == sorted(set(range(3, 610, 3)) | {100, 200, 300, 400, 500, 600, 610})
    assert [row["step"] for row in record["curve"] if "valid" in row] == [100, 200, 300, 400, 500, 600, 610]
    seconds = [row["seconds"] for row in record["curve"]]
    assert seconds == sorted(seconds)
    assert seconds[-1] == record["seconds"] > 0
    # The first three losses of this run, from the same run with one row per step.
    fine = train(small(steps=3, task_options={"T": 2}, hidden=2))
    assert record["curve"][0]["loss"] == pytest.approx(sum(row["loss"] for row in fine["curve"]) / 3, rel=1e-12)


def test_a_log_row_has_the_learning_rate_of_its_last_step():
    record = train(small(steps=10, schedule="polynomial", rate=0.5))
    assert [row["rate"] for row in record["curve"]] == pytest.approx([0.5 * (1 - step / 10) for step in range(10)])


def test_a_run_on_a_task_without_epochs_is_evaluated_twenty_times():
    run = Run(task="adding", task_options={"T": 2}, cell="STAR", hidden=2, batch=2, steps=40, backend="reference")
    assert [row["step"] for row in train(run)["curve"] if "valid" in row] == list(range(2, 41, 2))


def test_a_run_on_a_dataset_is_evaluated_after_every_epoch(made):
    run = Run(task="digits", cell="STAR", hidden=2, batch=5, epochs=3)
    epoch = run.make_task().length("train", 5)
    assert [row["step"] for row in train(run)["curve"] if "valid" in row] == [epoch, 2 * epoch, 3 * epoch]


def test_numbers_that_are_not_finite_are_null_in_the_files(tmp_path):
    run = small(task=f"{OWN}:Blind", task_options={"at": 9}, valid_every=4)
    record = train(run, tmp_path)
    folder = tmp_path / run.key
    assert strict((folder / "record.json").read_text()) == record
    for line in (folder / "curve.jsonl").read_text().splitlines():
        strict(line)
    assert record["curve"][-1]["valid"]["mse"] is None


def test_the_record_names_the_backend_that_ran_and_why_it_is_not_the_fastest():
    def backends(**fields):
        return train(small(steps=2, **fields))["about"]["backends"]

    requested = "backend='reference' was requested"
    assert backends() == [{"from": 0, "cell": "STARCell", "backend": "reference", "reason": requested}]
    assert backends(backend="auto") == [{"from": 0, "cell": "STARCell", "backend": "fused", "reason": None}]
    assert backends(backend="fused")[0]["backend"] == "fused"
    (refused,) = backends(backend="auto", task=f"{OWN}:Same", task_options={}, cell=f"{OWN}:SortedCell")
    assert (refused["cell"], refused["backend"]) == ("SortedCell", "reference")
    assert "own_tasks.py" in refused["reason"]


def test_a_resumed_run_that_changes_its_backend_is_told_and_recorded(tmp_path, monkeypatch):
    run, messages = small(backend="auto"), []
    with use_backend("reference"):
        stopped_after(5, monkeypatch, lambda: train(run, tmp_path))
    record = train(run, tmp_path, resume=True, say=messages.append)
    assert [(each["from"], each["backend"]) for each in record["about"]["backends"]] == [(0, "reference"), (5, "fused")]
    assert messages == [
        "STARCell ran on the backend reference before and runs on fused now; the result is not bit for bit that of a run "
        "without a stop."
    ]


def test_the_record_has_the_hashes_of_its_data_and_a_change_is_told(made, tmp_path):
    run = Run(task="digits", cell="STAR", hidden=2, batch=5, steps=2, valid_batches=1)
    record = train(run, tmp_path, say=pytest.fail)
    file = made / "digits" / "digits.csv.gz"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert record["about"]["data"] == {"dataset": "digits", "files": {"digits.csv.gz": digest}}
    assert train(run, tmp_path, say=pytest.fail) == record
    content, messages = file.read_bytes(), []
    try:
        file.write_bytes(content + b"\n")
        assert train(run, tmp_path, say=messages.append) == record
        compare([run], tmp_path, say=messages.append)
    finally:
        file.write_bytes(content)
    changed = "STAR on digits, seed 0: the dataset digits has changed since this run was trained (digits.csv.gz)."
    assert [message.startswith(changed) for message in messages] == [True, False, True]
    assert messages[1] == "1 of 1 runs are already finished."


def test_records_of_earlier_versions_are_read(tmp_path):
    run = small(steps=2)
    record = train(run, tmp_path)
    del record["about"]["backends"]
    file = tmp_path / run.key / "record.json"
    file.write_text(json.dumps(record))
    assert train(run, tmp_path, say=pytest.fail) == record


@pytest.mark.parametrize("at", [3, 20, 24])
@pytest.mark.sample(1)
def test_a_log_that_is_removed_during_training_is_written_again(at, tmp_path):
    run = small()
    expected = train(run)["curve"]
    curve = tmp_path / run.key / "curve.jsonl"

    def listen(update):
        if update.step == at and update.status is None:
            curve.unlink(missing_ok=True)

    record = train(run, tmp_path, listen=listen)
    assert untimed(record["curve"]) == untimed(expected)
    assert read_curve(curve) == record["curve"]


def test_log_rows_that_are_lost_before_a_resume_are_told(tmp_path, monkeypatch):
    run, messages = small(), []
    stopped_after(5, monkeypatch, lambda: train(run, tmp_path))
    (tmp_path / run.key / "curve.jsonl").unlink()
    record = train(run, tmp_path, resume=True, say=messages.append)
    assert messages == [
        f"{tmp_path / run.key / 'curve.jsonl'} lacks 5 rows of the first 5 steps, so the curve "
        "of the record will lack them too."
    ]
    assert [row["step"] for row in record["curve"]] == list(range(6, 25))
