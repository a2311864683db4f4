"""`unfading train --data` and `unfading predict`: from a file of sequences to predictions."""

import json

import numpy as np
import pytest

import unfading
from tests.helpers.command import run

DRAW = np.random.default_rng(0)
SIGNS = DRAW.choice([-1.0, 1.0], 60)
X = SIGNS[:, None] + 0.3 * DRAW.standard_normal((60, 6))
LABELS = np.where(SIGNS > 0, "up", "down")
FAST = ("--cell", "GRU", "--hidden", "4", "--epochs", "12", "--batch", "8", "--rate", "0.02")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    rows = [",".join([*map(str, x), label]) for x, label in zip(X, LABELS, strict=True)]
    (folder / "series.csv").write_text("\n".join([",".join([*(f"t{i}" for i in range(6)), "direction"]), *rows]) + "\n")
    command = ("train", "--data", str(folder / "series.csv"), "--target", "direction", *FAST, "--runs", str(folder / "runs"))
    answer = run(*command)
    assert answer.returncode == 0, answer.stderr
    return folder, command, answer


def key_folder(folder):
    return next((folder / "runs" / "series").glob("*/record.json")).parent


def test_what_was_inferred_is_told_with_the_flag_that_changes_it(trained):
    text = " ".join(trained[2].stderr.split())
    assert "60 rows of 6 steps, one sequence per row; target 'direction'" in text
    assert "classification, 2 classes (down, up); inferred from the target, --task regression changes it" in text
    assert "36 rows train, 12 validate (--validation 0.2), 12 test (--test 0.2)" in text
    assert "standardised by the training rows (--unscaled leaves them); data SHA-256" in text


def test_the_scores_the_page_and_the_way_to_load_are_told(trained):
    folder, _, answer = trained
    assert "test accuracy: " in answer.stdout
    assert (folder / "runs" / "series" / "report.html").exists()
    assert answer.stdout.splitlines()[-1].startswith(f"load it: unfading.load('{key_folder(folder)}')")


def test_a_run_that_has_trained_is_given_no_advice(trained, tmp_path):
    _, command, answer = trained
    assert "did not train" not in answer.stdout
    untested = run(*command[:-1], str(tmp_path), "--test", "0")
    assert untested.returncode == 0, untested.stderr
    assert "did not train" not in untested.stdout


def test_the_same_command_again_says_that_it_is_finished(trained):
    answer = run(*trained[1])
    assert answer.returncode == 0
    assert "already finished on" in answer.stderr


def test_predictions_are_those_of_the_loaded_model(trained, tmp_path):
    folder, _, _ = trained
    model = unfading.load(key_folder(folder))
    expected = model.predict(X)
    assert (expected == LABELS).mean() > 0.9
    np.save(tmp_path / "x.npy", X)
    for data in (tmp_path / "x.npy", folder / "series.csv"):
        answer = run("predict", str(key_folder(folder)), "--data", str(data), "-o", str(tmp_path / "y.npy"))
        assert answer.returncode == 0, answer.stderr
        assert np.load(tmp_path / "y.npy").tolist() == expected.tolist()
    answer = run(
        "predict", str(key_folder(folder)), "--data", str(tmp_path / "x.npy"), "--probabilities", "-o", str(tmp_path / "y.csv")
    )
    assert answer.returncode == 0, answer.stderr
    header, *rows = (tmp_path / "y.csv").read_text().splitlines()
    assert header == "down,up"
    assert np.allclose([[float(cell) for cell in row.split(",")] for row in rows], model.predict_proba(X))


def test_the_record_repeats_the_run_from_its_file(trained, tmp_path):
    folder, _, _ = trained
    record = key_folder(folder) / "record.json"
    answer = run("train", "--from", str(record), "--runs", str(tmp_path), "--json", "--quiet")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["test"] == json.loads(record.read_text())["test"]


def test_changed_data_are_another_run(trained, tmp_path):
    folder, _, _ = trained
    lines = (folder / "series.csv").read_text().splitlines()
    changed = tmp_path / "series.csv"
    changed.write_text("\n".join([lines[0], "9" + lines[1], *lines[2:]]) + "\n")
    settings = json.loads((key_folder(folder) / "run.json").read_text())["run"]
    settings["task_options"]["source"]["file"] = str(changed)
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "run": settings}))
    answer = run("train", "--from", str(tmp_path / "run.json"), "--runs", str(tmp_path / "runs"))
    assert answer.returncode == 2
    assert "these data are not those of the run" in answer.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--task", "adding"], "--task is classification or regression, or is left out; got 'adding'"),
        (["--target", "direktion"], "unknown column 'direktion'. Did you mean 'direction'?"),
        (["--target", "direction", "--task", "regression"], "y must hold real numbers"),
        (["--target", "direction", "--drop", "t9"], "unknown column 't9'"),
        (["--target", "direction", "--test", "0.9", "--validation", "0.2"], "leave no row to train on"),
    ],
)
def test_wrong_flags_are_one_sentence_and_leave_no_folder(trained, tmp_path, flags, sentence):
    answer = run("train", "--data", str(trained[0] / "series.csv"), *flags, "--runs", str(tmp_path / "runs"))
    assert answer.returncode == 2
    assert sentence in " ".join(answer.stderr.split())
    assert not (tmp_path / "runs").exists()


def test_predict_names_what_it_cannot_do(trained, tmp_path):
    folder, _, _ = trained
    np.save(tmp_path / "x.npy", np.ones((3, 4, 2)))
    for arguments, sentence in (
        ((str(key_folder(folder)), "--data", str(tmp_path / "x.npy")), "the model reads sequences with 1 channels; got 2"),
        ((str(tmp_path), "--data", str(tmp_path / "x.npy")), "it has no record.json"),
        ((str(key_folder(folder)), "--data", str(tmp_path / "x.npy"), "-o", "y.xls"), "-o takes a .npy or .csv file"),
        (
            (str(key_folder(folder)), "--data", str(tmp_path / "x.npy"), "-o", str(tmp_path / "none" / "y.csv")),
            "Create it first.",
        ),
    ):
        answer = run("predict", *arguments)
        assert answer.returncode == 2
        assert sentence in " ".join(answer.stderr.split())
