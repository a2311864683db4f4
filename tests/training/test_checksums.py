"""One flipped bit in any file of a run, or in a file of weights, is found, and the sentence names the file."""

import random
import shutil

import pytest
import torch

import unfading
from tests.helpers.trained import OWN, outcome, small, stopped_after
from unfading import catalogue
from unfading.diagnostics.subject import trained_run
from unfading.training import checkpoint, run_dir, weights
from unfading.training.run import Run
from unfading.training.train import train

FILES = ("run.json", "curve.jsonl", "last.safetensors", "best.safetensors", "record.json")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The parent of a finished run's folder."""
    where = tmp_path_factory.mktemp("done")
    train(small(), where)
    return where


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """The parent of a stopped run's folder, and the outcome without the stop."""
    where = tmp_path_factory.mktemp("halted")
    train(small(), where / "whole")
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(10, patch, lambda: train(small(), where))
    return where, outcome(where / "whole" / small().key)


def flip(path, numbers):
    """Flip one random bit of a file."""
    content = bytearray(path.read_bytes())
    bit = numbers.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def refused(path, call):
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("trials", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_one_flipped_bit_in_any_file_of_a_finished_run_is_found(done, tmp_path, trials):
    numbers, run = random.Random(0), small()
    assert {path.name for path in (done / run.key).iterdir()} - {".lock"} == set(FILES)
    for trial in range(trials):
        name = FILES[trial % len(FILES)]
        shutil.copytree(done / run.key, tmp_path / run.key, dirs_exist_ok=True)
        flip(tmp_path / run.key / name, numbers)
        refused(tmp_path / run.key / name, lambda: run_dir.verify(tmp_path / run.key))
        if trial < 100:
            refused(tmp_path / run.key / name, lambda: train(run, tmp_path))
            if name in ("run.json", "best.safetensors"):
                refused(tmp_path / run.key / name, lambda: trained_run(tmp_path / run.key, 2))


@pytest.mark.parametrize("trials", [25, pytest.param(1000, marks=pytest.mark.long)])
def test_one_flipped_bit_in_any_file_of_a_stopped_run_is_found_or_mended(halted, tmp_path, trials):
    """The best weights are in the last checkpoint too, from which their file is written again."""
    (where, expected), numbers, run = halted, random.Random(1), small()
    for trial in range(trials):
        name = FILES[trial % 4]
        shutil.rmtree(tmp_path / run.key, ignore_errors=True)
        shutil.copytree(where / run.key, tmp_path / run.key)
        flip(tmp_path / run.key / name, numbers)
        refused(tmp_path / run.key / name, lambda: run_dir.verify(tmp_path / run.key))
        if name != "best.safetensors":
            refused(tmp_path / run.key / name, lambda: train(run, tmp_path, resume=True))
        elif trial < 40:
            train(run, tmp_path, resume=True)
            assert outcome(tmp_path / run.key) == expected


def test_one_flipped_bit_in_the_stored_source_is_found(tmp_path):
    numbers, run = random.Random(3), small(task=f"{OWN}:Breaks", task_options={"at": 99})
    train(run, tmp_path)
    (path,) = (tmp_path / run.key / "source" / "task").glob("*.py")
    content = path.read_bytes()
    for _ in range(30):
        path.write_bytes(content)
        run_dir.verify(tmp_path / run.key)
        flip(path, numbers)
        refused(tmp_path / run.key / "source", lambda: run_dir.verify(tmp_path / run.key))


def test_files_without_checksums_are_read(done, tmp_path):
    """As those of earlier versions."""
    import json

    import safetensors.torch

    run = small()
    folder = tmp_path / run.key
    shutil.copytree(done / run.key, folder)
    for name in ("run.json", "record.json"):
        content = json.loads((folder / name).read_text())
        del content["sha256"]
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    rows = run_dir.read_curve(folder / "curve.jsonl")
    (folder / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("last", "best"):
        tensors, header = checkpoint.load(folder / f"{name}.safetensors")
        safetensors.torch.save_file(tensors, folder / f"{name}.safetensors", {checkpoint.HEADER: json.dumps(header)})
    run_dir.verify(folder)
    assert train(run, tmp_path) == train(run, done)
    (folder / "record.json").unlink()
    train(run, tmp_path, resume=True)
    assert outcome(folder) == outcome(done / run.key)


def test_a_log_that_is_removed_during_training_is_written_again(tmp_path):
    run = small()

    def remove(update):
        if update.step < 24:
            (tmp_path / run.key / "curve.jsonl").unlink(missing_ok=True)

    record = train(run, tmp_path, listen=remove)
    assert record["curve"]
    assert run_dir.read_curve(tmp_path / run.key / "curve.jsonl") == record["curve"]


@pytest.mark.parametrize("trials", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_one_flipped_bit_in_a_file_of_weights_is_found(done, tmp_path, trials):
    numbers, path = random.Random(2), weights.save(done / small().key, tmp_path / "w.safetensors")
    content = path.read_bytes()
    for _ in range(trials):
        path.write_bytes(content)
        flip(path, numbers)
        refused(path, lambda: unfading.load(path))
        refused(path, lambda: weights.card(path))


@pytest.mark.parametrize("cell", catalogue.cells(), ids=lambda cell: cell.__name__)
@pytest.mark.sample(8)
def test_the_shapes_of_every_model_are_known_before_it_is_built(cell, monkeypatch):
    run = Run(task="adding", cell=cell.__name__.removesuffix("Cell"), hidden=8, layers=2, steps=1)
    tensors = run.make_model().state_dict()
    model = weights.trained_model(run, tensors, "file")
    assert all(torch.equal(part, tensors[name]) for name, part in model.state_dict().items())
    large = Run(task="adding", cell=run.cell, hidden=1 << 15, layers=2, steps=1)
    with pytest.raises(ValueError, match=r"file does not fit the model that it describes: its .* has shape"):
        weights.trained_model(large, tensors, "file")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden": 40000}, "its rnn.cells.0.* has shape .* and the model's has"),
        ({"hidden": 10**30}, "does not fit|does not describe"),
        ({"layers": 10**9}, "tensors for 1000000000 layers"),
        ({"cell": "EURNN", "hidden": 4, "cell_options": {"capacity": 10**9}}, "its option capacity is 1000000000"),
        ({"dtype": "float64"}, "is torch.float32, and the model's is torch.float64"),
        ({"cell": 3}, "'cell' must be str; got 3"),
        ({"seed": 2**200}, "'seed' must be less than"),
        ({"rate": "x" * 10**6}, "rate must be a number"),
        ({"task_options": {"T": 10**400}}, "task_options must have 64 bits at most"),
    ],
)
def test_a_card_of_an_absurd_model_is_refused_before_the_model_is_built(done, tmp_path, monkeypatch, change, sentence):
    path = weights.save(done / small().key, tmp_path / "w.safetensors")
    tensors, card = checkpoint.load(path)
    checkpoint.save(path, tensors, {**card, "run": {**card["run"], **change}})
    devices, make = [], Run.make_model
    monkeypatch.setattr(Run, "make_model", lambda run: devices.append(torch.get_default_device().type) or make(run))
    with pytest.raises(ValueError, match=sentence) as caught:
        unfading.load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert set(devices) <= {"meta"}


def test_diagnose_refuses_a_checkpoint_that_lacks_tensors(done, tmp_path):
    run = small()
    shutil.copytree(done / run.key, tmp_path / run.key)
    path = tmp_path / run.key / "best.safetensors"
    tensors, header = checkpoint.load(path)
    name = next(name for name in tensors if name.startswith("model.rnn"))
    checkpoint.save(path, {key: part for key, part in tensors.items() if key != name}, header)
    with pytest.raises(ValueError, match=rf"best.safetensors does not fit the model that it describes: it has no {name[6:]}"):
        trained_run(tmp_path / run.key, 2)
    checkpoint.save(path, {"a": torch.ones(1), "model.b": torch.ones(1)}, header)
    with pytest.raises(ValueError, match=r"best.safetensors does not fit the model"):
        trained_run(tmp_path / run.key, 2)


HEADERS = {
    "no step": (lambda header: header.pop("step"), "is not a checkpoint of a run: it has no 'step'"),
    "no reached": (lambda header: header.pop("reached"), "it has no 'reached'"),
    "step as text": (lambda header: header.update(step="9"), "'step' must be int; got '9'"),
    "step below zero": (lambda header: header.update(step=-1), "'step' must be at least 0; got -1"),
    "huge step": (lambda header: header.update(step=10**400), "'step' must be less than"),
    "best of no scores": (lambda header: header.update(best={"step": 8}), "'best' is not a checkpoint .* no 'valid'"),
    "scores as text": (lambda header: header.update(best={"valid": {"mse": "x"}}), "'mse' must be int or float or null"),
    "nested": (lambda header: header.update(best=json_nested()), "is nested deeper than"),
}


def json_nested():
    value = {}
    for _ in range(200):
        value = {"valid": value}
    return value


@pytest.mark.parametrize(("change", "sentence"), HEADERS.values(), ids=HEADERS)
def test_a_header_with_a_wrong_field_is_one_sentence(halted, tmp_path, change, sentence):
    run = small()
    shutil.copytree(halted[0] / run.key, tmp_path / run.key)
    path = tmp_path / run.key / "last.safetensors"
    tensors, header = checkpoint.load(path)
    change(header)
    checkpoint.save(path, tensors, header)
    with pytest.raises(ValueError, match=sentence) as caught:
        train(run, tmp_path, resume=True)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
