"""Faults during training: numbers that are not finite, damaged files, a folder in use, a full disk."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.helpers.trained import OWN, Process, changed, files, outcome, small, stopped_after, tensors, train_outcome, weights
from unfading import train
from unfading.files import write_atomically
from unfading.training import checkpoint
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions
from unfading.training.run import VERSION
from unfading.training.run_dir import read_curve, read_record, read_run


def breaking(at=7, times=1000, how="loss", **fields):
    options = {"at": at, "times": times, "how": how}
    return small(**{"task": f"{OWN}:Breaks", "task_options": options, "dtype": "float64", **fields})


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.sample(2)
def test_a_step_that_is_not_finite_is_never_taken(how, optimiser, tmp_path):
    run = breaking(how=how, optimiser=optimiser)
    record = train(run, tmp_path)
    assert record["status"] == "diverged"
    assert record["reason"] == "loss or gradient not finite at step 7"
    assert record["steps"] == 7
    assert record["returns"] == 0
    before = changed(run, steps=7)
    train(before, tmp_path)
    at_end, at_seven = tensors(tmp_path / run.key), tensors(tmp_path / before.key)
    for name, part in at_seven.items():
        if name.startswith(("model.", "update.kept.", "update.taken")):
            assert torch.equal(at_end[name], part), name
    assert "NaN" not in (tmp_path / run.key / "record.json").read_text()
    assert "NaN" not in (tmp_path / run.key / "curve.jsonl").read_text()


def test_the_planted_gradient_is_not_finite_while_the_loss_is():
    """The planted fault is only in the gradient."""
    run = breaking(at=0, how="gradient")
    model, task = run.make_model(), run.make_task()
    batch = task.batch(0, 4, split="train", seed=0, device="cpu")
    loss = task.loss(model(batch.x.double())[0], batch._replace(target=batch.target.double()))
    loss.backward()
    assert torch.isfinite(loss)
    assert not all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_a_diverged_run_is_tested_with_its_best_weights_if_there_are_any():
    early = train(breaking(at=1, valid_every=8))
    assert (early["best"], early["test"]) == (None, None)
    late = train(breaking(at=17, valid_every=8))
    assert late["best"]["step"] == 16
    assert late["test"] == train(breaking(at=17, steps=16, valid_every=8))["test"]


def test_a_run_returns_to_better_weights_with_half_the_rate(tmp_path):
    run = breaking(at=7, times=1, retries=3, rate=1e-4, optimiser="sgd")
    record = train(run, tmp_path)
    assert record["status"] == "finished"
    assert record["returns"] == 1
    rates = [row["rate"] for row in record["curve"]]
    assert rates[:7] == [1e-4] * 7
    assert rates[7:] == [0.5e-4] * 17
    assert record["curve"][7]["loss"] is None
    assert [row["step"] for row in record["curve"]] == list(range(1, 25))


def test_a_run_that_returns_too_often_ends(tmp_path):
    record = train(breaking(at=7, retries=3), tmp_path)
    assert record["status"] == "diverged"
    assert record["returns"] == 3
    assert record["reason"] == "loss or gradient not finite at step 10"
    assert record["steps"] == 10


def test_a_run_returns_to_the_end_of_its_interval_with_the_lowest_loss(tmp_path):
    """If every later step fails, the weights stay those of the lowest loss: those of a run that ended there."""
    run = breaking(at=12, retries=1, rate=0.01)
    record = train(run, tmp_path)
    # The weights of the twelfth step have not been evaluated yet.
    losses = [row["loss"] for row in record["curve"][:11]]
    best = losses.index(min(losses)) + 1
    train(changed(run, steps=best), tmp_path)
    for name, part in weights(tmp_path / changed(run, steps=best).key).items():
        assert torch.equal(weights(tmp_path / run.key)[name], part)


def test_a_run_never_returns_to_weights_whose_loss_is_unknown(tmp_path):
    """One step moves the weights far away: its own loss was the lowest so far, the next one is not finite."""
    run = small(task=f"{OWN}:Cliff", task_options={"at": 6}, optimiser="sgd", rate=1e-3, clip_norm=None, retries=2)
    record = train(run, tmp_path)
    assert record["status"] == "finished"
    assert record["returns"] == 1


def test_weights_with_a_score_that_is_not_finite_are_never_tested():
    record = train(small(task=f"{OWN}:Blind", task_options={"at": 9}, valid_every=4))
    assert record["status"] == "finished"
    assert [row["valid"]["mse"] is None for row in record["curve"] if "valid" in row] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert record["best"]["step"] in (4, 8)


def stopped(tmp_path, monkeypatch, **fields):
    """A run that stopped at step 5, and its folder."""
    run = small(valid_every=4, **fields)
    stopped_after(5, monkeypatch, lambda: train(run, tmp_path))
    return run, tmp_path / run.key


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-20])


def empty(path):
    path.write_bytes(b"")


def of_something_else(path):
    safetensors.torch.save_file({"w": torch.ones(3)}, path)


def no_safetensors(path):
    path.write_bytes(b"PK\x03\x04 this is no checkpoint" * 9)


def no_json_inside(path):
    safetensors.torch.save_file({"w": torch.ones(3)}, path, {checkpoint.HEADER: "{nonsense"})


def about(**changes):
    def write(path):
        parts, header = checkpoint.load(path)
        checkpoint.save(path, parts, {**header, **changes})

    return write


def without_a_tensor(path):
    parts, header = checkpoint.load(path)
    parts.pop("update.taken")
    checkpoint.save(path, parts, header)


def with_another_shape(path):
    parts, header = checkpoint.load(path)
    parts["model.rnn.cells.0.W_h"] = torch.ones(7)
    checkpoint.save(path, parts, header)


def another_run(path):
    content = json.loads(path.read_text())
    content["run"]["seed"] = 9
    del content["sha256"]
    path.write_text(json.dumps(content))


def text(content):
    return lambda path: path.write_text(content)


def gone(path):
    path.unlink()


DAMAGED = {
    "last cut short": ("last.safetensors", cut_short, "is damaged: it was changed after it was written"),
    "last empty": ("last.safetensors", empty, "is damaged or not a checkpoint"),
    "last of something else": ("last.safetensors", of_something_else, "is not a file of unfading"),
    "last no safetensors": ("last.safetensors", no_safetensors, "is damaged or not a checkpoint"),
    "last no JSON": ("last.safetensors", no_json_inside, "is damaged"),
    "last of another version": (
        "last.safetensors",
        about(version=VERSION + 1),
        f"is of version {VERSION + 1}; this unfading reads version",
    ),
    "last of another run": ("last.safetensors", about(run={"task": "adding"}), "is a checkpoint of another run"),
    "last without a tensor": ("last.safetensors", without_a_tensor, "has no update.taken of the shape"),
    "last of another shape": ("last.safetensors", with_another_shape, "has no model.rnn.cells.0.W_h of the shape"),
    "run of another version": ("run.json", text('{"version": 99, "run": {}}'), "is of version 99; this unfading reads version"),
    "run no JSON": ("run.json", text("{"), "is damaged: it is not JSON"),
    "run no object": ("run.json", text("[1]"), "must be a JSON object; got"),
    "run with an unknown field": ("run.json", text('{"version": 1, "run": {"tsk": "adding"}}'), "run.json"),
    "run of another run": ("run.json", another_run, "describes another run than the name of its folder"),
    "record no JSON": ("record.json", text('{"version": 1, "run"'), "is damaged: it is not JSON"),
    "record of another version": ("record.json", text('{"version": 0}'), "is of version 0; this unfading reads version"),
    "record no text": ("record.json", lambda path: path.write_bytes(b"\xff\xfe\x00"), "is damaged: it is not JSON"),
    "curve no JSON": ("curve.jsonl", text("{}}\n"), "line 1 is damaged: it is not JSON"),
    "curve of something else": ("curve.jsonl", text("[1]\n"), "line 1 must be a JSON object"),
}


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGED.values(), ids=DAMAGED)
@pytest.mark.sample(9)
def test_an_error_names_the_damaged_file_and_changes_nothing(name, damage, sentence, tmp_path, monkeypatch):
    run, folder = stopped(tmp_path, monkeypatch)
    damage(folder / name)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=sentence) as caught:
        train(run, tmp_path, resume=True)
    assert "\n" not in str(caught.value)
    assert str(folder / name) in str(caught.value)
    assert files(tmp_path) == before
    # The lock on the folder has been released.
    shutil.rmtree(folder)
    assert train(run, tmp_path)["status"] == "finished"


@pytest.mark.parametrize("damage", [cut_short, gone, with_another_shape])
@pytest.mark.sample(1)
def test_the_best_weights_are_in_the_last_checkpoint_too(damage, tmp_path, monkeypatch):
    run, folder = stopped(tmp_path, monkeypatch)
    expected = train_outcome(run, tmp_path / "whole")
    damage(folder / "best.safetensors")
    train(run, tmp_path, resume=True)
    assert outcome(folder) == expected


def test_runs_that_stopped_separately_resume_together_whatever_their_retries(tmp_path, monkeypatch):
    runs = [small(valid_every=4, seed=0), small(valid_every=4, seed=1, retries=2)]
    expected = [train_outcome(run, tmp_path / "whole") for run in runs]
    for run in runs:
        stopped_after(5, monkeypatch, lambda run=run: train(run, tmp_path))
    records = train_together(runs, TrainOptions(tmp_path, resume=True), together=False)
    assert [record["test"] for record in records] == [each["test"] for each in expected]


def test_a_checkpoint_of_a_run_with_retries_must_hold_the_weights_to_return_to(tmp_path, monkeypatch):
    run, folder = stopped(tmp_path, monkeypatch, retries=2)
    parts, header = checkpoint.load(folder / "last.safetensors")
    parts.pop("update.best.w")
    checkpoint.save(folder / "last.safetensors", parts, header)
    with pytest.raises(ValueError, match=r"has no update\.best\.w of the shape"):
        train(run, tmp_path, resume=True)


def test_a_wrong_setting_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="rates: unknown parameter 'etaa'"):
        train(small(rates={"etaa": 0.1}), tmp_path)
    with pytest.raises(ValueError, match="max_lag must be at least 2"):
        train(small(cell_options={"max_lag": 1}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_running_statistics_is_refused(tmp_path):
    run = small(task=f"{OWN}:Counting", task_options={})
    with pytest.raises(ValueError, match=r"training changes head\.normal\.running_mean, which is not a parameter"):
        train(run, tmp_path)
    assert not (tmp_path / run.key / "best.safetensors").exists()


def test_an_edited_file_is_another_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Path(OWN).read_text()
    (tmp_path / "mine.py").write_text(source)
    before = small(task="mine.py:Breaks", task_options={}).key
    assert small(task="mine.py:Breaks", task_options={}).key == before
    (tmp_path / "mine.py").write_text(source + "\n# changed\n")
    assert small(task="mine.py:Breaks", task_options={}).key != before


def test_again_starts_again_whatever_is_in_the_folder(tmp_path, monkeypatch):
    run, folder = stopped(tmp_path, monkeypatch)
    expected = train_outcome(run, tmp_path / "whole")
    for name in ("last.safetensors", "best.safetensors", "curve.jsonl", "record.json"):
        (folder / name).write_text("}{")
    train(run, tmp_path, again=True)
    assert outcome(folder) == expected


def test_files_are_read_back_as_they_were_written(tmp_path):
    run = small()
    record = train(run, tmp_path)
    folder = tmp_path / run.key
    assert read_run(folder / "run.json") == run == read_run(folder / "record.json")
    assert read_record(folder / "record.json") == record
    assert read_curve(folder / "curve.jsonl") == record["curve"]
    with pytest.raises(ValueError, match=r"nothing.json does not exist"):
        read_run(folder / "nothing.json")


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_unchanged(fails, tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    write_atomically(path, b"old")
    contents = []

    def fail(*arguments):
        # The content that a process killed here would leave.
        contents.append(path.read_bytes())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, fail)
        with pytest.raises(OSError, match=r"could not be written: No space left on device. The previous file is unchanged"):
            write_atomically(path, b"new, and longer")
    assert contents == [b"old"]
    assert files(tmp_path) == {"last.safetensors": b"old"}
    write_atomically(path, b"new")
    assert files(tmp_path) == {"last.safetensors": b"new"}


def test_a_folder_in_use_is_refused(tmp_path):
    run = small(task=f"{OWN}:Slow", task_options={"at": 5})
    process = Process(run, tmp_path)
    while not (tmp_path / run.key / "slow").exists():
        time.sleep(0.01)
    before = files(tmp_path)
    for keywords in ({}, {"resume": True}, {"again": True}):
        with pytest.raises(ValueError, match=r"is being written by another process. Wait for it, or name another folder"):
            train(run, tmp_path, **keywords)
    assert files(tmp_path) == before
    os.kill(process.process.pid, signal.SIGKILL)
    process.end()
    # The lock was released with its process.
    assert train(small(), tmp_path, resume=True)["status"] == "finished"


def test_an_error_names_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be created: Not a directory. Name another folder") as caught:
        train(small(), tmp_path / "file" / "runs")
    assert str(tmp_path) in str(caught.value)


WRONG = {
    "option": ({"cell_options": {"max_lag": -3}}, "cell STAR: max_lag must be at least 2"),
    "rates": ({"rates": {"etta": 0.1}}, "rates: unknown parameter 'etta'"),
    "epochs": ({"epochs": 3, "steps": None}, "has no epochs; got epochs=3. Set steps"),
    "truncate": (
        {"truncate": 2, "task": "variable_copying", "task_options": {"T": 3, "per_row": True}},
        "rows of different lengths cannot do",
    ),
}


@pytest.mark.parametrize(("fields", "sentence"), WRONG.values(), ids=WRONG)
def test_a_setting_that_only_the_model_can_check_raises_an_error_of_one_sentence(fields, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence) as caught:
        train(changed(small(), **fields), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_gpu_raises_an_error(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=r'device="cuda", and torch finds no GPU here. Use device="cpu"'):
        train(small(device="cuda"), tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if (
        os.name != "posix"
        or os.geteuid() != 0
        or shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("no tmpfs can be mounted here: not root, or not allowed")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


FILLING = small(steps=120, task_options={"T": 2}, valid_every=10)


@pytest.fixture(scope="module")
def on_a_large_disk(tmp_path_factory):
    return train_outcome(FILLING, tmp_path_factory.mktemp("large"))


# Full when run.json, the log, either checkpoint, or the record is written.
ROOMS = [0, 8, 16, 24, *(pytest.param(room, marks=pytest.mark.long) for room in (4, 12, 20, 28, 32))]


@pytest.mark.parametrize("room", ROOMS, ids="{}k".format)
@pytest.mark.sample(2)
def test_a_full_disk_raises_an_error_of_one_sentence_and_keeps_the_last_checkpoint(room, small_disk, on_a_large_disk):
    ballast = small_disk / "ballast"
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (64 - 4 - room) * 1024)
    with pytest.raises(OSError, match="No space left on device") as caught:
        train(FILLING, small_disk, save_every=0.0)
    assert "\n" not in str(caught.value)
    assert str(small_disk) in str(caught.value)
    folder = small_disk / FILLING.key
    assert not (folder / "record.json").exists()
    checkpoints = [name for name in ("last", "best") if (folder / f"{name}.safetensors").exists()]
    assert checkpoints or room < 12
    for name in checkpoints:
        assert checkpoint.load(folder / f"{name}.safetensors")[1]["run"] == FILLING.to_json()
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    train(FILLING, small_disk, resume=True)
    assert outcome(folder) == on_a_large_disk
